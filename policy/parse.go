package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"weir/limit"
)

const (
	maxDomain = 256  // bytes, escaped: a lease id has room for no more
	maxKeys   = 4096 // bytes of all keys of a path
	maxFile   = 16 << 20
)

// MaxName is the longest name of a limit, in bytes.
const MaxName = 128

// parser reads one file.
type parser struct {
	lenient  bool
	hashKey  []byte // empty if there is none although one is needed
	errors   problems
	warnings problems
	domain   *domain
	// replacers are the named limits that replace others, for the search for
	// those that replace each other.
	replacers []replacer
	prefixes  map[string]string // of keys, each once

	fieldCount  int
	policyCount int
	// stopped: the file is too large, or has too many errors, to go on.
	stopped bool
}

// parsed is what the text of one policy file says.
type parsed struct {
	domain   *domain // without its policies if err is not nil
	warnings []string
	err      error // a line for everything that is wrong
}

// Parse reads the text of one policy file; name is what errors call it. Its
// error has a line for everything that is wrong.
func Parse(name string, data []byte, o Options) (*Set, error) {
	p := parse(name, data, o.withHashKey())
	if p.err != nil {
		return nil, p.err
	}
	return newSet([]*parsed{p}), nil
}

// parse is Parse, but draws no hash key.
func parse(name string, data []byte, o Options) *parsed {
	p := &parser{
		lenient:  o.Lenient,
		hashKey:  o.HashKey,
		errors:   problems{file: name},
		warnings: problems{file: name},
		domain:   &domain{file: name, sum: sha256.Sum256(data), shadow: o.Shadow},
	}
	p.file(data)
	if err := p.errors.err(); err != nil {
		p.domain.root = node{}
		return &parsed{domain: p.domain, err: err}
	}
	return &parsed{domain: p.domain, warnings: p.warnings.lines()}
}

// newSet returns the policies of files without errors, each of another domain.
func newSet(files []*parsed) *Set {
	s := &Set{domains: make(map[string]*domain, len(files))}
	for _, p := range files {
		s.domains[p.domain.name] = p.domain
		s.warnings = append(s.warnings, p.warnings...)
	}
	s.names = slices.Sorted(maps.Keys(s.domains))
	digest := sha256.New()
	for _, name := range s.names {
		_, _ = digest.Write(s.domains[name].sum[:]) // it never fails
	}
	s.version = hex.EncodeToString(digest.Sum(nil)[:6])
	for _, name := range s.names {
		s.files = append(s.files, s.domains[name].file)
	}
	return s
}

// file reads the whole text.
func (p *parser) file(data []byte) {
	if len(data) > maxFile {
		p.fail(1, nil, fmt.Sprintf("the file is larger than %d MiB; split it into domains", maxFile>>20))
		return
	}
	if root := p.document(data); root != nil {
		hide := mentionsSensitive(root, make(map[string]bool))
		p.errors.hideValues, p.warnings.hideValues = hide, hide
		p.root(root)
	}
	if len(p.errors.list) == 0 {
		p.lint()
	}
}

// fail notes an error.
func (p *parser) fail(line int, at *path, text string) {
	p.errors.add(line, at, text)
	p.stopped = p.stopped || p.errors.full()
}

// stop notes the error that ends the reading.
func (p *parser) stop(line int, at *path, text string) {
	if !p.stopped {
		p.fail(line, at, text)
	}
	p.stopped = true
}

// mistake notes what envoyproxy/ratelimit lets pass: an error, or a warning if
// the reading is lenient.
func (p *parser) mistake(line int, at *path, text string) {
	if p.lenient {
		p.warnings.add(line, at, text)
		return
	}
	p.fail(line, at, text)
}

// lapse is a mistake about a key. It is an error even in lenient reading if the key
// is sensitive: what to hide is not guessed.
func (p *parser) lapse(key string, line int, at *path, text string) {
	if key == "sensitive" {
		p.fail(line, at, text)
		return
	}
	p.mistake(line, at, text)
}

// require notes that a key is missing, and returns nil then.
func (p *parser) require(fields []field, name, label string, line int, at *path, remedy string) *field {
	f := get(fields, name)
	if f == nil {
		p.fail(line, at, label+" is missing; "+remedy)
	}
	return f
}

