package storetest

import (
	"cmp"
	"context"
	"math/big"
	"slices"
	"time"

	"weir/limit"
	"weir/store"
)

// Model is the slowest and plainest store: exact fractions, lists that are
// searched from end to end, nothing forgotten. It shares no arithmetic with the
// real ones, so that what they agree upon can be wrong.
type Model struct {
	now     func() int64
	buckets map[string]*modelBucket
	windows map[string]*modelWindow
	leases  []*modelLease
	streams map[string]*modelStream // by domain and stream
	told    map[string]int64        // when the usage of a stream was charged to a limit, or settled of it
	asked   map[string]*modelOperation
}

var _ store.Store = (*Model)(nil)

type modelBucket struct {
	tokens *big.Rat
	at     int64
	limit  limit.TokenBucket // that it was last decided under
}

// modelWindow is what has been counted in each window, by its start, and the latest that
// it was counted in.
type modelWindow struct {
	latest int64
	hits   map[int64]int64
}

type modelLease struct {
	id              limit.LeaseID
	domain          string
	slots           []*modelSlot
	granted, expiry int64
	life            int64
	released        bool
	reaped          bool // reported as expired
	lingers         bool
	forgotten       bool // undone, or nobody asks for it any more
	reserved        []*modelReservation
	settledAt       int64 // when the last of them was settled
	operation       *modelOperation
	stream, asker   string           // of the first request, and the operation; "" once it has ended
	windows         map[string]int64 // the starts of those that were charged
}

type modelReservation struct {
	key, name string
	hits      int64
	settled   bool
	limit     limit.Limit
	start     int64 // of a window
}

// outlives is how long l is known after it has ended.
func (l *modelLease) outlives() int64 {
	for _, r := range l.reserved {
		if !r.settled {
			return 3_600_000
		}
	}
	return 60_000
}

// until is when nobody knows l any more.
func (l *modelLease) until() int64 {
	if n := l.outlives(); n > 60_000 {
		return l.expiry + n
	}
	return max(l.expiry, l.settledAt) + 60_000
}

// streamUntil is when nobody knows any more that a stream holds l: it may be longer than l.
func (l *modelLease) streamUntil() int64 {
	if l.outlives() > 60_000 {
		return l.expiry + 86_400_000
	}
	return l.until()
}

// known reports whether the record of l means something.
func (l *modelLease) known(now int64) bool { return !l.forgotten && now < l.until() }

// modelOperation is S17.
type modelOperation struct {
	name    string
	lease   *modelLease
	body    [16]byte
	attempt uint32
	retold  bool
	endedAt int64 // of its lease, by a release
	ended   bool
}

type modelSlot struct {
	key, name string
	linger    int64
	expiry    int64
	reset     bool // nobody's any more
}

// taken reports whether the slot counts at now.
func (s *modelSlot) taken(now int64) bool { return !s.reset && s.expiry > now }

// modelStream is S14: at most one of the four holds, until its time is over.
type modelStream struct {
	lease                       *modelLease
	ended, ambiguous, tombstone bool
	until                       int64
}

// NewModel returns an empty model. It is not safe for concurrent use.
func NewModel(now func() int64) *Model {
	return &Model{now: now, buckets: make(map[string]*modelBucket), windows: make(map[string]*modelWindow), streams: make(map[string]*modelStream), told: make(map[string]int64), asked: make(map[string]*modelOperation)}
}

func integer(n int64) *big.Rat { return new(big.Rat).SetInt64(n) }

// tokensPerMilli is the refill of b in tokens.
func tokensPerMilli(b limit.TokenBucket) *big.Rat { return big.NewRat(b.Refill, b.Scale) }

func smaller(a, b *big.Rat) *big.Rat {
	if a.Cmp(b) <= 0 {
		return a
	}
	return b
}

// floor is the largest whole number <= r.
func floor(r *big.Rat) *big.Int { return new(big.Int).Div(r.Num(), r.Denom()) } // Euclidean, and the divisor is > 0

