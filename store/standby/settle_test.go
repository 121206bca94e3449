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
	// By the stream the lease is not known here: what the store tells is followed.
	s.Follow("d", []limit.Check{tokens}, storetest.TestLease("d", 2))
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
