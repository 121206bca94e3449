package storetest

import (
	"context"
	"math/big"

	"weir/limit"
)

// Undo implements [store.Store].
func (m *Model) Undo(ctx context.Context, r limit.Request) (limit.Release, error) {
	l, now := m.find(r.Lease), m.now()
	of := &modelOperation{}
	if l != nil && l.operation != nil && m.asked[l.operation.name] == l.operation {
		of = l.operation
	}
	if of.retold && !of.ended {
		return limit.Release{Result: limit.NotHeld}, nil
	}
	ended := of.ended // by a release: its attempts are late
	released, err := m.Release(ctx, limit.Ending{Lease: r.Lease})
	if released.Result != limit.NotHeld && !ended {
		delete(m.asked, of.name)
	}
	if released.Result != limit.Released {
		return released, err
	}
	l.forgotten = true
	given := map[string]bool{}
	for _, one := range l.reserved {
		given[one.key] = one.settled // what was used is known
	}
	for _, c := range r.Checks {
		if c.Shadow || c.Quota != 0 || c.Hits <= 0 || given[c.Key] {
			continue
		}
		given[c.Key] = true
		if w, ok := c.Limit.(limit.Window); ok {
			if start := l.windows[c.Key]; m.counts(c.Key, w, start, now) {
				m.countIn(c.Key, m.latest(c.Key, w, now), start, -c.Hits)
			}
			continue
		}
		m.debit(c.Key, c.Limit, -c.Hits, now)
	}
	return released, err
}

// debit charges hits, whether or not that much is left: to a bucket under the limit that it
// stands under (S18), and full is the absence of state.
func (m *Model) debit(key string, l limit.Limit, hits, now int64) {
	switch l := l.(type) {
	case limit.TokenBucket:
		full := true
		if old := m.buckets[key]; old != nil && m.bucket(key, old.limit, now).tokens.Cmp(integer(old.limit.Capacity)) < 0 {
			l, full = old.limit, false
		}
		if hits == 0 || hits < 0 && full {
			return
		}
		b := m.bucket(key, l, now)
		if full {
			b = &modelBucket{tokens: integer(l.Capacity), at: now, limit: l}
		}
		b.tokens = smaller(new(big.Rat).Sub(b.tokens, integer(hits)), integer(l.Capacity))
		if d := deepest(l); b.tokens.Cmp(d) < 0 {
			b.tokens = d
		}
		m.buckets[key] = b
	case limit.Window:
		m.count(key, l, hits, now)
	case limit.Concurrency:
	}
}

// Settle implements [store.Store].
func (m *Model) Settle(_ context.Context, u limit.Usage) ([]limit.Settlement, error) {
	now := m.now()
	var l *modelLease
	asked := u.Lease != ""
	holds := false // the stream holds a lease
	if asked {
		l = m.find(u.Lease)
	} else if s := m.stream(u.Domain, u.Stream, now); s != nil && !s.tombstone {
		l, asked, holds = s.lease, true, !s.ended && !s.ambiguous
	}
	if l != nil && !l.known(now) {
		l = nil
	}
	// tell notes that the usage of a stream was told, for ten minutes, and reports whether it
	// was before.
	tell := func(stream, key string) bool {
		mark := u.Domain + "|" + stream + "|" + key
		if at, done := m.told[mark]; done && now < at+600_000 {
			return true
		}
		m.told[mark] = now
		return false
	}
	of := u.Stream
	if l != nil && l.stream != "" {
		of = l.stream
	}
	settle := func(hits int64, meant func(r *modelReservation) bool) limit.Settlement {
		all := limit.Settlement{Result: limit.NotReserved}
		for _, r := range m.reservations(l) {
			if meant(r) {
				one := m.settleOne(l, r, hits, now)
				if of != "" && one.Result != limit.AlreadySettled {
					tell(of, r.key)
				}
				all.Result, all.Difference = min(all.Result, one.Result), all.Difference+one.Difference
			}
		}
		all.Difference = max(-limit.MaxExact, min(limit.MaxExact, all.Difference))
		return all
	}
	var all []limit.Settlement
	for _, c := range u.Checks {
		one := settle(c.Hits, func(r *modelReservation) bool { return r.key == c.Key })
		if one.Result == limit.NotReserved && u.Stream != "" {
			lost := c.Reserve > 0 && asked && l == nil
			at, done := m.told[u.Domain+"|"+u.Stream+"|"+c.Key]
			switch {
			case done && now < at+600_000:
				one.Result = limit.AlreadySettled
			case lost && holds:
				one.Result = limit.Late
			case !lost && !u.Reserved:
				tell(u.Stream, c.Key)
				m.debit(c.Key, c.Limit, c.Hits, now)
				one = limit.Settlement{Result: limit.Charged, Difference: c.Hits}
			}
		}
		all = append(all, one)
	}
	for _, used := range u.Limits {
		all = append(all, settle(used.Hits, func(r *modelReservation) bool { return used.Limit == "" || used.Limit == r.name }))
	}
	return all, nil
}

func (m *Model) reservations(l *modelLease) []*modelReservation {
	if l == nil {
		return nil
	}
	return l.reserved
}

// settleOne is S16 for one reservation.
func (m *Model) settleOne(l *modelLease, r *modelReservation, hits, now int64) limit.Settlement {
	if r.settled {
		return limit.Settlement{Result: limit.AlreadySettled}
	}
	if !l.released && !l.lingers && now >= l.expiry {
		return limit.Settlement{Result: limit.Late}
	}
	switch l := r.limit.(type) {
	case limit.Window:
		if !m.counts(r.key, l, r.start, now) {
			return limit.Settlement{Result: limit.Late}
		}
		if hits != r.hits {
			m.countIn(r.key, m.latest(r.key, l, now), r.start, hits-r.hits)
		}
	case limit.TokenBucket:
		m.debit(r.key, l, hits-r.hits, now)
	case limit.Concurrency:
	}
	r.settled, l.settledAt = true, now
	return limit.Settlement{Result: limit.Settled, Difference: hits - r.hits}
}