// bucket is the state of key at now under limit b: as it is stored if nothing
// changed, carried over otherwise.
func (m *Model) bucket(key string, b limit.TokenBucket, now int64) *modelBucket {
	old := m.buckets[key]
	if old == nil {
		return &modelBucket{tokens: integer(b.Capacity), at: now, limit: b}
	}
	at := max(now, old.at)
	// S3, under the limit that it was stored under: S18.
	gained := new(big.Rat).Mul(integer(at-old.at), tokensPerMilli(old.limit))
	tokens := smaller(new(big.Rat).Add(old.tokens, gained), integer(old.limit.Capacity))
	switch {
	case tokens.Cmp(integer(old.limit.Capacity)) == 0: // full has no state
		tokens = integer(b.Capacity)
	case old.limit.Scale != b.Scale:
		whole := new(big.Rat).SetInt(floor(tokens))
		fraction := new(big.Rat).Sub(tokens, whole)
		oldUnits := floor(new(big.Rat).Mul(fraction, integer(old.limit.Scale)))
		newUnits := new(big.Int)
		if new(big.Int).Mul(oldUnits, big.NewInt(b.Scale)).Cmp(big.NewInt(limit.MaxExact)) <= 0 {
			newUnits = floor(new(big.Rat).Mul(fraction, integer(b.Scale)))
		}
		tokens = whole.Add(whole, new(big.Rat).SetFrac(newUnits, big.NewInt(b.Scale)))
	}
	tokens = smaller(tokens, integer(b.Capacity))
	if d := deepest(b); tokens.Cmp(d) < 0 {
		tokens = d
	}
	return &modelBucket{tokens: tokens, at: at, limit: b}
}

// deepest is the deepest debt: in units it must stay exact.
func deepest(b limit.TokenBucket) *big.Rat {
	return new(big.Rat).Sub(integer(b.Capacity), big.NewRat(limit.MaxExact-b.Refill, b.Scale))
}

// millisUntil is the first whole millisecond at which b has the tokens.
func (b *modelBucket) millisUntil(tokens *big.Rat, now int64) int64 {
	missing := new(big.Rat).Sub(tokens, b.tokens)
	if missing.Sign() < 0 {
		missing.SetInt64(0)
	}
	wait := missing.Quo(missing, tokensPerMilli(b.limit))
	up := floor(new(big.Rat).Neg(wait)) // ceil(x) = -floor(-x)
	return b.at - now - up.Int64()
}

func (m *Model) live(key string, now int64) int64 {
	n := int64(0)
	for _, l := range m.leases {
		for _, s := range l.slots {
			if s.key == key && !l.released && s.taken(now) {
				n++
			}
		}
	}
	return n
}

