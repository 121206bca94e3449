// Package memory is the store of one process: weir's embedded default. It gives
// the same answers as the Redis store, and forgets what means nothing any more.
package memory

import (
	"cmp"
	"container/heap"
	"context"
	"fmt"
	"slices"
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
	slots  slots
	stream stream
	used   map[string]int64 // the limits that a stream's usage was charged to, by key, and until when (ms) that counts
	// charged is the last decision that charged it, so that each charges once.
	charged uint64
	dies    int64 // ms: it means nothing from then on
}

// lease is the record of a lease.
type lease struct {
	life, granted, expiry int64 // ms
	keys                  []string
	limits                []string // their names, one a key
	lingers               []int64  // ms, one a key
	expiries              []int64  // of its slots, one a key
	index                 string   // the domain's
	stream                string   // key of what is known of its stream, or ""
	lingering             bool     // its work ended early
	death                 *death
}

// stream is what is known of a stream until a time; after that, nothing is.
type stream struct {
	kind  streamKind
	token string // of its lease
	until int64  // ms
}

type streamKind uint8

const (
	unknown streamKind = iota
	holding
	ended
	ambiguous
	tombstone
)

// at is what is known at now.
func (s stream) at(now int64) stream {
	if s.until <= now {
		return stream{}
	}
	return s
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
			passed = st.window.At(l.Length().Milliseconds(), now).Passes(l, c.Hits)
		case limit.Concurrency:
			st.slots.reap(now, &budget)
			passed = c.Hits < 0 || st.slots.live(now) < l.Max
		}
		d.Results[i].Passed = passed
	}
	var before stream
	if r.Stream != "" {
		if st := s.states[limit.StreamKey(r.Domain, r.Stream)]; st != nil {
			before = st.stream.at(now)
		}
	}
	d.StreamEnded = before.kind == tombstone
	d.Admitted = !d.StreamEnded && !limit.Refused(r.Checks, d.Results)

	// Charge, each state once.
	s.calls++
	var held *lease
	for i, c := range r.Checks {
		st, passed := found[i], d.Results[i].Passed
		take := passed && d.Admitted && st.charged != s.calls
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
			over := l.ChargeOver && !c.Shadow && !passed && !d.StreamEnded && st.charged != s.calls
			if (take || over) && c.Hits != 0 {
				st.window = st.window.At(l.Length().Milliseconds(), now).Charge(c.Hits)
				s.write(c.Key, st, st.window.Start+l.Length().Milliseconds(), slack, now)
				take = true
			}
		case limit.Concurrency:
			if take = take && c.Hits >= 0; take {
				if held == nil {
					held = &lease{life: l.Lease.Milliseconds(), granted: now, index: index}
				}
				held.life = min(held.life, l.Lease.Milliseconds())
				held.keys = append(held.keys, c.Key)
				held.limits = append(held.limits, c.Name)
				held.lingers = append(held.lingers, l.Linger.Milliseconds())
			}
		}
		if take {
			st.charged = s.calls
		}
	}
	if held != nil {
		held.expiry = now + held.life
		d.Lease, d.TTL = r.Lease, limit.Millis(held.life)
		for _, key := range held.keys {
			held.expiries = append(held.expiries, held.expiry)
			s.hold(key, r.Lease.Token(), held.expiry, slack, now)
		}
		s.hold(index, r.Lease.Token(), held.expiry, indexSlack, now)
		key := limit.LeaseKey(r.Lease)
		s.leases[key] = held
		held.death = &death{key: key, at: held.expiry + limit.RecordSlack.Milliseconds()}
		heap.Push(&s.deaths, held.death)
	}

	if r.Stream != "" {
		s.remember(limit.StreamKey(r.Domain, r.Stream), before, held, r.Lease.Token(), now)
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
		length := l.Length().Milliseconds()
		w := st.window.At(length, now)
		r.Remaining = w.Remaining(l)
		r.ResetAfter = limit.Millis(w.ResetAfterMillis(length, now))
		if !passed && !never {
			r.RetryAfter = r.ResetAfter
		}
	case limit.Concurrency:
		r.Remaining = max(0, l.Max-st.slots.live(now))
	}
	return r
}

// remember notes what a request of a stream, of which so much was known before, has
// come to; held is nil if it was granted no lease. The mutex is held.
func (s *Store) remember(key string, before stream, held *lease, token string, now int64) {
	next := before
	switch {
	case before.kind == tombstone:
		next = stream{}
	case before.kind != unknown: // it has asked before
		next.kind, next.token = ambiguous, ""
		if held != nil {
			next.until = max(next.until, held.expiry+limit.RecordSlack.Milliseconds())
		}
	case held != nil:
		held.stream = key
		next = stream{holding, token, held.expiry + limit.RecordSlack.Milliseconds()}
	default:
		return
	}
	s.know(key, next, now)
}

// know keeps what is known of a stream. The mutex is held.
func (s *Store) know(key string, next stream, now int64) {
	st := s.states[key]
	if st == nil {
		st = &state{}
	}
	st.stream = next
	s.write(key, st, next.until, 0, now)
}

