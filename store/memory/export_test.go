package memory

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Dump prints all that still means something: what is only waiting to be cleaned
// away does not.
func (s *Store) Dump() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(s.states)) {
		st := s.states[key]
		if st.dies <= s.now() {
			continue
		}
		live := slices.Collect(st.slots.alive(s.now()))
		fmt.Fprintf(&b, "%s %+v %+v %v\n", key, st.bucket, st.window, live)
	}
	for _, key := range slices.Sorted(maps.Keys(s.leases)) {
		l := *s.leases[key]
		if l.death.at <= s.now() {
			continue
		}
		l.death = death{}
		fmt.Fprintf(&b, "%s %+v\n", key, l)
	}
	return b.String()
}
