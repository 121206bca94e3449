package policy

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"weir/limit"
)

// EnvoyOptions are what weir is run with, for [Set.LintEnvoy].
type EnvoyOptions struct {
	MaxWait      time.Duration // --max-wait
	StoreTimeout time.Duration // --store-timeout
}

// LintEnvoy reads an Envoy's configuration from files, which together say what its
// listeners and routes are, and returns a line for whatever in it does not go with the
// policies: "envoy: FILE:LINE: what is wrong; what to do". It looks at what weir needs,
// and lets pass all else: `envoy --mode validate` tells whether a configuration is
// valid. An error is of a file that cannot be read.
func (s *Set) LintEnvoy(paths []string, o EnvoyOptions) ([]string, error) {
	var texts [][]byte
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("envoy: %w; give a file that can be read", err)
		}
		if !info.Mode().IsRegular() { // to open a pipe may wait for ever
			return nil, fmt.Errorf("envoy: %s: it is not a regular file; give Envoy's configuration", path)
		}
		text, err := contents(path)
		if err != nil {
			return nil, err
		}
		texts = append(texts, text)
	}
	return s.lintEnvoy(paths, texts, o)
}

func (s *Set) lintEnvoy(names []string, texts [][]byte, o EnvoyOptions) ([]string, error) {
	r := &envoyReader{steps: maxEnvoySteps, seen: make(map[*yaml.Node]bool)}
	for i, text := range texts {
		if len(text) > maxFile {
			return nil, fmt.Errorf("envoy: %s: the file is larger than %d MiB; give one that is smaller", names[i], maxFile>>20)
		}
		r.file = i
		d := yaml.NewDecoder(bytes.NewReader(text))
		for {
			var doc yaml.Node
			err := d.Decode(&doc)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				line, what := position(err, text)
				return nil, fmt.Errorf("envoy: %s:%d: not valid YAML: %s; look at this line and those after it", names[i], line, show(what))
			}
			r.read(&doc, 0)
			for _, n := range doc.Content {
				r.read(n, 0)
			}
		}
	}
	l := envoyLinter{set: s, options: o, reader: r, told: make(map[string]bool), leases: make(map[*domain]domainLeases)}
	l.all()
	if r.steps < 0 {
		l.warn(spot{0, 1}, "it is so large, once its aliases are followed, that not all of it was looked at; give less of it")
	}
	slices.SortStableFunc(l.found, func(a, b envoyProblem) int {
		return cmp.Or(cmp.Compare(a.spot.file, b.spot.file), cmp.Compare(a.spot.line, b.spot.line))
	})
	var lines []string
	for _, p := range l.found {
		lines = append(lines, fmt.Sprintf("envoy: %s:%d: %s", names[p.spot.file], p.spot.line, p.text))
	}
	return lines, nil
}

// envoyLinter compares what was read with the policies.
type envoyLinter struct {
	set     *Set
	options EnvoyOptions
	reader  *envoyReader
	found   []envoyProblem
	told    map[string]bool
	leases  map[*domain]domainLeases // as far as they are known
}

type envoyProblem struct {
	spot spot
	text string
}

// warn notes a problem, once.
func (l *envoyLinter) warn(at spot, text string) {
	key := fmt.Sprint(at.file, at.line, text)
	if l.told[key] || len(l.found) >= maxProblems {
		return
	}
	l.told[key] = true
	l.found = append(l.found, envoyProblem{at, text})
}

func (l *envoyLinter) all() {
	asks := false
	for _, m := range l.reader.managers {
		tables := m.tables
		for _, t := range l.reader.tables {
			if m.named != "" && t.name == m.named {
				tables = append(tables, t)
			}
		}
		if len(tables) == 0 { // it gets them from elsewhere
			tables = []*envoyTable{{routes: []envoyRoute{{spot: m.spot}}}}
		}
		asks = l.manager(m, tables) || asks
	}
	if len(l.reader.managers) == 0 && len(l.reader.tables) > 0 {
		l.routesAlone()
		return
	}
	if !asks && l.reader.steps >= 0 { // else it was not read to its end, which is told
		l.warn(spot{0, 1}, "no ratelimit filter in it asks weir; is it the right file? Give all that have listeners and routes: --envoy may be repeated")
	}
}

// routesAlone looks at routes without the filters that ask.
func (l *envoyLinter) routesAlone() {
	if len(l.set.names) != 1 {
		l.warn(spot{0, 1}, "it has routes and no filter, so that nobody knows their domain; give the file with the filter too, or the policies of one domain alone")
		return
	}
	// What their manager may be: it renews, releases, and has no limit of time.
	d := l.set.names[0]
	m := &envoyManager{filters: []envoyFilter{{name: "envoy.filters.http.ratelimit", domain: d, timeout: envoyTime{is: true, value: time.Hour}}}, logs: []envoyLog{{domain: d}}}
	l.manager(m, l.reader.tables)
}

