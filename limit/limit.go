// Package limit holds weir's vocabulary (limits, checks, decisions, leases) and
// the exact arithmetic of its limits. It is pure: it reads no clock, does no
// I/O and imports the standard library alone.
package limit

import (
	"fmt"
	"math"
	"math/big"
	"time"
)

// MaxExact is the largest whole number that every store keeps exactly: 2^53-1,
// since Lua numbers are doubles. Hits and counts saturate here.
const MaxExact = 1<<53 - 1

// MaxLease is the longest life that a lease may have.
const MaxLease = 365 * 24 * time.Hour

// MaxWait is the longest time for which a request may wait for a slot.
const MaxWait = time.Minute

// MaxInFlight is the largest max_in_flight of a concurrency limit.
const MaxInFlight = 1_000_000_000

// MaxRequestsPerUnit is the largest requests_per_unit of a window: a uint32, as
// in Envoy's protocol.
const MaxRequestsPerUnit = 1<<32 - 1

// maxWindow keeps the length of a window a time.Duration.
const maxWindow = 290 * 365 * 24 * time.Hour

// Limit is one rule of a policy. It is a closed sum: [TokenBucket], [Window] or
// [Concurrency].
//
//sumtype:decl
type Limit interface{ isLimit() }

func (TokenBucket) isLimit() {}
func (Window) isLimit()      {}
func (Concurrency) isLimit() {}

// TokenBucket starts full, gains continuously and holds at most Capacity
// tokens. It counts in whole units, so that nothing is ever rounded: one token
// is Scale units, and every millisecond brings Refill units. The zero value is
// invalid: use [NewTokenBucket].
type TokenBucket struct {
	Capacity int64 // tokens, > 0
	Scale    int64 // units a token, > 0; Capacity*Scale+Refill <= MaxExact
	Refill   int64 // units a millisecond, > 0
}

// NewTokenBucket returns the bucket that holds capacity tokens and gains count
// tokens each period. It fails unless all are positive, period is whole
// milliseconds, and the scaled numbers are exact.
func NewTokenBucket(capacity, count int64, period time.Duration) (TokenBucket, error) {
	switch {
	case capacity <= 0:
		return TokenBucket{}, fmt.Errorf("capacity must be > 0, got %d", capacity)
	case count <= 0:
		return TokenBucket{}, fmt.Errorf("refill must be > 0, got %d", count)
	case period < time.Millisecond || period%time.Millisecond != 0:
		return TokenBucket{}, fmt.Errorf("the refill's period must be whole milliseconds, >= 1ms, got %v", period)
	}
	millis := period.Milliseconds()
	d := gcd(count, millis)
	b := TokenBucket{Capacity: capacity, Scale: millis / d, Refill: count / d}
	// capacity*scale + refill <= MaxExact, asked without overflow.
	if b.Refill >= MaxExact || capacity > (MaxExact-b.Refill)/b.Scale {
		return TokenBucket{}, b.inexact()
	}
	return b, nil
}

