package server_test

import (
	"testing"
	"time"

	weirv1 "weir/proto/weir/v1"
	"weir/server"
	"weir/store/memory"
	"weir/store/storetest"
)

// Usage that is settled by the limit's name gives back at once here.
func TestWhatIsSettledHereByNameIsNotRefusedUnasked(t *testing.T) {
	s := remembering(t)
	lease := acquire(t, s.leases, costing(2, typed("b", "x"))).GetLease().GetId()
	script(t, s, "[b=x]", "OVER [OVER 0]", "[b=x]", "OVER [OVER 0]")
	before := s.unasked(t)
	r, err := s.leases.Reconcile(storetest.Context(t), &weirv1.ReconcileRequest{Usage: []*weirv1.LeaseUsage{
		{LeaseId: lease, Limits: []*weirv1.LimitUsage{{Limit: "b", Hits: 1}}},
	}})
	if err != nil || r.GetResults()[0].GetLimits()[0].GetDifference() != -1 {
		t.Fatalf("Reconcile = %v, %v", r, err)
	}
	script(t, s, "[b=x]", "OK [OK 0]")
	if got := s.unasked(t); before != 1 || got != before {
		t.Errorf("%v were refused unasked before the usage was told, and %v then; want 1", before, got)
	}
}

// A bucket that stood under another policy for a while may have gained more than the one that
// came back says.
func TestAPolicyThatCameAndWentIsNotRefusedUnasked(t *testing.T) {
	clock := storetest.NewClock()
	s := serviceWith(t, memory.New(memory.Options{Now: clock.Now}), clock, func(o *server.Options) { o.RememberRefusals = storetest.Deadline })
	slow, fast := "domain: d\ndescriptors:\n  - {key: a, token_bucket: {capacity: 2, refill: 1/h}}\n", "domain: d\ndescriptors:\n  - {key: a, token_bucket: {capacity: 2, refill: 1/s}}\n"
	s.setPolicy(t, slow)
	script(t, s, "[a=x;hits=2]", "OK [OK 0]", "[a=x]", "OVER [OVER 0]", "[a=x]", "OVER [OVER 0]")
	s.setPolicy(t, fast)
	script(t, s, "[a=x]", "OVER [OVER 0]")
	clock.Advance(1500 * time.Millisecond)
	script(t, s, "[a=x;hits=2]", "OVER [OVER 0]") // one has come, and it is not told
	s.setPolicy(t, slow)
	script(t, s, "[a=x]", "OK [OK 0]")
}

// A refusal without asking is no decision of the store: a bucket beside it that stands under an
// older policy gains as that says, until the store is asked for it.
func TestWhatIsRefusedUnaskedCarriesNoBucketOver(t *testing.T) {
	for _, tt := range []struct {
		remember time.Duration
		want     string
	}{{0, "OVER [OVER 0]"}, {time.Second, "OK [OK 0]"}} {
		clock := storetest.NewClock()
		s := serviceWith(t, memory.New(memory.Options{Now: clock.Now}), clock, func(o *server.Options) { o.RememberRefusals = tt.remember })
		const other = "domain: d\ndescriptors:\n  - {key: b, token_bucket: {capacity: 1, refill: 1/h}}\n"
		s.setPolicy(t, other+"  - {key: a, token_bucket: {capacity: 2, refill: 1/s}}\n")
		script(t, s, "[a=x;hits=2]", "OK [OK 0]", "[b=x]", "OK [OK 0]")
		s.setPolicy(t, other+"  - {key: a, token_bucket: {capacity: 2, refill: 1/h}}\n")
		script(t, s, "[b=x]", "OVER [OVER 0]")
		if got := ask(t, s.envoy, "d", "[b=x][a=x]", 0); got[:4] != "OVER" {
			t.Errorf("both: %s, want a refusal", got)
		}
		unasked := s.unasked(t)
		clock.Advance(time.Second)
		got := ask(t, s.envoy, "d", "[a=x]", 0)
		if (unasked > 0) == (tt.remember > 0) && got != tt.want { // on a busy machine it may have been forgotten
			t.Errorf("remembered for %v, a second later: %s, want %s", tt.remember, got, tt.want)
		}
	}
}
