package limit_test

import (
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weir/limit"
)

func sliding(t testing.TB, maximum int64, unit limit.Unit, multiplier int64) limit.Window {
	t.Helper()
	w, err := limit.NewSlidingWindow(maximum, unit, multiplier)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestASlidingWindowOutOfBoundsIsAnError(t *testing.T) {
	for _, tt := range []struct {
		max        int64
		unit       limit.Unit
		multiplier int64
		err        string
	}{
		{max: 0, unit: limit.Second, multiplier: 1},
		{max: limit.MaxRequestsPerUnit, unit: limit.Year, multiplier: 1},
		{max: 5, unit: limit.Day, multiplier: 365},
		{max: 5, unit: limit.Day, multiplier: 366, err: "window: sliding has at most 365 days, got 366"},
		{max: 5, unit: limit.Year, multiplier: 2, err: "window: sliding has at most 365 days, got 730"},
		{max: -1, unit: limit.Day, multiplier: 1, err: "requests_per_unit"},
		{max: 1, unit: limit.Day, multiplier: 0, err: "unit_multiplier"},
	} {
		w, err := limit.NewSlidingWindow(tt.max, tt.unit, tt.multiplier)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("NewSlidingWindow(%d, %v, %d) = %v, %v, want error with %q", tt.max, tt.unit, tt.multiplier, w, err, tt.err)
			}
			continue
		}
		want := limit.Window{Max: tt.max, Unit: tt.unit, Multiplier: tt.multiplier, Sliding: true}
		if err != nil || w != want {
			t.Errorf("NewSlidingWindow(%d, %v, %d) = %v, %v, want %v", tt.max, tt.unit, tt.multiplier, w, err, want)
		}
	}
}

func TestHowASlidingWindowStands(t *testing.T) {
	const now = 1_800_000_000_000 // divides by a minute
	w := sliding(t, 60, limit.Minute, 1)
	ban := w
	ban.Max = 0
	before, current := int64(now-60_000), int64(now)
	sec := time.Second
	for _, tt := range []struct {
		name  string
		s     limit.WindowState
		w     limit.Window
		after time.Duration // now
		want  limit.State
	}{
		{"nothing counted", limit.WindowState{}, w, 20 * sec, limit.State{Remaining: 60, ResetAfter: 40 * sec}},
		{"in its own window a hit counts whole", limit.WindowState{Start: current, Count: 10}, w, 59 * sec, limit.State{Count: 10, Remaining: 50, ResetAfter: 61 * sec}},
		{"in the next, by the part that is left", limit.WindowState{Start: before, Count: 30}, w, 20 * sec, limit.State{Count: 20, Remaining: 40, ResetAfter: 40 * sec}},
		{"a part of a hit is a hit", limit.WindowState{Start: before, Count: 1}, w, 59_999 * time.Millisecond, limit.State{Count: 1, Remaining: 59, ResetAfter: time.Millisecond}},
		{"after two windows nothing is left", limit.WindowState{Start: before, Count: 30}, w, 60 * sec, limit.State{Remaining: 60, ResetAfter: 60 * sec}},
		{"both windows", limit.WindowState{Start: current, Count: 7, Previous: 60}, w, 20 * sec, limit.State{Count: 47, Remaining: 13, ResetAfter: 100 * sec}},
		{"full by the window before", limit.WindowState{Start: current, Count: 20, Previous: 60}, w, 20 * sec, limit.State{Count: 60, RetryAfter: sec, ResetAfter: 100 * sec}},
		{"full by itself", limit.WindowState{Start: current, Count: 60}, w, 50 * sec, limit.State{Count: 60, RetryAfter: 11 * sec, ResetAfter: 70 * sec}},
		{"over", limit.WindowState{Start: current, Count: 600}, w, 50 * sec, limit.State{Count: 600, RetryAfter: 64_100 * time.Millisecond, ResetAfter: 70 * sec}},
		{"as much as can be counted", limit.WindowState{Start: current, Count: limit.MaxExact, Previous: limit.MaxExact}, w, 0, limit.State{Count: limit.MaxExact, RetryAfter: 2 * time.Minute, ResetAfter: 2 * time.Minute}},
		{"time set back", limit.WindowState{Start: current, Count: 20, Previous: 30}, w, -5 * sec, limit.State{Count: 50, Remaining: 10, ResetAfter: 125 * sec}},
		{"full, time set back", limit.WindowState{Start: current, Count: 30, Previous: 30}, w, -5 * sec, limit.State{Count: 60, RetryAfter: 7 * sec, ResetAfter: 125 * sec}},
		{"a ban has no wait", limit.WindowState{}, ban, 0, limit.State{ResetAfter: time.Minute}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, tt.s.Inspect(tt.w, 1, now+tt.after.Milliseconds())); diff != "" {
				t.Errorf("%+v (-want +got):\n%s", tt.s, diff)
			}
		})
	}
	for _, hits := range []int64{0, 1} {
		if (limit.WindowState{}).Passes(ban, hits, now) {
			t.Errorf("a ban lets %d hits pass", hits)
		}
	}
	if full := (limit.WindowState{Start: current, Count: 60}); !full.Passes(w, 0, now) || full.Passes(w, 1, now) || !full.Passes(ban, -1, now) {
		t.Error("a full window must let 0 hits pass and not 1, and a refund always")
	}
}

