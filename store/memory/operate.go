package memory

import (
	"context"
	"strings"

	"weir/limit"
)

// Leases implements [store.Store].
func (s *Store) Leases(_ context.Context, domain string, after limit.Slot, n int) (limit.Listing, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var page limit.Listing
	index := s.states[limit.LeasesKey(domain)]
	if index == nil {
		return page, nil
	}
	now, parts := s.now(), 0
	from := slot{after.Expiry, after.Token}
	if from.expiry <= now { // those that have expired are not listed
		from = slot{expiry: now + 1}
	}
	var last slot
	for m := range index.slots.behind(from) {
		if len(page.Leases) == limit.PageSize(n) || parts >= limit.MaxListedParts {
			page.Next = limit.Slot{Token: last.token, Expiry: last.expiry}
			break
		}
		last = m
		one, read := s.listed(domain, m, now)
		page.Leases = append(page.Leases, one)
		parts += read
	}
	return page, nil
}

// listed is what is told of a member of a domain's index, and how many parts that has, told or
// not. The mutex is held.
func (s *Store) listed(domain string, m slot, now int64) (one limit.Listed, parts int) {
	one = limit.Listed{Lease: limit.LeaseOf(domain, m.token), ExpiresAfter: limit.Millis(m.expiry - now)}
	l := s.leases[limit.LeaseKey(one.Lease)]
	if l == nil {
		return one, 0
	}
	one.HeldFor = limit.Millis(max(0, now-l.granted))
	one.Lingering = l.kind == lingering
	one.Stream = strings.TrimPrefix(l.stream, limit.StreamKey(domain, ""))
	one.Operation = strings.TrimPrefix(l.operation, limit.OperationKey(domain, ""))
	for _, h := range l.slots {
		if st := s.states[h.key]; st != nil && h.expiry > now && st.slots.has(slot{h.expiry, l.token}) {
			one.Slots = append(one.Slots, limit.ListedSlot{Key: h.key, Limit: h.limit})
		}
	}
	for _, r := range l.reserved {
		one.Reserved = append(one.Reserved, limit.ListedReservation{Key: r.key, Limit: r.limit, Hits: r.hits, Settled: r.settled})
	}
	return one, len(l.slots) + len(l.reserved)
}

// Reset implements [store.Store].
func (s *Store) Reset(_ context.Context, checks []limit.Check) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	defer s.sweep(0, now)
	for _, c := range checks {
		st := s.states[c.Key]
		if st == nil {
			continue
		}
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			st.bucket = limit.BucketState{}
		case limit.Window:
			st.window = st.window.Reset(l, now) // it lives as long as before
		case limit.Concurrency:
			st.slots = nil
		}
	}
	return nil
}
