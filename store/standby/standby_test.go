package standby_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"weir/limit"
	"weir/store"
	"weir/store/standby"
	"weir/store/storetest"
)

// check is one of a limit, with a key of its own for each name.
func decide(t *testing.T, s *standby.Standby, r limit.Request, reason string) limit.Decision {
	t.Helper()
	d, err := s.Decide(r, reason)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func check(name string, l limit.Limit, mode limit.FailureMode) limit.Check {
	return limit.Check{Key: "weir:{d}:" + name, Name: name, Limit: l, Hits: 1, FailureMode: mode}
}

func bucket(t testing.TB, capacity, count int64, period time.Duration) limit.Limit {
	t.Helper()
	b, err := limit.NewTokenBucket(capacity, count, period)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func hourly(n int64) limit.Limit { return limit.Window{Max: n, Unit: limit.Hour, Multiplier: 1} }

func slots(n int64) limit.Limit { return limit.Concurrency{Max: n, Lease: time.Minute} }

func request(checks ...limit.Check) limit.Request {
	return limit.Request{Domain: "d", Checks: checks, Stream: "s"}
}

func hits(c limit.Check, n int64) limit.Check { c.Hits = n; return c }

func shadow(c limit.Check) limit.Check { c.Shadow = true; return c }

func quota(c limit.Check, group int) limit.Check { c.Quota = group; return c }

// told is a decision in a line: the verdict with its bypass, and each check with its
// own.
func told(d limit.Decision) string {
	verdict := "refused"
	if d.Admitted {
		verdict = "admitted"
	}
	parts := []string{verdict, by(d.Bypass)}
	for _, r := range d.Results {
		parts = append(parts, fmt.Sprintf("%t/%s", r.Passed, by(r.Bypass)))
	}
	return strings.Join(parts, " ")
}

func by(m limit.FailureMode) string {
	if m == limit.DefaultMode {
		return "-"
	}
	return m.String()
}

func TestEachLimitIsDecidedByItsMode(t *testing.T) {
	const service, open, local, closed = limit.DefaultMode, limit.ModeOpen, limit.ModeLocal, limit.ModeClosed
	one, ban := hourly(1), hourly(0)
	for _, test := range []struct {
		name   string
		mode   limit.FailureMode // the service's
		checks []limit.Check
		want   string
	}{
		{"the service's default", service, []limit.Check{check("a", one, service)}, "admitted open true/open"},
		{"the service's mode", closed, []limit.Check{check("a", one, service)}, "refused closed false/closed"},
		{"a limit's own mode", closed, []limit.Check{check("a", one, open)}, "admitted open true/open"},
		{"local", open, []limit.Check{check("a", one, local)}, "admitted local true/local"},
		{"the strictest is told", open, []limit.Check{check("a", one, service), check("b", one, local)}, "admitted local true/open true/local"},
		{"a refusal in any limit refuses", open, []limit.Check{check("a", one, open), check("b", one, closed), check("c", one, local)}, "refused closed true/open false/closed true/local"},
		{"slots", open, []limit.Check{check("a", slots(1), open), check("b", slots(1), local)}, "admitted local true/open true/local"},
		{"more than the share", open, []limit.Check{hits(check("a", one, local), 1), hits(check("b", hourly(9), local), 10)}, "refused local true/local false/-"},
		{"a ban needs no store", open, []limit.Check{check("a", ban, open)}, "refused - false/-"},
		{"a cost above the capacity needs none", open, []limit.Check{hits(check("a", bucket(t, 5, 1, time.Second), open), 6), check("b", one, open)}, "refused open false/- true/open"},
		{"a shadow refuses nobody", open, []limit.Check{shadow(check("a", one, closed)), check("b", one, open)}, "admitted open false/closed true/open"},
		{"shadows alone", open, []limit.Check{shadow(check("a", one, closed))}, "admitted closed false/closed"},
		{"a refund never refuses", open, []limit.Check{hits(check("a", one, closed), -1)}, "admitted open true/open"},
		{"a question asks too", open, []limit.Check{hits(check("a", one, closed), 0)}, "refused closed false/closed"},
		{"a question of a share passes", open, []limit.Check{hits(check("a", one, local), 0)}, "admitted local true/local"},
		{"a quota with another that is free", open, []limit.Check{quota(check("a", one, closed), 1), quota(check("b", one, open), 2)}, "admitted closed false/closed true/open"},
		{"quotas that are all closed", open, []limit.Check{quota(check("a", one, closed), 1), quota(check("b", one, closed), 2)}, "refused closed false/closed false/closed"},
	} {
		s := standby.New(standby.Options{Mode: test.mode, Now: storetest.NewClock().Now})
		d := decide(t, s, request(test.checks...), "store_timeout")
		if got := told(d); got != test.want {
			t.Errorf("%s: %s, want %s", test.name, got, test.want)
		}
		if want := map[bool]string{true: "store_timeout"}[d.Bypass != service]; d.BypassReason != want {
			t.Errorf("%s: the reason is %q, want %q", test.name, d.BypassReason, want)
		}
	}
}

func TestARefusalHereTakesNothing(t *testing.T) {
	s := standby.New(standby.Options{Now: storetest.NewClock().Now})
	a, b := check("a", hourly(1), limit.ModeLocal), check("b", hourly(1), limit.ModeLocal)
	lane, gate := check("lane", slots(1), limit.ModeLocal), check("gate", hourly(1), limit.ModeClosed)
	for i, step := range []struct {
		checks   []limit.Check
		admitted bool
	}{
		{[]limit.Check{a, lane, gate}, false},
		{[]limit.Check{b}, true},
		{[]limit.Check{a, lane, b}, false},
		{[]limit.Check{a, lane}, true},
		{[]limit.Check{a}, false},
		{[]limit.Check{lane}, false},
	} {
		if d := decide(t, s, request(step.checks...), "x"); d.Admitted != step.admitted {
			t.Errorf("step %d: %s, want admitted %t", i, told(d), step.admitted)
		}
	}
}

func TestTheSharesOfAllReplicasAreNeverMoreThanTheLimit(t *testing.T) {
	const n = 20
	for _, replicas := range []int{1, 2, 3, 7, 20, 21} {
		for _, l := range []limit.Limit{bucket(t, n, 1, time.Hour), hourly(n), slots(n)} {
			total := 0
			for range replicas {
				s := standby.New(standby.Options{Mode: limit.ModeLocal, Replicas: replicas, Now: storetest.NewClock().Now})
				for range 2 * n {
					if decide(t, s, request(check("a", l, limit.DefaultMode)), "x").Admitted {
						total++
					}
				}
			}
			if want := n / replicas * replicas; total != want {
				t.Errorf("%d replicas admit %d by %T of %d, want %d", replicas, total, l, n, want)
			}
		}
	}
}

func TestAFractionIsOfTheLimit(t *testing.T) {
	s := standby.New(standby.Options{Replicas: 2, Now: storetest.NewClock().Now})
	c := check("a", hourly(100), limit.ModeLocal)
	c.Fraction = limit.Whole / 5
	got := 0
	for decide(t, s, request(c), "x").Admitted {
		got++
	}
	if got != 10 {
		t.Errorf("a fifth of 100 for two is %d, want 10", got)
	}
}

// What the store has admitted counts, as far as the share goes: there is no burst when
// the store goes, and no debt.
func TestSharesFollowWhatTheStoreAdmits(t *testing.T) {
	clock := storetest.NewClock()
	s := standby.New(standby.Options{Mode: limit.ModeLocal, Replicas: 2, Now: clock.Now})
	tokens, window, lane := check("a", bucket(t, 10, 1, time.Second), limit.DefaultMode), check("b", hourly(10), limit.DefaultMode), check("c", slots(4), limit.DefaultMode)
	admits := func(c limit.Check) (n int) {
		for decide(t, s, request(c), "x").Admitted {
			n++
		}
		return n
	}
	id := limit.NewLeaseID("d", [16]byte{1})
	for range 3 {
		s.Follow("d", []limit.Check{tokens, window}, "")
	}
	s.Follow("d", []limit.Check{lane, check("open", slots(4), limit.ModeOpen)}, id)
	if a, b, c := admits(tokens), admits(window), admits(lane); a != 2 || b != 2 || c != 1 {
		t.Errorf("after 3 of 5, 3 of 5 and 1 of 2 there are %d, %d and %d left, want 2, 2 and 1", a, b, c)
	}
	for range 100 { // more than the share is no debt
		s.Follow("d", []limit.Check{tokens, window}, "")
	}
	clock.Advance(2 * time.Second)
	if got := admits(tokens); got != 1 {
		t.Errorf("after 2 s at 1 token in 2 s there is %d, want 1", got)
	}
	if n, mine, err := s.Renew(limit.Extension{Lease: id}); !n.Renewed || mine || err != nil {
		t.Errorf("Renew of what follows = %v, %t, %v; want it renewed, and not kept here", n, mine, err)
	}
	if r, mine, err := s.Release(limit.Ending{Lease: id}); r.Result != limit.Released || mine || err != nil {
		t.Errorf("Release of what follows = %v, %t, %v; want it released, and not kept here", r, mine, err)
	}
	if got := admits(lane); got != 1 {
		t.Errorf("after its release there is %d slot, want 1", got)
	}
}

// A limit that reserves and did not pass, as one in shadow, has no lease; the others of its
// request are followed all the same.
func TestWhatIsAdmittedBesideAShadowThatReservesIsFollowed(t *testing.T) {
	s := standby.New(standby.Options{Mode: limit.ModeLocal, Now: storetest.NewClock().Now})
	plain := hits(check("plain", hourly(10), limit.DefaultMode), 7)
	over := shadow(hits(check("over", hourly(10), limit.DefaultMode), 1))
	over.Reserve = time.Minute
	s.Follow("d", []limit.Check{plain, over}, "") // over did not pass at the store
	if got := decide(t, s, request(hits(plain, 0)), "x").Results[0].Remaining; got != 3 {
		t.Errorf("%d are left of the share, want 3", got)
	}
	if got := s.Unfollowed(); got != 0 {
		t.Errorf("%d were not followed, want none", got)
	}
}

// A slot that the store granted to a stream is free in the share when the stream's end is
// told.
func TestTheEndOfAStreamIsFollowed(t *testing.T) {
	s := standby.New(standby.Options{Mode: limit.ModeLocal, Now: storetest.NewClock().Now})
	lane := check("lane", slots(1), limit.DefaultMode)
	s.FollowRequest(limit.Request{Domain: "d", Checks: []limit.Check{lane}, Lease: storetest.TestLease("d", 1), Stream: "a"})
	if d := decide(t, s, request(lane), "x"); d.Admitted {
		t.Fatal("the slot is free")
	}
	if _, mine, err := s.Release(limit.Ending{Domain: "d", Stream: "a", Tombstone: true}); mine || err != nil {
		t.Errorf("Release by the stream = %t, %v, want that the store is asked", mine, err)
	}
	if d := decide(t, s, request(lane), "x"); !d.Admitted {
		t.Error("the slot is not free when its stream has ended")
	}
}

func TestALeaseOfThisProcess(t *testing.T) {
	clock := storetest.NewClock()
	o := standby.Options{Mode: limit.ModeLocal, Now: clock.Now}
	s, other := standby.New(o), standby.New(o)
	lane := check("lane", slots(1), limit.DefaultMode)
	d := decide(t, s, request(lane), "x")
	if _, local := d.Lease.Local(); !local || d.TTL != time.Minute {
		t.Fatalf("the lease is %q for %v, want one of a process for a minute", d.Lease, d.TTL)
	}
	if _, err := limit.ParseLeaseID(string(d.Lease)); err != nil {
		t.Error(err)
	}
	// Another replica may hear of it, and whoever asks again comes to this one.
	if _, mine, err := other.Release(limit.Ending{Lease: d.Lease}); !mine || !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Release at another replica = %t, %v, want ErrUnavailable", mine, err)
	}
	if _, mine, err := other.Renew(limit.Extension{Lease: d.Lease}); !mine || !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Renew at another replica = %t, %v, want ErrUnavailable", mine, err)
	}
	clock.Advance(50 * time.Second)
	if n, mine, err := s.Renew(limit.Extension{Lease: d.Lease}); !n.Renewed || n.TTL != time.Minute || !mine || err != nil {
		t.Errorf("Renew = %v, %t, %v", n, mine, err)
	}
	for _, want := range []limit.ReleaseResult{limit.Released, limit.NotHeld} {
		if r, mine, err := s.Release(limit.Ending{Lease: d.Lease}); r.Result != want || !mine || err != nil {
			t.Errorf("Release = %v, %t, %v, want %v", r.Result, mine, err, want)
		}
	}
	// By its stream, which is the store's affair unless it holds something here.
	named := request(lane)
	named.Stream = "named"
	if d = decide(t, s, named, "x"); !d.Admitted {
		t.Fatal("the slot is not free")
	}
	byStream := limit.Ending{Domain: "d", Stream: "named", Tombstone: true}
	if r, mine, err := s.Release(byStream); r.Result != limit.Released || !mine || err != nil {
		t.Errorf("Release by the stream = %v, %t, %v", r.Result, mine, err)
	}
	if _, mine, err := s.Release(byStream); mine || err != nil {
		t.Errorf("another Release by the stream = %t, %v, want that the store is asked", mine, err)
	}
	unknown := limit.Ending{Domain: "d", Stream: "unknown", Tombstone: true}
	if _, mine, err := s.Release(unknown); mine || err != nil {
		t.Errorf("Release by a stream that is not known = %t, %v, want that the store is asked", mine, err)
	}
	named.Stream = "unknown"
	if d = decide(t, s, named, "x"); !d.Admitted {
		t.Error("a tombstone was left here: they are the store's")
	}
	clock.Advance(time.Minute)
	if r, mine, err := s.Release(limit.Ending{Lease: d.Lease}); r.Result != limit.Expired || !mine || err != nil {
		t.Errorf("Release after its life = %v, %t, %v, want EXPIRED", r.Result, mine, err)
	}
}

