package policy

import (
	"cmp"

	"weir/limit"
)

// merger gathers the checks of a request, so that each state is asked once:
// with the hits of all that meet it (S10). The first check of a key carries
// their sum; finish gives it to the others of that key.
type merger struct {
	checks []limit.Check
	split  bool // some key has checks with different limits
	// With more than few checks, maps do what a scan does for less.
	first map[string]int      // the first check of a key
	same  map[keyAndLimit]int // the check of a key and limit; nil until it is needed
}

type keyAndLimit struct {
	key   string
	limit limit.Limit
}

// add returns the index of the check that stands for c.
func (m *merger) add(c limit.Check) int {
	i := m.firstOf(c.Key)
	if i < 0 {
		return m.append(c)
	}
	m.checks[i].Hits = combine(m.checks[i], c.Hits)
	if m.checks[i].Limit != c.Limit {
		m.split = true
		if i = m.sameAs(c); i < 0 {
			return m.append(c)
		}
	}
	m.checks[i] = merged(m.checks[i], c)
	return i
}

// finish returns the checks with their hits.
func (m *merger) finish() []limit.Check {
	for i := range m.checks {
		c := &m.checks[i]
		if m.split {
			// The first of a key comes before the others, so its hits are final.
			c.Hits = m.checks[m.firstOf(c.Key)].Hits
		}
		c.Hits = max(-limit.MaxExact, min(limit.MaxExact, c.Hits))
	}
	return m.checks
}

func (m *merger) append(c limit.Check) int {
	m.checks = append(m.checks, c)
	i := len(m.checks) - 1
	switch {
	case m.first != nil:
		m.index(i)
	case len(m.checks) > few:
		m.first = make(map[string]int, cap(m.checks))
		for j := range m.checks {
			m.index(j)
		}
	}
	return i
}

func (m *merger) index(i int) {
	c := &m.checks[i]
	if _, ok := m.first[c.Key]; !ok {
		m.first[c.Key] = i
	}
	if m.same != nil {
		m.same[keyAndLimit{c.Key, c.Limit}] = i
	}
}

func (m *merger) firstOf(key string) int {
	if m.first != nil {
		if i, ok := m.first[key]; ok {
			return i
		}
		return -1
	}
	for i := range m.checks {
		if m.checks[i].Key == key {
			return i
		}
	}
	return -1
}

func (m *merger) sameAs(c limit.Check) int {
	if m.first != nil {
		if m.same == nil {
			m.same = make(map[keyAndLimit]int, cap(m.checks))
			for i := range m.checks {
				m.same[keyAndLimit{m.checks[i].Key, m.checks[i].Limit}] = i
			}
		}
		if i, ok := m.same[keyAndLimit{c.Key, c.Limit}]; ok {
			return i
		}
		return -1
	}
	for i := range m.checks {
		if m.checks[i].Key == c.Key && m.checks[i].Limit == c.Limit {
			return i
		}
	}
	return -1
}

// combine returns the hits of c and of one more descriptor that meets it. A
// concurrency takes one slot whatever they are, so it keeps the largest: only
// if all are negative does it take none. The sum is exact for hundreds of
// descriptors, so that their order does not matter; finish cuts it.
func combine(c limit.Check, hits int64) int64 {
	if _, ok := c.Limit.(limit.Concurrency); ok {
		return max(c.Hits, hits)
	}
	const bound = 1 << 62
	return max(-bound, min(bound, c.Hits+hits))
}

// merged is a and b, which have the same key and limit, as one check. What is
// stricter wins, and what ties is settled without a look at their order, but
// for the group of a quota, which only numbers it.
func merged(a, b limit.Check) limit.Check {
	switch {
	case a.Shadow && !b.Shadow:
		b.Hits = a.Hits
		return b
	case !a.Shadow && b.Shadow:
		return a
	}
	a.Name = min(a.Name, b.Name)
	a.Class = min(a.Class, b.Class) // Lane before Pool
	// Closed before local before open, and what is said before what is not.
	a.FailureMode = max(a.FailureMode, b.FailureMode)
	a.Fraction = min(a.Fraction, b.Fraction)
	a.Quota = min(a.Quota, b.Quota) // none before any
	a.Reserve = cmp.Or(min(a.Reserve, b.Reserve), a.Reserve, b.Reserve)
	return a
}
