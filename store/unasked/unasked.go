// Package unasked remembers which checks a store has just refused, so that whoever asks the
// same again before it can pass is refused without asking.
package unasked

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"weir/limit"
)

// MaxLife is how long a refusal may be remembered at most. It bounds how late a refund of another
// process's is honoured, and the drift between the store's clock and ours.
const MaxLife = time.Second

// maxKept is how many states each of two generations remembers, at most: when the newer is full
// the older goes early.
const maxKept = 1 << 16

// Memory is what is remembered, of buckets and fixed windows: from a refusal on only time can
// make the check pass, since others only spend, but for what gives hits back. Its methods may
// be called at once. Use [New].
type Memory struct {
	life  time.Duration
	seed  maphash.Seed
	ended atomic.Uint64 // how many givings have ended
	all   giving        // to any state
	some  [1024]giving  // to the states of which this is the hash of the key, or of the domain

	mu       sync.RWMutex
	now, old map[string]refusal // two generations, by the key of the state; what is learned goes into now
	turned   time.Time          // when now became old
}

// giving says when hits were last given back to some states. A refusal counts if nothing is
// being given back to its state, and nothing has been since before it was asked for.
type giving struct {
	under atomic.Int64  // how many are under way
	last  atomic.Uint64 // the number of the last that has ended, in the order of their ends
}

func (g *giving) nothingSince(a Asked) bool { return g.under.Load() == 0 && g.last.Load() <= a.ended }

// end ends one that is under way, the nth of all.
func (g *giving) end(n uint64) {
	for last := g.last.Load(); last < n && !g.last.CompareAndSwap(last, n); last = g.last.Load() {
	}
	g.under.Add(-1)
}

// refusal is what a store told of a check that did not pass. Its times are from Asked.at on.
type refusal struct {
	asked           Asked
	limit           limit.Limit
	hits            int64
	remaining       int64
	until           time.Duration // it cannot pass before
	told            time.Duration // it passes then, or a moment before
	reset           time.Duration // ResetAfter, or a moment before
	ofKey, ofDomain *giving       // to its state, and to any of its domain
}

// at is what is told of the check at a later time.
func (f refusal) at(now time.Time) limit.Result {
	since := now.Sub(f.asked.at)
	r := limit.Result{Remaining: f.remaining, RetryAfter: up(f.told - since), ResetAfter: up(f.reset - since)}
	if b, ok := f.limit.(limit.TokenBucket); ok { // it has gained something, and so much is missing still
		r.Remaining = max(r.Remaining, (f.hits*b.Scale-r.RetryAfter.Milliseconds()*b.Refill)/b.Scale)
	}
	return r
}

// New returns an empty memory, of refusals that are so old at most. A life of more than MaxLife is
// cut to that, and with 0 nothing is remembered.
func New(life time.Duration) *Memory {
	return &Memory{life: min(life, MaxLife), seed: maphash.MakeSeed(), now: make(map[string]refusal), old: make(map[string]refusal)}
}

// Asked is the state of a memory before a store is asked. Take it before the call is sent.
type Asked struct {
	ended uint64
	at    time.Time
}

// Ask notes that a store is about to be asked.
func (m *Memory) Ask(now time.Time) Asked { return Asked{m.ended.Load(), now} }

// Learn notes what a store has decided of r, which was asked for at a, and answered by now.
func (m *Memory) Learn(a Asked, r limit.Request, d limit.Decision, now time.Time) {
	if d.StreamEnded {
		return
	}
	for i, c := range r.Checks {
		switch result := d.Results[i]; {
		case !d.Admitted && !result.Passed && lasts(c) && result.RetryAfter > 0:
			m.learn(a, r.Domain, c, result, now)
		default:
			m.changed(c, d.Admitted)
		}
	}
}

func (m *Memory) learn(a Asked, domain string, c limit.Check, result limit.Result, now time.Time) {
	// The store looked after the call was sent, and before its answer came; it cuts the time
	// to milliseconds.
	took := now.Sub(a.at)
	f := refusal{
		asked: a, limit: c.Limit, hits: c.Hits, remaining: result.Remaining,
		until: result.RetryAfter - time.Millisecond, told: took + result.RetryAfter, reset: took + result.ResetAfter,
		ofKey: m.giving(c.Key), ofDomain: m.giving(domain),
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if a.at.Sub(m.turned) > m.life || len(m.now) >= maxKept {
		m.now, m.old, m.turned = m.old, m.now, a.at
		clear(m.now)
	}
	m.now[c.Key] = f
}

// changed forgets what is known of the state of c if the store has changed it, so that what
// is told of it is as the store would have it.
func (m *Memory) changed(c limit.Check, charged bool) {
	if w, window := c.Limit.(limit.Window); window && w.ChargeOver {
		charged = true // maybe
	}
	if f, ok := m.find(c.Key); !ok || !charged && f.limit == c.Limit {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.now, c.Key)
	delete(m.old, c.Key)
}

// giving is that to the state with this key, or to any of this domain.
func (m *Memory) giving(name string) *giving {
	return &m.some[maphash.String(m.seed, name)%uint64(len(m.some))]
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
		d.Results[i] = f.at(now)
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
	if !ok || f.limit != c.Limit || c.Hits < f.hits || now.Sub(f.asked.at) >= min(f.until, m.life) {
		return refusal{}, false
	}
	return f, f.ofKey.nothingSince(f.asked) && f.ofDomain.nothingSince(f.asked) && m.all.nothingSince(f.asked)
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
// returns, once, when they have been, or that has failed. Of what was asked for before that
// nothing is known any more.
func (m *Memory) Give(keys []string) (given func()) {
	all := make([]*giving, len(keys))
	for i, key := range keys {
		all[i] = m.giving(key)
	}
	return m.give(all...)
}

// GiveAny is Give for any states of a domain.
func (m *Memory) GiveAny(domain string) (given func()) { return m.give(m.giving(domain)) }

// GiveAll is Give for all states. So it is called when a policy changes: a state that had
// another limit for a while may have gained more.
func (m *Memory) GiveAll() (given func()) { return m.give(&m.all) }

func (m *Memory) give(all ...*giving) (given func()) {
	for _, g := range all {
		g.under.Add(1)
	}
	return func() {
		n := m.ended.Add(1) // who asks from now on sees what was given back
		for _, g := range all {
			g.end(n)
		}
	}
}