// Release implements [store.Store].
func (s *Store) Release(_ context.Context, e limit.Ending) (limit.Release, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	defer s.sweep(0, now)
	if e.Lease != "" {
		return s.end(limit.LeaseKey(e.Lease), e.Lease.Token(), e.Early, now), nil
	}
	key := limit.StreamKey(e.Domain, e.Stream)
	var known stream
	if st := s.states[key]; st != nil {
		known = st.stream.at(now)
	}
	switch known.kind {
	case holding:
		return s.end(limit.LeaseKeyOf(e.Domain, known.token), known.token, e.Early, now), nil
	case unknown:
		if e.Tombstone {
			s.know(key, stream{kind: tombstone, until: now + limit.TombstoneLife.Milliseconds()}, now)
		}
	case ended, ambiguous, tombstone:
	}
	return limit.Release{Result: limit.NotHeld}, nil
}

// end releases the lease with the record under key. The mutex is held.
func (s *Store) end(key, token string, early bool, now int64) limit.Release {
	l := s.leases[key]
	switch {
	case l == nil || now >= l.expiry+limit.RecordSlack.Milliseconds():
		return limit.Release{Result: limit.NotHeld}
	case l.expiry <= now:
		s.endStream(l, token, now)
		return limit.Release{Result: limit.Expired}
	case l.lingering && early: // told again
		return limit.Release{Result: limit.NotHeld}
	}
	s.endStream(l, token, now)
	r := limit.Release{Result: limit.Released, HeldFor: limit.Millis(max(0, now-l.granted))}
	rest := &lease{life: l.life, granted: l.granted, index: l.index, stream: l.stream, lingering: true, death: l.death}
	for i, set := range l.keys {
		s.free(set, slot{l.expiries[i], token})
		if linger := l.lingers[i]; early && linger > 0 {
			rest.keys = append(rest.keys, set)
			rest.limits = append(rest.limits, l.limits[i])
			rest.lingers = append(rest.lingers, linger)
			rest.expiries = append(rest.expiries, now+linger)
			rest.expiry = max(rest.expiry, now+linger)
			s.hold(set, token, now+linger, slack, now)
		} else {
			r.Freed = append(r.Freed, limit.Freed{Key: set, Limit: l.limits[i]})
		}
	}
	s.free(l.index, slot{l.expiry, token})
	if len(rest.keys) == 0 {
		delete(s.leases, key)
		heap.Remove(&s.deaths, l.death.index)
		return r
	}
	r.Result = limit.Lingering
	s.hold(l.index, token, rest.expiry, indexSlack, now)
	s.leases[key] = rest
	rest.death.at = rest.expiry + limit.RecordSlack.Milliseconds()
	heap.Fix(&s.deaths, rest.death.index)
	return r
}

// endStream notes that the stream of l has ended, if it is still known to hold it.
// The mutex is held.
func (s *Store) endStream(l *lease, token string, now int64) {
	if st := s.states[l.stream]; st != nil && st.stream.at(now).kind == holding && st.stream.token == token {
		s.know(l.stream, stream{kind: ended, until: now + limit.RecordSlack.Milliseconds()}, now)
	}
}

// free takes a member out of the set under key, if it is there. The mutex is held.
func (s *Store) free(key string, m slot) {
	if st := s.states[key]; st != nil {
		st.slots.remove(m)
	}
}

// Charge implements [store.Store].
func (s *Store) Charge(_ context.Context, u limit.Usage) ([]bool, error) {
	if err := store.CheckUsage(u); err != nil {
		return nil, fmt.Errorf("memory: charge: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	defer s.sweep(len(u.Checks), now)
	mark := limit.UsageKey(u.Domain, u.Stream)
	used := s.states[mark]
	if used == nil {
		used = &state{used: make(map[string]int64)}
	}
	until := now + limit.UsageLife.Milliseconds()
	charged := make([]bool, len(u.Checks))
	for i, c := range u.Checks {
		if used.used[c.Key] > now {
			continue
		}
		charged[i] = true
		used.used[c.Key] = until
		s.write(mark, used, until, 0, now)
		st := s.states[c.Key]
		if st == nil {
			st = &state{}
		}
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			st.bucket = st.bucket.At(l, now).Debit(c.Hits)
			s.write(c.Key, st, st.bucket.Millis+st.bucket.FullAfterMillis(), slack, now)
		case limit.Window:
			st.window = st.window.At(l.Length().Milliseconds(), now).Charge(c.Hits)
			s.write(c.Key, st, st.window.Start+l.Length().Milliseconds(), slack, now)
		case limit.Concurrency: // CheckUsage refuses it
		}
	}
	return charged, nil
}

// Renew implements [store.Store].
func (s *Store) Renew(_ context.Context, id limit.LeaseID) (limit.Renewal, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	defer s.sweep(0, now)
	l := s.leases[limit.LeaseKey(id)]
	if l == nil || l.expiry <= now {
		return limit.Renewal{}, nil
	}
	for i, key := range l.keys {
		// Somebody else may have got a slot that is not there any more.
		if st := s.states[key]; st == nil || l.expiries[i] <= now || !st.slots.has(slot{l.expiries[i], id.Token()}) {
			return limit.Renewal{}, nil
		}
	}
	expiry := max(l.expiry, now+l.life)
	for i, key := range l.keys {
		s.free(key, slot{l.expiries[i], id.Token()})
		l.expiries[i] = expiry
		s.hold(key, id.Token(), expiry, slack, now)
	}
	s.free(l.index, slot{l.expiry, id.Token()})
	s.hold(l.index, id.Token(), expiry, indexSlack, now)
	if st := s.states[l.stream]; st != nil && st.stream.at(now).kind == holding && st.stream.token == id.Token() {
		s.know(l.stream, stream{holding, id.Token(), expiry + limit.RecordSlack.Milliseconds()}, now)
	}
	l.expiry, l.death.at = expiry, expiry+limit.RecordSlack.Milliseconds()
	heap.Fix(&s.deaths, l.death.index)
	return limit.Renewal{Renewed: true, TTL: limit.Millis(expiry - now)}, nil
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
			found[i] = st.bucket.Inspect(l, now)
		case limit.Window:
			found[i] = st.window.Inspect(l, now)
		case limit.Concurrency:
			live := st.slots[st.slots.expired(now):]
			first := make([]limit.Slot, 0, min(len(live), limit.MaxHolders))
			for _, m := range live[:cap(first)] {
				first = append(first, limit.Slot{Token: m.token, Expiry: m.expiry})
			}
			found[i] = l.Inspect(int64(len(live)), first, now)
		}
	}
	return found, nil
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

