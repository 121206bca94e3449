package redis

import (
	"context"
	"fmt"
	"slices"

	"weir/limit"
)

// Inspect implements [store.Store].
func (s *Store) Inspect(ctx context.Context, checks []limit.Check) ([]limit.State, error) {
	c := newCall(s.scripts.inspect)
	c.args.int(limit.MaxHolders)
	for _, check := range checks {
		c.keys = append(c.keys, check.Key)
		switch l := check.Limit.(type) {
		case limit.TokenBucket:
			c.args.string("b")
		case limit.Window:
			c.args.string(windowKind(l))
		case limit.Concurrency:
			c.args.string("c")
		}
	}
	reply, err := s.do(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("redis: inspect: %w", err)
	}
	states, err := inspected(checks, reply)
	if err != nil {
		return nil, fmt.Errorf("redis: inspect: %w", err)
	}
	return states, nil
}

// inspected reads inspect.lua's reply. It has the tokens of leases, which end them: an
// error says nothing of what is in it.
func inspected(checks []limit.Check, reply unpacker) ([]limit.State, error) {
	if n := reply.array(); n != 1+len(checks) {
		return nil, fmt.Errorf("a reply of %d items, want %d", n, 1+len(checks))
	}
	now := reply.int()
	states := make([]limit.State, len(checks))
	for i, c := range checks {
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			n, some := reply.fields(5)
			s := limit.BucketState{Level: n[0], Capacity: n[1], Scale: n[2], Refill: n[3], Millis: n[4]}
			if some && !possible(s) {
				return nil, fmt.Errorf("a bucket cannot be %+v", s)
			}
			states[i] = s.Inspect(l, c.Hits, now)
		case limit.Window:
			fields := 2
			if l.Sliding {
				fields = 3
			}
			n, _ := reply.fields(fields)
			if slices.Min(n) < 0 || slices.Max(n) > limit.MaxExact {
				return nil, fmt.Errorf("a window cannot be %v", n)
			}
			s := limit.WindowState{Start: n[0], Count: n[1]}
			if l.Sliding {
				s.Previous = n[2]
			}
			states[i] = s.Inspect(l, c.Hits, now)
		case limit.Concurrency:
			n := reply.array()
			if n%2 == 0 || n > 1+2*limit.MaxHolders {
				return nil, fmt.Errorf("a set has %d items", n)
			}
			live, first := reply.int(), make([]limit.Slot, n/2)
			for j := range first {
				first[j] = limit.Slot{Token: reply.text(), Expiry: reply.int()}
			}
			states[i] = l.Inspect(live, first, now)
		}
	}
	return states, reply.end()
}

// fields reads a state of n numbers, or none: zeros.
func (u *unpacker) fields(n int) (all []int64, some bool) {
	all = make([]int64, n)
	switch u.array() {
	case 0:
		return all, false
	case n:
		for i := range all {
			all[i] = u.int()
		}
	default:
		u.err = errPacked
	}
	return all, true
}

// possible reports whether the arithmetic is defined for s, which somebody else may
// have written.
func possible(s limit.BucketState) bool {
	return s.Scale > 0 && s.Scale <= limit.MaxExact && s.Capacity > 0 && s.Capacity <= limit.MaxExact/s.Scale &&
		s.Refill > 0 && s.Refill <= limit.MaxExact && s.Level >= -limit.MaxExact && s.Level <= s.Capacity*s.Scale &&
		s.Millis >= 0 && s.Millis <= limit.MaxExact
}
