// Package memory is the store of one process: weir's embedded default. It gives
// the same answers as the Redis store, and forgets what means nothing any more.
package memory

import (
	"context"
	"fmt"
	"sync"
	"time"

	"weir/limit"
	"weir/store"
)

const (
	slack       = 10 * time.Second // a state outlives its meaning by this
	indexSlack  = time.Hour        // the index of leases waits this long to be cleaned
	reapBudget  = 64               // expired members removed a call, at most
	sweepBudget = 16               // dead states removed a call, beyond those it may add
	pingBudget  = 20_000           // dead states removed by Ping, in parts of 500
)

// Options configure a store. The zero value is a store on the machine's clock.
type Options struct {
	// Now returns milliseconds since the epoch; nil means the wall clock at
	// start plus monotonic time, which changes of the wall clock do not move.
	Now func() int64
}

// Store keeps its state in this process. Use [New].
type Store struct {
	now func() int64

	mu     sync.Mutex // guards all below: a decision is one event
	states map[string]*state
	leases map[string]*lease // by limit.LeaseKey
	deaths deaths
	calls  uint64 // decisions so far
}

var _ store.Store = (*Store)(nil)

// state is what one key holds: that of its kind of limit, or the domain's index
// of leases, which is a set too.
type state struct {
	bucket limit.BucketState
	window limit.WindowState
	slots  *slots    // nil before the first
	of     *ofStream // nil if it is no stream's or operation's
	// charged and reserved are the last decision that did so, so that each does so once.
	charged, reserved uint64
	dies              int64 // ms: it means nothing from then on
	death             death
	kept              bool // in Store.states
}

// ofStream is what a state holds of a stream or an operation.
type ofStream struct {
	known known
	used  map[string]int64 // the limits that a stream's usage was charged to or settled of, by key, and until when (ms) that counts
}

// New returns an empty store.
func New(o Options) *Store {
	s := &Store{now: o.Now, states: make(map[string]*state), leases: make(map[string]*lease)}
	if s.now == nil {
		start := time.Now()
		s.now = func() int64 { return start.UnixMilli() + time.Since(start).Milliseconds() }
	}
	return s
}

// Decide implements [store.Store].
func (s *Store) Decide(_ context.Context, r limit.Request) (limit.Decision, error) {
	if err := store.CheckRequest(r); err != nil {
		return limit.Decision{}, fmt.Errorf("memory: decide: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	d := limit.Decision{Results: make([]limit.Result, len(r.Checks))}

	// Evaluate.
	budget := reapBudget
	index := ""
	if r.Lease != "" {
		index = limit.LeasesKey(r.Domain)
		if set := s.states[index]; set != nil {
			d.Expired = int64(set.slots.reap(now, &budget))
		}
	}
	var few [8]*state // no allocation for most requests
	found := append(few[:0], make([]*state, len(r.Checks))...)
	var fresh freshStates
	for i, c := range r.Checks {
		st := s.states[c.Key]
		if st == nil {
			st = fresh.get(c.Key) // it enters s.states only when it is written
		}
		found[i] = st
		passed := false
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			passed = st.bucket.At(l, now).Passes(c.Hits)
		case limit.Window:
			passed = st.window.At(l, now).Passes(l, c.Hits, now)
		case limit.Concurrency:
			st.slots.reap(now, &budget)
			passed = c.Hits < 0 || st.slots.live(now) < l.Max
		}
		d.Results[i].Passed = passed
	}
	var before known
	if r.Stream != "" {
		before = s.knownAt(limit.StreamKey(r.Domain, r.Stream), now)
	}
	d.StreamEnded = before.kind == tombstone
	d.Admitted = !d.StreamEnded && !limit.Refused(r.Checks, d.Results)
	if r.Operation.ID != "" {
		if err := s.replay(r, &d, now); err != nil {
			return limit.Decision{}, fmt.Errorf("memory: decide: %w", err)
		}
	}

	// Charge, each state once.
	s.calls++
	var held *lease
	var ahead map[string]int64
	for i, c := range r.Checks {
		st, passed := found[i], d.Results[i].Passed
		take := passed && d.Admitted && !d.Replayed && st.charged != s.calls
		reserves := d.Admitted && !d.Replayed && c.Reserve > 0 && c.Hits >= 0 && st.reserved != s.calls
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			if next := st.bucket.At(l, now); take && c.Hits != 0 {
				st.bucket = next.Charge(c.Hits)
				s.write(c.Key, st, st.bucket.Millis+st.bucket.FullAfterMillis(), slack, now)
			} else if st.bucket.Scale != 0 && !st.bucket.Of(l) {
				st.bucket = next // carried over to its new limit
				s.write(c.Key, st, st.bucket.Millis+st.bucket.FullAfterMillis(), slack, now)
			}
		case limit.Window:
			anyway := over(c, passed) && !d.StreamEnded && st.charged != s.calls
			if (take || anyway) && c.Hits != 0 {
				st.window = st.window.At(l, now).Charge(c.Hits)
				s.write(c.Key, st, now+st.window.ResetAfterMillis(l, now), slack, now)
				take = true
				if st.window.Start > now {
					if ahead == nil {
						ahead = make(map[string]int64)
					}
					ahead[c.Key] = st.window.Start
				}
			}
		case limit.Concurrency:
			if take = take && c.Hits >= 0; take {
				held = held.living(l.Lease)
				if held.slots == nil {
					held.slots = make([]heldSlot, 0, len(r.Checks)-i)
				}
				held.slots = append(held.slots, heldSlot{key: c.Key, limit: c.Name, linger: l.Linger.Milliseconds()})
			}
		}
		if take {
			st.charged = s.calls
		}
		if reserves && (passed || over(c, passed)) {
			st.reserved = s.calls
			held = held.living(c.Reserve)
			held.reserved = append(held.reserved, reserve(c, st, now))
		}
	}
	if r.Operation.ID != "" && d.Admitted && !d.Replayed && held == nil {
		held = held.living(limit.OperationLife)
	}
	if held != nil {
		d.Lease, d.TTL, held.ahead = r.Lease, limit.Millis(held.life), ahead
		s.grant(held, r, index, now)
	}
	if r.Stream != "" {
		s.remember(limit.StreamKey(r.Domain, r.Stream), before, held, now)
	}

	for i, c := range r.Checks {
		st := found[i]
		if kept := s.states[c.Key]; kept != nil {
			st = kept
		}
		d.Results[i] = result(c, st, d.Results[i].Passed, now)
	}
	s.sweep(len(r.Checks), now)
	return d, nil
}