// Decide implements [store.Store].
func (m *Model) Decide(_ context.Context, r limit.Request) (limit.Decision, error) {
	now := m.now()
	d := limit.Decision{Results: make([]limit.Result, len(r.Checks))}
	if r.Lease != "" {
		d.Expired = m.reap(r.Domain, now)
	}

	// Does each check pass by itself?
	for i, c := range r.Checks {
		passed := c.Hits < 0
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			passed = passed || m.bucket(c.Key, l, now).tokens.Cmp(integer(c.Hits)) >= 0
		case limit.Window:
			passed = passed || m.fits(c.Key, l, c.Hits, now)
		case limit.Concurrency:
			passed = passed || m.live(c.Key, now) < l.Max
		}
		d.Results[i].Passed = passed
	}

	// S1, S11, S21.
	d.Admitted = true
	quotas, over := map[int]bool{}, map[int]bool{}
	for i, c := range r.Checks {
		switch {
		case c.Shadow:
		case c.Quota != 0:
			quotas[c.Quota] = true
			if !d.Results[i].Passed {
				over[c.Quota] = true
			}
		case !d.Results[i].Passed:
			d.Admitted = false
		}
	}
	if len(quotas) > 0 && len(quotas) == len(over) {
		d.Admitted = false
	}

	// S14.
	stream := m.stream(r.Domain, r.Stream, now)
	if stream != nil && stream.tombstone {
		d.StreamEnded, d.Admitted = true, false
		delete(m.streams, r.Domain+"|"+r.Stream)
	}

	// S17.
	asked := m.asked[r.Domain+"|"+r.Operation.ID]
	if r.Operation.ID != "" && asked != nil {
		switch l := asked.lease; {
		case asked.ended && now < asked.endedAt+60_000 && r.Operation.Attempt > 0 && r.Operation.Attempt <= asked.attempt:
			return limit.Decision{}, store.ErrLateAttempt
		case !asked.ended && !l.released && !l.lingers && now < l.expiry:
			if asked.body != r.Operation.Body {
				return limit.Decision{}, store.ErrOtherRequest
			}
			asked.attempt, asked.retold = max(asked.attempt, r.Operation.Attempt), true
			d.Admitted, d.Replayed, d.Lease, d.TTL = true, true, l.id, limit.Millis(l.expiry-now)
			for i := range d.Results {
				d.Results[i].Passed = true
			}
		}
	}

	// Charge.
	charged, reserved := map[string]bool{}, map[string]bool{}
	held := &modelLease{id: r.Lease, domain: r.Domain, granted: now, windows: map[string]int64{}}
	live := func(d time.Duration) {
		if held.life == 0 || d.Milliseconds() < held.life {
			held.life = d.Milliseconds()
		}
	}
	for i, c := range r.Checks {
		pays := d.Admitted && !d.Replayed && d.Results[i].Passed
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			b := m.bucket(c.Key, l, now)
			if pays && c.Hits != 0 && !charged[c.Key] {
				b.tokens = smaller(new(big.Rat).Sub(b.tokens, integer(c.Hits)), integer(l.Capacity))
				m.buckets[c.Key], charged[c.Key] = b, true
			} else if old := m.buckets[c.Key]; old != nil && old.limit != l {
				m.buckets[c.Key] = b // S18: until the first decision after the change
			}
		case limit.Window:
			pays = pays || l.ChargeOver && !c.Shadow && !d.Results[i].Passed && !d.StreamEnded // S5
			if pays && c.Hits != 0 && !charged[c.Key] {
				m.count(c.Key, l, c.Hits, now)
				charged[c.Key] = true
				held.windows[c.Key] = m.latest(c.Key, l, now)
			}
		case limit.Concurrency:
			if pays && c.Hits >= 0 {
				held.slots = append(held.slots, &modelSlot{key: c.Key, name: c.Name, linger: l.Linger.Milliseconds()})
				live(l.Lease)
			}
		}
		if pays && d.Admitted && c.Reserve > 0 && c.Hits >= 0 && !reserved[c.Key] { // S16
			reserved[c.Key] = true
			live(c.Reserve)
			one := &modelReservation{key: c.Key, name: c.Name, hits: c.Hits, limit: c.Limit}
			if w, ok := c.Limit.(limit.Window); ok {
				one.start = m.latest(c.Key, w, now)
			}
			held.reserved = append(held.reserved, one)
		}
	}
	if r.Operation.ID != "" && d.Admitted && !d.Replayed {
		if held.life == 0 {
			live(time.Minute)
		}
		held.operation = &modelOperation{name: r.Domain + "|" + r.Operation.ID, lease: held, body: r.Operation.Body, attempt: r.Operation.Attempt}
		m.asked[held.operation.name] = held.operation
		held.asker = r.Operation.ID
	}
	if held.life > 0 {
		held.expire(now + held.life)
		m.leases = append(m.leases, held)
		d.Lease, d.TTL = r.Lease, limit.Millis(held.life)
	}
	if r.Stream != "" && !d.StreamEnded {
		switch {
		case stream != nil && d.Lease != "":
			*stream = modelStream{ambiguous: true, until: max(stream.until, held.streamUntil())}
		case stream != nil:
			*stream = modelStream{ambiguous: true, until: stream.until}
		case d.Lease != "":
			m.streams[r.Domain+"|"+r.Stream] = &modelStream{lease: held, until: held.streamUntil()}
			held.stream = r.Stream
		}
	}

	// S13.
	for i, c := range r.Checks {
		m.tell(c, &d.Results[i], now)
	}
	return d, nil
}

