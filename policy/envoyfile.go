package policy

import (
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// What is read of an Envoy configuration: only what weir needs of it, wherever it
// stands, since nobody knows all the extensions that files have.
type (
	// envoyManager is an HttpConnectionManager.
	envoyManager struct {
		spot    spot
		filters []envoyFilter
		logs    []envoyLog
		flush   time.Duration // of the access logs, while a stream runs; 0: not
		longest time.Duration // max_stream_duration; 0: none
		tables  []*envoyTable // its own
		named   string        // the table that it gets by RDS, "" if it has its own
	}
	// envoyFilter is a ratelimit filter.
	envoyFilter struct {
		spot     spot
		name     string
		domain   string
		timeout  envoyTime
		deny     spot // of failure_mode_deny: true; the zero value: it is not
		stage    string
		disabled bool
		own      *envoyRules // nil: those of the routes
	}
	// envoyLog is an access log that is sent by gRPC.
	envoyLog struct {
		spot   spot
		domain string // log_name
	}
	// envoyTable is a RouteConfiguration.
	envoyTable struct {
		name   string
		routes []envoyRoute
	}
	envoyRoute struct {
		spot    spot
		name    string // as a person says it; "" if there are no routes to be seen
		asks    bool   // it leads to an upstream
		timeout envoyTime
		longest envoyTime   // max_stream_duration
		rules   *envoyRules // of the route, and of its virtual host
		// filters are what it says of filters, by their names, the most special first.
		filters []map[string]envoyOverride
	}
	// envoyOverride is a RateLimitPerRoute or a FilterConfig.
	envoyOverride struct {
		spot     spot
		disabled bool
		domain   string
		rules    *envoyRules
	}
	envoyRules struct {
		spot  spot
		rules []envoyRule
	}
	// envoyRule is an item of rate_limits: it makes one descriptor.
	envoyRule struct {
		spot    spot
		stage   string
		atEnd   bool // apply_on_stream_done
		entries []envoyEntry
		// opaque: it has entries whose keys are not known, or may bring a limit of its own.
		opaque bool
	}
	envoyEntry struct {
		key, value string
		any        bool // the value comes from the request
		optional   bool // the entry may be left out
	}
	// envoyTime is a time that may not be there.
	envoyTime struct {
		spot  spot
		is    bool
		value time.Duration
	}
)

// spot is a line of a file; the zero value is none.
type spot struct {
	file int // its index
	line int
}

// What reading an Envoy configuration may cost: nodes that are looked at, and how
// deep they are.
const (
	maxEnvoySteps = 5_000_000
	maxEnvoyDepth = 200
)

// envoyReader reads Envoy configurations.
type envoyReader struct {
	file     int // the index of the one that is read
	steps    int // that are left
	seen     map[*yaml.Node]bool
	managers []*envoyManager
	tables   []*envoyTable // that stand outside of managers
}

// step counts a step, and reports whether there are any left.
func (r *envoyReader) step() bool {
	r.steps--
	return r.steps >= 0
}

// read finds managers and tables in all that is below n.
func (r *envoyReader) read(n *yaml.Node, depth int) {
	n = resolve(n)
	if n.Kind != yaml.MappingNode && n.Kind != yaml.SequenceNode || depth > maxEnvoyDepth || r.seen[n] || !r.step() {
		return
	}
	r.seen[n] = true // aliases lead here again
	switch {
	case strings.HasSuffix(r.text(n, "@type"), ".http_connection_manager.v3.HttpConnectionManager"):
		r.managers = append(r.managers, r.manager(n))
		return
	case r.get(n, "virtual_hosts") != nil:
		r.tables = append(r.tables, r.table(n))
		return
	}
	for _, c := range n.Content {
		r.read(c, depth+1)
	}
}

func (r *envoyReader) manager(n *yaml.Node) *envoyManager {
	m := &envoyManager{spot: r.at(n), longest: r.time(r.get(n, "common_http_protocol_options"), "max_stream_duration").value}
	for _, at := range []*yaml.Node{n, r.get(n, "access_log_options")} {
		if t := r.time(at, "access_log_flush_interval"); t.is {
			m.flush = t.value
		}
	}
	for _, log := range r.list(n, "access_log") {
		config := r.get(log, "typed_config")
		if strings.HasSuffix(r.text(config, "@type"), ".HttpGrpcAccessLogConfig") {
			m.logs = append(m.logs, envoyLog{r.at(log), r.text(r.get(config, "common_config"), "log_name")})
		}
	}
	for _, filter := range r.list(n, "http_filters") {
		config := r.get(filter, "typed_config")
		if strings.HasSuffix(r.text(config, "@type"), ".http.ratelimit.v3.RateLimit") {
			m.filters = append(m.filters, r.filter(filter, config))
		}
	}
	if t := r.get(n, "route_config"); t != nil {
		m.tables = append(m.tables, r.table(t))
	}
	m.named = r.text(r.get(n, "rds"), "route_config_name")
	return m
}

func (r *envoyReader) filter(n, config *yaml.Node) envoyFilter {
	f := envoyFilter{
		spot: r.at(n), name: r.text(n, "name"), disabled: r.flag(n, "disabled"),
		domain: r.text(config, "domain"), timeout: r.time(config, "timeout"), stage: r.stage(config),
		own: r.rules(config),
	}
	if d := r.get(config, "failure_mode_deny"); d != nil && r.flag(config, "failure_mode_deny") {
		f.deny = r.at(d)
	}
	return f
}

func (r *envoyReader) table(n *yaml.Node) *envoyTable {
	t := &envoyTable{name: r.text(n, "name")}
	all := r.overrides(n)
	for _, host := range r.list(n, "virtual_hosts") {
		ofHost, hostRules := r.overrides(host), r.rules(host)
		for _, x := range r.list(host, "routes") {
			action := r.get(x, "route")
			route := envoyRoute{
				spot: r.at(x), name: r.routeName(x), asks: action != nil,
				timeout: r.time(action, "timeout"), longest: r.time(r.get(action, "max_stream_duration"), "max_stream_duration"),
				rules: r.rules(action), filters: []map[string]envoyOverride{r.overrides(x), ofHost, all},
			}
			switch {
			case route.rules == nil:
				route.rules = hostRules
			case hostRules != nil && r.flag(action, "include_vh_rate_limits"):
				route.rules = &envoyRules{route.rules.spot, slices.Concat(route.rules.rules, hostRules.rules)}
			}
			t.routes = append(t.routes, route)
		}
	}
	return t
}

// routeName is a route as a person says it: route /images.
func (r *envoyReader) routeName(n *yaml.Node) string {
	if name := r.text(n, "name"); name != "" {
		return "route " + show(name)
	}
	match := r.get(n, "match")
	for _, kind := range []string{"prefix", "path", "path_separated_prefix"} {
		if text := r.text(match, kind); text != "" {
			return "route " + show(text)
		}
	}
	if text := r.text(r.get(match, "safe_regex"), "regex"); text != "" {
		return "route " + show(text)
	}
	return "the route"
}

func (r *envoyReader) overrides(n *yaml.Node) map[string]envoyOverride {
	config := r.get(n, "typed_per_filter_config")
	if config == nil || config.Kind != yaml.MappingNode {
		return nil
	}
	all := make(map[string]envoyOverride)
	for i := 0; i+1 < len(config.Content) && r.step(); i += 2 {
		c := resolve(config.Content[i+1])
		o := envoyOverride{spot: r.at(c), disabled: r.flag(c, "disabled")}
		if inner := r.get(c, "config"); inner != nil && strings.HasSuffix(r.text(c, "@type"), ".FilterConfig") {
			c = inner
		}
		o.domain, o.rules = r.text(c, "domain"), r.rules(c)
		all[resolve(config.Content[i]).Value] = o
	}
	return all
}

// rules reads the rate_limits of n; nil if there are none.
func (r *envoyReader) rules(n *yaml.Node) *envoyRules {
	items := r.list(n, "rate_limits")
	if len(items) == 0 {
		return nil
	}
	all := &envoyRules{spot: r.at(r.get(n, "rate_limits"))}
	for _, item := range items {
		rule := envoyRule{spot: r.at(item), stage: r.stage(item), atEnd: r.flag(item, "apply_on_stream_done"), opaque: r.get(item, "limit") != nil}
		for _, action := range r.list(item, "actions") {
			e, ok := r.entry(action)
			rule.opaque = rule.opaque || !ok
			rule.entries = append(rule.entries, e)
		}
		all.rules = append(all.rules, rule)
	}
	return all
}

// actions are the kinds of actions, with the keys of their entries, where these
// have a default.
var actions = map[string]string{
	"generic_key": "generic_key", "header_value_match": "header_match", "query_parameter_value_match": "query_match",
	"remote_address_match": "remote_address_match", "request_headers": "", "query_parameters": "", "metadata": "", "dynamic_metadata": "",
	"source_cluster": "source_cluster", "destination_cluster": "destination_cluster", "remote_address": "remote_address", "masked_remote_address": "masked_remote_address",
}

// entry reads what an action adds to a descriptor. It is not ok if nobody can know
// its key.
func (r *envoyReader) entry(action *yaml.Node) (e envoyEntry, ok bool) {
	for kind, key := range actions {
		a := r.get(action, kind)
		if a == nil {
			continue
		}
		e = envoyEntry{key: key, value: r.text(a, "descriptor_value"), optional: r.flag(a, "skip_if_absent")}
		if own := r.text(a, "descriptor_key"); own != "" {
			e.key = own
		}
		e.any = e.value == "" || strings.Contains(e.value, "%") // or a format
		return e, e.key != ""
	}
	e = envoyEntry{key: r.text(r.get(r.get(action, "extension"), "typed_config"), "descriptor_key"), any: true}
	return e, e.key != ""
}

func (r *envoyReader) at(n *yaml.Node) spot { return spot{r.file, n.Line} }

// get returns the value of a key of a map, or nil. Envoy takes keys in either
// spelling, rate_limits and rateLimits.
func (r *envoyReader) get(n *yaml.Node, key string) *yaml.Node { return r.find(n, key, camel(key), 0) }

func (r *envoyReader) find(n *yaml.Node, key, other string, depth int) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode || depth > maxDepth {
		return nil
	}
	var merged *yaml.Node
	for i := 0; i+1 < len(n.Content) && r.step(); i += 2 {
		switch k := resolve(n.Content[i]).Value; k {
		case key, other:
			return resolve(n.Content[i+1])
		case "<<":
			merged = resolve(n.Content[i+1])
		}
	}
	switch {
	case merged == nil:
	case merged.Kind == yaml.SequenceNode:
		for _, m := range merged.Content {
			if v := r.find(resolve(m), key, other, depth+1); v != nil || !r.step() {
				return v
			}
		}
	default:
		return r.find(merged, key, other, depth+1)
	}
	return nil
}

