package policy

import (
	"cmp"
	"time"

	"weir/limit"
)

// Match returns the checks that r meets. No match, and a domain that the set
// does not know, mean no limit. It keeps nothing of r but its texts.
func (s *Set) Match(r Request) Match {
	m := Match{Descriptors: make([]Matched, len(r.Descriptors))}
	d := s.domains[r.Domain]
	if d == nil {
		return m
	}
	var onStack [few]place
	places := onStack[:0]
	if len(r.Descriptors) > few {
		places = make([]place, 0, len(r.Descriptors))
	}
	var names replaced
	total := 0 // checks, at most
	for _, asked := range r.Descriptors {
		p := d.find(asked.Entries)
		if asked.refundsNothing(r.Hits) {
			p, asked.Override = place{}, nil
		}
		places = append(places, p)
		if asked.Override != nil {
			total++
		}
		if p.node == nil {
			continue
		}
		total += len(p.node.rules)
		if d.replaces {
			names.collect(p.node, asked.Override != nil)
		}
	}
	if total == 0 {
		return m
	}

	all := merger{checks: make([]limit.Check, 0, total)}
	indices := make([]int, 0, total) // of all descriptors, one after the other
	for i, asked := range r.Descriptors {
		from := len(indices)
		hits := asked.cost(r.Hits)
		n := places[i].node
		subject := asked.Entries
		if n != nil && places[i].shared {
			subject = d.subject(asked.Entries)
		}
		if d.sensitive != nil && (asked.Override != nil || n != nil && len(n.rules) > 0) {
			subject = d.hide(subject)
		}
		if asked.Override != nil && !asked.refundsNothing(r.Hits) {
			c := limit.Check{
				Key:         limit.Key(d.name, *asked.Override, subject),
				Limit:       *asked.Override,
				Hits:        hits,
				Name:        OverrideName,
				Shadow:      d.shadow,
				FailureMode: d.failure.mode,
				Fraction:    d.failure.fraction,
			}
			if n != nil {
				c.Class, c.FailureMode, c.Fraction = n.class, n.failure.mode, n.failure.fraction
				c.Reserve = n.reserve(names)
			}
			indices = append(indices, all.add(c))
		}
		if n == nil {
			m.Descriptors[i].Checks = indices[from:len(indices):len(indices)]
			continue
		}
		for j := range n.rules {
			rule := &n.rules[j]
			if asked.Override != nil && !rule.outlivesOverride() || names.has(rule.explicit) {
				continue
			}
			if rule.check.Limit == nil {
				m.Descriptors[i].Unlimited = true
				continue
			}
			c := rule.check
			c.Key = limit.Key(d.name, c.Limit, subject)
			c.Hits = hits
			if rule.quota {
				c.Quota = i + 1
			}
			indices = append(indices, all.add(c))
		}
		m.Descriptors[i].Checks = indices[from:len(indices):len(indices)]
	}
	m.Checks = all.finish()
	return m
}

// reserve is how long a request's own limit reserves: as long as the limits that it stands
// in for, the shortest of those that do; 0 if none does. What names are of is left out.
func (n *node) reserve(names replaced) (shortest time.Duration) {
	for i := range n.rules {
		rule := &n.rules[i]
		if rule.outlivesOverride() || names.has(rule.explicit) {
			continue
		}
		shortest = cmp.Or(min(shortest, rule.check.Reserve), shortest, rule.check.Reserve)
	}
	return shortest
}

// outlivesOverride reports whether the rule applies beside a request's own
// limit, which replaces buckets and windows.
func (r *rule) outlivesOverride() bool {
	_, ok := r.check.Limit.(limit.Concurrency)
	return ok
}

// cost is the hits of the descriptor in a request with the given hits, within
// ±limit.MaxExact.
func (d Descriptor) cost(request uint64) int64 {
	hits := max(request, 1)
	if d.HasHits {
		hits = d.Hits
	}
	n := int64(min(hits, limit.MaxExact))
	if d.Negative {
		return -n
	}
	return n
}

// refundsNothing reports whether the descriptor gives back 0 hits. It meets no
// limit then: S9, a refund never refuses, and 0 hits of any other kind ask.
func (d Descriptor) refundsNothing(request uint64) bool {
	return d.Negative && d.cost(request) == 0
}

// few is up to how many elements a scan of a list is used instead of a map.
const few = 16

// replaced is the names that the limits of one request replace. A limit that is
// replaced itself still replaces: two that name each other both go.
type replaced struct {
	list []string
	set  map[string]bool // instead of list, if there are many
}

// collect adds what the rules of n replace; overridden leaves out those that a
// request's own limit does away with.
func (r *replaced) collect(n *node, overridden bool) {
	for i := range n.rules {
		if overridden && !n.rules[i].outlivesOverride() {
			continue
		}
		for _, name := range n.rules[i].replaces {
			switch {
			case r.set != nil:
				r.set[name] = true
			case len(r.list) < few:
				r.list = append(r.list, name)
			default:
				r.set = map[string]bool{name: true}
				for _, name := range r.list {
					r.set[name] = true
				}
			}
		}
	}
}

func (r *replaced) has(explicit string) bool {
	if explicit == "" || len(r.list) == 0 {
		return false
	}
	if r.set != nil {
		return r.set[explicit]
	}
	for _, name := range r.list {
		if name == explicit {
			return true
		}
	}
	return false
}
