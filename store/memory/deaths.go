package memory

import (
	"container/heap"
	"time"
)

// write keeps st under key until meaningless ms, and a slack. The mutex is held.
func (s *Store) write(key string, st *state, meaningless int64, slack time.Duration, now int64) {
	st.dies = max(st.dies, now, meaningless+slack.Milliseconds())
	if !st.kept {
		st.kept, st.death = true, death{key: key, at: st.dies}
		s.states[key] = st
		heap.Push(&s.deaths, &st.death)
	}
}

// sweep forgets states that mean nothing any more: more than a call adds, so
// that none pile up, and few, so that none waits. The mutex is held.
func (s *Store) sweep(checks int, now int64) {
	for range checks + sweepBudget {
		if len(s.deaths) == 0 || s.deaths[0].at > now {
			return
		}
		first := s.deaths[0]
		st := s.states[first.key]
		if st != nil && st.dies > now { // it was used since
			first.at = st.dies
			heap.Fix(&s.deaths, 0)
			continue
		}
		heap.Pop(&s.deaths)
		if st != nil {
			delete(s.states, first.key)
		} else {
			delete(s.leases, first.key)
		}
	}
}

// death says when to look whether a key still means something. Every key that
// is kept has exactly one.
type death struct {
	key   string
	at    int64 // ms
	index int   // in the heap
}

// deaths is a heap, the earliest first.
type deaths []*death

func (d deaths) Len() int           { return len(d) }
func (d deaths) Less(i, j int) bool { return d[i].at < d[j].at }
func (d deaths) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].index, d[j].index = i, j
}

func (d *deaths) Push(x any) {
	m, _ := x.(*death)
	m.index = len(*d)
	*d = append(*d, m)
}

func (d *deaths) Pop() any {
	old := *d
	last := old[len(old)-1]
	old[len(old)-1] = nil
	*d = old[:len(old)-1]
	return last
}
