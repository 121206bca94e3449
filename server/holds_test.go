package server

import (
	"testing"
	"time"

	"weir/limit"
)

// S7: Retry-After of a full lane or pool is mean hold / max_in_flight, 1 s before
// the first release, at least 1 s, at most retry_after.
func TestTheWaitForASlotIsTheMeanHoldOverTheSlots(t *testing.T) {
	lane := func(maximum int64, retryAfter time.Duration) limit.Check {
		l, err := limit.NewConcurrency(maximum, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		l.RetryAfterMax = retryAfter
		return limit.Check{Name: "lane", Limit: l}
	}
	h := newHolds()
	expect := func(c limit.Check, want time.Duration) {
		t.Helper()
		if got := h.estimate("d", c); got != want {
			t.Errorf("estimate(%+v) = %v, want %v", c.Limit, got, want)
		}
	}
	expect(lane(3, 0), time.Second)
	h.add("d", "lane", 30*time.Second)
	expect(lane(3, 0), 10*time.Second)
	expect(lane(3, 4*time.Second), 4*time.Second)
	expect(lane(100, 0), time.Second)
	expect(lane(7, 0), 4286*time.Millisecond)
	h.add("d", "lane", 38*time.Second) // the mean moves by an eighth
	expect(lane(1, 0), 31*time.Second)
	h.add("elsewhere", "lane", time.Hour)
	h.add("d", "other", time.Hour)
	expect(lane(1, 0), 31*time.Second)
}