// What can never pass is no business of the share, which it must not turn into the
// whole limit for a while.
func TestWhatCanNeverPassDoesNotRefillAShare(t *testing.T) {
	clock := storetest.NewClock()
	s := standby.New(standby.Options{Mode: limit.ModeLocal, Replicas: 10, Now: clock.Now})
	c := check("a", bucket(t, 10, 10, time.Second), limit.DefaultMode)
	admitted := 0
	for range 20 {
		if decide(t, s, request(c), "x").Admitted {
			admitted++
		}
		if d := decide(t, s, request(hits(c, 11)), "x"); d.Admitted {
			t.Fatal("a cost above the capacity is admitted")
		}
		clock.Advance(100 * time.Millisecond)
	}
	if admitted != 2 { // the first, and one a second
		t.Errorf("%d of 20 are admitted within 1.9 s by a share of 1/s, want 2", admitted)
	}
}

// What is followed has a bound, and what is beyond is counted and has its whole share.
func TestFollowingHasABound(t *testing.T) {
	clock := storetest.NewClock()
	s := standby.New(standby.Options{Mode: limit.ModeLocal, Now: clock.Now, MaxFollowed: 3})
	for i := range 10 {
		s.Follow("d", []limit.Check{check(fmt.Sprint(i), hourly(1), limit.DefaultMode)}, "")
	}
	if got := s.Unfollowed(); got != 7 {
		t.Errorf("%d of 10 were not followed, want 7", got)
	}
	for i := range 10 {
		if got, want := decide(t, s, request(check(fmt.Sprint(i), hourly(1), limit.DefaultMode)), "x").Admitted, i >= 3; got != want {
			t.Errorf("subject %d of 10: admitted %t, want %t", i, got, want)
		}
	}
	clock.Advance(2 * time.Hour)
	for range 10 {
		s.Forget()
	}
	s.Follow("d", []limit.Check{check("later", hourly(1), limit.DefaultMode)}, "")
	if got := s.Unfollowed(); got != 7 {
		t.Errorf("%d were not followed, when all before was forgotten", got)
	}
}
