package limit_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weir/limit"
)

// The waits that an inspection tells are the first milliseconds at which what they
// promise is so, also after a change of the policy, and when time was set back.
func TestInspectedWaitsAreExact(t *testing.T) {
	buckets := []limit.TokenBucket{}
	for _, config := range []struct {
		capacity, count int64
		period          time.Duration
	}{{10, 1, time.Second}, {3, 2, time.Second}, {7, 7, time.Minute}, {50, 50, 7 * time.Second}, {1, 1, 24 * time.Hour}, {1_000_000_000, 99_991, 100_003 * time.Millisecond}} {
		b, err := limit.NewTokenBucket(config.capacity, config.count, config.period)
		if err != nil {
			t.Fatal(err)
		}
		buckets = append(buckets, b)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		was, b := buckets[r.IntN(len(buckets))], buckets[r.IntN(len(buckets))]
		now := int64(1_800_000_000_000)
		s := limit.BucketState{
			Level: r.Int64N(3*was.Capacity*was.Scale) - 2*was.Capacity*was.Scale,
			Scale: was.Scale, Refill: was.Refill, Capacity: was.Capacity,
			Millis: now - r.Int64N(30_000) + 10_000,
		}
		hits := r.Int64N(min(b.Capacity, 20) + 1)
		got := s.Inspect(b, hits, now)
		at := s.At(b, now)
		if want := at.Remaining(); got.Remaining != want || got.Level > want || got.Level < want && got.Level >= 0 {
			t.Fatalf("%+v.Inspect(%+v) has level %d and %d remaining, want %d", s, b, got.Level, got.Remaining, want)
		}
		expectFirst(t, s, b, now, got.RetryAfter, func(at limit.BucketState) bool { return at.Passes(hits) })
		expectFirst(t, s, b, now, got.ResetAfter, func(at limit.BucketState) bool { return at.Level == at.Capacity*at.Scale })
	}
}

func expectFirst(t *testing.T, s limit.BucketState, b limit.TokenBucket, now int64, wait time.Duration, is func(limit.BucketState) bool) {
	t.Helper()
	then := now + wait.Milliseconds()
	if !is(s.At(b, then)) {
		t.Fatalf("%+v under %+v: not yet after %v: %+v", s, b, wait, s.At(b, then))
	}
	if wait > 0 && is(s.At(b, then-1)) {
		t.Fatalf("%+v under %+v: one millisecond before %v already: %+v", s, b, wait, s.At(b, then-1))
	}
}

func TestAnInspectionTellsAnyState(t *testing.T) {
	const now = 1_800_000_000_000 // divides by a minute
	b, err := limit.NewTokenBucket(10, 1, 3*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	bucket := func(level int64) limit.BucketState {
		return limit.BucketState{Level: level, Scale: b.Scale, Refill: b.Refill, Capacity: b.Capacity, Millis: now}
	}
	w, err := limit.NewWindow(5, limit.Minute, 1)
	if err != nil {
		t.Fatal(err)
	}
	ban := w
	ban.Max = 0
	lane, err := limit.NewConcurrency(2, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name      string
		got, want limit.State
	}{
		{"no bucket is a full one", limit.BucketState{}.Inspect(b, 1, now), limit.State{Level: 10, Remaining: 10}},
		{"a fraction is no token", bucket(2999).Inspect(b, 1, now), limit.State{RetryAfter: time.Millisecond, ResetAfter: 27_001 * time.Millisecond}},
		{"debt is rounded down", bucket(-1).Inspect(b, 1, now), limit.State{Level: -1, RetryAfter: 3001 * time.Millisecond, ResetAfter: 30_001 * time.Millisecond}},
		{"whole debt", bucket(-6000).Inspect(b, 1, now), limit.State{Level: -2, RetryAfter: 9 * time.Second, ResetAfter: 36 * time.Second}},
		{"no window", limit.WindowState{}.Inspect(w, 1, now+1000), limit.State{Remaining: 5, ResetAfter: 59 * time.Second}},
		{"an old window", limit.WindowState{Start: now - 60_000, Count: 5}.Inspect(w, 1, now), limit.State{Remaining: 5, ResetAfter: time.Minute}},
		{"a full window", limit.WindowState{Start: now, Count: 5}.Inspect(w, 1, now), limit.State{Count: 5, RetryAfter: time.Minute, ResetAfter: time.Minute}},
		{"a window that is over", limit.WindowState{Start: now, Count: 9}.Inspect(w, 1, now), limit.State{Count: 9, RetryAfter: time.Minute, ResetAfter: time.Minute}},
		{"a ban has no wait", limit.WindowState{}.Inspect(ban, 1, now), limit.State{ResetAfter: time.Minute}},
		{
			"a lane that holds more than a lowered maximum",
			lane.Inspect(3, []limit.Slot{{Token: "a", Expiry: now + 1}, {Token: "b", Expiry: now + 2000}, {Token: "c", Expiry: now + 2000}}, now),
			limit.State{Count: 3, Holders: []limit.Holder{{"a", time.Millisecond}, {"b", 2 * time.Second}, {"c", 2 * time.Second}}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, test.got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	if got := len(lane.Inspect(101, make([]limit.Slot, 101), now).Holders); got != limit.MaxHolders {
		t.Errorf("%d holders of 101, want %d", got, limit.MaxHolders)
	}
}

func TestAShortenedHolderIsNoLeaseID(t *testing.T) {
	id := limit.NewLeaseID("d", [16]byte{1, 2, 3, 4, 5, 6, 7, 8, 9})
	short := limit.Holder{Token: id.Token()}.Short()
	if want := "AQIDBAUG…"; short != want {
		t.Errorf("Short of %s = %s, want %s", id, short, want)
	}
	if _, err := limit.ParseLeaseID(short + ".d"); err == nil {
		t.Errorf("ParseLeaseID(%s.d) succeeded", short)
	}
}
