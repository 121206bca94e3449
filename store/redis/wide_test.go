package redis_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"weir/limit"
	"weir/store"
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

// The widest record of a lease: a reservation of each limit that a request may meet. What
// could fail half-way would leave some of it.
func TestTheWidestReservationIsKept(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, _ := open(t, server, storetest.NewClock().Now)
		const limits = limit.MaxReserved
		r := withLease(request())
		for i := range 1024 - limits {
			r.Checks = append(r.Checks, check(lane(t, 2, time.Minute), strings.Repeat("v", 60)+fmt.Sprint(i)))
		}
		for i := range limits {
			c := check(bucket(t, 10, time.Hour), strings.Repeat("v", 60)+fmt.Sprint(i))
			c.Hits, c.Reserve, c.Name = 4, time.Minute, strings.Repeat("n", 120)+fmt.Sprint(i)
			r.Checks = append(r.Checks, c)
		}
		if d := decide(t, s, r); !d.Admitted || d.Lease == "" {
			t.Fatalf("admitted %t with the lease %q", d.Admitted, d.Lease)
		}
		ctx := storetest.Context(t)
		settled, err := s.Settle(ctx, limit.Usage{Domain: r.Domain, Lease: r.Lease, Limits: []limit.Used{{Hits: 1}}})
		if err != nil || settled[0].Result != limit.Settled || settled[0].Difference != -3*limits {
			t.Errorf("Settle = %v, %v, want all of them by -3", settled, err)
		}
		if _, err := s.Renew(ctx, limit.Extension{Lease: r.Lease}); err != nil {
			t.Errorf("Renew: %v", err)
		}
		for _, st := range inspect(t, s, r.Checks[1024-limits:]...) {
			if st.Level != 9 {
				t.Fatalf("a bucket has %d left, want 9", st.Level)
			}
		}
		more := r
		more.Checks = append(more.Checks, r.Checks[1023])
		if _, err := s.Decide(ctx, withLease(more)); err == nil || errors.Is(err, store.ErrUnavailable) {
			t.Errorf("one reservation more: %v, want an error of its own", err)
		}
		if released, err := s.Release(ctx, limit.Ending{Lease: r.Lease}); err != nil || released.Result != limit.Released {
			t.Errorf("Release = %v, %v", released, err)
		}
	})
}
