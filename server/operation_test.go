package server_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
)

// operate is an attempt of an operation: the lease that it gets, or what it is told.
func operate(t testing.TB, client weirv1.LeaseServiceClient, id string, attempt uint32, descriptors ...*weirv1.Descriptor) string {
	t.Helper()
	r, err := client.Acquire(storetest.Context(t), &weirv1.AcquireRequest{Domain: "d", Descriptors: descriptors, OperationId: id, Attempt: attempt})
	switch {
	case err != nil:
		return status.Code(err).String()
	case !r.GetAdmitted():
		return r.GetVerdict().GetReason()
	case r.GetReplayed():
		return "again " + r.GetLease().GetId()
	}
	return r.GetLease().GetId()
}

// C08, T15: an operation that asks again is told of its lease, and takes nothing.
func TestAnOperationThatAsksAgainTakesNothing(t *testing.T) {
	s := serve(t, lanePolicy)
	alice := typed("account", "alice")
	first := operate(t, s.leases, "A", 0, alice)
	if got, want := operate(t, s.leases, "A", 0, alice), "again "+first; got != want {
		t.Errorf("the second A is told %s, want %s", got, want)
	}
	second := operate(t, s.leases, "B", 0, alice)
	if got := operate(t, s.leases, "C", 0, alice); got != "lane_full" {
		t.Errorf("C is told %s, want lane_full", got)
	}
	if got, want := left(acquire(t, s.leases, costing(0, typed("account", "alice")))), "[8 0]"; fmt.Sprint(got) != want {
		t.Errorf("of account=alice are left %v, want %s: two tokens and two slots are taken", got, want)
	}
	if got := operate(t, s.leases, "B", 0, costing(5, typed("account", "alice"))); got != codes.FailedPrecondition.String() {
		t.Errorf("B with a cost of 5 is told %s, want FailedPrecondition", got)
	}
	if got := release(t, s.leases, first); got != "RELEASED" {
		t.Errorf("the release of A finds %s", got)
	}
	if got := operate(t, s.leases, "C", 0, alice); strings.Contains(got, "again") || got == first || got == second || len(got) < 20 {
		t.Errorf("C, which was refused, is told %s, want a lease of its own", got)
	}
	for series, want := range map[string]float64{
		`weir_replayed_total{domain="d"}`:                                                  1,
		`weir_operation_conflicts_total{domain="d",reason="other_request"}`:                1,
		`weir_leases_granted_total{domain="d"}`:                                            3,
		`weir_decisions_total{domain="d",verdict="admitted"}`:                              4,
		`weir_store_errors_total{op="decide",reason="store_error"}`:                        0,
		`weir_checks_total{domain="d",kind="concurrency",limit="account",result="passed"}`: 3,
	} {
		if got := s.metric(t, series); got != want {
			t.Errorf("%s = %v, want %v", series, got, want)
		}
	}
}

func TestAnOperationMayNameItsDescriptorsInAnyOrder(t *testing.T) {
	s := serve(t, lanePolicy)
	first := operate(t, s.leases, "A", 1, typed("account", "alice"), typed("day", "x"))
	if got, want := operate(t, s.leases, "A", 2, typed("day", "x"), typed("account", "alice")), "again "+first; got != want {
		t.Errorf("the same in another order is told %s, want %s", got, want)
	}
}

// Two callers at once under one id get one lease, and one charge.
func TestAnOperationOfTwoCallersAtOnceIsOne(t *testing.T) {
	s := serve(t, lanePolicy)
	leases := make(chan string, 40)
	for range cap(leases) {
		go func() {
			m, err := s.leases.Acquire(storetest.Context(t), &weirv1.AcquireRequest{Domain: "d", OperationId: "Ä", Attempt: 4294967295, Descriptors: []*weirv1.Descriptor{typed("account", "alice")}})
			if err != nil {
				leases <- err.Error()
				return
			}
			leases <- m.GetLease().GetId()
		}()
	}
	first := <-leases
	for range cap(leases) - 1 {
		if other := <-leases; other != first {
			t.Errorf("a caller holds %s, another %s", other, first)
		}
	}
	if got := release(t, s.leases, first); got != "RELEASED" {
		t.Errorf("released: %s", got)
	}
	if got := operate(t, s.leases, "Ä", 4294967295, typed("account", "alice")); got != codes.FailedPrecondition.String() {
		t.Errorf("the latest attempt is told %s after the release, want FailedPrecondition", got)
	}
}

func TestALateAttemptTakesNothing(t *testing.T) {
	s := serve(t, lanePolicy)
	alice := typed("account", "alice")
	lease := operate(t, s.leases, "A", 1, alice)
	if got, want := operate(t, s.leases, "A", 2, alice), "again "+lease; got != want {
		t.Errorf("attempt 2 is told %s, want %s", got, want)
	}
	release(t, s.leases, lease)
	if got := operate(t, s.leases, "A", 1, alice); got != codes.FailedPrecondition.String() {
		t.Errorf("attempt 1 is told %s after the release, want FailedPrecondition", got)
	}
	if got := operate(t, s.leases, "A", 3, alice); len(got) < 20 {
		t.Errorf("attempt 3 is told %s, want a lease", got)
	}
}

// A bucket alone makes a lease if an operation asks: by it the answer is given again.
func TestAnOperationIsKnownForAMinute(t *testing.T) {
	s := serve(t, lanePolicy)
	day := typed("day", "x")
	first := operate(t, s.leases, "A", 0, day)
	if got, want := operate(t, s.leases, "A", 0, day), "again "+first; got != want {
		t.Errorf("the second A is told %s, want %s", got, want)
	}
	s.clock.Advance(time.Minute)
	if got := operate(t, s.leases, "A", 0, day); got == first || len(got) < 20 {
		t.Errorf("A is told %s after a minute, want another lease", got)
	}
	if got := fmt.Sprint(left(acquire(t, s.leases, costing(0, typed("day", "x"))))); got != "[3]" {
		t.Errorf("day=x has %s left, want [3]", got)
	}
}

func TestOperationsHaveBounds(t *testing.T) {
	s := serve(t, lanePolicy)
	for _, test := range []struct {
		id      string
		attempt uint32
		want    string
	}{
		{strings.Repeat("x", 128), 1, ""},
		{strings.Repeat("x", 129), 1, "operation_id has 129 bytes"},
		{"", 1, "there is no operation_id"},
	} {
		_, err := s.leases.Acquire(storetest.Context(t), &weirv1.AcquireRequest{Domain: "d", Descriptors: []*weirv1.Descriptor{typed("day", "x")}, OperationId: test.id, Attempt: test.attempt})
		expectInvalid(t, err, test.want)
	}
}
