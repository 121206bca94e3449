package redis_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weir/limit"
	"weir/store"
	"weir/store/storetest"
)

func leases(t testing.TB, s store.Store, after limit.Slot, n int) limit.Listing {
	t.Helper()
	page, err := s.Leases(storetest.Context(t), "d", after, n)
	if err != nil {
		t.Fatal(err)
	}
	return page
}

// Many leases may expire in one millisecond: a page begins among them, also if the lease
// at which the last one ended has gone, and each is told once, in the order of bytes.
func TestPagesOfLeasesThatExpireTogether(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, client := open(t, server, storetest.NewClock().Now)
		l := lane(t, 10_000, time.Minute)
		want := make(map[limit.LeaseID]bool)
		for range 2500 {
			r := withLease(request(check(l, "x")))
			decide(t, s, r)
			want[r.Lease] = true
		}
		before := raw(t, client)
		var got []limit.LeaseID
		after, gone := limit.Slot{}, []limit.LeaseID(nil)
		for {
			page := leases(t, s, after, limit.MaxListed)
			if n := len(page.Leases); n > limit.MaxListed || n == 0 {
				t.Fatalf("a page of %d leases", n)
			}
			for _, one := range page.Leases {
				got = append(got, one.Lease)
			}
			if len(gone) == 0 {
				if diff := cmp.Diff(before, raw(t, client)); diff != "" {
					t.Fatalf("a listing has written (-want +got):\n%s", diff)
				}
			}
			if after = page.Next; after == (limit.Slot{}) {
				break
			}
			last := page.Leases[len(page.Leases)-1].Lease
			if r, err := s.Release(storetest.Context(t), limit.Ending{Lease: last}); err != nil || r.Result != limit.Released {
				t.Fatalf("Release = %+v, %v", r, err)
			}
			gone = append(gone, last)
		}
		for _, id := range got {
			if !want[id] {
				t.Fatalf("%s is told twice, or was never granted", id)
			}
			delete(want, id)
		}
		if len(want) > 0 {
			t.Errorf("%d leases are not told", len(want))
		}
		if !slices.IsSortedFunc(got, func(a, b limit.LeaseID) int { return bytes.Compare([]byte(a), []byte(b)) }) {
			t.Error("they are not in the order of their tokens")
		}
		if len(gone) != 2 {
			t.Errorf("there were %d pages before the last, want 2", len(gone))
		}
	})
}

// A page of leases that hold much is short.
func TestAPageOfLeasesIsBoundedByWhatTheyHold(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, _ := open(t, server, storetest.NewClock().Now)
		l := lane(t, 100, time.Minute)
		wide := request()
		for i := range 700 {
			wide.Checks = append(wide.Checks, check(l, fmt.Sprint(i)))
		}
		for range 5 {
			decide(t, s, withLease(wide))
		}
		var sizes []int
		for after := (limit.Slot{}); ; {
			page := leases(t, s, after, limit.MaxListed)
			sizes = append(sizes, len(page.Leases))
			if after = page.Next; after == (limit.Slot{}) {
				break
			}
		}
		if diff := cmp.Diff([]int{2, 2, 1}, sizes); diff != "" { // the second brings 1000
			t.Errorf("leases in each page (-want +got):\n%s", diff)
		}
	})
}

// Of a lease whose record Redis has lost there is its id, and until when its slots are taken.
func TestALeaseWithoutItsRecordIsListed(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock()
		s, client := open(t, server, clock.Now)
		r := withLease(request(check(lane(t, 1, time.Minute), "x")))
		decide(t, s, r)
		clock.Advance(time.Second)
		if err := client.Del(storetest.Context(t), limit.LeaseKey(r.Lease)).Err(); err != nil {
			t.Fatal(err)
		}
		want := limit.Listing{Leases: []limit.Listed{{Lease: r.Lease, ExpiresAfter: 59 * time.Second}}}
		if diff := cmp.Diff(want, leases(t, s, limit.Slot{}, 10)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// What is of a format that is not known is neither listed nor reset, and an error says so; nor
// is anything else of that call.
func TestWhatIsOfALaterFormatIsNotReset(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock()
		s, client := open(t, server, clock.Now)
		own, theirs := check(bucket(t, 5, time.Second), "x"), check(hourly(t, 5), "x")
		decide(t, s, request(own))
		decide(t, openVersion(t, server.URL, clock.Now, "after next"), withLease(request(theirs, check(lane(t, 5, time.Minute), "x"))))
		before := raw(t, client)
		ctx := storetest.Context(t)
		if err := s.Reset(ctx, []limit.Check{own, theirs}); err == nil || !strings.Contains(err.Error(), "state of format") {
			t.Errorf("Reset = %v, want an error about the format", err)
		}
		if _, err := s.Leases(ctx, "d", limit.Slot{}, 10); err == nil || !strings.Contains(err.Error(), "state of format") {
			t.Errorf("Leases = %v, want an error about the format", err)
		}
		if diff := cmp.Diff(before, raw(t, client)); diff != "" {
			t.Errorf("they have written (-want +got):\n%s", diff)
		}
	})
}

// A reset keeps no state alive for longer than it means something.
func TestAResetStateExpiresAsBefore(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, client := open(t, server, nil)
		checks := []limit.Check{check(bucket(t, 5, time.Hour), "x"), check(hourly(t, 5), "x"), check(slides(t, 5), "x"), check(lane(t, 5, time.Minute), "x")}
		decide(t, s, withLease(request(checks...)))
		ctx := storetest.Context(t)
		was := make(map[string]time.Duration)
		for _, c := range checks {
			was[c.Key] = client.PExpireTime(ctx, c.Key).Val()
		}
		if err := s.Reset(ctx, checks); err != nil {
			t.Fatal(err)
		}
		for i, c := range checks {
			got, kept := client.PExpireTime(ctx, c.Key).Val(), i == 1 || i == 2
			if kept && got != was[c.Key] || !kept && got != -2 { // -2: there is no such key
				t.Errorf("%s expires at %v, and before the reset at %v", c.Key, got, was[c.Key])
			}
		}
	})
}
