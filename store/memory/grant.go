package memory

import (
	"container/heap"
	"time"

	"weir/limit"
	"weir/store"
)

// over reports whether c is charged although it did not pass.
func over(c limit.Check, passed bool) bool {
	w, ok := c.Limit.(limit.Window)
	return ok && w.ChargeOver && !c.Shadow && !passed
}

// living is the lease that is to be granted, a new one if it is nil, with at most this
// life.
func (l *lease) living(life time.Duration) *lease {
	if l == nil {
		l = &lease{kind: holding, life: life.Milliseconds()}
	}
	l.life = min(l.life, life.Milliseconds())
	return l
}

// reserve is the reservation of c, whose state has been charged.
func reserve(c limit.Check, st *state, now int64) reservation {
	r := reservation{key: c.Key, limit: c.Name, hits: c.Hits, of: c.Limit}
	if w, ok := c.Limit.(limit.Window); ok {
		r.start = st.window.At(w, now).Start
	}
	return r
}

// grant keeps the lease of r. The mutex is held.
func (s *Store) grant(l *lease, r limit.Request, index string, now int64) {
	l.token, l.index, l.granted, l.expiry = r.Lease.Token(), index, now, now+l.life
	for i := range l.slots {
		l.slots[i].expiry = l.expiry
		s.hold(l.slots[i].key, l.token, l.expiry, slack, now)
	}
	if len(l.slots)+len(l.reserved) > 0 {
		s.hold(index, l.token, l.expiry, indexSlack, now)
	}
	key := limit.LeaseKey(r.Lease)
	s.leases[key] = l
	l.death = death{key: key, at: l.expiry + l.outlives()}
	heap.Push(&s.deaths, &l.death)
	if r.Operation.ID != "" {
		l.operation = limit.OperationKey(r.Domain, r.Operation.ID)
		s.know(l.operation, known{kind: holding, token: l.token, until: l.death.at, body: r.Operation.Body, attempt: r.Operation.Attempt}, now)
	}
}

// replay makes d the decision of an operation that holds a lease, if it does, or says why
// there is none. The mutex is held.
func (s *Store) replay(r limit.Request, d *limit.Decision, now int64) error {
	key := limit.OperationKey(r.Domain, r.Operation.ID)
	k := s.knownAt(key, now)
	if k.kind == ended && r.Operation.Attempt > 0 && r.Operation.Attempt <= k.attempt {
		return store.ErrLateAttempt
	}
	l := s.leases[limit.LeasePrefix(r.Domain)+k.token]
	if k.kind != holding || l == nil || l.kind != holding || l.expiry <= now {
		return nil
	}
	if k.body != r.Operation.Body {
		return store.ErrOtherRequest
	}
	k.attempt, k.told, k.until = max(k.attempt, r.Operation.Attempt), k.told+1, l.death.at
	s.know(key, k, now)
	d.Admitted, d.Replayed = true, true
	d.Lease, d.TTL = limit.LeaseOf(r.Domain, k.token), limit.Millis(l.expiry-now)
	for i := range d.Results {
		d.Results[i].Passed = true
	}
	return nil
}
