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
	l, before := s.leaseOf(u, now)
	told := "" // where it is noted what was told of the stream's usage
	switch {
	case l != nil && l.stream != "":
		told = limit.UsageKeyOf(l.stream)
	case u.Stream != "":
		told = limit.UsageKey(u.Domain, u.Stream)
	}
	settled := make([]limit.Settlement, 0, len(u.Checks)+len(u.Limits))
	for _, c := range u.Checks {
		one := s.settle(l, told, c.Hits, now, func(r reservation) bool { return r.key == c.Key })
		if one.Result == limit.NotReserved && u.Stream != "" {
			one = s.charge(u, c, l, before, now)
		}
		settled = append(settled, one)
	}
	for _, used := range u.Limits {
		settled = append(settled, s.settle(l, told, used.Hits, now, func(r reservation) bool { return used.Limit == "" || used.Limit == r.limit }))
	}
	if l != nil {
		s.settledAll(l, now)
	}
	return settled, nil
}

// leaseOf is the lease whose usage u is, if it is known still, and what is known of its
// stream, or if u names the lease itself: ended. The mutex is held.
func (s *Store) leaseOf(u limit.Usage, now int64) (*lease, kind) {
	k := known{kind: ended, token: u.Lease.Token()}
	if u.Lease == "" {
		k = s.knownAt(limit.StreamKey(u.Domain, u.Stream), now)
	}
	l := s.leases[limit.LeasePrefix(u.Domain)+k.token]
	if l == nil || l.death.at <= now {
		return nil, k.kind
	}
	return l, k.kind
}

// settle settles the reservations of l that are meant, and notes under told that it was
// told of them; "": nowhere. The mutex is held.
func (s *Store) settle(l *lease, told string, hits, now int64, meant func(reservation) bool) limit.Settlement {
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
		if told != "" && result != limit.AlreadySettled {
			s.note(told, r.key, now)
		}
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
		s.debitBucket(r.key, own, more, now)
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

// note notes under key that the stream has told its usage of a limit, unless it had before.
// The mutex is held.
func (s *Store) note(key, limitKey string, now int64) {
	st := s.state(key)
	of := st.stream()
	if of.used[limitKey] > now {
		return
	}
	if of.used == nil {
		of.used = make(map[string]int64)
	}
	until := now + limit.UsageLife.Milliseconds()
	of.used[limitKey] = until
	s.write(key, st, until, 0, now)
}

// charge charges c, of which l has reserved nothing, once a stream, of which so much was
// known. The mutex is held.
func (s *Store) charge(u limit.Usage, c limit.Check, l *lease, before kind, now int64) limit.Settlement {
	key := limit.UsageKey(u.Domain, u.Stream)
	switch {
	case s.state(key).stream().used[c.Key] > now:
		return limit.Settlement{Result: limit.AlreadySettled}
	case c.Reserve > 0 && l == nil && before == holding: // it has expired
		return limit.Settlement{Result: limit.Late}
	case c.Reserve > 0 && l == nil && before != unknown && before != tombstone, u.Reserved:
		return limit.Settlement{Result: limit.NotReserved} // what a lease has reserved that is not known any more stands
	}
	s.note(key, c.Key, now)
	switch of := c.Limit.(type) {
	case limit.TokenBucket:
		s.debitBucket(c.Key, of, c.Hits, now)
	case limit.Window:
		st := s.state(c.Key)
		st.window = st.window.At(of, now).Charge(c.Hits)
		s.write(c.Key, st, now+st.window.ResetAfterMillis(of, now), slack, now)
	case limit.Concurrency:
	}
	return limit.Settlement{Result: limit.Charged, Difference: c.Hits}
}

// debitBucket charges hits to a bucket, whether or not they are there, under the limit
// that it stands under. A full one, which has no state, has nothing to be given back. The
// mutex is held.
func (s *Store) debitBucket(key string, b limit.TokenBucket, hits, now int64) {
	st := s.state(key)
	own := st.bucket.Own(b, now)
	if hits > 0 || hits < 0 && own.FullAfterMillis() > 0 {
		st.bucket = own.Debit(hits)
		s.write(key, st, st.bucket.Millis+st.bucket.FullAfterMillis(), slack, now)
	}
}

// stream is what st holds of a stream or an operation.
func (st *state) stream() *ofStream {
	if st.of == nil {
		st.of = &ofStream{}
	}
	return st.of
}

// state is what is kept under key, or a new one, which is not kept yet. The mutex is held.
func (s *Store) state(key string) *state {
	if st := s.states[key]; st != nil {
		return st
	}
	return &state{}
}
