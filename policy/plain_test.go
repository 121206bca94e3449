package policy

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"weir/limit"
)

// The plain way to match: every pattern is looked at, and memory is taken as it comes. It
// says what the fast one has to find.

func plainChild(n *node, e limit.Entry) *node {
	if c := n.exact[entry{e.Key, e.Value}]; c != nil {
		return c
	}
	if c := plainWildcard(n, e); c != nil {
		return c
	}
	return n.bare[e.Key]
}

func plainWildcard(n *node, e limit.Entry) *node {
	for _, c := range n.wild {
		if slowGlob(c.key, e.Key) && (c.value == "" || slowGlob(c.value, e.Value)) {
			return c
		}
	}
	return nil
}

func plainFind(d *domain, entries []limit.Entry) place {
	if len(entries) == 0 {
		return place{}
	}
	p := place{node: &d.root}
	for _, e := range entries {
		if p.node = plainChild(p.node, e); p.node == nil {
			return place{}
		}
		p.shared = p.shared || p.node.share
	}
	return p
}

func plainSubject(d *domain, entries []limit.Entry) []limit.Entry {
	var s []limit.Entry
	n := &d.root
	for _, e := range entries {
		n = plainChild(n, e)
		if n.share && strings.Contains(n.key, "*") {
			e.Key = n.key
		}
		if n.share && strings.Contains(n.value, "*") {
			e.Value = n.value
		}
		s = append(s, e)
	}
	return s
}

func plainHide(d *domain, subject []limit.Entry) (hidden []limit.Entry) {
	for _, e := range subject {
		secret := d.sensitive != nil && strings.Contains(e.Key, "*")
		if d.sensitive != nil {
			for key := range d.sensitive.keys {
				secret = secret || slowGlob(key, e.Key)
			}
		}
		if secret {
			e = limit.Hashed(e.Key, d.hasher.digest(d.name, e.Key, e.Value))
		}
		hidden = append(hidden, e)
	}
	return hidden
}

func plainMatch(s *Set, r Request) Match {
	m := Match{Descriptors: make([]Matched, len(r.Descriptors))}
	d := s.domains[r.Domain]
	if d == nil {
		return m
	}
	var places []place
	replaced := make(map[string]bool)
	for _, asked := range r.Descriptors {
		p := plainFind(d, asked.Entries)
		if asked.refundsNothing(r.Hits) {
			p = place{}
		}
		places = append(places, p)
		if p.node == nil {
			continue
		}
		for _, rule := range p.node.rules {
			if asked.Override != nil && !rule.outlivesOverride() {
				continue
			}
			for _, name := range rule.replaces {
				replaced[name] = true
			}
		}
	}
	left := func(rule rule) bool { return rule.explicit != "" && replaced[rule.explicit] }
	var all []limit.Check
	add := func(i int, c limit.Check) {
		at := -1
		for j := range all {
			if all[j].Key == c.Key {
				all[j].Hits = combine(all[j], c.Hits)
				c.Hits = all[j].Hits
				if all[j].Limit == c.Limit {
					at = j
				}
			}
		}
		if at < 0 {
			at = len(all)
			all = append(all, c)
		}
		all[at] = merged(all[at], c)
		m.Descriptors[i].Checks = append(m.Descriptors[i].Checks, at)
	}
	for i, asked := range r.Descriptors {
		m.Descriptors[i].Checks = []int{}
		n := places[i].node
		subject := asked.Entries
		if n != nil && places[i].shared {
			subject = plainSubject(d, subject)
		}
		subject = plainHide(d, subject)
		if asked.Override != nil && !asked.refundsNothing(r.Hits) {
			c := limit.Check{
				Key: limit.Key(d.name, *asked.Override, subject), Limit: *asked.Override, Hits: asked.cost(r.Hits),
				Name: OverrideName, Shadow: d.shadow, FailureMode: d.failure.mode, Fraction: d.failure.fraction,
			}
			if n != nil {
				c.Class, c.FailureMode, c.Fraction = n.class, n.failure.mode, n.failure.fraction
				for _, rule := range n.rules {
					if r := rule.check.Reserve; r > 0 && !rule.outlivesOverride() && !left(rule) && (c.Reserve == 0 || r < c.Reserve) {
						c.Reserve = r
					}
				}
			}
			add(i, c)
		}
		if n == nil {
			continue
		}
		for _, rule := range n.rules {
			switch {
			case asked.Override != nil && !rule.outlivesOverride() || left(rule):
			case rule.check.Limit == nil:
				m.Descriptors[i].Unlimited = true
			default:
				c := rule.check
				c.Key, c.Hits = limit.Key(d.name, c.Limit, subject), asked.cost(r.Hits)
				if rule.quota {
					c.Quota = i + 1
				}
				add(i, c)
			}
		}
	}
	for _, c := range all {
		first := slices.IndexFunc(all, func(one limit.Check) bool { return one.Key == c.Key })
		c.Hits = max(-limit.MaxExact, min(limit.MaxExact, all[first].Hits))
		m.Checks = append(m.Checks, c)
	}
	return m
}

// randomText is a short text of few letters, so that many are alike.
func randomText(r *rand.Rand, letters string, most int) string {
	b := make([]byte, r.IntN(most+1))
	for i := range b {
		b[i] = letters[r.IntN(len(letters))]
	}
	return string(b)
}

