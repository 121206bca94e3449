package memory

import (
	"container/heap"
	"context"
	"time"

	"weir/limit"
)

// lease is the record of a lease.
type lease struct {
	life, granted, expiry int64 // ms
	keys                  []string
	limits                []string // their names, one a key
	lingers               []int64  // ms, one a key
	expiries              []int64  // of its slots, one a key
	index                 string   // the domain's
	stream                string   // key of what is known of its stream, or ""
	lingering             bool     // its work ended early
	death                 *death
}

// stream is what is known of a stream until a time; after that, nothing is.
type stream struct {
	kind  streamKind
	token string // of its lease
	until int64  // ms
}

type streamKind uint8

const (
	unknown streamKind = iota
	holding
	ended
	ambiguous
	tombstone
)

// at is what is known at now.
func (s stream) at(now int64) stream {
	if s.until <= now {
		return stream{}
	}
	return s
}

// remember notes what a request of a stream, of which so much was known before, has
// come to; held is nil if it was granted no lease. The mutex is held.
func (s *Store) remember(key string, before stream, held *lease, token string, now int64) {
	next := before
	switch {
	case before.kind == tombstone:
		next = stream{}
	case before.kind != unknown: // it has asked before
		next.kind, next.token = ambiguous, ""
		if held != nil {
			next.until = max(next.until, held.expiry+limit.RecordSlack.Milliseconds())
		}
	case held != nil:
		held.stream = key
		next = stream{holding, token, held.expiry + limit.RecordSlack.Milliseconds()}
	default:
		return
	}
	s.know(key, next, now)
}

// know keeps what is known of a stream. The mutex is held.
func (s *Store) know(key string, next stream, now int64) {
	st := s.states[key]
	if st == nil {
		st = &state{}
	}
	st.stream = next
	s.write(key, st, next.until, 0, now)
}

// Release implements [store.Store].
func (s *Store) Release(_ context.Context, e limit.Ending) (limit.Release, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	defer s.sweep(0, now)
	if e.Lease != "" {
		return s.end(limit.LeaseKey(e.Lease), e.Lease.Token(), e.Early, now), nil
	}
	key := limit.StreamKey(e.Domain, e.Stream)
	var known stream
	if st := s.states[key]; st != nil {
		known = st.stream.at(now)
	}
	switch known.kind {
	case holding:
		return s.end(limit.LeasePrefix(e.Domain)+known.token, known.token, e.Early, now), nil
	case unknown:
		if e.Tombstone {
			s.know(key, stream{kind: tombstone, until: now + limit.TombstoneLife.Milliseconds()}, now)
		}
	case ended, ambiguous, tombstone:
	}
	return limit.Release{Result: limit.NotHeld}, nil
}

// end releases the lease with the record under key. The mutex is held.
func (s *Store) end(key, token string, early bool, now int64) limit.Release {
	l := s.leases[key]
	switch {
	case l == nil || now >= l.expiry+limit.RecordSlack.Milliseconds():
		return limit.Release{Result: limit.NotHeld}
	case l.expiry <= now:
		s.endStream(l, token, now)
		return limit.Release{Result: limit.Expired}
	case l.lingering && early: // told again
		return limit.Release{Result: limit.NotHeld}
	}
	s.endStream(l, token, now)
	r := limit.Release{Result: limit.Released, HeldFor: limit.Millis(max(0, now-l.granted))}
	rest := &lease{life: l.life, granted: l.granted, index: l.index, stream: l.stream, lingering: true, death: l.death}
	for i, set := range l.keys {
		s.free(set, slot{l.expiries[i], token})
		if linger := l.lingers[i]; early && linger > 0 {
			rest.keys = append(rest.keys, set)
			rest.limits = append(rest.limits, l.limits[i])
			rest.lingers = append(rest.lingers, linger)
			rest.expiries = append(rest.expiries, now+linger)
			rest.expiry = max(rest.expiry, now+linger)
			s.hold(set, token, now+linger, slack, now)
		} else {
			r.Freed = append(r.Freed, limit.Freed{Key: set, Limit: l.limits[i]})
		}
	}
	s.free(l.index, slot{l.expiry, token})
	if len(rest.keys) == 0 {
		delete(s.leases, key)
		heap.Remove(&s.deaths, l.death.index)
		return r
	}
	r.Result = limit.Lingering
	s.hold(l.index, token, rest.expiry, indexSlack, now)
	s.leases[key] = rest
	rest.death.at = rest.expiry + limit.RecordSlack.Milliseconds()
	heap.Fix(&s.deaths, rest.death.index)
	return r
}

// endStream notes that the stream of l has ended, if it is still known to hold it.
// The mutex is held.
func (s *Store) endStream(l *lease, token string, now int64) {
	if st := s.states[l.stream]; st != nil && st.stream.at(now).kind == holding && st.stream.token == token {
		s.know(l.stream, stream{kind: ended, until: now + limit.RecordSlack.Milliseconds()}, now)
	}
}

// free takes a member out of the set under key, if it is there. The mutex is held.
func (s *Store) free(key string, m slot) {
	if st := s.states[key]; st != nil {
		st.slots.remove(m)
	}
}

// hold adds a member to the set under key. The mutex is held.
func (s *Store) hold(key, token string, expiry int64, slack time.Duration, now int64) {
	st := s.states[key]
	if st == nil {
		st = &state{}
	}
	st.slots.add(slot{expiry, token})
	s.write(key, st, expiry, slack, now)
}

// Renew implements [store.Store].
func (s *Store) Renew(_ context.Context, id limit.LeaseID) (limit.Renewal, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	defer s.sweep(0, now)
	l := s.leases[limit.LeaseKey(id)]
	if l == nil || l.expiry <= now {
		return limit.Renewal{}, nil
	}
	for i, key := range l.keys {
		// Somebody else may have got a slot that is not there any more.
		if st := s.states[key]; st == nil || l.expiries[i] <= now || !st.slots.has(slot{l.expiries[i], id.Token()}) {
			return limit.Renewal{}, nil
		}
	}
	expiry := max(l.expiry, now+l.life)
	for i, key := range l.keys {
		s.free(key, slot{l.expiries[i], id.Token()})
		l.expiries[i] = expiry
		s.hold(key, id.Token(), expiry, slack, now)
	}
	s.free(l.index, slot{l.expiry, id.Token()})
	s.hold(l.index, id.Token(), expiry, indexSlack, now)
	if st := s.states[l.stream]; st != nil && st.stream.at(now).kind == holding && st.stream.token == id.Token() {
		s.know(l.stream, stream{holding, id.Token(), expiry + limit.RecordSlack.Milliseconds()}, now)
	}
	l.expiry, l.death.at = expiry, expiry+limit.RecordSlack.Milliseconds()
	heap.Fix(&s.deaths, l.death.index)
	return limit.Renewal{Renewed: true, TTL: limit.Millis(expiry - now)}, nil
}
