package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

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
		c.undo = func(reply unpacker, err error) { s.undo(r, reply, err) }
	}
	switch {
	case r.Stream != "":
		with = "s"
	case r.Operation.ID != "":
		with = "o"
	}
	a := &c.args
	a.string(token)
	a.string(with)
	if r.Operation.ID != "" {
		a.string(string(r.Operation.Body[:]))
		a.int(int64(r.Operation.Attempt))
	}
	c.keys = slices.Grow(c.keys, len(r.Checks)+4)
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
		name := ""
		if check.Reserve > 0 {
			name = check.Name
		}
		switch l := check.Limit.(type) {
		case limit.TokenBucket:
			hits := min(check.Hits, l.Capacity+1) // more is no different, and stays exact
			a.check("b", key, hits, mode, l.Capacity, l.Scale, l.Refill, check.Reserve, name)
			a.limit(l.Capacity, l.Scale, l.Refill)
		case limit.Window:
			over := int64(0)
			if l.ChargeOver {
				over = 1
			}
			a.check(windowKind(l), key, check.Hits, mode, l.Max, l.Length().Milliseconds(), over, check.Reserve, name)
			a.string("")
		case limit.Concurrency:
			a.check("c", key, check.Hits, mode, l.Max, l.Lease.Milliseconds(), l.Linger.Milliseconds(), 0, check.Name)
			a.string("")
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

// check adds one of decide.lua's checks, but for its last field.
func (p *packer) check(kind string, key int, hits int64, mode string, x, y, z int64, reserve time.Duration, name string) {
	p.string(kind)
	p.int(int64(key))
	p.int(hits)
	p.string(mode)
	p.ints(x, y, z, reserve.Milliseconds())
	p.string(name)
}

// windowKind is w's letter for the scripts.
func windowKind(w limit.Window) string {
	if w.Sliding {
		return "s"
	}
	return "w"
}

// decide.lua's first numbers, beyond whether the request is admitted.
const (
	streamEnded = 2 + iota
	replayed
	otherBody
	lateAttempt
)

// decision reads decide.lua's reply.
func decision(r limit.Request, reply unpacker) (limit.Decision, error) {
	n, first := reply.array(), reply.int()
	want := 3 + 4*len(r.Checks)
	switch {
	case n == 1 && first == otherBody:
		return limit.Decision{}, fmt.Errorf("redis: decide: %w", store.ErrOtherRequest)
	case n == 1 && first == lateAttempt:
		return limit.Decision{}, fmt.Errorf("redis: decide: %w", store.ErrLateAttempt)
	case first == replayed:
		want++
	}
	if n != want {
		return limit.Decision{}, fmt.Errorf("redis: decide: a reply of %d items, want %d", n, want)
	}
	d := limit.Decision{
		Admitted: first == 1 || first == replayed, StreamEnded: first == streamEnded, Replayed: first == replayed,
		Expired: reply.int(), TTL: limit.Millis(reply.int()), Results: make([]limit.Result, len(r.Checks)),
	}
	for i := range d.Results {
		d.Results[i] = limit.Result{Passed: reply.int() == 1, Remaining: reply.int(), RetryAfter: limit.Millis(reply.int()), ResetAfter: limit.Millis(reply.int())}
	}
	if d.TTL > 0 {
		d.Lease = r.Lease
	}
	if d.Replayed {
		d.Lease = limit.LeaseOf(r.Domain, reply.text())
	}
	if err := reply.end(); err != nil {
		return limit.Decision{}, fmt.Errorf("redis: decide: unexpected reply: %w", err)
	}
	return d, nil
}

// undo has a decision that was not told undone, unless it is known that no lease was
// granted. If no node is known for it by now its lease ends by its expiry.
func (s *Store) undo(r limit.Request, reply unpacker, err error) {
	if d, bad := decision(r, reply); err == nil && (bad == nil && d.Lease != r.Lease || errors.Is(bad, store.ErrOtherRequest) || errors.Is(bad, store.ErrLateAttempt)) {
		return
	}
	if n := s.routes.node(limit.LeaseKey(r.Lease)); n != nil {
		n.undo(newGiveBack(r))
	}
}

// giveBack is a decision to undo: its lease, and what its checks took.
type giveBack struct {
	lease limit.LeaseID
	taken []taken
}

// taken is what release.lua gives back of one state.
type taken struct {
	key, kind     string
	hits, x, y, z int64
}

func newGiveBack(r limit.Request) giveBack {
	g := giveBack{lease: r.Lease}
	for _, c := range r.Checks {
		if c.Shadow || c.Quota != 0 || c.Hits <= 0 {
			continue // nobody knows whether it was charged
		}
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			g.taken = append(g.taken, taken{c.Key, "b", c.Hits, l.Capacity, l.Scale, l.Refill})
		case limit.Window:
			g.taken = append(g.taken, taken{c.Key, windowKind(l), c.Hits, l.Length().Milliseconds(), 0, 0})
		case limit.Concurrency:
		}
	}
	return g
}

// undoCall undoes a decision, also one that Redis has not seen yet: that one will then
// take nothing.
func undoCall(release *script, g giveBack) *call {
	c := leaseCall(release, g.lease)
	c.args.string("1")
	c.args.string("u")
	c.args.string("")
	for _, t := range g.taken {
		c.keys = append(c.keys, t.key)
		c.args.string(t.kind)
		c.args.ints(t.hits, t.x, t.y, t.z)
	}
	return c
}