// manager looks at a manager with its routes, and reports whether it asks weir.
func (l *envoyLinter) manager(m *envoyManager, tables []*envoyTable) bool {
	c := &envoyChecker{envoyLinter: l, manager: m, uses: make([]filterUse, len(m.filters))}
	for _, t := range tables {
		for i := range t.routes {
			c.route(&t.routes[i])
		}
	}
	c.unreleased()
	asks := false
	for i := range m.filters {
		c.filter(&m.filters[i], c.uses[i])
		asks = asks || c.uses[i].asks
	}
	return asks
}

// envoyChecker looks at one manager.
type envoyChecker struct {
	*envoyLinter
	manager *envoyManager
	uses    []filterUse // of each filter
	missing []missingRelease
	// released: on some route a release is told to a domain that is asked there.
	released bool
}

// filterUse is what a filter does on any of the routes.
type filterUse struct{ asks, releases bool }

// missingRelease is a filter that takes slots on a route where nobody gives them back.
type missingRelease struct {
	route  *envoyRoute
	filter spot
	domain string
}

// applied is what a filter does on a route.
type applied struct {
	filter *envoyFilter
	spot   spot
	domain *domain // nil if no policy has it
	name   string  // of the domain
	source spot    // of the rules
	asks   []envoyRule
	ends   []envoyRule
}

func (c *envoyChecker) route(r *envoyRoute) {
	var all []applied
	for i := range c.manager.filters {
		a, ok := c.apply(&c.manager.filters[i], r)
		if !ok {
			continue
		}
		c.uses[i].asks = c.uses[i].asks || len(a.asks) > 0
		c.uses[i].releases = c.uses[i].releases || releases(a.ends)
		all = append(all, a)
	}
	for _, a := range all {
		for _, rule := range a.ends {
			if rule.event() == "release" && !rule.has("weir.lease_id") && !rule.has("weir.stream_id") {
				c.warn(rule.spot, "the release names neither weir.stream_id nor weir.lease_id, so that it releases nothing; add both, as docs/envoy.md has them")
			}
		}
		if releases(a.ends) {
			c.elsewhere(a, all)
		}
		if a.domain == nil {
			continue
		}
		for _, rule := range slices.Concat(a.asks, a.ends) {
			c.unmet(a.domain, rule)
		}
		first, leases := c.lease(a)
		if leases {
			c.unnamed(a)
			c.releasePath(r, a, all)
		}
		if first.at != nil && r.asks {
			c.outlived(r, a, first)
		}
	}
}

// apply returns what a filter does on a route; not ok: nothing.
func (c *envoyChecker) apply(f *envoyFilter, r *envoyRoute) (applied, bool) {
	a := applied{filter: f, spot: f.spot, name: f.domain}
	rules, off := f.own, f.disabled
	staged := false
	if rules == nil {
		rules, staged = r.rules, true
	}
	for _, overrides := range r.filters {
		o, ok := overrides[f.name]
		if !ok {
			continue
		}
		off = o.disabled
		if o.domain != "" {
			a.name, a.spot = o.domain, o.spot
		}
		if o.rules != nil {
			rules, staged = o.rules, false
		}
		break
	}
	if off || rules == nil {
		return a, false
	}
	a.source = rules.spot
	for _, rule := range rules.rules {
		switch {
		case !c.reader.step(): // told at the end
			return a, false
		case staged && rule.stage != f.stage:
		case rule.atEnd:
			a.ends = append(a.ends, rule)
		default:
			a.asks = append(a.asks, rule)
		}
	}
	a.domain = c.set.domains[a.name]
	if a.domain == nil {
		c.warn(a.spot, fmt.Sprintf("no policy file has domain: %s, so that nothing is limited; give its file to weir, or mend the name", show(a.name)))
	}
	return a, len(a.asks)+len(a.ends) > 0
}