func TestARefundIsOfWhatWasCountedLast(t *testing.T) {
	s := limit.WindowState{Start: 60_000, Count: 5, Previous: 10}
	for _, tt := range []struct{ hits, count, previous int64 }{
		{3, 8, 10}, {0, 5, 10}, {-3, 2, 10}, {-5, 0, 10}, {-7, 0, 8}, {-15, 0, 0}, {-limit.MaxExact, 0, 0}, {limit.MaxExact, limit.MaxExact, 10},
	} {
		if got, want := s.Charge(tt.hits), (limit.WindowState{Start: 60_000, Count: tt.count, Previous: tt.previous}); got != want {
			t.Errorf("%+v.Charge(%d) = %+v, want %+v", s, tt.hits, got, want)
		}
	}
}

func TestASettlementIsOfTheWindowThatItWasReservedIn(t *testing.T) {
	w := sliding(t, 20, limit.Minute, 1)
	fixed := w
	fixed.Sliding = false
	s := limit.WindowState{Start: 120_000, Count: 5, Previous: 10}
	for _, tt := range []struct {
		w                 limit.Window
		start, difference int64
		want              limit.WindowState
		ok                bool
	}{
		{w, 120_000, 7, limit.WindowState{Start: 120_000, Count: 12, Previous: 10}, true},
		{w, 120_000, -7, limit.WindowState{Start: 120_000, Previous: 10}, true},
		{w, 60_000, -7, limit.WindowState{Start: 120_000, Count: 5, Previous: 3}, true},
		{w, 60_000, limit.MaxExact, limit.WindowState{Start: 120_000, Count: 5, Previous: limit.MaxExact}, true},
		{w, 0, -7, s, false},
		{w, 180_000, -7, s, false},
		{fixed, 120_000, -7, limit.WindowState{Start: 120_000, Previous: 10}, true},
		{fixed, 60_000, -7, s, false},
	} {
		if got, ok := s.Settle(tt.w, tt.start, tt.difference); got != tt.want || ok != tt.ok {
			t.Errorf("%+v.Settle(%+v, %d, %d) = %+v, %v, want %+v, %v", s, tt.w, tt.start, tt.difference, got, ok, tt.want, tt.ok)
		}
	}
}

