// Package unasked remembers which checks a store has just refused, so that whoever asks the
// same again before it can pass is refused without asking.
package unasked

import (
	"sync"
	"sync/atomic"
	"time"

	"weir/limit"
)

// MaxLife is how long a refusal may be remembered at most. It bounds how late a refund of another
// process's is honoured, and the drift between the store's clock and ours.
const MaxLife = time.Second

// maxKept is how many states are remembered in one life, at most.
const maxKept = 1 << 16

// Memory is what is remembered, of buckets and fixed windows: from a refusal on only time can
// make the check pass, since others only spend, but for what gives hits back. Its methods may
// be called at once. Use [New].
type Memory struct {
	life  time.Duration
	given atomic.Uint64 // how often hits were given back, each counted when it began and ended

	mu       sync.RWMutex
	now, old map[string]refusal // by the key of the state; what is learned goes into now
	turned   time.Time          // when now became old
}

// refusal is what a store told of a check that did not pass.
type refusal struct {
	limit     limit.Limit
	hits      int64
	remaining int64
	until     time.Time // it cannot pass before
	told      time.Time // it passes then, or a moment before
	reset     time.Time // ResetAfter, or a moment before
	forget    time.Time
}

// New returns an empty memory, of refusals that are so old at most.
func New(life time.Duration) *Memory {
	return &Memory{life: min(life, MaxLife), now: make(map[string]refusal), old: make(map[string]refusal)}
}

// Asked is the state of a memory before a store is asked. Take it before the call is sent.
type Asked struct {
	given uint64
	at    time.Time
}

// Ask notes that a store is about to be asked.
func (m *Memory) Ask(now time.Time) Asked { return Asked{m.given.Load(), now} }

// Learn notes what a store has refused to r, which was asked for at a, and answered by now.
func (m *Memory) Learn(a Asked, r limit.Request, d limit.Decision, now time.Time) {
	if d.Admitted || d.StreamEnded {
		return
	}
	for i, c := range r.Checks {
		if result := d.Results[i]; !result.Passed && lasts(c) && result.RetryAfter > 0 {
			m.learn(a, c, result, now)
		}
	}
}

func (m *Memory) learn(a Asked, c limit.Check, result limit.Result, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.given.Load() != a.given {
		return // it may have been refused before something was given back
	}
	if a.at.Sub(m.turned) > m.life || len(m.now) >= maxKept {
		m.now, m.old, m.turned = m.old, m.now, a.at
		clear(m.now)
	}
	// The store looked after the call was sent, and before its answer came; it cuts the time
	// to milliseconds.
	m.now[c.Key] = refusal{
		limit: c.Limit, hits: c.Hits, remaining: result.Remaining,
		until: a.at.Add(result.RetryAfter - time.Millisecond), told: now.Add(result.RetryAfter), reset: now.Add(result.ResetAfter), forget: a.at.Add(m.life),
	}
}

// lasts reports whether a refusal of c is one until its time has come, and for all that cost
// as much.
func lasts(c limit.Check) bool {
	switch l := c.Limit.(type) {
	case limit.TokenBucket:
	case limit.Window:
		if l.ChargeOver || l.Sliding { // the first is to be charged
			return false
		}
	case limit.Concurrency:
		return false
	}
	return c.Hits > 0 && !c.Shadow && c.Quota == 0
}

// Refuse decides r if it is known that the store would refuse it, and whose fault that is. What
// is known of no check is its result, but for those that refuse: see [limit.Result].Unknown.
func (m *Memory) Refuse(r limit.Request, now time.Time) (d limit.Decision, known bool) {
	if r.Operation.ID != "" || r.Stream != "" && r.NeedsLease() {
		return d, false // it may hold a lease already, and the store notes that it has asked
	}
	class, lanes := limit.Pool, false // of what is known to refuse; others of the caller's own
	for i, c := range r.Checks {
		switch w, window := c.Limit.(limit.Window); {
		case c.Quota != 0, c.Hits < 0, window && w.ChargeOver && !c.Shadow:
			return limit.Decision{}, false // the store does something though it refuses
		case !c.Shadow && c.Impossible() != limit.NoReason:
			return limit.Decision{}, false // that is what is to be told
		}
		f, ok := m.refuses(c, now)
		switch {
		case !ok:
			lanes = lanes || !c.Shadow && c.Class == limit.Lane
			continue
		case c.Hits > f.hits: // it waits longer, and how long is the store's to say
			return limit.Decision{}, false
		case c.Class == limit.Lane:
			class = limit.Lane
		}
		if !known {
			known, d.Results = true, make([]limit.Result, len(r.Checks))
			for j := range d.Results {
				d.Results[j] = limit.Result{Passed: true, Unknown: true}
			}
		}
		d.Results[i] = limit.Result{Remaining: f.remaining, RetryAfter: up(f.told.Sub(now)), ResetAfter: up(f.reset.Sub(now))}
	}
	if class == limit.Pool && lanes {
		return limit.Decision{}, false // S8: if a lane refuses too, it is the lane's
	}
	return d, known
}

// refuses returns what is known of the state of c, if c cannot pass yet.
func (m *Memory) refuses(c limit.Check, now time.Time) (refusal, bool) {
	if !lasts(c) {
		return refusal{}, false
	}
	f, ok := m.find(c.Key)
	return f, ok && f.limit == c.Limit && c.Hits >= f.hits && now.Before(f.until) && now.Before(f.forget)
}

// up rounds up to whole milliseconds, as stores tell times.
func up(d time.Duration) time.Duration {
	return (d + time.Millisecond - 1).Truncate(time.Millisecond)
}

func (m *Memory) find(key string) (refusal, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	f, ok := m.now[key]
	if !ok {
		f, ok = m.old[key]
	}
	return f, ok
}

// Give is called before hits may be given back to the states with these keys, and what it
// returns when they have been, or that has failed.
func (m *Memory) Give(keys []string) (given func()) {
	return m.giving(func() {
		for _, key := range keys {
			delete(m.now, key)
			delete(m.old, key)
		}
	})
}

// GiveAny is Give for any states.
func (m *Memory) GiveAny() (given func()) {
	return m.giving(func() {
		clear(m.now)
		clear(m.old)
	})
}

// giving forgets now, and when it is called again.
func (m *Memory) giving(forget func()) (again func()) {
	again = func() {
		m.given.Add(1) // before the lock: nobody who asked before learns any more
		m.mu.Lock()
		defer m.mu.Unlock()
		forget()
	}
	again()
	return again
}