// camel is rate_limits as rateLimits.
func camel(key string) string {
	words := strings.Split(key, "_")
	for i, w := range words {
		if i > 0 && w != "" {
			words[i] = strings.ToUpper(w[:1]) + w[1:]
		}
	}
	return strings.Join(words, "")
}

// text returns a scalar of a map, or "".
func (r *envoyReader) text(n *yaml.Node, key string) string {
	if v := r.get(n, key); v != nil && v.Kind == yaml.ScalarNode && !isNull(v) {
		return v.Value
	}
	return ""
}

func (r *envoyReader) flag(n *yaml.Node, key string) bool { return r.text(n, key) == "true" }

// stage is that of a filter or a rule; "" is 0.
func (r *envoyReader) stage(n *yaml.Node) string {
	if s := r.text(n, "stage"); s != "0" {
		return s
	}
	return ""
}

// list returns the items of a list of a map, or nothing.
func (r *envoyReader) list(n *yaml.Node, key string) []*yaml.Node {
	v := r.get(n, key)
	if v == nil || v.Kind != yaml.SequenceNode {
		return nil
	}
	var items []*yaml.Node
	for _, item := range v.Content {
		if !r.step() {
			break
		}
		items = append(items, resolve(item))
	}
	return items
}

// time reads a time such as 0.3s, the one way in which Envoy writes it. One that is
// not valid is as if it were not there: Envoy does not load it.
func (r *envoyReader) time(n *yaml.Node, key string) envoyTime {
	v := r.get(n, key)
	if v == nil || v.Kind != yaml.ScalarNode || !strings.HasSuffix(v.Value, "s") {
		return envoyTime{}
	}
	d, err := time.ParseDuration(v.Value)
	return envoyTime{r.at(v), err == nil && d >= 0, max(0, d)}
}
