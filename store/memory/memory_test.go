package memory_test

import (
	"strconv"
	"testing"
	"time"

	"weir/limit"
	"weir/store/memory"
	"weir/store/storetest"
)

func TestMemoryPassesTheScenarios(t *testing.T) {
	storetest.RunScenarios(t, "../testdata", func(_ *testing.T, now func() int64) storetest.Fixture {
		s := memory.New(memory.Options{Now: now})
		return storetest.Fixture{Store: s, Dump: s.Dump}
	})
}

func check(t testing.TB, l limit.Limit, value string) limit.Check {
	t.Helper()
	return limit.Check{Name: "k", Limit: l, Hits: 1, Key: limit.Key("d", l, []limit.Entry{{Key: "k", Value: value}})}
}

// What means nothing any more is forgotten by later calls, with no sweeper: the
// store is as small as what is alive (T33).
func TestIdleStateIsForgotten(t *testing.T) {
	clock := storetest.NewClock()
	s := memory.New(memory.Options{Now: clock.Now})
	b, err := limit.NewTokenBucket(10, 1, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	lane, err := limit.NewConcurrency(3, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	n := uint64(0)
	ask := func(value string) limit.LeaseID {
		n++
		r := limit.Request{
			Domain: "d", Lease: storetest.TestLease("d", n),
			Checks: []limit.Check{check(t, b, value), check(t, lane, value)},
		}
		if d, err := s.Decide(t.Context(), r); err != nil || !d.Admitted {
			t.Fatalf("Decide = %+v, %v", d, err)
		}
		return r.Lease
	}
	for i := range 10_000 {
		id := ask(strconv.Itoa(i))
		if i%2 == 0 {
			if r, err := s.Release(t.Context(), limit.Ending{Lease: id}); err != nil || r.Result != limit.Released {
				t.Fatalf("Release = %v, %v", r, err)
			}
		}
	}
	if got := s.Len(); got < 20_000 {
		t.Fatalf("Len = %d after 10,000 subjects, want each kept", got)
	}
	// After two idle hours each call forgets more than it adds.
	clock.Advance(2 * time.Hour)
	for range 10_000 {
		clock.Advance(30 * time.Second)
		ask("busy")
	}
	if got := s.Len(); got > 50 {
		t.Errorf("Len = %d while one subject is busy, want a few", got)
	}
}

func TestWithoutAClockTimeIsMonotonic(t *testing.T) {
	s := memory.New(memory.Options{})
	b, err := limit.NewTokenBucket(1, 1, 20*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	r := limit.Request{Domain: "d", Checks: []limit.Check{check(t, b, "x")}}
	admitted := 0
	for end := time.Now().Add(storetest.Deadline); admitted < 3; {
		if d, err := s.Decide(t.Context(), r); err != nil {
			t.Fatal(err)
		} else if d.Admitted {
			admitted++
		}
		if time.Now().After(end) {
			t.Fatal("tokens do not come back")
		}
	}
}