func (m *Model) tell(c limit.Check, r *limit.Result, now int64) {
	switch l := c.Limit.(type) {
	case limit.TokenBucket:
		b := m.bucket(c.Key, l, now)
		r.Remaining = max(0, floor(b.tokens).Int64())
		r.ResetAfter = limit.Millis(b.millisUntil(integer(l.Capacity), now))
		if !r.Passed && c.Hits <= l.Capacity {
			r.RetryAfter = limit.Millis(b.millisUntil(integer(c.Hits), now))
		}
	case limit.Window:
		s := m.windowState(c.Key, l, c.Hits, now)
		r.Remaining, r.ResetAfter = s.Remaining, s.ResetAfter
		if !r.Passed && l.Max > 0 && c.Hits <= l.Max {
			r.RetryAfter = s.RetryAfter
		}
	case limit.Concurrency:
		r.Remaining = max(0, l.Max-m.live(c.Key, now))
	}
}

// reap counts, once each and at most 64 a call, the leases that have expired.
func (m *Model) reap(domain string, now int64) (n int64) {
	for _, l := range m.leases {
		if n < 64 && l.domain == domain && len(l.slots)+len(l.reserved) > 0 && !l.released && !l.reaped && l.expiry <= now {
			l.reaped = true
			n++
		}
	}
	return n
}

func (m *Model) find(id limit.LeaseID) *modelLease {
	for _, l := range m.leases {
		if l.id == id {
			return l
		}
	}
	return nil
}

// stream is what is known of a stream at now.
func (m *Model) stream(domain, stream string, now int64) *modelStream {
	s := m.streams[domain+"|"+stream]
	if s == nil || now >= s.until {
		return nil
	}
	return s
}

// expire sets when all slots of l, and l itself, expire.
func (l *modelLease) expire(at int64) {
	l.expiry = at
	for _, s := range l.slots {
		s.expiry = at
	}
}

// Release implements [store.Store].
func (m *Model) Release(_ context.Context, e limit.Ending) (limit.Release, error) {
	now, l := m.now(), m.find(e.Lease)
	if e.Lease == "" {
		s := m.stream(e.Domain, e.Stream, now)
		if s == nil && e.Tombstone {
			m.streams[e.Domain+"|"+e.Stream] = &modelStream{tombstone: true, until: now + 30_000}
		}
		if s != nil && !s.ended {
			l = s.lease
		}
	}
	if l == nil || l.released || !l.known(now) {
		return limit.Release{Result: limit.NotHeld}, nil
	}
	if now < l.expiry && l.lingers && e.Early {
		return limit.Release{Result: limit.NotHeld}, nil
	}
	for _, s := range m.streams {
		if s.lease == l && !s.ended && now < s.until {
			until := now + l.outlives()
			if now >= l.expiry { // its estimates stand
				until = max(until, s.until)
			}
			*s = modelStream{ended: true, lease: l, until: until}
		}
	}
	if o := l.operation; o != nil && m.asked[o.name] == o && !o.ended {
		o.ended, o.endedAt = true, now
	}
	if now >= l.expiry {
		return limit.Release{Result: limit.Expired}, nil
	}
	r := limit.Release{Result: limit.Released, HeldFor: limit.Millis(max(0, now-l.granted))}
	var lingering []*modelSlot
	for _, s := range l.slots {
		if e.Early && s.linger > 0 && !s.reset { // S22
			s.expiry = now + s.linger
			lingering = append(lingering, s)
		} else {
			r.Freed = append(r.Freed, limit.Freed{Key: s.key, Limit: s.name})
		}
	}
	if len(lingering) == 0 {
		l.released, l.expiry = true, now
		l.forgotten = len(l.reserved) == 0
		return r, nil
	}
	r.Result = limit.Lingering
	l.lingers, l.slots, l.expiry, l.asker = true, lingering, 0, ""
	for _, s := range lingering {
		l.expiry = max(l.expiry, s.expiry)
	}
	return r, nil
}