// The weight, and the first millisecond of a retry, beside integers without bound: of
// counts up to 2^53-1, in windows up to a year.
func TestSlidingAgainstIntegersWithoutBound(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		w := randomSliding(t, r)
		length := w.Length().Milliseconds()
		s := limit.WindowState{Start: r.Int64N(1000) * length, Count: upTo(r, limit.MaxExact), Previous: upTo(r, limit.MaxExact)}
		if r.IntN(2) == 0 { // near the limit
			s.Count, s.Previous = upTo(r, w.Max), upTo(r, 2*w.Max)
		}
		now := s.Start + r.Int64N(length)
		expectCounted(t, s, w, now)
		hits := upTo(r, w.Max)
		expectFirstPass(t, s, w, hits, now)
		if back := s.Start - r.Int64N(length) - 1; back >= 0 { // time was set back
			expectCounted(t, s, w, back)
			expectFirstPass(t, s, w, hits, back)
		}
		reset := s.ResetAfterMillis(w, now)
		if then := s.At(w, now+reset); then.Count != 0 || then.Previous != 0 {
			t.Fatalf("%+v of %+v at %d: %+v after its reset, want nothing", s, w, now, then)
		}
		if then := s.At(w, now+reset-1); s.Count+s.Previous > 0 && then.Counted(w, now+reset-1) == 0 {
			t.Fatalf("%+v of %+v at %d: nothing is counted 1 ms before its reset", s, w, now)
		}
	}
}

// randomSliding is a window of any size, half of the time a small one.
func randomSliding(t testing.TB, r *rand.Rand) limit.Window {
	unit := limit.Second + limit.Unit(r.IntN(7))
	longest := int64(limit.MaxSliding / limit.Window{Unit: unit, Multiplier: 1}.Length())
	return sliding(t, 1+upTo(r, limit.MaxRequestsPerUnit-1), unit, 1+upTo(r, longest-1))
}

// upTo is 0..most, of any number of digits alike.
func upTo(r *rand.Rand, most int64) int64 {
	n := r.Int64N(1 << (1 + r.IntN(53)))
	if n > most {
		return most
	}
	return n
}

// expectCounted wants count + ceil(previous * left / length).
func expectCounted(t testing.TB, s limit.WindowState, w limit.Window, now int64) {
	t.Helper()
	length := w.Length().Milliseconds()
	left := min(length, s.Start+length-now)
	weight := new(big.Int).Mul(big.NewInt(s.Previous), big.NewInt(left))
	weight.Add(weight, big.NewInt(length-1)).Quo(weight, big.NewInt(length))
	want := min(limit.MaxExact, s.Count+weight.Int64())
	if got := s.Counted(w, now); got != want {
		t.Fatalf("%+v.Counted(%+v, %d) = %d, want %d", s, w, now, got, want)
	}
	if got, want := s.Remaining(w, now), max(0, w.Max-want); got != want {
		t.Fatalf("%+v.Remaining(%+v, %d) = %d, want %d", s, w, now, got, want)
	}
}

// expectFirstPass wants hits refused 1 ms before their retry, and admitted then.
func expectFirstPass(t testing.TB, s limit.WindowState, w limit.Window, hits, now int64) {
	t.Helper()
	if s.Passes(w, hits, now) {
		return
	}
	wait := s.RetryAfterMillis(w, hits, now)
	then := now + wait
	if wait <= 0 || then > s.Start+2*w.Length().Milliseconds() {
		t.Fatalf("%+v.RetryAfterMillis(%+v, %d, %d) = %d, want two windows at most", s, w, hits, now, wait)
	}
	if s.At(w, then-1).Passes(w, hits, then-1) || !s.At(w, then).Passes(w, hits, then) {
		t.Fatalf("%+v.RetryAfterMillis(%+v, %d, %d) = %d is not the first millisecond", s, w, hits, now, wait)
	}
}

// A fixed window is one that forgets the one before: nothing but the hits since its start
// count, and all waits are for its end.
func TestAFixedWindowCountsItselfAlone(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	w, err := limit.NewWindow(9, limit.Second, 2)
	if err != nil {
		t.Fatal(err)
	}
	const length = 2000
	var s limit.WindowState
	var start, count int64 // the latest window, and its hits
	now := int64(1_800_000_000_000)
	for step := range 20_000 {
		now += r.Int64N(1500) - 400
		hits := r.Int64N(14) - 3
		if began := now / length * length; began > start {
			start, count = began, 0
		}
		if s = s.At(w, now); s != (limit.WindowState{Start: start, Count: count}) {
			t.Fatalf("step %d: %+v, want %d hits since %d", step, s, count, start)
		}
		passes, end := hits < 0 || count+hits <= w.Max, start+length-now
		if got := s.Passes(w, hits, now); got != passes || s.Remaining(w, now) != max(0, w.Max-count) || s.ResetAfterMillis(w, now) != end {
			t.Fatalf("step %d: %+v passes %d hits: %v, has %d left and ends in %d ms, want %v, %d, %d", step, s, hits, got, s.Remaining(w, now), s.ResetAfterMillis(w, now), passes, max(0, w.Max-count), end)
		}
		if !passes && hits <= w.Max && s.RetryAfterMillis(w, hits, now) != end {
			t.Fatalf("step %d: %+v does not retry at its end", step, s)
		}
		if passes || r.IntN(4) == 0 {
			s, count = s.Charge(hits), max(0, count+hits)
		}
	}
}

