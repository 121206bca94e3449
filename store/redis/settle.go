package redis

import (
	"context"
	"fmt"

	"weir/limit"
	"weir/store"
)

// Settle implements [store.Store].
func (s *Store) Settle(ctx context.Context, u limit.Usage) ([]limit.Settlement, error) {
	if err := store.CheckUsage(u); err != nil {
		return nil, fmt.Errorf("redis: settle: %w", err)
	}
	reply, err := s.do(ctx, s.settleCall(u))
	if err != nil {
		return nil, fmt.Errorf("redis: settle: %w", err)
	}
	if n := reply.array(); n != 2*(len(u.Checks)+len(u.Limits)) {
		return nil, fmt.Errorf("redis: settle: a reply of %d items, want %d", n, 2*(len(u.Checks)+len(u.Limits)))
	}
	settled := make([]limit.Settlement, len(u.Checks)+len(u.Limits))
	for i := range settled {
		settled[i] = limit.Settlement{Result: limit.SettlementResult(reply.int()), Difference: reply.int()}
	}
	if err := reply.end(); err != nil {
		return nil, fmt.Errorf("redis: settle: unexpected reply: %w", err)
	}
	return settled, nil
}

func (s *Store) settleCall(u limit.Usage) *call {
	c := newCall(s.scripts.settle)
	token, streamed, reserved := "", "", ""
	if u.Lease != "" {
		token = u.Lease.Token()
	}
	if u.Stream != "" {
		streamed = "1"
	}
	if u.Reserved {
		reserved = "1"
	}
	for _, arg := range []string{token, streamed, reserved, limit.LeasePrefix(u.Domain)} {
		c.args.string(arg)
	}
	seen := make(map[string]int, len(u.Checks))
	for _, check := range u.Checks {
		key := c.key(check.Key, seen)
		reserves := ""
		if check.Reserve > 0 {
			reserves = "1"
		}
		switch l := check.Limit.(type) {
		case limit.TokenBucket:
			c.args.string("b")
			c.args.ints(int64(key), check.Hits, l.Capacity, l.Scale, l.Refill)
		case limit.Window:
			c.args.string(windowKind(l))
			c.args.ints(int64(key), check.Hits, l.Length().Milliseconds(), 0, 0)
		case limit.Concurrency: // CheckUsage refuses it
		}
		c.args.string(reserves)
	}
	for _, used := range u.Limits {
		c.args.string("n")
		c.args.string(used.Limit)
		c.args.ints(used.Hits, 0, 0, 0)
		c.args.string("")
	}
	if u.Lease != "" {
		c.keys = append(c.keys, limit.LeaseKey(u.Lease))
	}
	if u.Stream != "" {
		c.keys = append(c.keys, limit.StreamKey(u.Domain, u.Stream), limit.UsageKey(u.Domain, u.Stream))
	}
	return c
}
