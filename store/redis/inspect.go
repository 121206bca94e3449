package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"weir/limit"
)

// Inspect implements [store.Store].
func (s *Store) Inspect(ctx context.Context, checks []limit.Check) ([]limit.State, error) {
	c := newCall(s.scripts.inspect)
	c.args = []any{s.clock(), limit.MaxHolders}
	for _, check := range checks {
		c.keys = append(c.keys, check.Key)
		switch l := check.Limit.(type) {
		case limit.TokenBucket:
			c.args = append(c.args, "b")
		case limit.Window:
			c.args = append(c.args, windowKind(l))
		case limit.Concurrency:
			c.args = append(c.args, "c")
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
func inspected(checks []limit.Check, reply any) ([]limit.State, error) {
	items, _ := reply.([]any)
	if len(items) != 1+len(checks) {
		return nil, fmt.Errorf("a reply of %d items, want %d", len(items), 1+len(checks))
	}
	now, ok := items[0].(int64)
	if !ok {
		return nil, fmt.Errorf("the time is a %T", items[0])
	}
	states := make([]limit.State, len(checks))
	for i, c := range checks {
		raw, _ := items[1+i].([]any)
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			n, err := numbers(raw, 5)
			if err != nil {
				return nil, err
			}
			s := limit.BucketState{Level: n[0], Capacity: n[1], Scale: n[2], Refill: n[3], Millis: n[4]}
			if len(raw) > 0 && !possible(s) {
				return nil, fmt.Errorf("a bucket cannot be %+v", s)
			}
			states[i] = s.Inspect(l, c.Hits, now)
		case limit.Window:
			fields := 2
			if l.Sliding {
				fields = 3
			}
			n, err := numbers(raw, fields)
			if err != nil {
				return nil, err
			}
			if slices.Min(n) < 0 || slices.Max(n) > limit.MaxExact {
				return nil, fmt.Errorf("a window cannot be %v", n)
			}
			s := limit.WindowState{Start: n[0], Count: n[1]}
			if l.Sliding {
				s.Previous = n[2]
			}
			states[i] = s.Inspect(l, c.Hits, now)
		case limit.Concurrency:
			if len(raw) == 0 {
				return nil, errors.New("a set without its count")
			}
			live, ok := raw[0].(int64)
			if !ok {
				return nil, fmt.Errorf("a set's count is a %T", raw[0])
			}
			first := make([]limit.Slot, len(raw)/2)
			for j := range first {
				token, _ := raw[1+2*j].(string)
				expiry, _ := raw[2+2*j].(int64)
				first[j] = limit.Slot{Token: token, Expiry: expiry}
			}
			states[i] = l.Inspect(live, first, now)
		}
	}
	return states, nil
}

// possible reports whether the arithmetic is defined for s, which somebody else may
// have written.
func possible(s limit.BucketState) bool {
	return s.Scale > 0 && s.Scale <= limit.MaxExact && s.Capacity > 0 && s.Capacity <= limit.MaxExact/s.Scale &&
		s.Refill > 0 && s.Refill <= limit.MaxExact && s.Level >= -limit.MaxExact && s.Level <= s.Capacity*s.Scale &&
		s.Millis >= 0 && s.Millis <= limit.MaxExact
}

// numbers are the n fields of a state; zeros without one.
func numbers(raw []any, n int) ([]int64, error) {
	if len(raw) == 0 {
		return make([]int64, n), nil
	}
	if len(raw) != n {
		return nil, fmt.Errorf("a state has %d fields, want %d", len(raw), n)
	}
	return integers(raw)
}
