package redis

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"weir/limit"
	"weir/store"
)

// Decide implements [store.Store].
func (s *Store) Decide(ctx context.Context, r limit.Request) (limit.Decision, error) {
	if err := store.CheckRequest(r); err != nil {
		return limit.Decision{}, fmt.Errorf("redis: decide: %w", err)
	}
	reply, err := s.do(ctx, s.decideCall(r))
	if err != nil {
		return limit.Decision{}, fmt.Errorf("redis: decide: %w", err)
	}
	return decision(r, reply)
}

func (s *Store) decideCall(r limit.Request) *call {
	c := newCall(s.scripts.decide)
	c.silence = s.silence
	token, with := "", ""
	if r.Lease != "" {
		token = r.Lease.Token()
		c.undo = func(reply any, err error) { s.undo(r, reply, err) }
	}
	switch {
	case r.Stream != "":
		with = "s"
	case r.Operation.ID != "":
		with = "o"
	}
	c.args = append(make([]any, 0, 5+7*len(r.Checks)), s.clock(), token, with)
	if r.Operation.ID != "" {
		c.args = append(c.args, r.Operation.Body[:], r.Operation.Attempt)
	}
	c.keys = make([]string, 0, len(r.Checks)+4)
	var seen map[string]int // only for requests that are not small
	if len(r.Checks) > 8 {
		seen = make(map[string]int, len(r.Checks))
	}
	for _, check := range r.Checks {
		key := c.key(check.Key, seen)
		mode := ""
		switch {
		case check.Shadow:
			mode = "s"
		case check.Quota != 0:
			mode = strconv.Itoa(check.Quota)
		}
		switch l := check.Limit.(type) {
		case limit.TokenBucket:
			hits := min(check.Hits, l.Capacity+1) // more is no different, and stays exact
			c.args = append(c.args, "b", key, hits, mode, l.Capacity, l.Scale, reserving(check, l.Refill))
		case limit.Window:
			over := int64(0)
			if l.ChargeOver {
				over = 1
			}
			c.args = append(c.args, windowKind(l), key, check.Hits, mode, l.Max, l.Length().Milliseconds(), reserving(check, over))
		case limit.Concurrency:
			c.args = append(c.args, "c", key, check.Hits, mode, l.Max, l.Lease.Milliseconds(), strconv.FormatInt(l.Linger.Milliseconds(), 10)+" "+check.Name)
		}
	}
	if r.Lease != "" {
		c.keys = append(c.keys, limit.LeaseKey(r.Lease), limit.LeasesKey(r.Domain))
	}
	if r.Stream != "" {
		c.keys = append(c.keys, limit.StreamKey(r.Domain, r.Stream))
	}
	if r.Operation.ID != "" {
		c.keys = append(c.keys, limit.OperationKey(r.Domain, r.Operation.ID))
	}
	return c
}

// windowKind is w's letter for the scripts.
func windowKind(w limit.Window) string {
	if w.Sliding {
		return "s"
	}
	return "w"
}

// reserving is the last argument of a bucket or a window.
func reserving(c limit.Check, n int64) any {
	if c.Reserve == 0 {
		return n
	}
	return fmt.Sprintf("%d %d %s", n, c.Reserve.Milliseconds(), c.Name)
}

// decide.lua's first numbers, beyond whether the request is admitted.
const (
	streamEnded = 2 + iota
	replayed
	otherBody
	lateAttempt
)

// decision reads decide.lua's reply.
func decision(r limit.Request, reply any) (limit.Decision, error) {
	items, _ := reply.([]any)
	n, err := integers(items[:min(len(items), 3+4*len(r.Checks))])
	switch {
	case err != nil:
		return limit.Decision{}, fmt.Errorf("redis: decide: unexpected reply: %w", err)
	case len(n) == 1 && n[0] == otherBody:
		return limit.Decision{}, fmt.Errorf("redis: decide: %w", store.ErrOtherRequest)
	case len(n) == 1 && n[0] == lateAttempt:
		return limit.Decision{}, fmt.Errorf("redis: decide: %w", store.ErrLateAttempt)
	}
	want := 3 + 4*len(r.Checks)
	id := r.Lease
	if len(n) > 0 && n[0] == replayed {
		want++
		token, _ := items[len(items)-1].(string)
		id = limit.LeaseOf(r.Domain, token)
	}
	if len(items) != want {
		return limit.Decision{}, fmt.Errorf("redis: decide: a reply of %d items, want %d", len(items), want)
	}
	d := limit.Decision{
		Admitted: n[0] == 1 || n[0] == replayed, StreamEnded: n[0] == streamEnded, Replayed: n[0] == replayed,
		Expired: n[1], TTL: limit.Millis(n[2]), Results: make([]limit.Result, len(r.Checks)),
	}
	if d.TTL > 0 {
		d.Lease = id
	}
	for i := range d.Results {
		p := n[3+4*i:]
		d.Results[i] = limit.Result{Passed: p[0] == 1, Remaining: p[1], RetryAfter: limit.Millis(p[2]), ResetAfter: limit.Millis(p[3])}
	}
	return d, nil
}

// undo has a decision that was not told undone, unless it is known that no lease was
// granted. If no node is known for it by now its lease ends by its expiry.
func (s *Store) undo(r limit.Request, reply any, err error) {
	if d, bad := decision(r, reply); err == nil && (bad == nil && d.Lease != r.Lease || errors.Is(bad, store.ErrOtherRequest) || errors.Is(bad, store.ErrLateAttempt)) {
		return
	}
	if n := s.routes.node(limit.LeaseKey(r.Lease)); n != nil {
		n.undo(newGiveBack(r))
	}
}

// giveBack is a decision to undo.
type giveBack struct {
	lease limit.LeaseID
	keys  []string // the states of its checks
	args  []any    // those of release.lua for each key
}

func newGiveBack(r limit.Request) giveBack {
	g := giveBack{lease: r.Lease}
	for _, c := range r.Checks {
		if c.Shadow || c.Quota != 0 || c.Hits <= 0 {
			continue // nobody knows whether it was charged
		}
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			g.keys = append(g.keys, c.Key)
			g.args = append(g.args, "b", c.Hits, l.Capacity, l.Scale, l.Refill)
		case limit.Window:
			g.keys = append(g.keys, c.Key)
			g.args = append(g.args, windowKind(l), c.Hits, l.Length().Milliseconds(), 0, 0)
		case limit.Concurrency:
		}
	}
	return g
}

// undoCall undoes a decision, also one that Redis has not seen yet: that one will then
// take nothing.
func undoCall(release *script, g giveBack, now string) *call {
	c := leaseCall(release, g.lease, now)
	c.args = append(append(c.args, "1", "u", ""), g.args...)
	c.keys = append(c.keys, g.keys...)
	return c
}
