package redis_test

import (
	"fmt"
	"testing"
	"time"

	"weir/limit"
	"weir/store/storetest"
)

// R19: a request with as many limits as the protocol lets through is decided as
// a whole, and so is its release.
func TestAWideRequestIsDecidedAsAWhole(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock()
		s, _ := open(t, server, clock.Now)
		b, l := bucket(t, 5, time.Hour), lane(t, 2, time.Minute)
		var r limit.Request
		for i := range 1024 {
			r.Checks = append(r.Checks, check(b, fmt.Sprint(i)), check(l, fmt.Sprint(i)))
		}
		r.Domain = "d"
		for left := int64(1); left >= 0; left-- {
			r = withLease(r)
			d := decide(t, s, r)
			if !d.Admitted {
				t.Fatal("refused")
			}
			for i, result := range d.Results {
				if want := left + int64(1-i%2)*3; result.Remaining != want {
					t.Fatalf("check %d: remaining %d, want %d", i, result.Remaining, want)
				}
			}
		}
		if d := decide(t, s, withLease(r)); d.Admitted || d.Results[0].Remaining != 3 {
			t.Errorf("with all lanes full: admitted %v, %+v", d.Admitted, d.Results[0])
		}
		released, err := s.Release(storetest.Context(t), limit.Ending{Lease: r.Lease})
		if err != nil || released.Result != limit.Released || len(released.Freed) != 1024 {
			t.Errorf("Release = %v of %d limits, %v", released.Result, len(released.Freed), err)
		}
		if d := decide(t, s, withLease(r)); !d.Admitted {
			t.Error("refused after a release")
		}
	})
}