// unmet warns of a descriptor that no policy meets.
func (c *envoyChecker) unmet(d *domain, rule envoyRule) {
	var parts []string
	for _, e := range rule.entries {
		switch {
		case strings.HasPrefix(e.key, limit.ReservedPrefix):
			if e.key == "weir.event" && e.value == "release" {
				return
			}
		case e.any:
			parts = append(parts, show(e.key))
		case d.sensitive.names(e.key):
			parts = append(parts, show(e.key)+"="+hidden)
		default:
			parts = append(parts, show(e.key)+"="+show(e.value))
		}
	}
	if rule.opaque || len(parts) == 0 || len(c.met(d, rule)) > 0 || c.reader.steps < 0 {
		return
	}
	c.warn(rule.spot, fmt.Sprintf("no policy of domain %s meets the descriptor %s, so that it limits nothing; mend the key, or write a policy for it: %s has none of these keys, as deep as this", show(d.name), strings.Join(parts, ","), d.file))
}

// met returns the policies that a descriptor may meet.
func (c *envoyChecker) met(d *domain, rule envoyRule) []*node {
	if rule.opaque {
		return nil
	}
	var found []*node
	var walk func(n *node, rest []envoyEntry)
	walk = func(n *node, rest []envoyEntry) {
		for len(rest) > 0 && strings.HasPrefix(rest[0].key, limit.ReservedPrefix) {
			rest = rest[1:]
		}
		if !c.reader.step() {
			return
		}
		if len(rest) == 0 {
			if n != &d.root {
				found = append(found, n)
			}
			return
		}
		e := rest[0]
		if e.optional {
			walk(n, rest[1:])
		}
		if !e.any {
			if child := n.child(limit.Entry{Key: e.key, Value: e.value}); child != nil {
				walk(child, rest[1:])
			}
			return
		}
		for _, child := range n.children {
			if c.reader.step() && glob(child.key, e.key) {
				walk(child, rest[1:])
			}
		}
	}
	walk(&d.root, rule.entries)
	return found
}

// unnamed warns of requests that do not name their stream.
func (c *envoyChecker) unnamed(a applied) {
	if !slices.ContainsFunc(a.asks, func(r envoyRule) bool { return r.has("weir.stream_id") }) {
		c.warn(a.source, "none of these names the stream, so that a release finds nothing if weir's answer is lost; add - actions: [{request_headers: {header_name: x-weir-stream, descriptor_key: weir.stream_id}}], as docs/envoy.md has it")
	}
}

// releasePath notes a route on which slots are taken and not given back.
func (c *envoyChecker) releasePath(r *envoyRoute, a applied, all []applied) {
	elsewhere := false
	for _, other := range all {
		if releases(other.ends) {
			if other.name == a.name {
				c.released = true
				return
			}
			elsewhere = true // told by itself
		}
	}
	if !elsewhere && !c.logs(a.name) {
		c.missing = append(c.missing, missingRelease{r, a.spot, a.name})
	}
}

// logs reports whether an access log tells weir the end of the streams.
func (c *envoyChecker) logs(domain string) bool {
	return slices.ContainsFunc(c.manager.logs, func(log envoyLog) bool { return log.domain == domain })
}

// unreleased warns of slots that nobody gives back: at the routes, if others do.
func (c *envoyChecker) unreleased() {
	for _, m := range c.missing {
		at, where := m.filter, "the filter takes slots, and"
		if c.released {
			at, where = m.route.spot, m.route.name+" takes slots, and"
		}
		c.warn(at, fmt.Sprintf("%s nothing tells weir the end of a stream, so that each is taken until its lease is over; add the filter ratelimit.release and the access log with log_name: %s, as docs/envoy.md has them (unless your service releases)", where, show(m.domain)))
	}
}

// elsewhere warns of releases that go to another domain than what is asked.
func (c *envoyChecker) elsewhere(a applied, all []applied) {
	var asked []string
	for _, other := range all {
		if len(other.asks) == 0 {
			continue
		}
		if other.name == a.name {
			return
		}
		asked = append(asked, show(other.name))
	}
	if len(asked) > 0 {
		c.warn(a.spot, fmt.Sprintf("it releases in the domain %s, and slots are taken in %s, so that it finds none; use one domain", show(a.name), strings.Join(asked, ", ")))
	}
}

// defaultRouteTimeout is Envoy's.
const defaultRouteTimeout = 15 * time.Second

// shortest is the lease that ends first.
type shortest struct {
	life  time.Duration
	label string // concurrency.lease or reserve
	at    *node  // nil: there is none
}

// lease returns the shortest lease of those that what a filter asks may take, and
// whether it may take any.
func (c *envoyChecker) lease(a applied) (first shortest, takes bool) {
	if !c.leasesOf(a.domain).any {
		return first, false
	}
	for _, rule := range a.asks {
		takes = takes || rule.opaque
		for _, n := range c.met(a.domain, rule) {
			for i := range n.rules {
				check := &n.rules[i].check
				if l, ok := check.Limit.(limit.Concurrency); ok && (first.at == nil || l.Lease < first.life) {
					first = shortest{l.Lease, "concurrency.lease", n}
				}
				if check.Reserve > 0 && (first.at == nil || check.Reserve < first.life) {
					first = shortest{check.Reserve, "reserve", n}
				}
			}
		}
	}
	return first, takes || first.at != nil
}