func (p *parser) root(n *yaml.Node) {
	if n.Kind != yaml.MappingNode {
		got := describe(n)
		if n.Kind == yaml.ScalarNode && !isNull(n) {
			got = "a text" // perhaps of a file with a secret, named by mistake
		}
		p.fail(n.Line, nil, "the file must be a map, got "+got+"; begin it with domain: NAME")
		return
	}
	fields := p.fields(n, nil, rootLevel)
	// The domain and its shadow first: the descriptors need them.
	if f := p.require(fields, "domain", "domain", n.Line, nil, "begin the file with domain: NAME"); f != nil {
		p.domainName(f)
	}
	if f := get(fields, "shadow_mode"); f != nil {
		on, _ := p.flag(f, nil)
		p.domain.shadow = p.domain.shadow || on
	}
	p.domain.failure.fraction = limit.Whole
	if f := get(fields, "failure_mode"); f != nil {
		p.domain.failure.mode = p.failureMode(f, nil)
	}
	if f := get(fields, "local_fraction"); f != nil {
		p.domain.failure.fraction = p.fraction(f, nil)
	}
	if f := get(fields, "descriptors"); f != nil {
		p.descriptors(f, &p.domain.root, nil, 1)
	}
	p.circles()
}

func (p *parser) domainName(f *field) {
	name, ok := p.text(f, nil)
	if !ok {
		return
	}
	escaped := len(limit.NewLeaseID(name, [16]byte{})) - len(limit.NewLeaseID("", [16]byte{}))
	switch {
	case name == "":
		p.fail(f.line, nil, "domain is empty; give it the name that Envoy sends")
	case escaped > maxDomain:
		p.fail(f.line, nil, fmt.Sprintf("domain is %d bytes long when escaped, and may have %d; shorten it", escaped, maxDomain))
	}
	p.domain.name, p.domain.line = name, f.line
}

// descriptors reads a list of policies; depth is 1 for those of the root.
func (p *parser) descriptors(f *field, parent *node, at *path, depth int) {
	switch {
	case isNull(f.value):
		return
	case f.value.Kind != yaml.SequenceNode:
		p.fail(f.value.Line, at, "descriptors must be a list, got "+describe(f.value)+"; begin each item with a dash: - key: …")
		return
	case depth > maxDepth:
		p.stop(f.value.Line, nil, fmt.Sprintf("descriptors are nested more than %d deep; does an alias name a list that it is in?", maxDepth))
		return
	}
	for i, item := range f.value.Content {
		if p.policyCount++; p.policyCount > maxPolicies {
			p.stop(item.Line, at, fmt.Sprintf("the file has more than %d descriptors once its aliases are followed; split it into domains", maxPolicies))
		}
		if p.stopped {
			return
		}
		p.descriptor(resolve(item), parent, &path{up: at, index: i}, depth)
	}
	parent.indexed()
	p.sharedOnce(parent, at)
}

// sharedOnce refuses a pattern that shares its subject beside a policy whose key
// is the same text: a request that sends that text would name both subjects alike.
func (p *parser) sharedOnce(parent *node, at *path) {
	var byKey map[string][]*node // the first two of each pattern
	for _, c := range parent.wild {
		if !strings.Contains(c.key, "*") {
			continue
		}
		if byKey == nil {
			byKey = make(map[string][]*node)
		}
		if same := byKey[c.key]; len(same) < 2 {
			byKey[c.key] = append(same, c)
		}
	}
	for _, shared := range parent.wild {
		for _, other := range byKey[shared.key] {
			if shared.share && other != shared {
				p.fail(shared.line, at, fmt.Sprintf("a key with share_threshold must stand alone, and line %d has the same key; give that one another pattern", other.line))
				return
			}
		}
	}
}