// freshStates are states that are not kept yet, by key. One key, the usual case,
// needs no map.
type freshStates struct {
	key  string // of the first
	one  *state
	more map[string]*state
}

func (f *freshStates) get(key string) *state {
	if f.one == nil {
		f.key, f.one = key, &state{}
	}
	if f.key == key {
		return f.one
	}
	if f.more == nil {
		f.more = make(map[string]*state)
	}
	if f.more[key] == nil {
		f.more[key] = &state{}
	}
	return f.more[key]
}

// result is what is told of one check after the decision.
func result(c limit.Check, st *state, passed bool, now int64) limit.Result {
	r := limit.Result{Passed: passed}
	never := c.Impossible() != limit.NoReason
	switch l := c.Limit.(type) {
	case limit.TokenBucket:
		b := st.bucket.At(l, now)
		ahead := b.Millis - now // time was set back
		r.Remaining = b.Remaining()
		r.ResetAfter = limit.Millis(ahead + b.FullAfterMillis())
		if !passed && !never {
			r.RetryAfter = limit.Millis(ahead + b.RetryAfterMillis(c.Hits))
		}
	case limit.Window:
		w := st.window.At(l, now)
		r.Remaining = w.Remaining(l, now)
		r.ResetAfter = limit.Millis(w.ResetAfterMillis(l, now))
		if !passed && !never {
			r.RetryAfter = limit.Millis(w.RetryAfterMillis(l, c.Hits, now))
		}
	case limit.Concurrency:
		r.Remaining = max(0, l.Max-st.slots.live(now))
	}
	return r
}

// Inspect implements [store.Store].
func (s *Store) Inspect(_ context.Context, checks []limit.Check) ([]limit.State, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	found := make([]limit.State, len(checks))
	for i, c := range checks {
		st := s.states[c.Key]
		if st == nil {
			st = &state{}
		}
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			found[i] = st.bucket.Inspect(l, c.Hits, now)
		case limit.Window:
			found[i] = st.window.Inspect(l, c.Hits, now)
		case limit.Concurrency:
			live := st.slots.live(now)
			first := make([]limit.Slot, 0, min(live, limit.MaxHolders))
			for m := range st.slots.alive(now) {
				if len(first) == cap(first) {
					break
				}
				first = append(first, limit.Slot{Token: m.token, Expiry: m.expiry})
			}
			found[i] = l.Inspect(live, first, now)
		}
	}
	return found, nil
}

// Len is how many states and leases are kept.
func (s *Store) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.states) + len(s.leases)
}

// Held implements [store.Store].
func (s *Store) Held(_ context.Context, domain string) (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st := s.states[limit.LeasesKey(domain)]; st != nil {
		return st.slots.live(s.now()), nil
	}
	return 0, nil
}

// Ping implements [store.Store]. It always succeeds. Servers ask it each second,
// so it forgets what means nothing any more where no other call comes.
func (s *Store) Ping(context.Context) error {
	for range pingBudget / 500 {
		s.mu.Lock()
		before := len(s.deaths)
		s.sweep(500, s.now())
		done := len(s.deaths) == before
		s.mu.Unlock()
		if done {
			return nil
		}
	}
	return nil
}

// Close implements [store.Store].
func (s *Store) Close() error { return nil }
