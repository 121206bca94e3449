package limit_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"weir/limit"
)

func TestATokenBucketIsExactOrAnError(t *testing.T) {
	for _, tt := range []struct {
		capacity, count int64
		period          time.Duration
		scale, refill   int64  // want
		err             string // or a part of the error
	}{
		{capacity: 10, count: 1, period: time.Second, scale: 1000, refill: 1},
		{capacity: 3, count: 2, period: time.Second, scale: 500, refill: 1},
		{capacity: 7, count: 7, period: time.Minute, scale: 60_000, refill: 7},
		{capacity: 1, count: 1, period: 3 * time.Second, scale: 3000, refill: 1},
		{capacity: 100_000, count: 100_000, period: 24 * time.Hour, scale: 864, refill: 1},
		{capacity: 1, count: 5000, period: time.Second, scale: 1, refill: 5},
		// The largest that is exact, and the next (T32).
		{capacity: limit.MaxExact - 1, count: 1000, period: time.Second, scale: 1, refill: 1},
		{capacity: limit.MaxExact, count: 1000, period: time.Second, err: "capacity 9007199254740991 x 1 + 1 = 9007199254740992 is too large to be exact, it must be < 2^53 = 9007199254740992; use a capacity of at most 9007199254740990 or a rounder refill"},
		{capacity: 9007199254740, count: 1, period: time.Second, scale: 1000, refill: 1},
		{capacity: 9007199254741, count: 1, period: time.Second, err: "capacity 9007199254741 x 1000 + 1 = 9007199254741001 is too large"},
		{capacity: math.MaxInt64, count: 1, period: 9223372036854 * time.Millisecond, err: "9223372036854775807 x 9223372036854 + 1 = 85070591730227460290807111591179 is too large to be exact, it must be < 2^53 = 9007199254740992; use a capacity of at most 976 or a rounder refill"},
		{capacity: 1, count: math.MaxInt64, period: time.Millisecond, err: "= 9223372036854775808 is too large to be exact, it must be < 2^53 = 9007199254740992; use a rounder refill"},
		{capacity: 0, count: 1, period: time.Second, err: "capacity must be > 0"},
		{capacity: -1, count: 1, period: time.Second, err: "capacity must be > 0"},
		{capacity: 1, count: 0, period: time.Second, err: "refill must be > 0"},
		{capacity: 1, count: -1, period: time.Second, err: "refill must be > 0"},
		{capacity: 1, count: 1, period: 0, err: "whole milliseconds"},
		{capacity: 1, count: 1, period: time.Microsecond, err: "whole milliseconds"},
		{capacity: 1, count: 1, period: 1500 * time.Microsecond, err: "whole milliseconds"},
		{capacity: 1, count: 1, period: -time.Second, err: "whole milliseconds"},
	} {
		b, err := limit.NewTokenBucket(tt.capacity, tt.count, tt.period)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("NewTokenBucket(%d, %d, %v) = %v, %v, want error with %q", tt.capacity, tt.count, tt.period, b, err, tt.err)
			}
			continue
		}
		want := limit.TokenBucket{Capacity: tt.capacity, Scale: tt.scale, Refill: tt.refill}
		if err != nil || b != want {
			t.Errorf("NewTokenBucket(%d, %d, %v) = %v, %v, want %v", tt.capacity, tt.count, tt.period, b, err, want)
		}
	}
}

func TestAWindowOutOfBoundsIsAnError(t *testing.T) {
	for _, tt := range []struct {
		max        int64
		unit       limit.Unit
		multiplier int64
		length     time.Duration
		err        string
	}{
		{max: 5, unit: limit.Second, multiplier: 1, length: time.Second},
		{max: 0, unit: limit.Week, multiplier: 2, length: 14 * 24 * time.Hour},
		{max: limit.MaxRequestsPerUnit, unit: limit.Month, multiplier: 1, length: 30 * 24 * time.Hour},
		{max: 1, unit: limit.Year, multiplier: 290, length: 290 * 365 * 24 * time.Hour},
		{max: 1, unit: limit.Year, multiplier: 291, err: "unit_multiplier must be 1..290"},
		{max: 1, unit: limit.Second, multiplier: math.MaxInt64, err: "unit_multiplier"},
		{max: 1, unit: limit.Second, multiplier: 0, err: "unit_multiplier"},
		{max: -1, unit: limit.Second, multiplier: 1, err: "requests_per_unit"},
		{max: limit.MaxRequestsPerUnit + 1, unit: limit.Second, multiplier: 1, err: "requests_per_unit"},
		{max: 1, unit: limit.NoUnit, multiplier: 1, err: "unit must be one of"},
		{max: 1, unit: limit.Unit(99), multiplier: 1, err: "unit must be one of"},
	} {
		w, err := limit.NewWindow(tt.max, tt.unit, tt.multiplier)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("NewWindow(%d, %v, %d) = %v, %v, want error with %q", tt.max, tt.unit, tt.multiplier, w, err, tt.err)
			}
			continue
		}
		if err != nil || w.Length() != tt.length {
			t.Errorf("NewWindow(%d, %v, %d).Length() = %v, %v, want %v", tt.max, tt.unit, tt.multiplier, w.Length(), err, tt.length)
		}
	}
}

func TestAConcurrencyOutOfBoundsIsAnError(t *testing.T) {
	for _, tt := range []struct {
		max   int64
		lease time.Duration
		ok    bool
	}{
		{1, time.Millisecond, true},
		{limit.MaxInFlight, limit.MaxLease, true},
		{0, time.Second, false},
		{-1, time.Second, false},
		{limit.MaxInFlight + 1, time.Second, false},
		{1, 0, false},
		{1, time.Microsecond, false},
		{1, 1500 * time.Microsecond, false},
		{1, limit.MaxLease + time.Millisecond, false},
	} {
		if _, err := limit.NewConcurrency(tt.max, tt.lease); (err == nil) != tt.ok {
			t.Errorf("NewConcurrency(%d, %v): error %v, want ok = %v", tt.max, tt.lease, err, tt.ok)
		}
	}
}

func TestUnitsAreReadAsTheyAreNamed(t *testing.T) {
	for u := limit.Second; u <= limit.Year; u++ {
		if got := limit.ParseUnit(u.String()); got != u {
			t.Errorf("ParseUnit(%q) = %v, want %v", u.String(), got, u)
		}
	}
	if got := limit.ParseUnit("fortnight"); got != limit.NoUnit {
		t.Errorf("ParseUnit(fortnight) = %v, want NoUnit", got)
	}
}
