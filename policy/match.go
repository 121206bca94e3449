package policy

import (
	"cmp"
	"time"

	"weir/limit"
)

// Match returns the checks that r meets. No match, and a domain that the set
// does not know, mean no limit. It keeps nothing of r but its texts.
func (s *Set) Match(r Request) Match {
	d := s.domains[r.Domain]
	if d == nil {
		return Match{Descriptors: make([]Matched, len(r.Descriptors))}
	}
	var onStack [few]place
	places := onStack[:0]
	if len(r.Descriptors) > few {
		places = make([]place, 0, len(r.Descriptors))
	}
	var names replaced
	total := 0 // checks, at most
	for i := range r.Descriptors {
		asked := &r.Descriptors[i]
		p := d.find(asked.Entries)
		if asked.refundsNothing(r.Hits) {
			p = place{}
		} else if asked.Override != nil {
			total++
		}
		places = append(places, p)
		if p.node == nil {
			continue
		}
		total += len(p.node.rules)
		if d.replaces {
			names.collect(p.node, asked.Override != nil)
		}
	}
	m, indices := newMatch(len(r.Descriptors), total)
	if total == 0 {
		return m
	}

	all := merger{checks: m.Checks}
	for i := range r.Descriptors {
		asked, n := &r.Descriptors[i], places[i].node
		from := len(indices)
		hits := asked.cost(r.Hits)
		subject := asked.Entries
		if n != nil && places[i].shared {
			subject = d.subject(asked.Entries)
		}
		if d.sensitive != nil && (asked.Override != nil || n != nil && len(n.rules) > 0) {
			subject = d.hide(subject)
		}
		if asked.Override != nil && !asked.refundsNothing(r.Hits) {
			var own limit.Limit = *asked.Override
			c := limit.Check{
				Key:         limit.Key(d.name, own, subject),
				Limit:       own,
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
		if n != nil {
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
				c.Key = limit.KeyOf(rule.prefix, subject)
				c.Hits = hits
				if rule.quota {
					c.Quota = i + 1
				}
				indices = append(indices, all.add(c))
			}
		}
		m.Descriptors[i].Checks = indices[from:len(indices):len(indices)]
	}
	m.Checks = all.finish()
	return m
}

// newMatch returns the match of n descriptors, with room for total checks and for their
// indices, those of all descriptors one after the other. Of most requests it is one piece of
// memory.
func newMatch(n, total int) (m Match, indices []int) {
	switch {
	case total == 0:
		m.Descriptors = make([]Matched, n)
	case n == 1 && total <= 2:
		room := &struct {
			descriptors [1]Matched
			checks      [2]limit.Check
			indices     [2]int
		}{}
		m.Descriptors, m.Checks, indices = room.descriptors[:], room.checks[:0], room.indices[:0]
	case n <= 4 && total <= 4:
		room := &struct {
			descriptors [4]Matched
			checks      [4]limit.Check
			indices     [4]int
		}{}
		m.Descriptors, m.Checks, indices = room.descriptors[:n:n], room.checks[:0], room.indices[:0]
	default:
		m.Descriptors, m.Checks, indices = make([]Matched, n), make([]limit.Check, 0, total), make([]int, 0, total)
	}
	return m, indices
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
