package redis

import (
	"context"
	"fmt"
	"strings"

	"weir/limit"
)

// Leases implements [store.Store].
func (s *Store) Leases(ctx context.Context, domain string, after limit.Slot, n int) (limit.Listing, error) {
	c := newCall(s.scripts.leases, limit.LeasesKey(domain))
	c.alone = true // it takes long enough as it is
	c.args.int(int64(limit.PageSize(n)))
	c.args.string(limit.LeasePrefix(domain))
	c.args.int(after.Expiry)
	c.args.string(after.Token)
	reply, err := s.do(ctx, c)
	if err != nil {
		return limit.Listing{}, fmt.Errorf("redis: leases: %w", err)
	}
	page, err := listing(domain, reply)
	if err != nil {
		return limit.Listing{}, fmt.Errorf("redis: leases: %w", err)
	}
	return page, nil
}

// listing reads leases.lua's reply. It has the tokens of leases, which end them: an error
// says nothing of what is in it.
func listing(domain string, reply unpacker) (page limit.Listing, err error) {
	reply.array()
	now, more, n := reply.int(), reply.int(), reply.int()
	var last limit.Slot
	for i := int64(0); i < n && reply.err == nil; i++ {
		last = limit.Slot{Token: reply.text(), Expiry: reply.int()}
		one := limit.Listed{Lease: limit.LeaseOf(domain, last.Token), ExpiresAfter: limit.Millis(last.Expiry - now)}
		if granted := reply.int(); granted >= 0 {
			one.HeldFor = limit.Millis(max(0, now-granted))
		}
		one.Lingering = reply.int() == 1
		one.Stream = strings.TrimPrefix(reply.text(), limit.StreamKey(domain, ""))
		one.Operation = strings.TrimPrefix(reply.text(), limit.OperationKey(domain, ""))
		for j := reply.array(); j > 0 && reply.err == nil; j -= 2 {
			one.Slots = append(one.Slots, limit.ListedSlot{Key: reply.text(), Limit: reply.text()})
		}
		for j := reply.array(); j > 0 && reply.err == nil; j -= 4 {
			one.Reserved = append(one.Reserved, limit.ListedReservation{
				Key: reply.text(), Limit: reply.text(), Hits: reply.int(), Settled: reply.int() == 1,
			})
		}
		page.Leases = append(page.Leases, one)
	}
	if more == 1 {
		page.Next = last
	}
	if err := reply.end(); err != nil {
		return limit.Listing{}, err
	}
	return page, nil
}

// Reset implements [store.Store].
func (s *Store) Reset(ctx context.Context, checks []limit.Check) error {
	if len(checks) == 0 {
		return nil
	}
	c := newCall(s.scripts.reset)
	for _, check := range checks {
		c.keys = append(c.keys, check.Key)
		switch l := check.Limit.(type) {
		case limit.TokenBucket:
			c.args.string("b")
			c.args.int(0)
		case limit.Window:
			c.args.string(windowKind(l))
			c.args.int(l.Length().Milliseconds())
		case limit.Concurrency:
			c.args.string("c")
			c.args.int(0)
		}
	}
	if _, err := s.do(ctx, c); err != nil {
		return fmt.Errorf("redis: reset: %w", err)
	}
	return nil
}
