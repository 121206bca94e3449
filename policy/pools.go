package policy

import (
	"iter"

	"weir/limit"
)

// Pools returns the domain and the check of each concurrency limit that is of one subject
// alone, since every entry of its path has a value: how many it holds is one number.
func (s *Set) Pools() iter.Seq2[string, limit.Check] {
	return func(yield func(domain string, c limit.Check) bool) {
		for _, name := range s.names {
			if !s.domains[name].root.pools(nil, func(path []limit.Entry) bool {
				m := s.Match(Request{Domain: name, Descriptors: []Descriptor{{Entries: path}}})
				for _, c := range m.Checks {
					if _, ok := c.Limit.(limit.Concurrency); ok && !yield(name, c) {
						return false
					}
				}
				return true
			}) {
				return
			}
		}
	}
}

// pools yields the path of each node below n that has a limit and values alone; path is
// n's own.
func (n *node) pools(path []limit.Entry, yield func(path []limit.Entry) bool) bool {
	for _, c := range n.children {
		if c.value == "" || c.isPattern() {
			continue
		}
		own := append(path[:len(path):len(path)], limit.Entry{Key: c.key, Value: c.value})
		if len(c.rules) > 0 && !yield(own) || !c.pools(own, yield) {
			return false
		}
	}
	return true
}
