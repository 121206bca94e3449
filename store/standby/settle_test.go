package standby_test

import (
	"errors"
	"testing"
	"time"

	"weir/limit"
	"weir/store"
	"weir/store/standby"
	"weir/store/storetest"
)

// What was reserved without the store is settled where it was reserved, and the rest is
// the store's.
func TestAReservationOfThisProcess(t *testing.T) {
	clock := storetest.NewClock()
	o := standby.Options{Mode: limit.ModeLocal, Now: clock.Now}
	s, other := standby.New(o), standby.New(o)
	tokens := hits(check("tokens", hourly(100), limit.DefaultMode), 60)
	tokens.Reserve = time.Minute
	plain := hits(check("plain", hourly(100), limit.DefaultMode), 5)
	r := request(tokens)
	r.Stream = "s"
	d := decide(t, s, r, "x")
	if _, local := d.Lease.Local(); !local || d.TTL != time.Minute {
		t.Fatalf("the lease is %q for %v, want one of a process for a minute", d.Lease, d.TTL)
	}
	left := func() int64 {
		return decide(t, s, request(hits(check("tokens", hourly(100), limit.DefaultMode), 0)), "x").Results[0].Remaining
	}

	byName := limit.Usage{Domain: "d", Lease: d.Lease, Limits: []limit.Used{{Limit: "other"}, {Limit: "tokens", Hits: 20}}}
	if _, _, err := other.Settle(byName); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Settle at another replica: %v, want ErrUnavailable", err)
	}
	all, rest, err := s.Settle(byName)
	want := []limit.Settlement{{Result: limit.NotReserved}, {Result: limit.Settled, Difference: -40}}
	if err != nil || len(all) != 2 || all[0] != want[0] || all[1] != want[1] || len(rest.Checks)+len(rest.Limits) != 0 {
		t.Errorf("Settle by the name = %v, %+v, %v, want %v and nothing for the store", all, rest, err, want)
	}
	if got := left(); got != 80 {
		t.Errorf("%d are left, want 80", got)
	}
	// By the stream, and with a limit that reserved nothing: that is for the store.
	all, rest, err = s.Settle(limit.Usage{Domain: "d", Stream: "s", Checks: []limit.Check{plain, tokens}})
	if err != nil || all[1].Result != limit.AlreadySettled || len(rest.Checks) != 1 || rest.Checks[0].Name != plain.Name || rest.Stream != "s" {
		t.Errorf("Settle by the stream = %v, %+v, %v, want that tokens was settled before, and plain is for the store", all, rest, err)
	}
}

// What the store has reserved and settled, its share follows.
func TestASettlementIsFollowed(t *testing.T) {
	s := standby.New(standby.Options{Mode: limit.ModeLocal, Now: storetest.NewClock().Now})
	tokens := hits(check("tokens", hourly(100), limit.DefaultMode), 60)
	tokens.Reserve = time.Minute
	left := func() int64 {
		return decide(t, s, request(hits(check("tokens", hourly(100), limit.DefaultMode), 0)), "x").Results[0].Remaining
	}
	id := storetest.TestLease("d", 1)
	s.Follow("d", []limit.Check{tokens}, id)
	usage := limit.Usage{Domain: "d", Lease: id, Limits: []limit.Used{{Hits: 10}}}
	_, rest, err := s.Settle(usage)
	if err != nil || len(rest.Limits) != 1 || rest.Lease != id {
		t.Fatalf("Settle leaves %+v, %v, want all of it for the store", rest, err)
	}
	s.FollowUsage(rest, []limit.Settlement{{Result: limit.Settled, Difference: -50}})
	if got := left(); got != 90 {
		t.Errorf("%d are left, want 90", got)
	}
	// By its stream too.
	s.FollowRequest(limit.Request{Domain: "d", Checks: []limit.Check{tokens}, Lease: storetest.TestLease("d", 2), Stream: "s"})
	byStream := limit.Usage{Domain: "d", Stream: "s", Checks: []limit.Check{hits(tokens, 25)}}
	if _, rest, err = s.Settle(byStream); err != nil || len(rest.Checks) != 1 {
		t.Fatalf("Settle leaves %+v, %v, want all of it for the store", rest, err)
	}
	s.FollowUsage(rest, []limit.Settlement{{Result: limit.Settled, Difference: -35}})
	if got := left(); got != 65 {
		t.Errorf("%d are left, want 65", got)
	}
	s.FollowUsage(rest, []limit.Settlement{{Result: limit.Charged, Difference: 25}})
	s.FollowUsage(rest, []limit.Settlement{{Result: limit.AlreadySettled}})
	if got := left(); got != 40 {
		t.Errorf("%d are left, want 40", got)
	}
	// What another replica's lease has reserved was not taken here.
	rest.Stream = "elsewhere"
	s.FollowUsage(rest, []limit.Settlement{{Result: limit.Settled, Difference: -30}})
	if got := left(); got != 40 {
		t.Errorf("%d are left, want 40", got)
	}
	s.FollowUsage(rest, []limit.Settlement{{Result: limit.Settled, Difference: 30}})
	if got := left(); got != 10 {
		t.Errorf("%d are left, want 10", got)
	}
}