// hitLog is a true sliding log: every hit that was admitted.
type hitLog []struct{ millis, hits int64 }

func (l *hitLog) add(millis, hits int64) {
	*l = append(*l, struct{ millis, hits int64 }{millis, hits})
}

// in is how many hits came in the last length ms, now among them.
func (l hitLog) in(length, now int64) (n int64) {
	for i := len(l) - 1; i >= 0 && l[i].millis > now-length; i-- {
		if l[i].millis <= now {
			n += l[i].hits
		}
	}
	return n
}

// bound is how many hits a sliding window of length ms admits in any interval of so many
// ms, at most, as docs/decisions/0016-sliding-windows.md derives it.
func bound(maximum, length, interval int64) int64 {
	return maximum + maximum*max(0, interval-2)/length
}

// Whatever is asked: how far a sliding window may be from a log of all hits. It admits
// at most bound hits in an interval, so less than 2*max in its own length, and has
// nobody wait for more than its length longer than the log would.
func TestSlidingAgainstALog(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 5))
		w := sliding(t, 1+r.Int64N(1<<r.IntN(8)), limit.Second, 1+r.Int64N(3))
		length := w.Length().Milliseconds()
		var s limit.WindowState
		var log hitLog
		now := int64(1_800_000_000_000)
		for range 400 {
			switch start := now - now%length; r.IntN(6) {
			case 0:
				now += r.Int64N(2 * length)
			case 1: // the last moment of a window
				now = start + length - 1
			case 2: // the first of the next
				now = start + length
			case 3:
				now += r.Int64N(length / 10)
			case 4:
				now++
			case 5: // a moment after
			}
			s = s.At(w, now)
			hits := 1 + r.Int64N(w.Max)
			if r.IntN(2) == 0 { // all that it will give
				hits = min(w.Max, max(1, s.Remaining(w, now)))
			}
			if r.IntN(3) == 0 && !s.Passes(w, hits, now) {
				now += s.RetryAfterMillis(w, hits, now)
				s = s.At(w, now)
			}
			if !s.Passes(w, hits, now) {
				then := now // when the log would admit it: some hit has left it
				for i := 0; i < len(log) && log.in(length, then)+hits > w.Max; i++ {
					then = max(now, log[i].millis+length)
				}
				if waits := now + s.RetryAfterMillis(w, hits, now) - then; waits > length {
					t.Fatalf("seed %d: %+v of %+v at %d has %d hits wait for %d ms longer than a log would, want %d at most", seed, s, w, now, hits, waits, length)
				}
				continue
			}
			s = s.Charge(hits)
			log.add(now, hits)
			for _, interval := range []int64{1, 2, 1 + r.Int64N(length), length} {
				if got, want := log.in(interval, now), bound(w.Max, length, interval); got > want {
					t.Fatalf("seed %d: %+v admitted %d hits within %d ms, want %d at most", seed, w, got, interval, want)
				}
			}
		}
	}
}

