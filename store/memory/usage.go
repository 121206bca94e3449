package memory

import (
	"context"
	"fmt"

	"weir/limit"
	"weir/store"
)

// Charge implements [store.Store].
func (s *Store) Charge(_ context.Context, u limit.Usage) ([]bool, error) {
	if err := store.CheckUsage(u); err != nil {
		return nil, fmt.Errorf("memory: charge: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	defer s.sweep(len(u.Checks), now)
	mark := limit.UsageKey(u.Domain, u.Stream)
	used := s.states[mark]
	if used == nil {
		used = &state{used: make(map[string]int64)}
	}
	until := now + limit.UsageLife.Milliseconds()
	charged := make([]bool, len(u.Checks))
	for i, c := range u.Checks {
		if used.used[c.Key] > now {
			continue
		}
		charged[i] = true
		used.used[c.Key] = until
		s.write(mark, used, until, 0, now)
		st := s.states[c.Key]
		if st == nil {
			st = &state{}
		}
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			st.bucket = st.bucket.At(l, now).Debit(c.Hits)
			s.write(c.Key, st, st.bucket.Millis+st.bucket.FullAfterMillis(), slack, now)
		case limit.Window:
			st.window = st.window.At(l.Length().Milliseconds(), now).Charge(c.Hits)
			s.write(c.Key, st, st.window.Start+l.Length().Milliseconds(), slack, now)
		case limit.Concurrency: // CheckUsage refuses it
		}
	}
	return charged, nil
}