// What is told by the stream, and again by the lease, is given back to the share once, also
// beside a reservation of the same limit that is settled only then.
func TestASettlementToldByStreamAndByLeaseIsFollowedOnce(t *testing.T) {
	s := standby.New(standby.Options{Mode: limit.ModeLocal, Now: storetest.NewClock().Now})
	tokens := hits(check("tokens", hourly(100), limit.DefaultMode), 30)
	tokens.Reserve = time.Minute
	second := tokens
	second.Key += ",user=x"
	id := storetest.TestLease("d", 1)
	s.FollowRequest(limit.Request{Domain: "d", Checks: []limit.Check{tokens, second}, Lease: id, Stream: "s"})
	s.Follow("d", []limit.Check{hits(tokens, 50), hits(second, 50)}, storetest.TestLease("d", 2))
	settle := func(u limit.Usage, answer limit.Settlement) {
		t.Helper()
		_, rest, err := s.Settle(u)
		if err != nil || len(rest.Checks)+len(rest.Limits) != 1 {
			t.Fatalf("Settle leaves %+v, %v", rest, err)
		}
		s.FollowUsage(rest, []limit.Settlement{answer})
	}
	used := limit.Usage{Domain: "d", Stream: "s", Checks: []limit.Check{hits(tokens, 10)}}
	settle(used, limit.Settlement{Result: limit.Settled, Difference: -20})
	used.Lease = id // it is sent again, with the lease: the store has settled it before
	settle(used, limit.Settlement{Result: limit.AlreadySettled})
	settle(limit.Usage{Domain: "d", Lease: id, Limits: []limit.Used{{Limit: "tokens", Hits: 25}}}, limit.Settlement{Result: limit.Settled, Difference: -5})
	for key, want := range map[string]int64{tokens.Key: 40, second.Key: 25} {
		c := hits(check("tokens", hourly(100), limit.DefaultMode), 0)
		c.Key = key
		if got := decide(t, s, request(c), "x").Results[0].Remaining; got != want {
			t.Errorf("of %s %d are left, want %d", key, got, want)
		}
	}
}

// A limit that is open keeps nothing here, so that nothing can be settled of it, whoever
// else it would refuse: the usage is the store's.
func TestUsageOfAnOpenLimitRefusesNobody(t *testing.T) {
	s := standby.New(standby.Options{Mode: limit.ModeOpen, Now: storetest.NewClock().Now})
	tokens := hits(check("tokens", hourly(1000), limit.ModeOpen), 400)
	tokens.Reserve = time.Minute
	if d := decide(t, s, request(tokens), "x"); d.Lease != "" || !d.Admitted {
		t.Fatalf("an open limit is decided as %+v, want it admitted without a lease", d)
	}
	u := limit.Usage{Domain: "d", Stream: "s", Checks: []limit.Check{hits(tokens, 150)}}
	if _, rest, err := s.Settle(u); err != nil || len(rest.Checks) != 1 {
		t.Fatalf("Settle leaves %+v, %v, want all of it for the store", rest, err)
	}
	s.FollowUsage(u, []limit.Settlement{{Result: limit.Charged, Difference: 150}})
	other := limit.Check{Key: "weir:{elsewhere}:other", Name: "other", Limit: hourly(5), Hits: 1, FailureMode: limit.ModeOpen}
	if got := told(decide(t, s, limit.Request{Domain: "elsewhere", Checks: []limit.Check{other}}, "x")); got != "admitted open true/open" {
		t.Errorf("the next request, of another domain, is %s, want admitted open true/open", got)
	}
}

// However long the store is away, what is open, closed or can never pass takes no memory.
func TestOnlySharesAreKept(t *testing.T) {
	s := standby.New(standby.Options{Mode: limit.ModeOpen, Now: storetest.NewClock().Now})
	reserves := func(c limit.Check) limit.Check { c.Reserve = time.Minute; return c }
	r := request(
		reserves(check("tokens", hourly(1000), limit.ModeOpen)), check("lane", slots(3), limit.ModeOpen),
		shadow(reserves(check("closed", hourly(1000), limit.ModeClosed))), shadow(reserves(hits(check("never", hourly(10), limit.ModeOpen), 11))),
	)
	for i := range 100 {
		if i%2 == 1 {
			r.Stream, r.Operation = "", limit.Operation{ID: "o", Attempt: uint32(i)}
		}
		if d := decide(t, s, r, "x"); !d.Admitted || d.Lease != "" {
			t.Fatalf("request %d is decided as %+v, want it admitted without a lease", i, d)
		}
	}
	if got := s.Kept(); got != 0 {
		t.Errorf("%d states and leases are kept, want none", got)
	}
}

// Without the store, too, an operation that asks again takes nothing.
func TestAnOperationWithoutTheStore(t *testing.T) {
	s := standby.New(standby.Options{Mode: limit.ModeLocal, Now: storetest.NewClock().Now})
	r := request(check("lane", slots(2), limit.DefaultMode))
	r.Stream, r.Operation = "", limit.Operation{ID: "o", Attempt: 1}
	first, again := decide(t, s, r, "x"), decide(t, s, r, "x")
	if !again.Replayed || again.Lease != first.Lease || again.Results[0].Remaining != 1 {
		t.Errorf("the second try is %+v, want the lease %s", again, first.Lease)
	}
	r.Operation.Body[0] = 1
	if _, err := s.Decide(r, "x"); !errors.Is(err, store.ErrOtherRequest) {
		t.Errorf("for something else: %v, want ErrOtherRequest", err)
	}
}

// Of a bucket or a window alone it is known too.
func TestAnOperationOfABucketAloneTakesNothingTwiceWithoutTheStore(t *testing.T) {
	s := standby.New(standby.Options{Mode: limit.ModeLocal, Now: storetest.NewClock().Now})
	r := request(hits(check("tokens", hourly(100), limit.DefaultMode), 40))
	r.Stream, r.Operation = "", limit.Operation{ID: "o", Attempt: 1}
	decide(t, s, r, "x")
	r.Operation.Attempt = 2
	again := decide(t, s, r, "x")
	if !again.Replayed || again.Results[0].Remaining != 60 {
		t.Errorf("the second try is told again: %t, and %d are left, want true and 60", again.Replayed, again.Results[0].Remaining)
	}
}