// The bound is no worse than the truth: all hits at the end of a window, and from then on
// whatever is given.
func TestTheBoundOfASlidingWindowIsReached(t *testing.T) {
	for _, tt := range []struct {
		max, seconds int64
		want         int64 // hits in some interval as long as the window
	}{
		{1, 1, 1},
		{2, 1, 3},
		{10, 1, 19},
		{100, 60, 199},
		{500, 1, 999},
		{501, 1, 999 + 1}, // more than one in 2 ms
		{5000, 1, 9990},
	} {
		w := sliding(t, tt.max, limit.Second, tt.seconds)
		length := w.Length().Milliseconds()
		begin := 1000 * length
		s := limit.WindowState{}.At(w, begin-1).Charge(tt.max)
		var log hitLog
		log.add(begin-1, tt.max)
		for now := begin; now <= begin+length-2; now++ {
			s = s.At(w, now)
			if hits := s.Remaining(w, now); hits > 0 {
				s = s.Charge(hits)
				log.add(now, hits)
			}
		}
		got := log.in(length, begin+length-2)
		if got != tt.want || got != bound(tt.max, length, length) {
			t.Errorf("%+v admitted %d hits within its length, want %d, and the bound is %d", w, got, tt.want, bound(tt.max, length, length))
		}
	}
}

// The other way: the log is empty again, and the window full for as long as it is.
func TestTheLongestWaitOfASlidingWindowIsReached(t *testing.T) {
	w := sliding(t, 10, limit.Minute, 1)
	const begin, length = 600_000, 60_000
	s := limit.WindowState{}.At(w, begin).Charge(10)
	const now = begin + length // a log has forgotten the 10
	s = s.At(w, now)
	if got := s.Counted(w, now); got != 10 {
		t.Errorf("%d are counted when all are a minute old, want 10", got)
	}
	if got := s.RetryAfterMillis(w, 10, now); got != length {
		t.Errorf("10 more wait for %d ms, want %d", got, length)
	}
	if got := s.RetryAfterMillis(w, 1, now); got != length/10 {
		t.Errorf("1 more waits for %d ms, want %d", got, length/10)
	}
}

// What is asked all the time gets a hit less than the limit allows, or a millisecond's
// worth if that is more: a part of the last hit of the window before counts to its end.
func TestWhatASteadyDemandGets(t *testing.T) {
	for _, tt := range []struct {
		max  int64
		want []int64 // hits admitted in the windows, in order
	}{
		{1, []int64{1, 0, 1, 0, 1}},
		{2, []int64{2, 1, 1, 1, 1}},
		{10, []int64{10, 9, 9, 9, 9}},
		{100, []int64{100, 99, 99, 99, 99}},
		{5000, []int64{5000, 4995, 4995, 4995, 4995}},
	} {
		w := sliding(t, tt.max, limit.Second, 1)
		var s limit.WindowState
		got := make([]int64, len(tt.want))
		for now := range int64(1000 * len(got)) {
			s = s.At(w, now)
			hits := s.Remaining(w, now)
			s = s.Charge(hits)
			got[now/1000] += hits
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("max %d, hits a window (-want +got):\n%s", tt.max, diff)
		}
	}
}