func (p *parser) descriptor(item *yaml.Node, parent *node, at *path, depth int) {
	label(item, at)
	fields := p.fields(item, at, descriptorLevel)
	if item.Kind != yaml.MappingNode {
		return
	}
	n := &node{line: item.Line, failure: p.domain.failure}
	named := p.identity(fields, n, item.Line, at)
	p.options(fields, n, at)
	if named {
		if before := parent.add(n); before != nil {
			p.fail(item.Line, at, fmt.Sprintf("the same key and value stand in line %d; merge the two", before.line))
		}
	}
	if named && n.sensitive {
		p.sensitive(get(fields, "sensitive").line, n.key, at)
	}
	for _, kind := range []struct {
		key  string
		read func(*parser, *field, *node, *path) (rule, bool)
	}{
		{"token_bucket", (*parser).tokenBucket},
		{"rate_limit", (*parser).rateLimit},
		{"concurrency", (*parser).concurrency},
	} {
		f := get(fields, kind.key)
		if f == nil || isNull(f.value) {
			continue
		}
		r, ok := kind.read(p, f, n, at)
		if !ok {
			continue
		}
		if r.check.Limit != nil {
			r.prefix = p.keyPrefix(r.check.Limit)
		}
		r.check.Class, r.check.Shadow = n.class, n.shadow || p.domain.shadow
		r.check.FailureMode, r.check.Fraction = n.failure.mode, n.failure.fraction
		r.check.Name = r.explicit
		if r.explicit == "" {
			r.check.Name = defaultName(at.keys())
		}
		r.quota = n.quota && !r.check.Shadow
		if r.check.Shadow {
			r.replaces = nil // a shadow limit replaces nothing
		}
		if len(r.replaces) > 0 {
			p.domain.replaces = true
			p.replacers = append(p.replacers, replacer{r.explicit, r.replaces, f.line, f.label, at})
		}
		n.rules = append(n.rules, r)
	}
	if f := get(fields, "descriptors"); f != nil {
		p.descriptors(f, n, at, depth+1)
	}
}

// keyPrefix is limit.KeyPrefix, the same text for limits that share it.
func (p *parser) keyPrefix(l limit.Limit) string {
	prefix := limit.KeyPrefix(p.domain.name, l)
	if p.prefixes == nil {
		p.prefixes = make(map[string]string)
	}
	if before, ok := p.prefixes[prefix]; ok {
		return before
	}
	p.prefixes[prefix] = prefix
	return prefix
}

// label gives the path of a descriptor its key and value before they are
// checked, so that every error of it can name them.
func label(item *yaml.Node, at *path) {
	if item.Kind != yaml.MappingNode {
		return
	}
	for i := 0; i+1 < len(item.Content); i += 2 {
		k, v := resolve(item.Content[i]), resolve(item.Content[i+1])
		if k.Kind != yaml.ScalarNode || v.Kind != yaml.ScalarNode || isNull(v) {
			continue
		}
		switch k.Value {
		case "key":
			at.key = v.Value
		case "value":
			at.value = v.Value
		}
	}
}

// identity reads the key and the value of a descriptor, and reports whether it
// can stand in the tree.
func (p *parser) identity(fields []field, n *node, line int, at *path) bool {
	f := p.require(fields, "key", "key", line, at, "give the descriptor a key")
	if f == nil {
		return false
	}
	key, ok := p.text(f, at)
	if !ok {
		return false
	}
	n.key, at.key = key, key
	if f := get(fields, "value"); f != nil {
		n.value, ok = p.text(f, at)
		ok = ok || isNull(f.value) // any value
		at.value = n.value
	}
	length := 0
	for up := at; up != nil; up = up.up {
		length += len(up.key) + 1
	}
	switch {
	case key == "":
		p.fail(f.line, at, "key is empty; give the descriptor a key")
	case strings.HasPrefix(key, limit.ReservedPrefix):
		p.fail(f.line, at, fmt.Sprintf("keys that begin with %s are reserved; rename it", limit.ReservedPrefix))
	case length > maxKeys:
		p.stop(f.line, nil, fmt.Sprintf("the keys down to a descriptor have more than %d bytes; shorten them", maxKeys))
	default:
		return ok
	}
	return false
}

