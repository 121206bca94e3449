package limit

import (
	"crypto/sha256"
	"slices"
	"strconv"
	"time"
)

// Class says whose allowance refused: the caller's own or the shared one.
type Class uint8

// The classes. Lane is the default and is answered with HTTP 429; Pool with 503.
const (
	Lane Class = iota
	Pool
)

// String is the class on the wire: "lane" or "pool".
func (c Class) String() string {
	if c == Pool {
		return "pool"
	}
	return "lane"
}

// FailureMode says what becomes of a check that no store decides. A larger one is
// stricter.
type FailureMode uint8

// The failure modes. The zero value leaves it to the service.
const (
	DefaultMode FailureMode = iota
	ModeOpen                // it passes
	ModeLocal               // this process decides, by its share of the limit
	ModeClosed              // it refuses
)

// failureModes are the names in policy files.
var failureModes = [...]string{ModeOpen: "open", ModeLocal: "local", ModeClosed: "closed"}

// String is the mode's name in policy files; "" for DefaultMode.
func (m FailureMode) String() string {
	if int(m) < len(failureModes) {
		return failureModes[m]
	}
	return ""
}

// ParseFailureMode returns the mode with this name, or DefaultMode.
func ParseFailureMode(name string) FailureMode {
	for m := ModeOpen; m <= ModeClosed; m++ {
		if failureModes[m] == name {
			return m
		}
	}
	return DefaultMode
}

// Check is a limit applied to one subject with a number of hits: what a store
// is asked. Two checks of a request may share a Key only if both are windows,
// which then have one length and differ in what they allow: each carries the hits
// of both, and the state is charged once.
type Check struct {
	// Key names the state in the store: see [Key].
	Key   string
	Limit Limit
	// Hits is the cost, within ±MaxExact. 0 asks without charging, negative
	// refunds. A Concurrency takes one slot whatever the hits, none if negative.
	Hits int64
	// Name is the limit's name in metrics, headers and refusals. It comes from
	// the policy file, never from a request.
	Name  string
	Class Class
	// Shadow: evaluated and counted, and never refuses.
	Shadow bool
	// FailureMode is the policy's, or its domain's, and Fraction how much of the limit
	// a process may allow by itself under ModeLocal. Stores do not look at them.
	FailureMode FailureMode
	Fraction    Fraction
	// Quota, if not 0, is the group (one a descriptor) that this check belongs
	// to; quota checks refuse only if every group has a failing check.
	Quota int
	// Reserve, if not 0, has the hits of a bucket or a window noted with the lease, so that
	// they can be settled by what was used in truth: see [Usage]. It is how long the lease
	// lives, unless it is renewed or other limits say less; whole milliseconds, 0..MaxLease.
	Reserve time.Duration
}

// Impossible returns Banned or CostExceedsCapacity for a check that can never
// pass, else NoReason.
func (c Check) Impossible() Reason {
	switch l := c.Limit.(type) {
	case TokenBucket:
		if c.Hits > l.Capacity {
			return CostExceedsCapacity
		}
	case Window:
		switch {
		case c.Hits < 0:
		case l.Max == 0:
			return Banned
		case c.Hits > l.Max:
			return CostExceedsCapacity
		}
	case Concurrency:
	}
	return NoReason
}

// Request is what a store decides at one instant: all of the checks or none.
type Request struct {
	// Domain that the keys of all checks belong to.
	Domain string
	Checks []Check // at most MaxReserved of them reserve
	// Lease is the id under which slots are held if the request is admitted and
	// takes some; required if the request [NeedsLease]. It must be new.
	Lease LeaseID
	// Stream, if not "", is the stream that asks: its lease can be released by it
	// alone, see [Ending]. It needs a Lease.
	Stream string
	// Operation, if it has an ID, is what asks, so that it may ask again. A request has a
	// Stream or an Operation, not both.
	Operation Operation
}

// Operation is the logical request behind attempts to get one lease. The zero value is
// none.
type Operation struct {
	ID string // of the domain; at most MaxOperation bytes
	// Body tells what is asked, see [BodyOf]: another one under an ID that holds a lease is
	// refused.
	Body [16]byte
	// Attempt tells the tries of an operation apart, each higher than the last: one that
	// is not newer than those of a lease that was released is late. 0: never late.
	Attempt uint32
}