// Renew implements [store.Store].
func (m *Model) Renew(_ context.Context, e limit.Extension) (limit.Renewal, error) {
	now, l := m.now(), m.find(e.Lease)
	if l == nil || l.released || l.expiry <= now || l.lingers && e.OfStream {
		return limit.Renewal{}, nil
	}
	for _, s := range l.slots {
		if !s.taken(now) {
			return limit.Renewal{}, nil
		}
	}
	l.expire(max(l.expiry, now+l.life))
	for _, s := range m.streams {
		if s.lease == l && !s.ended && now < s.until {
			s.until = l.streamUntil()
		}
	}
	return limit.Renewal{Renewed: true, TTL: limit.Millis(l.expiry - now)}, nil
}

// Inspect implements [store.Store]. Waits are not computed, but looked for.
func (m *Model) Inspect(_ context.Context, checks []limit.Check) ([]limit.State, error) {
	now := m.now()
	found := make([]limit.State, len(checks))
	for i, c := range checks {
		s := &found[i]
		switch l := c.Limit.(type) {
		case limit.TokenBucket:
			s.Level = floor(m.bucket(c.Key, l, now).tokens).Int64()
			s.Remaining = max(0, s.Level)
			has := func(tokens int64) time.Duration {
				return limit.Millis(first(func(after int64) bool {
					return m.bucket(c.Key, l, now+after).tokens.Cmp(integer(tokens)) >= 0
				}))
			}
			s.ResetAfter = has(l.Capacity)
			if c.Hits >= 0 && c.Hits <= l.Capacity {
				s.RetryAfter = has(c.Hits)
			}
		case limit.Window:
			*s = m.windowState(c.Key, l, c.Hits, now)
			if c.Hits < 0 {
				s.RetryAfter = 0
			}
		case limit.Concurrency:
			s.Count = m.live(c.Key, now)
			s.Remaining = max(0, l.Max-s.Count)
			for _, held := range m.leases {
				for _, slot := range held.slots {
					if slot.key == c.Key && !held.released && slot.taken(now) {
						s.Holders = append(s.Holders, limit.Holder{Token: held.id.Token(), ExpiresAfter: limit.Millis(slot.expiry - now)})
					}
				}
			}
			slices.SortFunc(s.Holders, func(a, b limit.Holder) int {
				return cmp.Or(cmp.Compare(a.ExpiresAfter, b.ExpiresAfter), cmp.Compare(a.Token, b.Token))
			})
			s.Holders = s.Holders[:min(len(s.Holders), 100)]
		}
	}
	return found, nil
}

// first is the smallest n >= 0 from which on it is so.
func first(is func(n int64) bool) int64 {
	if is(0) {
		return 0
	}
	no, yes := int64(0), int64(1)
	for !is(yes) {
		no, yes = yes, 2*yes
	}
	for yes-no > 1 {
		if n := (no + yes) / 2; is(n) {
			yes = n
		} else {
			no = n
		}
	}
	return yes
}

// Held implements [store.Store].
func (m *Model) Held(_ context.Context, domain string) (n int64, _ error) {
	for _, l := range m.leases {
		if l.domain == domain && len(l.slots)+len(l.reserved) > 0 && !l.released && l.expiry > m.now() {
			n++
		}
	}
	return n, nil
}

// Ping implements [store.Store].
func (m *Model) Ping(context.Context) error { return nil }

// Close implements [store.Store].
func (m *Model) Close() error { return nil }
