package limit

// The arithmetic of the stores, written once, here and in window.go: store/memory calls
// it, and the scripts of store/redis transcribe it line for line. All times are whole
// milliseconds since the Unix epoch; a state never sees time go back.

// BucketState is what a store keeps of one token bucket. It remembers the
// limit that it was written under, since the old refill counts until the first
// decision after a change. The zero value means no state: a full bucket.
type BucketState struct {
	Level    int64 // units, <= Capacity*Scale
	Scale    int64 // of the limit it was written under; 0 means no state
	Refill   int64
	Capacity int64
	Millis   int64 // time of the last decision that wrote
}

// Of reports whether the state was written under limit b.
func (s BucketState) Of(b TokenBucket) bool {
	return s.Scale == b.Scale && s.Refill == b.Refill && s.Capacity == b.Capacity
}

// At returns the state at time now, under limit b. A bucket that is full has no
// state, so a full one is full under b too, whatever its old capacity.
func (s BucketState) At(b TokenBucket, now int64) BucketState {
	next := BucketState{Level: b.Capacity * b.Scale, Scale: b.Scale, Refill: b.Refill, Capacity: b.Capacity, Millis: now}
	if s.Scale == 0 {
		return next
	}
	next.Millis = max(now, s.Millis)
	// Accrue at the old rate. Elapsed is first cut to what fills the bucket, so
	// that the product cannot overflow.
	full := s.Capacity * s.Scale
	elapsed := min(next.Millis-s.Millis, ceilDiv(full-s.Level, s.Refill))
	level := min(full, s.Level+elapsed*s.Refill)
	switch {
	case level == full:
		return next
	case s.Scale != b.Scale:
		level = rescale(level, s.Scale, b)
	}
	next.Level = max(next.deepest(), min(next.Level, level))
	return next
}

// deepest is the level of the deepest debt: what is missing from full, and the
// refill of a millisecond, stay exact together.
func (s BucketState) deepest() int64 { return s.Capacity*s.Scale - (MaxExact - s.Refill) }

// rescale converts level from units of the old scale to b's: whole tokens
// exactly, the fraction rounded down where the product is exact, else dropped.
func rescale(level, scale int64, b TokenBucket) int64 {
	tokens, fraction := level/scale, level%scale
	if fraction < 0 { // floor, not truncation
		tokens, fraction = tokens-1, fraction+scale
	}
	switch deepest := (BucketState{Capacity: b.Capacity, Scale: b.Scale, Refill: b.Refill}).deepest(); {
	case tokens >= b.Capacity:
		return b.Capacity * b.Scale
	case tokens < deepest/b.Scale-1:
		return deepest
	}
	units := tokens * b.Scale
	if fraction <= MaxExact/b.Scale {
		units += fraction * b.Scale / scale
	}
	return units
}

// Passes reports whether hits tokens are there. 0 passes unless the bucket is
// in debt; a refund always passes.
func (s BucketState) Passes(hits int64) bool {
	return hits < 0 || hits <= s.Capacity && s.Level >= hits*s.Scale
}

// Charge takes hits tokens, or refunds them if negative, never above capacity.
// Tokens that are not there must not be taken: ask Passes first.
func (s BucketState) Charge(hits int64) BucketState {
	full := s.Capacity * s.Scale
	if hits < -(MaxExact / s.Scale) { // more than any debt
		s.Level = full
	} else {
		s.Level = min(full, s.Level-hits*s.Scale)
	}
	return s
}

// Debit takes hits tokens whether or not they are there, or refunds them if
// negative. Debt saturates where the arithmetic stays exact.
func (s BucketState) Debit(hits int64) BucketState {
	if hits > MaxExact/s.Scale { // more than any debt
		s.Level = s.deepest()
		return s
	}
	s = s.Charge(hits)
	s.Level = max(s.Level, s.deepest())
	return s
}

// Remaining is the number of whole tokens, >= 0.
func (s BucketState) Remaining() int64 { return max(0, s.Level/s.Scale) }

// RetryAfterMillis is the first millisecond from the state's time on at which
// hits pass, for 0 <= hits <= Capacity.
func (s BucketState) RetryAfterMillis(hits int64) int64 {
	return ceilDiv(max(0, hits*s.Scale-s.Level), s.Refill)
}

// FullAfterMillis is when the bucket is full, from the state's time on.
func (s BucketState) FullAfterMillis() int64 {
	return ceilDiv(s.Capacity*s.Scale-s.Level, s.Refill)
}
