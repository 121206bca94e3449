package standby_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weir/limit"
	"weir/store/standby"
	"weir/store/storetest"
)

// What was granted here is listed, and not what follows the store.
func TestOnlyLeasesOfItsOwnAreListed(t *testing.T) {
	clock := storetest.NewClock()
	s := standby.New(standby.Options{Mode: limit.ModeLocal, Now: clock.Now})
	lane := check("c:lane=a", slots(5), limit.ModeLocal)
	s.Follow("d", []limit.Check{lane}, storetest.TestLease("d", 1))
	own := decide(t, s, request(lane), "why").Lease
	clock.Advance(time.Second)
	want := limit.Listing{Leases: []limit.Listed{{
		Lease: own, HeldFor: time.Second, ExpiresAfter: 59 * time.Second, Stream: "s", Slots: []limit.ListedSlot{{Key: lane.Key, Limit: lane.Name}},
	}}}
	if diff := cmp.Diff(want, s.Leases("d", limit.Slot{}, 10)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A reset makes the shares whole again, of what was decided here and of what follows the store.
func TestAResetMakesSharesWhole(t *testing.T) {
	clock := storetest.NewClock()
	s := standby.New(standby.Options{Mode: limit.ModeLocal, Replicas: 2, Now: clock.Now})
	checks := []limit.Check{
		check("b:a", bucket(t, 4, 1, time.Hour), limit.ModeLocal), check("w:a", hourly(4), limit.ModeLocal), check("c:a", slots(4), limit.ModeLocal),
	}
	s.Follow("d", checks, storetest.TestLease("d", 1))
	decide(t, s, request(checks...), "why")
	if d := decide(t, s, request(checks...), "why"); d.Admitted {
		t.Fatal("admitted beyond the share")
	}
	s.Reset(checks)
	for i := range 2 {
		if d := decide(t, s, request(checks...), "why"); !d.Admitted {
			t.Errorf("request %d after a reset is refused: %+v", i, d)
		}
	}
	if d := decide(t, s, request(checks...), "why"); d.Admitted {
		t.Error("admitted beyond the share, after a reset")
	}
}