// BodyOf is the Body of an operation that asks for checks: the keys of their states, in
// which sensitive values are hashed, and their hits, whatever their order.
func BodyOf(checks []Check) (body [16]byte) {
	parts := make([]string, len(checks))
	for i, c := range checks {
		parts[i] = c.Key + " " + strconv.FormatInt(c.Hits, 10) + "\n" // no key has a space
	}
	slices.Sort(parts)
	sum := sha256.New()
	for _, part := range parts {
		_, _ = sum.Write([]byte(part)) // it never fails
	}
	copy(body[:], sum.Sum(nil))
	return body
}

// MaxReserved is how many checks of a request may reserve: a lease's record is read and
// written whole.
const MaxReserved = 128

// Reserving is how many checks of r reserve.
func (r Request) Reserving() (n int) {
	for _, c := range r.Checks {
		if c.Reserve > 0 {
			n++
		}
	}
	return n
}

// MaxOperation is the longest id of an operation, in bytes.
const MaxOperation = 128

// OperationLife is the life of a lease that an operation is granted if nothing else gives
// it one: for so long it may ask again.
const OperationLife = time.Minute

// NeedsLease reports whether r must bring a lease id.
func (r Request) NeedsLease() bool {
	if r.Operation.ID != "" {
		return true
	}
	for _, c := range r.Checks {
		if _, slot := c.Limit.(Concurrency); slot || c.Reserve > 0 {
			return true
		}
	}
	return false
}

// Result is the outcome of one check.
type Result struct {
	// Passed says whether the check by itself would admit.
	Passed bool
	// Remaining tokens, hits or slots after the decision, >= 0: charged if the
	// request was admitted, untouched if refused.
	Remaining int64
	// RetryAfter is the first moment at which a check that did not pass may
	// pass: exact for buckets and windows, 0 for concurrency (it can't be known)
	// and for what is Impossible.
	RetryAfter time.Duration
	// ResetAfter is when a bucket is full, or a window has forgotten what counts now: at
	// its end; a sliding one that has counted anything, at the end of the next. 0 for
	// concurrency.
	ResetAfter time.Duration
	// Bypass is how the check came to pass or not if no store decided it. The numbers
	// above are those of this process's share then, and 0 unless it is ModeLocal, but
	// for the RetryAfter of ModeClosed.
	Bypass FailureMode
	// Unknown: another check is known to refuse, so that this one was not looked at. It says
	// that it Passed, and nothing else is known.
	Unknown bool
}

// Decision is a store's answer.
type Decision struct {
	Admitted bool
	Results  []Result // one a check, in order
	// Lease is what the request holds now: under its own lease id or, if Replayed, the one
	// that its operation held before; "" if it holds nothing.
	Lease LeaseID
	// TTL is the life of the lease from now on; 0 without one.
	TTL time.Duration
	// Replayed: the operation held its lease already. Lease is that one, nothing was taken,
	// all checks passed when it was granted, and the numbers are those of now.
	Replayed bool
	// StreamEnded: the end of the request's stream was told before the request came.
	// It is refused, whatever the results, and took nothing.
	StreamEnded bool
	// Expired is how many leases of the domain this call found expired and
	// cleaned away. Each is reported once.
	Expired int64
	// Bypass says that the store was not reached, and what was done instead: the
	// strictest mode of the checks. DefaultMode if the store decided.
	Bypass FailureMode
	// BypassReason is a word for metrics and metadata; "" without a bypass.
	BypassReason string
}

// Refused reports whether the request is refused: an enforced check did not
// pass, or every quota group has a check that did not.
func Refused(checks []Check, results []Result) bool {
	for i, c := range checks {
		if !c.Shadow && c.Quota == 0 && !results[i].Passed {
			return true
		}
	}
	return QuotaExhausted(checks, results)
}

// QuotaExhausted reports whether there are quota groups and all are over.
func QuotaExhausted(checks []Check, results []Result) bool {
	var over map[int]bool // by group; most requests have none
	for i, c := range checks {
		if c.Quota != 0 && !c.Shadow {
			if over == nil {
				over = make(map[int]bool)
			}
			over[c.Quota] = over[c.Quota] || !results[i].Passed
		}
	}
	for _, o := range over {
		if !o {
			return false
		}
	}
	return len(over) > 0
}