// docs/decisions/0016-sliding-windows.md: a contract of at most 100 in any minute is never
// broken by a sliding window of 50, and is by one of 51; nor by a bucket that holds 1
// and gains 100 a minute, which uses it in full.
func TestWhatNeverBreaksAContractOfAnyMinute(t *testing.T) {
	const length, contract = 60_000, 100
	for _, tt := range []struct {
		max  int64
		want bool
	}{{50, true}, {51, false}} {
		if got := bound(tt.max, length, length) <= contract; got != tt.want {
			t.Errorf("a sliding window of %d keeps the contract: %v, want %v", tt.max, got, tt.want)
		}
	}
	b, err := limit.NewTokenBucket(1, contract, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	var s limit.BucketState
	var log hitLog
	most := int64(0)
	for now := int64(1_800_000_000_000); now < 1_800_000_000_000+3*length; now++ {
		if s = s.At(b, now); !s.Passes(1) {
			continue
		}
		s = s.Charge(1)
		log.add(now, 1)
		most = max(most, log.in(length, now))
	}
	if most != contract {
		t.Errorf("the bucket admitted %d within a minute at most, want %d", most, contract)
	}
}

// FuzzSliding runs any asks, charges, settlements and steps of time beside a list of
// what was counted in each window, with fractions without bound.
func FuzzSliding(f *testing.F) {
	f.Add(int64(10), uint8(2), int64(1), []byte("\x00\x05\x01\x09\x10\x03\x40\xff"))
	f.Add(int64(limit.MaxRequestsPerUnit), uint8(7), int64(1), []byte("\x30\xff\x12\x01\x31\xff\xff\xff"))
	f.Add(int64(1), uint8(1), int64(1), []byte("\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01"))
	f.Fuzz(func(t *testing.T, maximum int64, unit uint8, multiplier int64, program []byte) {
		w, err := limit.NewSlidingWindow(maximum, limit.Unit(unit), multiplier)
		if err != nil || len(program) > 1000 {
			return
		}
		length := w.Length().Milliseconds()
		counted := make(map[int64]int64) // hits by the start of their window
		last := int64(0)                 // the latest window
		now := length * 1000
		var s limit.WindowState
		for i := 0; i+1 < len(program); i += 2 {
			op, size := program[i], int64(program[i+1])
			switch op % 4 {
			case 0: // time passes
				now += size * max(1, length/100)
			case 1:
				now += size
			case 2: // it is set back
				now = max(0, now-size*max(1, length/1000))
			case 3:
			}
			hits := size
			if op&16 != 0 {
				hits = maximum / max(1, size)
			}
			if op&32 != 0 {
				hits = limit.MaxExact / max(1, size)
			}
			if op&64 != 0 {
				hits = -hits
			}
			last = max(last, now/length*length)
			s = s.At(w, now)
			if want := (limit.WindowState{Start: last, Count: counted[last], Previous: counted[last-length]}); s != want {
				t.Fatalf("step %d: %+v, want %+v", i, s, want)
			}
			expectCounted(t, s, w, now)
			passes := s.Passes(w, hits, now)
			if want := hits < 0 || maximum > 0 && s.Counted(w, now)+hits <= maximum; passes != want {
				t.Fatalf("step %d: %+v.Passes(%+v, %d, %d) = %v, want %v", i, s, w, hits, now, passes, want)
			}
			if !passes && hits <= maximum && maximum > 0 {
				expectFirstPass(t, s, w, hits, now)
			}
			switch {
			case op&128 != 0:
				start := last - int64(op%8)*length
				counts := start >= last-length
				var ok bool
				if s, ok = s.Settle(w, start, hits); ok != counts {
					t.Fatalf("step %d: Settle of the window %d before = %v, want %v", i, op%8, ok, counts)
				}
				if counts {
					counted[start] = min(limit.MaxExact, max(0, counted[start]+hits))
				}
			case hits >= 0 && (passes || op&8 != 0):
				s = s.Charge(hits)
				counted[last] = min(limit.MaxExact, counted[last]+hits)
			case hits < 0:
				s = s.Charge(hits)
				for _, start := range []int64{last, last - length} {
					back := min(counted[start], -hits)
					counted[start] -= back
					hits += back
				}
			}
		}
	})
}

// The wait of a window is its first millisecond, whatever was counted: refused one
// earlier, admitted then. Over any count, capacity changed since, and a clock set back.
func TestTheWaitOfAnyWindowIsExact(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	units := []limit.Unit{limit.Second, limit.Minute, limit.Month, limit.Year}
	for i := range 300_000 {
		w, err := limit.NewWindow(1+r.Int64N(1<<(1+r.UintN(32))), units[r.IntN(len(units))], 1)
		if err != nil {
			continue
		}
		w.Sliding = r.IntN(4) > 0
		length := w.Length().Milliseconds()
		start := length * (1 + r.Int64N(40))
		s := limit.WindowState{Start: start, Count: r.Int64N(1 << (1 + r.UintN(53))), Previous: 0}
		if w.Sliding {
			s.Previous = r.Int64N(1 << (1 + r.UintN(53)))
		}
		now := start + r.Int64N(length)
		if r.IntN(8) == 0 {
			now = start - r.Int64N(length) // set back
		}
		hits := r.Int64N(w.Max + 1)
		at := s.At(w, now)
		if at.Passes(w, hits, now) {
			continue
		}
		wait := at.RetryAfterMillis(w, hits, now)
		if wait <= 0 || at.At(w, now+wait-1).Passes(w, hits, now+wait-1) || !at.At(w, now+wait).Passes(w, hits, now+wait) {
			t.Fatalf("case %d: %+v %+v hits %d at %d: wait %d is not the first", i, w, s, hits, now, wait)
		}
	}
}
