package server_test

import "testing"

// S14: the first ends the lease, the rest find nothing, also within one call.
func TestTheFirstOfTheSameReleasesEndsTheLease(t *testing.T) {
	s := serve(t, lanePolicy)
	for range 50 {
		id := acquire(t, s.leases, typed("pool", "images")).GetLease().GetId()
		if got, want := release(t, s.leases, id, id, id), "RELEASED NOT_HELD NOT_HELD"; got != want {
			t.Fatalf("the same lease three times = %s, want %s", got, want)
		}
	}
}