// write keeps st under key until meaningless ms, and a slack. The mutex is held.
func (s *Store) write(key string, st *state, meaningless int64, slack time.Duration, now int64) {
	st.dies = max(st.dies, now, meaningless+slack.Milliseconds())
	if s.states[key] == nil {
		s.states[key] = st
		heap.Push(&s.deaths, &death{key: key, at: st.dies})
	}
}

// hold adds a member to the set under key. The mutex is held.
func (s *Store) hold(key, token string, expiry int64, slack time.Duration, now int64) {
	st := s.states[key]
	if st == nil {
		st = &state{}
	}
	st.slots.add(slot{expiry, token})
	s.write(key, st, expiry, slack, now)
}

// sweep forgets states that mean nothing any more: more than a call adds, so
// that none pile up, and few, so that none waits. The mutex is held.
func (s *Store) sweep(checks int, now int64) {
	for range checks + sweepBudget {
		if len(s.deaths) == 0 || s.deaths[0].at > now {
			return
		}
		first := s.deaths[0]
		if st := s.states[first.key]; st != nil && st.dies > now { // it was used since
			first.at = st.dies
			heap.Fix(&s.deaths, 0)
			continue
		}
		heap.Pop(&s.deaths)
		delete(s.states, first.key)
		delete(s.leases, first.key)
	}
}

// death says when to look whether a key still means something. Every key that
// is kept has exactly one.
type death struct {
	key   string
	at    int64 // ms
	index int   // in the heap
}

// deaths is a heap, the earliest first.
type deaths []*death

func (d deaths) Len() int           { return len(d) }
func (d deaths) Less(i, j int) bool { return d[i].at < d[j].at }
func (d deaths) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].index, d[j].index = i, j
}

func (d *deaths) Push(x any) {
	m, _ := x.(*death)
	m.index = len(*d)
	*d = append(*d, m)
}

func (d *deaths) Pop() any {
	old := *d
	last := old[len(old)-1]
	old[len(old)-1] = nil
	*d = old[:len(old)-1]
	return last
}

// slots is a set of tokens in the order of their expiry, so that the live ones
// are counted without removing the others.
type slots []slot

type slot struct {
	expiry int64 // ms
	token  string
}

func (a slot) compare(b slot) int {
	return cmp.Or(cmp.Compare(a.expiry, b.expiry), cmp.Compare(a.token, b.token))
}

func (s *slots) add(m slot) {
	i, found := slices.BinarySearchFunc(*s, m, slot.compare)
	if !found {
		*s = slices.Insert(*s, i, m)
	}
}

func (s slots) has(m slot) bool {
	_, found := slices.BinarySearchFunc(s, m, slot.compare)
	return found
}

func (s *slots) remove(m slot) {
	if i, found := slices.BinarySearchFunc(*s, m, slot.compare); found {
		*s = slices.Delete(*s, i, i+1)
	}
}

// expired is how many members have expired at now; they stand first.
func (s slots) expired(now int64) int {
	n, _ := slices.BinarySearchFunc(s, now, func(m slot, now int64) int {
		if m.expiry <= now {
			return -1
		}
		return 1
	})
	return n
}

func (s slots) live(now int64) int64 { return int64(len(s) - s.expired(now)) }

// reap removes expired members within the budget and says how many.
func (s *slots) reap(now int64, budget *int) int {
	n := min(s.expired(now), *budget)
	*budget -= n
	*s = (*s)[n:]
	return n
}
