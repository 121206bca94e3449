package limit_test

import (
	"math/big"
	"testing"
	"time"

	"weir/limit"
)

func TestAShareIsRoundedDown(t *testing.T) {
	bucket := func(capacity, count int64, period time.Duration) limit.Limit {
		b, err := limit.NewTokenBucket(capacity, count, period)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	window := func(n int64) limit.Limit {
		return limit.Window{Max: n, Unit: limit.Day, Multiplier: 2, ChargeOver: true}
	}
	slides := func(n int64) limit.Limit {
		return limit.Window{Max: n, Unit: limit.Day, Multiplier: 2, Sliding: true}
	}
	slots := func(n int64) limit.Limit {
		return limit.Concurrency{Max: n, Lease: time.Second, Linger: time.Minute}
	}
	const half = limit.Whole / 2
	for _, test := range []struct {
		of       limit.Limit
		fraction limit.Fraction
		replicas int64
		want     limit.Limit
	}{
		{bucket(10, 1, time.Second), 0, 1, bucket(10, 1, time.Second)},
		{bucket(10, 1, time.Second), limit.Whole, 5, bucket(2, 1, 5*time.Second)},
		{bucket(10, 1, time.Second), half, 3, bucket(1, 1, 6*time.Second)},
		{bucket(10, 7, time.Minute), limit.Whole, 10, bucket(1, 7, 10*time.Minute)},
		{bucket(10, 1, time.Second), limit.Whole, 11, nil},
		{bucket(1, 1, time.Second), half, 1, nil},
		{window(100), half, 3, window(16)},
		{window(100), limit.Whole, 101, nil},
		{window(0), limit.Whole, 1, nil},
		{window(limit.MaxRequestsPerUnit), limit.Whole, 1, window(limit.MaxRequestsPerUnit)},
		{slides(100), half, 3, slides(16)},
		{slots(3), limit.Whole, 2, slots(1)},
		{slots(3), limit.Whole, 4, nil},
		{slots(3), 333_333, 1, nil},
		{slots(3), 333_334, 1, slots(1)},
	} {
		if got := limit.Share(test.of, test.fraction, test.replicas); got != test.want {
			t.Errorf("Share(%v, %d, %d) = %v, want %v", test.of, test.fraction, test.replicas, got, test.want)
		}
	}
}

// FuzzShare: a bucket's share can be counted exactly, and all shares together never
// allow more than the bucket, nor much less.
func FuzzShare(f *testing.F) {
	f.Add(int64(10), int64(1), int64(1000), int64(1_000_000), int64(5))
	f.Add(int64(limit.MaxExact-1), int64(1), int64(1), int64(999_999), int64(1_000_000))
	f.Add(int64(1), int64(limit.MaxExact-1), int64(1), int64(1), int64(1))
	f.Add(int64(9), int64(100_000), int64(86_400_000), int64(333_333), int64(7))
	f.Fuzz(func(t *testing.T, capacity, count, millis, fraction, replicas int64) {
		b, err := limit.NewTokenBucket(capacity, count, limit.Millis(millis))
		if err != nil || fraction < 1 || fraction > int64(limit.Whole) || replicas < 1 || replicas > 1_000_000 {
			return
		}
		share := limit.Share(b, limit.Fraction(fraction), replicas)
		if share == nil {
			return
		}
		s, _ := share.(limit.TokenBucket)
		n := big.NewInt
		times := func(a, b *big.Int) *big.Int { return new(big.Int).Mul(a, b) }
		if sum := new(big.Int).Add(times(n(s.Capacity), n(s.Scale)), n(s.Refill)); s.Capacity <= 0 || s.Scale <= 0 || s.Refill <= 0 || sum.Cmp(n(limit.MaxExact)) > 0 {
			t.Fatalf("the share of %+v is %+v, which cannot be counted", b, s)
		}
		// a/b <= c/d by a*d <= c*b.
		whole := n(int64(limit.Whole))
		if times(times(n(s.Capacity), n(replicas)), whole).Cmp(times(n(b.Capacity), n(fraction))) > 0 {
			t.Errorf("%d shares of %+v hold %d each, which is too much", replicas, b, s.Capacity)
		}
		gained := times(times(times(n(s.Refill), n(b.Scale)), n(replicas)), whole)
		most := times(times(n(b.Refill), n(s.Scale)), n(fraction))
		if gained.Cmp(most) > 0 {
			t.Errorf("%d shares of %+v gain %d/%d each, which is too much", replicas, b, s.Refill, s.Scale)
		}
	})
}
