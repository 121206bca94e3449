package limit

import "time"

// MaxHolders is how many holders an inspection tells of one concurrency limit.
const MaxHolders = 100

// State is how a limit stands for one subject, at an instant of the store's
// clock. Its waits are those of a subject that nobody decides meanwhile.
type State struct {
	// Level is a bucket's whole tokens, rounded down, negative in debt; 0 for the
	// other kinds.
	Level int64
	// Count is the hits that count now (in a sliding window, those of the one before by
	// their weight), or the live leases; 0 for a bucket.
	Count int64
	// Remaining tokens, hits or slots, >= 0.
	Remaining int64
	// RetryAfter is the first millisecond at which the check's hits pass: 0 if they pass
	// now, never will ([Check.Impossible]), or for concurrency, where it can't be known.
	RetryAfter time.Duration
	// ResetAfter is when a bucket is full, or a window has forgotten what counts now; 0 for
	// concurrency.
	ResetAfter time.Duration
	// Holders are the live leases of a concurrency limit, those that expire first,
	// at most MaxHolders of Count.
	Holders []Holder
}

// Holder is a live lease that holds a slot.
type Holder struct {
	// Token is that of its LeaseID. Whoever has it can end the lease: others are
	// shown Short.
	Token        string
	ExpiresAfter time.Duration // > 0
}

// shortToken is how much of a token is shown: enough to name a lease, while the
// 80 bits that are left out cannot be guessed.
const shortToken = 8

// Short names the lease for people, and cannot end it: the start of its id.
func (h Holder) Short() string { return h.Token[:min(shortToken, len(h.Token))] + "…" }

// Slot is a member of a set of slots.
type Slot struct {
	Token  string
	Expiry int64 // ms
}

// Inspect is how the bucket stands at now under limit b, for hits that may pass. Nothing is written,
// so what comes later comes at the rate under which the state was written.
func (s BucketState) Inspect(b TokenBucket, hits, now int64) State {
	at, own := s.At(b, now), s
	if s.Scale == 0 {
		own = at
	}
	own = own.At(TokenBucket{Capacity: own.Capacity, Scale: own.Scale, Refill: own.Refill}, now)
	ahead := own.Millis - now // time was set back
	state := State{Level: floorDiv(at.Level, at.Scale), Remaining: at.Remaining()}
	if hits <= b.Capacity && !at.Passes(hits) {
		// What fills the old capacity is full under any.
		state.RetryAfter = Millis(ahead + own.RetryAfterMillis(min(own.Capacity, hits)))
	}
	if at.Level < at.Capacity*at.Scale {
		state.ResetAfter = Millis(ahead + own.RetryAfterMillis(min(own.Capacity, b.Capacity)))
	}
	return state
}

// Inspect is how the limit stands at now, with so many live leases; first are those
// that expire first.
func (l Concurrency) Inspect(live int64, first []Slot, now int64) State {
	state := State{Count: live, Remaining: max(0, l.Max-live)}
	for _, m := range first[:min(len(first), MaxHolders)] {
		state.Holders = append(state.Holders, Holder{Token: m.Token, ExpiresAfter: Millis(m.Expiry - now)})
	}
	return state
}

// Foresee is what a decision over checks would be whose limits stand so: nothing is taken, so that each
// Remaining is what is left now. Streams, operations and the store's absence are left out.
func Foresee(checks []Check, states []State) Decision {
	d := Decision{Results: make([]Result, len(checks))}
	for i, c := range checks {
		s, passed := states[i], c.Hits < 0
		switch l := c.Limit.(type) {
		case TokenBucket:
			passed = passed || s.Level >= c.Hits
		case Window:
			passed = passed || l.Max > 0 && s.Count+c.Hits <= l.Max
		case Concurrency:
			passed = passed || s.Count < l.Max
		}
		d.Results[i] = Result{Passed: passed, Remaining: s.Remaining, ResetAfter: s.ResetAfter}
		if !passed {
			d.Results[i].RetryAfter = s.RetryAfter
		}
	}
	d.Admitted = !Refused(checks, d.Results)
	return d
}

// floorDiv is a/b rounded down; b > 0.
func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}
