package limit

import "math/bits"

// Fraction is a part of a limit, in millionths: 1..[Whole]. The zero value is the whole.
type Fraction int64

// Whole is the fraction that is all of a limit.
const Whole Fraction = 1_000_000

// Share is what one of several processes may allow by itself of a limit: fraction of
// it, divided by their number. It is rounded down, so that all shares together are
// never more than the limit; nil means that nothing is left. Replicas is 1 or more.
func Share(l Limit, fraction Fraction, replicas int64) Limit {
	if fraction == 0 {
		fraction = Whole
	}
	of := ratio{uint64(fraction), uint64(Whole)}
	of.den *= uint64(min(max(replicas, 1), maxReplicas))
	switch l := l.(type) {
	case TokenBucket:
		if b := l.share(of); b.Capacity > 0 && b.Refill > 0 {
			return b
		}
		return nil
	case Window:
		if l.Max = of.floor(l.Max); l.Max > 0 {
			return l
		}
		return nil
	case Concurrency:
		if l.Max = of.floor(l.Max); l.Max > 0 {
			return l
		}
		return nil
	}
	return nil
}

// maxReplicas keeps the arithmetic exact.
const maxReplicas = 1_000_000

// share is the bucket with a part of the capacity and of the refill. Its tokens are
// cut into more units, so that the refill is exact, as far as they can be counted.
func (b TokenBucket) share(of ratio) TokenBucket {
	s := TokenBucket{Capacity: of.floor(b.Capacity)}
	if s.Capacity == 0 {
		return s
	}
	// (capacity*scale + refill) * times <= MaxExact, as b's own were.
	times := min(int64(of.den), MaxExact/(s.Capacity*b.Scale+b.Refill))
	s.Scale = b.Scale * times
	s.Refill = ratio{of.num * uint64(times), of.den}.floor(b.Refill)
	d := gcd(s.Scale, s.Refill)
	s.Scale, s.Refill = s.Scale/d, s.Refill/d
	return s
}

// ratio is num/den, at most 1 or, of a bucket's refill, MaxExact/refill.
type ratio struct{ num, den uint64 }

// floor is n times the ratio, rounded down; n >= 0.
func (r ratio) floor(n int64) int64 {
	hi, lo := bits.Mul64(uint64(n), r.num)
	q, _ := bits.Div64(hi, lo, r.den)
	return int64(q)
}
