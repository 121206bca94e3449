package memory

import (
	"container/heap"
	"context"
	"time"

	"weir/limit"
)

// lease is the record of a lease. It means something until its death.
type lease struct {
	token         string
	life, granted int64 // ms
	expiry        int64 // ms; or when it ended
	kind          kind  // holding, lingering or ended
	slots         []heldSlot
	reserved      []reservation
	ahead         map[string]int64 // starts of windows by key that began after it was granted: time was set back
	index         string           // the domain's
	stream        string           // key of what is known of its stream, or ""
	operation     string           // the same of its operation
	death         death
}

// heldSlot is a slot that a lease holds.
type heldSlot struct {
	key, limit     string
	linger, expiry int64 // ms
}

// reservation is what a lease has reserved of a limit.
type reservation struct {
	key, limit string
	hits       int64
	settled    bool
	of         limit.Limit // a bucket or a window
	start      int64       // of the window that it is of
}

// outlives is how long, in ms, the record means something after the lease.
func (l *lease) outlives() int64 {
	for _, r := range l.reserved {
		if !r.settled {
			return limit.ReservedSlack.Milliseconds()
		}
	}
	return limit.RecordSlack.Milliseconds()
}

// knownUntil is until when, in ms, a stream or an operation is known to hold the lease.
func (l *lease) knownUntil(ofStream bool) int64 {
	if ofStream && l.outlives() == limit.ReservedSlack.Milliseconds() {
		return l.expiry + limit.StreamSlack.Milliseconds()
	}
	return l.death.at
}

// known is what is known of a stream or an operation until a time; after that, nothing is.
type known struct {
	kind    kind
	attempt uint32 // of an operation: its latest; here it takes no room
	token   string // of its lease
	until   int64  // ms
	// Of an operation: what it asked, and how often it was told of its lease again.
	body [16]byte
	told int64
}

type kind uint8

const (
	unknown kind = iota
	holding
	ended
	ambiguous
	tombstone
	lingering
)

// at is what is known at now.
func (k known) at(now int64) known {
	if k.until <= now {
		return known{}
	}
	return k
}

// knownAt is what is known at now by a key. The mutex is held.
func (s *Store) knownAt(key string, now int64) known {
	if st := s.states[key]; st != nil && st.of != nil {
		return st.of.known.at(now)
	}
	return known{}
}

// remember notes what a request of a stream, of which so much was known before, has
// come to; held is nil if it was granted no lease. The mutex is held.
func (s *Store) remember(key string, before known, held *lease, now int64) {
	next := before
	switch {
	case before.kind == tombstone:
		next = known{}
	case before.kind != unknown: // it has asked before
		next.kind, next.token = ambiguous, ""
		if held != nil {
			next.until = max(next.until, held.knownUntil(true))
		}
	case held != nil:
		held.stream = key
		next = known{kind: holding, token: held.token, until: held.knownUntil(true)}
	default:
		return
	}
	s.know(key, next, now)
}

// know keeps what is known of a stream or an operation. The mutex is held.
func (s *Store) know(key string, next known, now int64) {
	st := s.state(key)
	st.stream().known = next
	s.write(key, st, next.until, 0, now)
}

// Release implements [store.Store].
func (s *Store) Release(_ context.Context, e limit.Ending) (limit.Release, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	defer s.sweep(0, now)
	if e.Lease != "" {
		return s.end(limit.LeaseKey(e.Lease), e.Early, false, now), nil
	}
	key := limit.StreamKey(e.Domain, e.Stream)
	switch k := s.knownAt(key, now); k.kind {
	case holding:
		return s.end(limit.LeasePrefix(e.Domain)+k.token, e.Early, false, now), nil
	case unknown:
		if e.Tombstone {
			s.know(key, known{kind: tombstone, until: now + limit.TombstoneLife.Milliseconds()}, now)
		}
	case ended, ambiguous, tombstone, lingering:
	}
	return limit.Release{Result: limit.NotHeld}, nil
}

// Undo implements [store.Store].
func (s *Store) Undo(_ context.Context, r limit.Request) (limit.Release, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	defer s.sweep(0, now)
	key := limit.LeaseKey(r.Lease)
	l := s.leases[key]
	if l != nil && l.operation != "" {
		if o := s.knownAt(l.operation, now); o.kind == holding && o.token == l.token && o.told > 0 {
			return limit.Release{Result: limit.NotHeld}, nil
		}
	}
	released := s.end(key, false, true, now)
	if released.Result != limit.Released {
		return released, nil
	}
	given := make(map[string]bool, len(r.Checks))
	for _, one := range l.reserved {
		given[one.key] = one.settled // somebody has told what was used: that stays charged
	}
	for _, c := range r.Checks {
		if c.Shadow || c.Quota != 0 || c.Hits <= 0 || given[c.Key] {
			continue
		}
		given[c.Key] = true
		switch w := c.Limit.(type) {
		case limit.TokenBucket:
			s.debitBucket(c.Key, w, -c.Hits, now)
		case limit.Window:
			start, ok := l.ahead[c.Key]
			if !ok {
				start = l.granted - l.granted%w.Length().Milliseconds()
			}
			s.settleWindow(c.Key, w, start, -c.Hits, now)
		case limit.Concurrency:
		}
	}
	return released, nil
}