// inexact says why the bucket can't be counted exactly, with the number that comes
// out (T32), which may be far larger than an int64.
func (b TokenBucket) inexact() error {
	sum := new(big.Int).Mul(big.NewInt(b.Capacity), big.NewInt(b.Scale))
	sum.Add(sum, big.NewInt(b.Refill))
	remedy := "use a rounder refill"
	if most := (MaxExact - b.Refill) / b.Scale; most > 0 {
		remedy = fmt.Sprintf("use a capacity of at most %d or a rounder refill", most)
	}
	return fmt.Errorf("capacity %d x %d + %d = %d is too large to be exact, it must be < 2^53 = %d; %s",
		b.Capacity, b.Scale, b.Refill, sum, int64(MaxExact)+1, remedy)
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// FillTime is how long the bucket takes from empty to full, rounded up to a
// whole millisecond.
func (b TokenBucket) FillTime() time.Duration {
	return Millis(ceilDiv(b.Capacity*b.Scale, b.Refill))
}

// Unit is the unit of a window, as in envoyproxy/ratelimit: a month is 30 days,
// a year 365.
type Unit uint8

// The units. The zero value is no unit.
const (
	NoUnit Unit = iota
	Second
	Minute
	Hour
	Day
	Week
	Month
	Year
)

var units = [...]struct {
	name   string
	length time.Duration
}{
	Second: {"second", time.Second},
	Minute: {"minute", time.Minute},
	Hour:   {"hour", time.Hour},
	Day:    {"day", 24 * time.Hour},
	Week:   {"week", 7 * 24 * time.Hour},
	Month:  {"month", 30 * 24 * time.Hour},
	Year:   {"year", 365 * 24 * time.Hour},
}

// String is the unit's name in policy files, in lower case; "" for NoUnit.
func (u Unit) String() string {
	if int(u) < len(units) {
		return units[u].name
	}
	return ""
}

// ParseUnit returns the unit with this lower-case name, or NoUnit.
func ParseUnit(name string) Unit {
	for u := Second; u <= Year; u++ {
		if units[u].name == name {
			return u
		}
	}
	return NoUnit
}

// Window counts hits in windows of Multiplier units, aligned to the Unix epoch.
// The zero value is invalid: use [NewWindow] or [NewSlidingWindow].
type Window struct {
	Max        int64 // hits a window, 0..MaxRequestsPerUnit; 0 bans
	Unit       Unit  // never NoUnit
	Multiplier int64 // units a window, > 0
	// ChargeOver charges the window even in a refused request in which the
	// window itself was over (on_over: charge), so that usage known only
	// afterwards closes the gate.
	ChargeOver bool
	// Sliding counts the hits of the window before too, by the part of it that is
	// not yet Length ago, as if they had come evenly: see [WindowState].
	Sliding bool
}

// NewWindow returns the window of max hits in each multiplier units. It fails
// if a number is out of range.
func NewWindow(maximum int64, unit Unit, multiplier int64) (Window, error) {
	switch {
	case maximum < 0 || maximum > MaxRequestsPerUnit:
		return Window{}, fmt.Errorf("requests_per_unit must be 0..%d, got %d", int64(MaxRequestsPerUnit), maximum)
	case unit.String() == "":
		return Window{}, fmt.Errorf("unit must be one of second, minute, hour, day, week, month, year")
	case multiplier <= 0 || multiplier > int64(maxWindow/units[unit].length):
		return Window{}, fmt.Errorf("unit_multiplier must be 1..%d for unit %s, got %d", int64(maxWindow/units[unit].length), unit, multiplier)
	}
	return Window{Max: maximum, Unit: unit, Multiplier: multiplier}, nil
}

// Length is the length of one window.
func (w Window) Length() time.Duration {
	return time.Duration(w.Multiplier) * units[w.Unit].length
}

// Concurrency counts the leases that are held at once. The zero value is
// invalid: use [NewConcurrency].
type Concurrency struct {
	Max   int64         // slots, > 0
	Lease time.Duration // life of a lease unless it is renewed, whole milliseconds, > 0
	// RetryAfterMax caps the Retry-After that is estimated for a full lane or
	// pool; 0 means no cap.
	RetryAfterMax time.Duration
	// Linger is how much longer a slot stays taken if the stream ended before its
	// upstream answered, since the work goes on; whole milliseconds, 0..MaxLease.
	Linger time.Duration
	// MaxWait is how long a request may wait for a slot before it is refused, if it is
	// set, at most [MaxWait]; the zero value leaves it to the service. Negative: it does
	// not wait.
	MaxWait time.Duration
}

// NewConcurrency returns the limit of maximum leases, each with the given life.
func NewConcurrency(maximum int64, lease time.Duration) (Concurrency, error) {
	switch {
	case maximum <= 0 || maximum > MaxInFlight:
		return Concurrency{}, fmt.Errorf("max_in_flight must be 1..%d, got %d", int64(MaxInFlight), maximum)
	case lease < time.Millisecond || lease > MaxLease || lease%time.Millisecond != 0:
		return Concurrency{}, fmt.Errorf("lease must be whole milliseconds, 1ms..%v, got %v", MaxLease, lease)
	}
	return Concurrency{Max: maximum, Lease: lease}, nil
}

// Millis is n milliseconds, or the longest Duration (292 years) if they are more.
func Millis(n int64) time.Duration {
	return time.Duration(min(n, math.MaxInt64/int64(time.Millisecond))) * time.Millisecond
}

// ceilDiv is a/b rounded up; a >= 0, b > 0.
func ceilDiv(a, b int64) int64 {
	q := a / b
	if a%b != 0 {
		q++
	}
	return q
}
