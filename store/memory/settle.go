package memory

import (
	"container/heap"
	"context"
	"fmt"

	"weir/limit"
	"weir/store"
)

// Settle implements [store.Store].
func (s *Store) Settle(_ context.Context, u limit.Usage) ([]limit.Settlement, error) {
	if err := store.CheckUsage(u); err != nil {
		return nil, fmt.Errorf("memory: settle: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	defer s.sweep(len(u.Checks), now)
	l, wasHeld := s.leaseOf(u, now)
	settled := make([]limit.Settlement, 0, len(u.Checks)+len(u.Limits))
	for _, c := range u.Checks {
		one := s.settle(l, c.Hits, now, func(r reservation) bool { return r.key == c.Key })
		// Of a limit that reserves, the reservation of a lease that is not known any more
		// stands.
		if one.Result == limit.NotReserved && u.Stream != "" && !u.Reserved && (c.Reserve == 0 || l != nil || !wasHeld) {
			one = s.charge(u, c, now)
		}
		settled = append(settled, one)
	}
	for _, used := range u.Limits {
		settled = append(settled, s.settle(l, used.Hits, now, func(r reservation) bool { return used.Limit == "" || used.Limit == r.limit }))
	}
	if l != nil {
		s.settledAll(l, now)
	}
	return settled, nil
}

// leaseOf is the lease whose usage u is, if it is known still; wasHeld if there was one.
// The mutex is held.
func (s *Store) leaseOf(u limit.Usage, now int64) (l *lease, wasHeld bool) {
	token := u.Lease.Token()
	wasHeld = token != ""
	if !wasHeld {
		k := s.knownAt(limit.StreamKey(u.Domain, u.Stream), now)
		token, wasHeld = k.token, k.kind != unknown && k.kind != tombstone
	}
	if l = s.leases[limit.LeasePrefix(u.Domain)+token]; l == nil || l.death.at <= now {
		return nil, wasHeld
	}
	return l, wasHeld
}

// settle settles the reservations of l that are meant. The mutex is held.
func (s *Store) settle(l *lease, hits, now int64, meant func(reservation) bool) limit.Settlement {
	all := limit.Settlement{Result: limit.NotReserved}
	if l == nil {
		return all
	}
	for i := range l.reserved {
		r := &l.reserved[i]
		if !meant(*r) {
			continue
		}
		result, more := s.settleOne(l, r, hits, now)
		all.Result = min(all.Result, result)
		all.Difference = max(-limit.MaxExact, min(limit.MaxExact, all.Difference+more))
	}
	return all
}

// settleOne settles one reservation of l. The mutex is held.
func (s *Store) settleOne(l *lease, r *reservation, hits, now int64) (result limit.SettlementResult, more int64) {
	switch {
	case r.settled:
		return limit.AlreadySettled, 0
	case l.kind == holding && l.expiry <= now:
		return limit.Late, 0
	}
	more = hits - r.hits
	switch own := r.of.(type) {
	case limit.TokenBucket:
		st := s.state(r.key)
		before := st.bucket.Own(own, now)
		if more != 0 {
			st.bucket = before.Debit(more)
			s.write(r.key, st, st.bucket.Millis+st.bucket.FullAfterMillis(), slack, now)
		}
	case limit.Window:
		if !s.settleWindow(r.key, own, r.start, more, now) {
			return limit.Late, 0
		}
	case limit.Concurrency:
	}
	r.settled = true
	return limit.Settled, more
}

// settleWindow adds difference to the window of key that began at start, and reports
// whether that one still counts. The mutex is held.
func (s *Store) settleWindow(key string, w limit.Window, start, difference, now int64) bool {
	st := s.state(key)
	next, ok := st.window.At(w, now).Settle(w, start, difference)
	if ok && difference != 0 {
		st.window = next
		s.write(key, st, now+next.ResetAfterMillis(w, now), slack, now)
	}
	return ok
}

// settledAll lets the record of l die earlier if nothing of it is to be settled any more.
// The mutex is held.
func (s *Store) settledAll(l *lease, now int64) {
	if l.outlives() == limit.RecordSlack.Milliseconds() && len(l.reserved) > 0 {
		at := max(now, l.expiry) + limit.RecordSlack.Milliseconds()
		if at < l.death.at {
			l.death.at = at
			heap.Fix(&s.deaths, l.death.index)
		}
	}
}

// charge charges c, once a stream. The mutex is held.
func (s *Store) charge(u limit.Usage, c limit.Check, now int64) limit.Settlement {
	key := limit.UsageKey(u.Domain, u.Stream)
	mark := s.state(key)
	if mark.used[c.Key] > now {
		return limit.Settlement{Result: limit.AlreadySettled}
	}
	if mark.used == nil {
		mark.used = make(map[string]int64)
	}
	until := now + limit.UsageLife.Milliseconds()
	mark.used[c.Key] = until
	s.write(key, mark, until, 0, now)
	s.debit(c, c.Hits, now)
	return limit.Settlement{Result: limit.Charged, Difference: c.Hits}
}

// debit charges hits to the limit of c, whether or not that much is left. The mutex is
// held.
func (s *Store) debit(c limit.Check, hits, now int64) {
	st := s.state(c.Key)
	switch l := c.Limit.(type) {
	case limit.TokenBucket:
		st.bucket = st.bucket.At(l, now).Debit(hits)
		s.write(c.Key, st, st.bucket.Millis+st.bucket.FullAfterMillis(), slack, now)
	case limit.Window:
		st.window = st.window.At(l, now).Charge(hits)
		s.write(c.Key, st, now+st.window.ResetAfterMillis(l, now), slack, now)
	case limit.Concurrency:
	}
}

// state is what is kept under key, or a new one, which is not kept yet. The mutex is held.
func (s *Store) state(key string) *state {
	if st := s.states[key]; st != nil {
		return st
	}
	return &state{}
}
