package limit_test

import (
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"weir/limit"
)

// TestBucketAgainstIntegersWithoutBound runs a million random steps of the
// largest bucket that is accepted, and of usual ones, beside unbounded integers
// (T32): zero divergence.
func TestBucketAgainstIntegersWithoutBound(t *testing.T) {
	for _, config := range []struct {
		capacity, count int64
		period          time.Duration
	}{
		{limit.MaxExact - 1, 1000, time.Second},
		{9007199254740, 1, time.Second},
		{9007190247, 1000, 1000001 * time.Millisecond},
		{7, 7, time.Minute},
		{50, 10, time.Second},
	} {
		b, err := limit.NewTokenBucket(config.capacity, config.count, config.period)
		if err != nil {
			t.Fatal(err)
		}
		r := rand.New(rand.NewPCG(1, 2))
		var s limit.BucketState
		now := int64(1_800_000_000_000)
		full := new(big.Int).Mul(big.NewInt(b.Capacity), big.NewInt(b.Scale))
		level, at := new(big.Int).Set(full), now // what the model keeps
		gained, need := new(big.Int), new(big.Int)
		for step := range 200_000 {
			now += r.Int64N(1 << r.IntN(50))
			if now > limit.MaxExact/2 {
				now = 1_800_000_000_000 // set back: no allowance comes of it
			}
			// The model: level += elapsed x refill, capped.
			if now > at {
				gained.Mul(big.NewInt(now-at), big.NewInt(b.Refill))
				if level.Add(level, gained); level.Cmp(full) > 0 {
					level.Set(full)
				}
				at = now
			}
			hits := r.Int64N(1<<r.IntN(53)) % (b.Capacity + 1)
			if r.IntN(8) == 0 {
				hits = -hits
			}
			need.Mul(big.NewInt(hits), big.NewInt(b.Scale))
			passes := hits < 0 || level.Cmp(need) >= 0

			next := s.At(b, now)
			if got := next.Passes(hits); got != passes {
				t.Fatalf("%+v step %d: Passes(%d) at level %d = %v, want %v", b, step, hits, next.Level, got, passes)
			}
			if !passes {
				// The first millisecond at which it passes, and not one earlier.
				wait := next.RetryAfterMillis(hits)
				if next.At(b, next.Millis+wait-1).Passes(hits) || !next.At(b, next.Millis+wait).Passes(hits) {
					t.Fatalf("%+v step %d: RetryAfterMillis(%d) = %d is not the first millisecond", b, step, hits, wait)
				}
				continue // a refused try moves nothing
			}
			if level.Sub(level, need); level.Cmp(full) > 0 {
				level.Set(full)
			}
			s = next.Charge(hits)
			if s.Level != level.Int64() {
				t.Fatalf("%+v step %d: level %d, want %v", b, step, s.Level, level)
			}
		}
	}
}

func TestBucketNeverHoldsMoreThanItsCapacity(t *testing.T) {
	b, err := limit.NewTokenBucket(3, 2, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	s := limit.BucketState{}.At(b, 1000).Charge(3)
	for _, now := range []int64{1001, 1500, 2500, 2501, 1 << 50} {
		if at := s.At(b, now); at.Level > b.Capacity*b.Scale {
			t.Errorf("level at %d = %d, want at most %d", now, at.Level, b.Capacity*b.Scale)
		}
	}
	if got := s.At(b, 1<<50).Charge(-limit.MaxExact).Remaining(); got != 3 {
		t.Errorf("after a refund of everything: %d tokens, want 3", got)
	}
}

func TestMillisSaturates(t *testing.T) {
	if got := limit.Millis(limit.MaxExact); got <= 0 {
		t.Errorf("Millis(MaxExact) = %v, want the longest Duration", got)
	}
	if got := limit.Millis(1500); got != 1500*time.Millisecond {
		t.Errorf("Millis(1500) = %v", got)
	}
}
