package storetest

import (
	"cmp"
	"context"
	"slices"

	"weir/limit"
)

// Leases implements [store.Store].
func (m *Model) Leases(_ context.Context, domain string, after limit.Slot, n int) (page limit.Listing, _ error) {
	now := m.now()
	var live []*modelLease
	for _, l := range m.leases {
		if l.domain == domain && len(l.slots)+len(l.reserved) > 0 && !l.released && l.expiry > now {
			live = append(live, l)
		}
	}
	order := func(expiry int64, token string, l *modelLease) int {
		return cmp.Or(cmp.Compare(expiry, l.expiry), cmp.Compare(token, l.id.Token()))
	}
	slices.SortFunc(live, func(a, b *modelLease) int { return order(a.expiry, a.id.Token(), b) })
	parts := 0
	for _, l := range live {
		if order(after.Expiry, after.Token, l) >= 0 {
			continue
		}
		if len(page.Leases) == min(max(n, 1), 1000) || parts >= 1000 {
			last := page.Leases[len(page.Leases)-1]
			page.Next = limit.Slot{Token: last.Lease.Token(), Expiry: now + last.ExpiresAfter.Milliseconds()}
			break
		}
		parts += len(l.slots) + len(l.reserved)
		one := limit.Listed{
			Lease: l.id, HeldFor: limit.Millis(max(0, now-l.granted)), ExpiresAfter: limit.Millis(l.expiry - now),
			Lingering: l.lingers, Stream: l.stream, Operation: l.asker,
		}
		for _, s := range l.slots {
			if s.taken(now) {
				one.Slots = append(one.Slots, limit.ListedSlot{Key: s.key, Limit: s.name})
			}
		}
		for _, r := range l.reserved {
			one.Reserved = append(one.Reserved, limit.ListedReservation{Key: r.key, Limit: r.name, Hits: r.hits, Settled: r.settled})
		}
		page.Leases = append(page.Leases, one)
	}
	return page, nil
}

// Reset implements [store.Store].
func (m *Model) Reset(_ context.Context, checks []limit.Check) error {
	for _, c := range checks {
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			delete(m.buckets, c.Key)
		case limit.Window:
			if all := m.windows[c.Key]; all != nil {
				all.latest, all.hits = m.latest(c.Key, l, m.now()), make(map[int64]int64)
			}
		case limit.Concurrency:
			for _, held := range m.leases {
				for _, s := range held.slots {
					s.reset = s.reset || s.key == c.Key
				}
			}
		}
	}
	return nil
}