// randomPolicies is a file of n policies, in up to three levels: values, patterns and keys
// alone, beside each other and in each other.
func randomPolicies(r *rand.Rand, n int) string {
	var b strings.Builder
	b.WriteString("domain: d\ndescriptors:\n")
	depth, seen := 0, []map[string]bool{{}, {}, {}}
	for range n {
		if depth > 0 || b.Len() > 40 {
			depth = min(2, r.IntN(depth+2))
		}
		indent := strings.Repeat("    ", depth)
		key, value := "k"+randomText(r, "ab", 1), ""
		switch r.IntN(3) {
		case 0:
			key = "k" + randomText(r, "ab*", 3)
		case 1:
			value = randomText(r, "ab", 4)
		default:
			value = randomText(r, "ab*", 6)
		}
		own := key + "=" + value
		if seen[depth][own] {
			depth = 0
			continue
		}
		seen[depth][own] = true
		for below := depth + 1; below < len(seen); below++ {
			seen[below] = map[string]bool{}
		}
		fmt.Fprintf(&b, "  %s- key: %q\n", indent, key)
		if value != "" {
			fmt.Fprintf(&b, "  %s  value: %q\n", indent, value)
		}
		switch r.IntN(5) {
		case 0:
			fmt.Fprintf(&b, "  %s  token_bucket: {capacity: %d, refill: 1/s, reserve: 5m}\n", indent, 1+r.IntN(9))
		case 1:
			fmt.Fprintf(&b, "  %s  rate_limit: {unit: hour, requests_per_unit: %d, name: n%d}\n", indent, r.IntN(9), r.IntN(3))
		case 2:
			fmt.Fprintf(&b, "  %s  concurrency: {max_in_flight: %d, lease: 1m, replaces: [{name: n%d}]}\n", indent, 1+r.IntN(9), r.IntN(3))
		case 3:
			fmt.Fprintf(&b, "  %s  rate_limit: {unlimited: true}\n", indent)
		}
		if r.IntN(8) == 0 {
			fmt.Fprintf(&b, "  %s  sensitive: true\n", indent)
		}
		if strings.Contains(value, "*") && r.IntN(4) == 0 {
			fmt.Fprintf(&b, "  %s  share_threshold: true\n", indent)
		}
		fmt.Fprintf(&b, "  %s  descriptors:\n", indent)
	}
	return b.String()
}

func randomRequest(r *rand.Rand) Request {
	asked := Request{Domain: "d", Hits: uint64(r.IntN(3))}
	for range 1 + r.IntN(20) {
		var d Descriptor
		for range 1 + r.IntN(3) {
			d.Entries = append(d.Entries, limit.Entry{Key: "k" + randomText(r, "aab*", 3), Value: randomText(r, "aaabbb*", 8)})
		}
		if r.IntN(3) == 0 {
			d.Hits, d.HasHits, d.Negative = uint64(r.IntN(3)), true, r.IntN(2) == 0
		}
		if r.IntN(6) == 0 {
			d.Override = &limit.Window{Max: int64(r.IntN(5)), Unit: limit.Hour, Multiplier: 1}
		}
		asked.Descriptors = append(asked.Descriptors, d)
	}
	return asked
}

// However many policies there are, and of whatever patterns, a request meets what it would
// meet if each was looked at.
func TestAMatchIsThatOfThePlainWay(t *testing.T) {
	checks := 0
	for seed := range uint64(30) {
		r := rand.New(rand.NewPCG(seed, 1))
		text := randomPolicies(r, 1+int(seed)*10)
		s := mustParse(t, text)
		for range 20 {
			asked := randomRequest(r)
			got, want := s.Match(asked), plainMatch(s, asked)
			for i := range got.Descriptors { // no checks are none, however they are told
				got.Descriptors[i].Checks = append([]int{}, got.Descriptors[i].Checks...)
			}
			if len(want.Checks) == 0 {
				got.Checks, want.Checks = nil, nil
			}
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("%s\n%+v meets\n%+v, want\n%+v", text, asked, got, want)
			}
			checks += len(want.Checks)
		}
	}
	if checks < 1000 {
		t.Errorf("%d checks were met, want many", checks)
	}
}

// What is told of patterns that nothing reaches is what a comparison of all pairs tells.
func TestHiddenPatternsAreThoseOfThePlainWay(t *testing.T) {
	covers := func(n, other *node) bool {
		switch {
		case !slowGlob(n.key, other.key):
			return false
		case n.value == "" || strings.Trim(n.value, "*") == "":
			return true // any value
		}
		return other.value != "" && slowGlob(n.value, other.value)
	}
	hidden := 0
	for seed := range uint64(30) {
		text := randomPolicies(rand.New(rand.NewPCG(seed, 2)), 1+int(seed)*10)
		s := mustParse(t, text)
		root := &s.domains["d"].root
		var visit func(parent *node)
		visit = func(parent *node) {
			for _, n := range parent.children {
				var want *node
				if n.value == "" || n.isPattern() {
					for _, w := range parent.wild {
						if w == n {
							break
						}
						if covers(w, n) {
							want = w
							break
						}
					}
				}
				if got := (&linter{}).hiddenBy(parent, n); got != want {
					t.Fatalf("%s\nline %d is hidden by %+v, want %+v", text, n.line, got, want)
				} else if got != nil {
					hidden++
				}
				visit(n)
			}
		}
		visit(root)
	}
	if hidden < 100 {
		t.Errorf("%d policies were hidden, want many", hidden)
	}
}