// outlived warns of streams that may live longer than their lease s.
func (c *envoyChecker) outlived(r *envoyRoute, a applied, s shortest) {
	at, life, what := r.spot, defaultRouteTimeout, "has the default timeout of 15s, longer than"
	if r.timeout.is {
		at, life, what = r.timeout.spot, r.timeout.value, "has a timeout of "+shortTime(r.timeout.value)+", longer than"
	}
	longest := c.manager.longest
	if r.longest.is {
		longest = r.longest.value
	}
	if longest > 0 && (life == 0 || longest < life) {
		life, what = longest, "has a max_stream_duration of "+shortTime(longest)+", longer than"
	}
	if life > 0 && life <= s.life {
		return
	}
	if life == 0 {
		what = "has no timeout, and may outlive"
	}
	lease := fmt.Sprintf("%s: %s of %s (%s:%d)", s.label, shortTime(s.life), show(s.at.key), a.domain.file, s.at.line)
	if !c.logs(a.name) || c.manager.flush == 0 && c.manager.spot.line > 0 {
		c.warn(at, fmt.Sprintf("%s %s %s, and nothing renews the lease: what takes longer goes on without its slot; write a longer lease or a shorter timeout, or renew by access_log_flush_interval and the access log with log_name: %s, as docs/envoy.md has them", r.name, what, lease, show(a.name)))
		return
	}
	if 3*c.manager.flush > s.life {
		c.warn(c.manager.spot, fmt.Sprintf("its access_log_flush_interval is %s, more than a third of %s, which streams of %s may outlive: a sign of life that is late loses the slot; write a shorter one, or a longer lease", shortTime(c.manager.flush), lease, r.name))
	}
}

// filter looks at a filter for itself.
func (c *envoyChecker) filter(f *envoyFilter, use filterUse) {
	d := c.set.domains[f.domain]
	switch {
	case use.asks && !f.timeout.is:
		c.warn(f.spot, "the filter has no timeout, so that Envoy waits 20ms, and of a burst most passes unasked; write timeout: 0.3s")
	case use.asks && d != nil:
		wait := c.leasesOf(d).wait
		if f.timeout.value < wait+c.options.StoreTimeout {
			c.warn(f.timeout.spot, fmt.Sprintf("the timeout of %s is shorter than what weir may take, max_wait %s and --store-timeout %s, and what takes longer passes unasked; write a longer one", shortTime(f.timeout.value), shortTime(wait), shortTime(c.options.StoreTimeout)))
		}
	case use.releases && !f.timeout.is:
		c.warn(f.spot, "the filter has no timeout, so that a release is given up after 20ms, and its slot is taken until its lease is over; write timeout: 5s, and a retry_policy that fills it")
	}
	if use.asks && f.deny.line > 0 {
		c.warn(f.deny, "failure_mode_deny: true answers 500 to every request while weir is away; remove it, and let failure_mode of the policies say what becomes of them while the store is")
	}
}

// domainLeases are what is to be known of a domain's leases.
type domainLeases struct {
	any  bool          // requests may hold leases
	wait time.Duration // how long one may wait for a slot, at most
}

func (l *envoyLinter) leasesOf(d *domain) domainLeases {
	known, ok := l.leases[d]
	if ok {
		return known
	}
	for n := range d.policies() {
		for i := range n.rules {
			c, slots := n.rules[i].check.Limit.(limit.Concurrency)
			known.any = known.any || slots || n.rules[i].check.Reserve > 0
			switch {
			case !slots:
			case c.MaxWait == 0:
				known.wait = max(known.wait, l.options.MaxWait)
			default:
				known.wait = max(known.wait, c.MaxWait) // negative: it does not wait
			}
		}
	}
	l.leases[d] = known
	return known
}

func releases(rules []envoyRule) bool {
	return slices.ContainsFunc(rules, func(r envoyRule) bool { return r.event() == "release" })
}

// event is the value of weir.event, or "".
func (r envoyRule) event() string {
	for _, e := range r.entries {
		if e.key == "weir.event" {
			return e.value
		}
	}
	return ""
}

func (r envoyRule) has(key string) bool {
	return slices.ContainsFunc(r.entries, func(e envoyEntry) bool { return e.key == key })
}