// end releases the lease with the record under key; undo leaves nothing of it. The mutex
// is held.
func (s *Store) end(key string, early, undo bool, now int64) limit.Release {
	l := s.leases[key]
	switch {
	case l == nil || l.death.at <= now, l.kind == ended:
		return limit.Release{Result: limit.NotHeld}
	case l.kind == lingering && early && l.expiry > now: // told again
		return limit.Release{Result: limit.NotHeld}
	}
	s.forgetBy(l, undo, now)
	if l.expiry <= now {
		return limit.Release{Result: limit.Expired}
	}
	r := limit.Release{Result: limit.Released, HeldFor: limit.Millis(max(0, now-l.granted))}
	s.free(l.index, slot{l.expiry, l.token})
	held := l.slots
	if len(held) > 0 {
		r.Freed = make([]limit.Freed, 0, len(held))
	}
	l.slots, l.expiry, l.kind, l.operation = nil, now, ended, ""
	for _, h := range held {
		kept := s.free(h.key, slot{h.expiry, l.token})
		if early && h.linger > 0 && kept {
			h.expiry = now + h.linger
			l.slots = append(l.slots, h)
			l.expiry, l.kind = max(l.expiry, h.expiry), lingering
			s.hold(h.key, l.token, h.expiry, slack, now)
		} else {
			r.Freed = append(r.Freed, limit.Freed{Key: h.key, Limit: h.limit})
		}
	}
	if l.kind == lingering {
		r.Result = limit.Lingering
		s.hold(l.index, l.token, l.expiry, indexSlack, now)
	} else if undo || len(l.reserved) == 0 {
		delete(s.leases, key)
		heap.Remove(&s.deaths, l.death.index)
		return r
	}
	l.death.at = l.expiry + l.outlives()
	heap.Fix(&s.deaths, l.death.index)
	return r
}

// forgetBy notes that the stream and the operation of l have ended, if they are still
// known to hold it. The mutex is held.
func (s *Store) forgetBy(l *lease, undo bool, now int64) {
	if k := s.knownAt(l.stream, now); k.kind == holding && k.token == l.token {
		until := now + l.outlives()
		if l.expiry <= now { // its estimates stand
			until = max(until, k.until)
		}
		s.know(l.stream, known{kind: ended, token: l.token, until: until}, now)
	}
	if k := s.knownAt(l.operation, now); k.kind == holding && k.token == l.token {
		next := known{kind: ended, attempt: k.attempt, until: now + limit.RecordSlack.Milliseconds()}
		if undo || k.attempt == 0 {
			next = known{}
		}
		s.know(l.operation, next, now)
	}
}

// free takes a member out of the set under key, and reports whether it was there. The
// mutex is held.
func (s *Store) free(key string, m slot) bool {
	st := s.states[key]
	return st != nil && st.slots.remove(m)
}

// hold adds a member to the set under key. The mutex is held.
func (s *Store) hold(key, token string, expiry int64, slack time.Duration, now int64) {
	st := s.state(key)
	if st.slots == nil {
		st.slots = &slots{}
	}
	st.slots.add(slot{expiry, token})
	s.write(key, st, expiry, slack, now)
}

// Renew implements [store.Store].
func (s *Store) Renew(_ context.Context, e limit.Extension) (limit.Renewal, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	defer s.sweep(0, now)
	l := s.leases[limit.LeaseKey(e.Lease)]
	if l == nil || l.expiry <= now || l.kind == ended || l.kind == lingering && e.OfStream {
		return limit.Renewal{}, nil
	}
	for _, h := range l.slots {
		// Somebody else may have got a slot that is not there any more.
		if st := s.states[h.key]; st == nil || h.expiry <= now || !st.slots.has(slot{h.expiry, l.token}) {
			return limit.Renewal{}, nil
		}
	}
	expiry := max(l.expiry, now+l.life)
	for i := range l.slots {
		h := &l.slots[i]
		s.free(h.key, slot{h.expiry, l.token})
		h.expiry = expiry
		s.hold(h.key, l.token, expiry, slack, now)
	}
	if len(l.slots)+len(l.reserved) > 0 {
		s.free(l.index, slot{l.expiry, l.token})
		s.hold(l.index, l.token, expiry, indexSlack, now)
	}
	l.expiry, l.death.at = expiry, expiry+l.outlives()
	heap.Fix(&s.deaths, l.death.index)
	for _, key := range []string{l.stream, l.operation} {
		if k := s.knownAt(key, now); k.kind == holding && k.token == l.token {
			k.until = l.knownUntil(key == l.stream)
			s.know(key, k, now)
		}
	}
	return limit.Renewal{Renewed: true, TTL: limit.Millis(expiry - now)}, nil
}
