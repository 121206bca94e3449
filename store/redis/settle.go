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
	n, err := integers(reply)
	if err != nil || len(n) != 2*(len(u.Checks)+len(u.Limits)) {
		return nil, fmt.Errorf("redis: settle: unexpected reply %v", reply)
	}
	settled := make([]limit.Settlement, len(n)/2)
	for i := range settled {
		settled[i] = limit.Settlement{Result: limit.SettlementResult(n[2*i]), Difference: n[2*i+1]}
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
	c.args = []any{s.clock(), token, streamed, reserved, limit.LeasePrefix(u.Domain)}
	seen := make(map[string]int, len(u.Checks))
	for _, check := range u.Checks {
		key := c.key(check.Key, seen)
		reserves := ""
		if check.Reserve > 0 {
			reserves = "1"
		}
		switch l := check.Limit.(type) {
		case limit.TokenBucket:
			c.args = append(c.args, "b", key, check.Hits, l.Capacity, l.Scale, l.Refill, reserves)
		case limit.Window:
			c.args = append(c.args, windowKind(l), key, check.Hits, l.Length().Milliseconds(), 0, 0, reserves)
		case limit.Concurrency: // CheckUsage refuses it
		}
	}
	for _, used := range u.Limits {
		c.args = append(c.args, "n", used.Limit, used.Hits, 0, 0, 0, "")
	}
	if u.Lease != "" {
		c.keys = append(c.keys, limit.LeaseKey(u.Lease))
	}
	if u.Stream != "" {
		c.keys = append(c.keys, limit.StreamKey(u.Domain, u.Stream), limit.UsageKey(u.Domain, u.Stream))
	}
	return c
}