// options reads the keys of a descriptor that say how its limits apply.
func (p *parser) options(fields []field, n *node, at *path) {
	for i := range fields {
		f := &fields[i]
		switch f.name {
		case "shadow_mode":
			n.shadow, _ = p.flag(f, at)
		case "quota_mode":
			n.quota, _ = p.flag(f, at)
			if n.quota && get(fields, "concurrency") != nil {
				p.fail(f.line, at, "quota_mode does not go with concurrency, whose slots are not a quota; remove one or split the descriptor")
			}
		case "share_threshold":
			n.share, _ = p.flag(f, at)
			if n.share && !n.isPattern() {
				p.fail(f.line, at, "share_threshold needs a * in key or value; add one or remove it")
			}
		case "reject_as":
			text, ok := p.text(f, at)
			switch {
			case !ok:
			case text == limit.Lane.String():
			case text == limit.Pool.String():
				n.class = limit.Pool
			default:
				p.fail(f.line, at, fmt.Sprintf("reject_as must be lane or pool, got %s; write one of the two", describe(f.value)))
			}
		case "failure_mode":
			n.failure.mode, n.ownFailure = p.failureMode(f, at), true
		case "local_fraction":
			n.failure.fraction, n.ownFailure = p.fraction(f, at), true
		case "sensitive":
			on, ok := p.flag(f, at)
			n.sensitive, n.harmless = on, ok && !on
		case "detailed_metric", "value_to_metric":
			if on, _ := p.flag(f, at); on {
				p.warnings.add(f.line, at, f.name+" has no effect in weir; remove it")
			}
		case "metadata":
			switch {
			case isNull(f.value):
			case f.value.Kind != yaml.MappingNode:
				p.fail(f.line, at, "metadata must be a map, got "+describe(f.value)+"; remove it, since it has no effect in weir")
			default:
				p.warnings.add(f.line, at, f.name+" has no effect in weir; remove it")
			}
		}
	}
}

// sensitive notes that the values of a key must not be seen in this domain.
func (p *parser) sensitive(line int, key string, at *path) {
	d := p.domain
	if d.sensitive == nil {
		d.sensitive, d.hasher = &keySet{}, newHasher(p.hashKey)
		if len(p.hashKey) == 0 {
			p.fail(line, at, "sensitive needs --hash-key-file with --redis, so that all replicas hash alike; make one by openssl rand -hex 32")
		}
	}
	before := len(d.sensitive.patterns)
	d.sensitive.add(key)
	if len(d.sensitive.patterns) > max(before, maxPatterns) {
		p.stop(line, at, fmt.Sprintf("more than %d patterns are sensitive; use fewer, as each entry is compared with all", maxPatterns))
	}
}

// failureMode reads open, closed or local.
func (p *parser) failureMode(f *field, at *path) limit.FailureMode {
	text, ok := p.text(f, at)
	mode := limit.ParseFailureMode(text)
	switch {
	case !ok:
	case mode == limit.DefaultMode:
		p.fail(f.line, at, fmt.Sprintf("failure_mode must be open, closed or local, got %s; write one of the three", describe(f.value)))
	}
	return mode
}

// fraction reads a number above 0, 1 at most, of 6 decimals at most.
func (p *parser) fraction(f *field, at *path) limit.Fraction {
	if isNull(f.value) {
		return limit.Whole
	}
	whole, decimals, _ := strings.Cut(f.value.Value, ".")
	millionths := whole + decimals + strings.Repeat("0", max(0, 6-len(decimals)))
	n, err := strconv.ParseUint(millionths, 10, 64)
	if f.value.Kind == yaml.ScalarNode && !quoted(f.value) && whole != "" && len(decimals) <= 6 && err == nil && n > 0 && n <= uint64(limit.Whole) {
		return limit.Fraction(n)
	}
	p.fail(f.value.Line, at, fmt.Sprintf("%s must be a number above 0 and at most 1 with at most 6 decimals, got %s; write which part of the limit all replicas together may allow while the store is away, like 0.5", f.label, describe(f.value)))
	return limit.Whole
}

// defaultName is the name of a limit that has none: its path of keys, made fit
// for a metric's label. One that is too long ends in a digest that tells it
// from others.
func defaultName(keys string) string {
	if !printable(keys) {
		keys = strings.Map(func(r rune) rune {
			if !printable(string(r)) {
				return '_'
			}
			return r
		}, keys)
	}
	if len(keys) <= MaxName {
		return keys
	}
	sum := sha256.Sum256([]byte(keys))
	digest := "~" + hex.EncodeToString(sum[:4])
	cut := MaxName - len(digest)
	for !utf8.RuneStart(keys[cut]) {
		cut--
	}
	return keys[:cut] + digest
}
