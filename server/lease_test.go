package server_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
)

const lanePolicy = `
domain: d
descriptors:
  - key: account
    token_bucket: {capacity: 10, refill: 1/s}
    concurrency: {max_in_flight: 2, lease: 2m}
  - {key: pool, value: images, concurrency: {max_in_flight: 1, lease: 90s}, reject_as: pool}
  - {key: day, rate_limit: {unit: day, requests_per_unit: 5}}
  - {key: trial, token_bucket: {capacity: 1, refill: 1/10s}, shadow_mode: true}
  - {key: free, rate_limit: {unlimited: true}}
`

// typed is a descriptor of LeaseService, of keys and values.
func typed(entries ...string) *weirv1.Descriptor {
	d := &weirv1.Descriptor{}
	for e := range slices.Chunk(entries, 2) {
		d.Entries = append(d.Entries, &weirv1.Entry{Key: e[0], Value: e[1]})
	}
	return d
}

func costing(hits uint64, d *weirv1.Descriptor) *weirv1.Descriptor {
	d.Hits = &hits
	return d
}

func refunding(d *weirv1.Descriptor) *weirv1.Descriptor {
	d.Refund = true
	return d
}

func acquire(t testing.TB, client weirv1.LeaseServiceClient, descriptors ...*weirv1.Descriptor) *weirv1.AcquireResponse {
	t.Helper()
	r, err := client.Acquire(storetest.Context(t), &weirv1.AcquireRequest{Domain: "d", Descriptors: descriptors})
	if err != nil {
		t.Fatalf("Acquire(%v): %v", descriptors, err)
	}
	return r
}

// release returns the results as words.
func release(t testing.TB, client weirv1.LeaseServiceClient, ids ...string) string {
	t.Helper()
	r, err := client.Release(storetest.Context(t), &weirv1.ReleaseRequest{LeaseIds: ids})
	if err != nil {
		t.Fatalf("Release(%q): %v", ids, err)
	}
	var words []string
	for _, result := range r.GetResults() {
		words = append(words, strings.TrimPrefix(result.GetStatus().String(), "RELEASE_STATUS_"))
	}
	return strings.Join(words, " ")
}

func renew(t testing.TB, client weirv1.LeaseServiceClient, ids ...string) string {
	t.Helper()
	r, err := client.Renew(storetest.Context(t), &weirv1.RenewRequest{LeaseIds: ids})
	if err != nil {
		t.Fatalf("Renew(%q): %v", ids, err)
	}
	var words []string
	for _, result := range r.GetResults() {
		word := strings.TrimPrefix(result.GetStatus().String(), "RENEW_STATUS_")
		if ttl := result.GetTtl().AsDuration(); ttl != 0 {
			word += fmt.Sprintf("(%v,%v)", ttl, result.GetRenewAfter().AsDuration())
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

// left are the remaining numbers of an answer, in order.
func left(r *weirv1.AcquireResponse) []uint64 {
	var n []uint64
	for _, s := range r.GetStatuses() {
		for _, l := range s.GetLimits() {
			n = append(n, l.GetRemaining())
		}
	}
	return n
}

func expectAnswer(t *testing.T, what string, got, want proto.Message) {
	t.Helper()
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// S6, S7, S8, S13: the typed answers, in full.
func TestAcquireTellsTheDecisionInFull(t *testing.T) {
	s := serve(t, lanePolicy)
	bucket := func(remaining uint64, reset time.Duration, passed bool) *weirv1.LimitStatus {
		return &weirv1.LimitStatus{Name: "account", Kind: weirv1.LimitKind_LIMIT_KIND_TOKEN_BUCKET, Capacity: 10, Remaining: remaining, ResetAfter: durationpb.New(reset), Passed: passed}
	}
	slots := func(name string, capacity, remaining uint64, passed bool) *weirv1.LimitStatus {
		return &weirv1.LimitStatus{Name: name, Kind: weirv1.LimitKind_LIMIT_KIND_CONCURRENCY, Capacity: capacity, Remaining: remaining, Passed: passed}
	}
	untilMidnight := durationpb.New(12 * time.Hour) // the clock stands at noon

	// Everything at once: limits, a shadow, unlimited, and what meets nothing.
	got := acquire(t, s.leases,
		typed("account", "alice"), typed("pool", "images"), typed("day", "x"), typed("trial", "x"), typed("free", "x"), typed("nobody", "x"))
	id := got.GetLease().GetId()
	if !strings.HasSuffix(id, ".d") || len(id) != 24 {
		t.Errorf("the lease id is %q, want 22 characters and .d", id)
	}
	expectAnswer(t, "admitted", got, &weirv1.AcquireResponse{
		Admitted: true,
		Verdict:  &weirv1.Verdict{},
		Lease:    &weirv1.Lease{Id: id, Ttl: durationpb.New(90 * time.Second), RenewAfter: durationpb.New(30 * time.Second)},
		Statuses: []*weirv1.DescriptorStatus{
			{Limits: []*weirv1.LimitStatus{bucket(9, time.Second, true), slots("account", 2, 1, true)}},
			{Limits: []*weirv1.LimitStatus{slots("pool", 1, 0, true)}},
			{Limits: []*weirv1.LimitStatus{{Name: "day", Kind: weirv1.LimitKind_LIMIT_KIND_WINDOW, Capacity: 5, Remaining: 4, ResetAfter: untilMidnight, Passed: true}}},
			{Limits: []*weirv1.LimitStatus{{Name: "trial", Kind: weirv1.LimitKind_LIMIT_KIND_TOKEN_BUCKET, Remaining: 0, Capacity: 1, ResetAfter: durationpb.New(10 * time.Second), Passed: true, Shadow: true}}},
			{Unlimited: true},
			{},
		},
	})

	// The bucket is short and the pool is full: both are told, with what truly
	// remains, and the exact wait is the longer.
	got = acquire(t, s.leases, typed("pool", "images"), costing(10, typed("account", "alice")))
	full := &weirv1.Violation{Limit: "pool", Class: weirv1.Class_CLASS_POOL, Reason: "pool_full", RetryAfter: durationpb.New(time.Second), Estimated: true, Retryable: true}
	short := &weirv1.Violation{Limit: "account", Class: weirv1.Class_CLASS_LANE, Reason: "bucket_empty", RetryAfter: durationpb.New(time.Second), Retryable: true}
	expectAnswer(t, "refused by two", got, &weirv1.AcquireResponse{
		Verdict: &weirv1.Verdict{
			Class: weirv1.Class_CLASS_LANE, Reason: "bucket_empty", Limit: "account", RetryAfter: durationpb.New(time.Second), Retryable: true,
			Violations: []*weirv1.Violation{short, full},
		},
		Statuses: []*weirv1.DescriptorStatus{
			{Limits: []*weirv1.LimitStatus{slots("pool", 1, 0, false)}},
			{Limits: []*weirv1.LimitStatus{bucket(9, time.Second, false), slots("account", 2, 1, true)}},
		},
	})

	// The pool alone.
	got = acquire(t, s.leases, typed("pool", "images"), typed("account", "alice"))
	expectAnswer(t, "refused by the pool", got.GetVerdict(), &weirv1.Verdict{
		Class: weirv1.Class_CLASS_POOL, Reason: "pool_full", Limit: "pool", RetryAfter: durationpb.New(time.Second), Estimated: true, Retryable: true,
		Violations: []*weirv1.Violation{full},
	})

	// What can never pass has no wait.
	got = acquire(t, s.leases, costing(11, typed("account", "alice")), typed("pool", "images"))
	expectAnswer(t, "refused for ever", got.GetVerdict(), &weirv1.Verdict{
		Class: weirv1.Class_CLASS_LANE, Reason: "cost_exceeds_capacity", Limit: "account",
		Violations: []*weirv1.Violation{{Limit: "account", Class: weirv1.Class_CLASS_LANE, Reason: "cost_exceeds_capacity"}, full},
	})

	// A shadow limit that would refuse is told with an admitted request.
	got = acquire(t, s.leases, typed("trial", "x"))
	expectAnswer(t, "shadowed", got, &weirv1.AcquireResponse{
		Admitted: true,
		Verdict: &weirv1.Verdict{Shadowed: []*weirv1.Violation{
			{Limit: "trial", Class: weirv1.Class_CLASS_LANE, Reason: "bucket_empty", RetryAfter: durationpb.New(10 * time.Second), Retryable: true},
		}},
		Statuses: []*weirv1.DescriptorStatus{
			{Limits: []*weirv1.LimitStatus{{Name: "trial", Kind: weirv1.LimitKind_LIMIT_KIND_TOKEN_BUCKET, Capacity: 1, ResetAfter: durationpb.New(10 * time.Second), Shadow: true}}},
		},
	})

	// Nothing held, nothing to release.
	if got := acquire(t, s.leases, typed("day", "x")); got.GetLease() != nil {
		t.Errorf("a request without concurrency has the lease %v, want none", got.GetLease())
	}
}

// T29: the wait does not depend on the order of the descriptors, and is an
// estimate only if nothing exact waits longer.
func TestTheCombinedWaitIsTheLongestInAnyOrder(t *testing.T) {
	s := serve(t, `
domain: d
descriptors:
  - {key: soon, token_bucket: {capacity: 1, refill: 1/2500ms}}
  - {key: late, token_bucket: {capacity: 1, refill: 1/20s}}
  - {key: lane, concurrency: {max_in_flight: 1, lease: 2m}}
`)
	// A lane that is held for 4 s at a time makes the estimate 4 s.
	first := acquire(t, s.leases, typed("lane", "x"))
	s.clock.Advance(4 * time.Second)
	if got := release(t, s.leases, first.GetLease().GetId()); got != "RELEASED" {
		t.Fatalf("release: %s", got)
	}
	soon, late, lane := typed("soon", "x"), typed("late", "x"), typed("lane", "x")
	if !acquire(t, s.leases, soon, late, lane).GetAdmitted() {
		t.Fatal("the first is refused")
	}
	var want *weirv1.Verdict
	for _, order := range [][]*weirv1.Descriptor{
		{soon, late, lane}, {soon, lane, late}, {late, soon, lane}, {late, lane, soon}, {lane, soon, late}, {lane, late, soon},
	} {
		got := acquire(t, s.leases, order...).GetVerdict()
		if want == nil {
			want = got
		}
		expectAnswer(t, fmt.Sprint(order), got, want)
	}
	var violated []string
	for _, v := range want.GetViolations() {
		violated = append(violated, fmt.Sprintf("%s %v %v", v.GetLimit(), v.GetRetryAfter().AsDuration(), v.GetEstimated()))
	}
	if diff := cmp.Diff([]string{"late 20s false", "lane 4s true", "soon 2.5s false"}, violated); diff != "" {
		t.Errorf("violations (-want +got):\n%s", diff)
	}
	if got := want.GetRetryAfter().AsDuration(); got != 20*time.Second || want.GetEstimated() || want.GetLimit() != "late" {
		t.Errorf("retry after %v for %s, estimated %v; want exactly 20s for late", got, want.GetLimit(), want.GetEstimated())
	}
	alone := acquire(t, s.leases, lane).GetVerdict()
	if got := alone.GetRetryAfter().AsDuration(); got != 4*time.Second || !alone.GetEstimated() {
		t.Errorf("retry after %v for the lane alone, estimated %v; want an estimated 4s", got, alone.GetEstimated())
	}
}

// S9: the cost of a request and of a descriptor, 0 and refunds.
func TestAcquireChargesTheDescriptorsHitsElseTheRequests(t *testing.T) {
	for _, test := range []struct {
		name string
		ask  *weirv1.AcquireRequest
		want []uint64 // left, after 3 of 5 were taken
	}{
		{"one by default", &weirv1.AcquireRequest{Descriptors: []*weirv1.Descriptor{typed("day", "x")}}, []uint64{1}},
		{"the request's hits", &weirv1.AcquireRequest{Hits: proto.Uint64(2), Descriptors: []*weirv1.Descriptor{typed("day", "x")}}, []uint64{0}},
		{"the request's 0 asks without charging", &weirv1.AcquireRequest{Hits: proto.Uint64(0), Descriptors: []*weirv1.Descriptor{typed("day", "x")}}, []uint64{2}},
		{"the descriptor's own hits", &weirv1.AcquireRequest{Hits: proto.Uint64(7), Descriptors: []*weirv1.Descriptor{costing(2, typed("day", "x"))}}, []uint64{0}},
		{"the descriptor's 0 asks without charging", &weirv1.AcquireRequest{Descriptors: []*weirv1.Descriptor{costing(0, typed("day", "x"))}}, []uint64{2}},
		{"a refund", &weirv1.AcquireRequest{Descriptors: []*weirv1.Descriptor{refunding(costing(2, typed("day", "x")))}}, []uint64{4}},
		{"a refund of more than was taken", &weirv1.AcquireRequest{Descriptors: []*weirv1.Descriptor{refunding(costing(1<<64-1, typed("day", "x")))}}, []uint64{5}},
		{"a refund of the request's hits", &weirv1.AcquireRequest{Hits: proto.Uint64(2), Descriptors: []*weirv1.Descriptor{refunding(typed("day", "x"))}}, []uint64{4}},
		{"the same limit twice is one check", &weirv1.AcquireRequest{Descriptors: []*weirv1.Descriptor{typed("day", "x"), typed("day", "x")}}, []uint64{0, 0}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := serve(t, lanePolicy)
			acquire(t, s.leases, costing(3, typed("day", "x")))
			test.ask.Domain = "d"
			r, err := s.leases.Acquire(storetest.Context(t), test.ask)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, left(r)); diff != "" || !r.GetAdmitted() {
				t.Errorf("admitted %v, left (-want +got):\n%s", r.GetAdmitted(), diff)
			}
		})
	}
}

// S9: a slot is taken whatever the hits, and none by a refund.
func TestACostOfZeroTakesASlotAndARefundTakesNone(t *testing.T) {
	s := serve(t, lanePolicy)
	if r := acquire(t, s.leases, costing(0, typed("pool", "images"))); !r.GetAdmitted() || r.GetLease() == nil {
		t.Errorf("hits 0: %v, want a lease", r)
	}
	if r := acquire(t, s.leases, refunding(typed("pool", "images"))); !r.GetAdmitted() || r.GetLease() != nil {
		t.Errorf("refund: %v, want admission without a lease", r)
	}
	if r := acquire(t, s.leases, costing(0, typed("pool", "images"))); r.GetAdmitted() {
		t.Errorf("hits 0 on a full pool: %v, want a refusal", r)
	}
	const misuse = `weir_misuse_total{domain="d",reason="negative_hits_on_concurrency"}`
	if got := s.metric(t, misuse); got != 1 {
		t.Errorf("%s is %v, want 1", misuse, got)
	}
}

func TestReservedEntriesOfAnAcquireAreStripped(t *testing.T) {
	s := serve(t, lanePolicy)
	acquire(t, s.leases, costing(3, typed("day", "x")))
	for _, d := range []*weirv1.Descriptor{
		typed("weir.stream_id", "s", "day", "x"),
		typed("day", "x", "weir.event", "release", "weir.lease_id", "nonsense"),
		typed("weir.", "", "day", "x", "weir.later", "y"),
	} {
		if got := left(acquire(t, s.leases, costing(0, d))); !slices.Equal(got, []uint64{2}) {
			t.Errorf("Acquire(%v) leaves %v, want [2]: that of day=x", d, got)
		}
	}
	got := acquire(t, s.leases, typed("weir.stream_id", "s"))
	expectAnswer(t, "a descriptor of reserved entries alone", got, &weirv1.AcquireResponse{
		Admitted: true, Verdict: &weirv1.Verdict{}, Statuses: []*weirv1.DescriptorStatus{{}},
	})
}

func TestRequestsOutOfBoundsAreInvalid(t *testing.T) {
	s := serve(t, lanePolicy)
	many := func(n int, entries ...string) []*weirv1.Descriptor {
		return slices.Repeat([]*weirv1.Descriptor{typed(entries...)}, n)
	}
	for _, test := range []struct {
		name string
		ask  *weirv1.AcquireRequest
		want string // in the error; "" for none
	}{
		{"no domain", &weirv1.AcquireRequest{Descriptors: many(1, "day", "x")}, "domain is empty"},
		{"a domain of 256 bytes", &weirv1.AcquireRequest{Domain: strings.Repeat("d", 256), Descriptors: many(1, "day", "x")}, ""},
		{"a longer domain", &weirv1.AcquireRequest{Domain: strings.Repeat("d", 257), Descriptors: many(1, "day", "x")}, "domain has 257 bytes; use at most 256"},
		{"no descriptors", &weirv1.AcquireRequest{Domain: "d"}, "descriptors is empty"},
		{"1024 descriptors", &weirv1.AcquireRequest{Domain: "d", Hits: proto.Uint64(0), Descriptors: many(1024, "day", "x")}, ""},
		{"more descriptors", &weirv1.AcquireRequest{Domain: "d", Descriptors: many(1025, "day", "x")}, "descriptors has 1025 elements; send at most 1024"},
		{"no entries", &weirv1.AcquireRequest{Domain: "d", Descriptors: []*weirv1.Descriptor{typed("day", "x"), typed()}}, "descriptors[1].entries is empty"},
		{"64 entries", &weirv1.AcquireRequest{Domain: "d", Descriptors: many(1, slices.Repeat([]string{"day", "x"}, 64)...)}, ""},
		{"more entries", &weirv1.AcquireRequest{Domain: "d", Descriptors: many(1, slices.Repeat([]string{"day", "x"}, 65)...)}, "descriptors[0].entries has 65 elements"},
		{"an empty key", &weirv1.AcquireRequest{Domain: "d", Descriptors: many(1, "", "x")}, "descriptors[0].entries[0].key is empty"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := s.leases.Acquire(storetest.Context(t), test.ask)
			expectInvalid(t, err, test.want)
		})
	}
	if got := left(acquire(t, s.leases, costing(0, typed("day", "x")))); !slices.Equal(got, []uint64{5}) {
		t.Errorf("afterwards day=x has %v left, want [5]: nothing is charged in part", got)
	}

	id := acquire(t, s.leases, typed("account", "alice")).GetLease().GetId()
	for _, test := range []struct {
		name string
		ids  []string
		want string
	}{
		{"no leases", nil, "no lease ids"},
		{"more than 1000 leases", slices.Repeat([]string{id}, 1001), "1001 lease ids, at most 1000"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := s.leases.Release(storetest.Context(t), &weirv1.ReleaseRequest{LeaseIds: test.ids})
			expectInvalid(t, err, test.want)
			_, err = s.leases.Renew(storetest.Context(t), &weirv1.RenewRequest{LeaseIds: test.ids})
			expectInvalid(t, err, test.want)
		})
	}
	if got := release(t, s.leases, id); got != "RELEASED" {
		t.Errorf("afterwards the lease is %s, want RELEASED: nothing is released in part", got)
	}
}

// expectInvalid wants INVALID_ARGUMENT with the text, or no error for "".
func expectInvalid(t *testing.T, err error, want string) {
	t.Helper()
	switch s := status.Convert(err); {
	case want == "" && err != nil:
		t.Errorf("%v, want an answer", err)
	case want != "" && (s.Code() != codes.InvalidArgument || !strings.Contains(s.Message(), want)):
		t.Errorf("%v, want INVALID_ARGUMENT with %q", err, want)
	}
}

// T09, T10: only the first release ends a lease, and only that one.
func TestReleaseAnswersEachLeaseInOrder(t *testing.T) {
	s := serve(t, lanePolicy)
	a := acquire(t, s.leases, typed("account", "alice")).GetLease().GetId()
	b := acquire(t, s.leases, typed("account", "alice")).GetLease().GetId()
	if acquire(t, s.leases, typed("account", "alice")).GetAdmitted() {
		t.Error("a third is admitted to a lane of two")
	}
	unknown := strings.Repeat("A", 22) + ".d"
	if got, want := release(t, s.leases, unknown, a, "zzz", ""), "NOT_HELD RELEASED NOT_HELD NOT_HELD"; got != want {
		t.Errorf("Release(unknown, a, zzz, empty) = %s, want %s", got, want)
	}
	if got, want := release(t, s.leases, a), "NOT_HELD"; got != want {
		t.Errorf("a again: %s, want %s", got, want)
	}
	// The token of a lease under another domain's name is another lease.
	if got, want := release(t, s.leases, strings.TrimSuffix(b, "d")+"other"), "NOT_HELD"; got != want {
		t.Errorf("b of another domain: %s, want %s", got, want)
	}
	if got, want := release(t, s.leases, b), "RELEASED"; got != want {
		t.Errorf("b: %s, want %s", got, want)
	}
	c := acquire(t, s.leases, typed("account", "alice")).GetLease().GetId()
	s.clock.Advance(2 * time.Minute)
	if got, want := release(t, s.leases, c), "EXPIRED"; got != want {
		t.Errorf("c, late: %s, want %s", got, want)
	}
}

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

// Results stand in the order of the ids, though many are asked at once.
func TestResultsOfManyReleasesAreInOrder(t *testing.T) {
	s := serve(t, `
domain: d
descriptors: [{key: lane, concurrency: {max_in_flight: 1000, lease: 2m}}]
`)
	var ids, want []string
	for i := range 1000 {
		if i%3 == 0 {
			ids, want = append(ids, acquire(t, s.leases, typed("lane", "x")).GetLease().GetId()), append(want, "RELEASED")
		} else {
			ids, want = append(ids, fmt.Sprintf("%022d.d", i)), append(want, "NOT_HELD")
		}
	}
	got := strings.Fields(release(t, s.leases, ids...))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("1000 releases (-want +got):\n%s", diff)
	}
	if got := s.metric(t, `weir_leases_held{domain="d"}`); got != 0 {
		t.Errorf("%v leases are held, want none", got)
	}
}

// T11: a renewal extends a live lease, and revives none.
func TestRenewExtendsAndNeverRevives(t *testing.T) {
	s := serve(t, lanePolicy)
	a := acquire(t, s.leases, typed("pool", "images")).GetLease().GetId()
	s.clock.Advance(60 * time.Second)
	if got, want := renew(t, s.leases, a, "zzz", strings.Repeat("A", 22)+".d"), "RENEWED(1m30s,30s) LOST LOST"; got != want {
		t.Errorf("Renew(a, zzz, unknown) = %s, want %s", got, want)
	}
	s.clock.Advance(90*time.Second - time.Millisecond)
	if acquire(t, s.leases, typed("pool", "images")).GetAdmitted() {
		t.Error("the pool is free while a renewed lease is live")
	}
	s.clock.Advance(time.Millisecond)
	if got, want := renew(t, s.leases, a), "LOST"; got != want {
		t.Errorf("after its expiry: %s, want %s", got, want)
	}
	b := acquire(t, s.leases, typed("pool", "images"))
	if !b.GetAdmitted() {
		t.Error("the pool is taken by a lease that was lost")
	}
	if got, want := release(t, s.leases, b.GetLease().GetId())+" "+renew(t, s.leases, b.GetLease().GetId()), "RELEASED LOST"; got != want {
		t.Errorf("release and renew: %s, want %s", got, want)
	}
}

// S20: what one request may meet is bounded, so that it cannot use up the time of
// the store.
func TestARequestThatMeetsTooManyLimitsIsInvalid(t *testing.T) {
	s := serve(t, `
domain: d
descriptors:
  - key: a
    token_bucket: {capacity: 5, refill: 1/h}
    rate_limit: {unit: hour, requests_per_unit: 5}
    concurrency: {max_in_flight: 5, lease: 1m}
`)
	m := &weirv1.AcquireRequest{Domain: "d"}
	for i := range 342 { // 1,026 limits
		m.Descriptors = append(m.Descriptors, typed("a", strconv.Itoa(i)))
	}
	if _, err := s.leases.Acquire(storetest.Context(t), m); status.Code(err) != codes.InvalidArgument {
		t.Errorf("Acquire of 1,026 limits: %v, want INVALID_ARGUMENT", err)
	}
	m.Descriptors = m.Descriptors[:341]
	if r, err := s.leases.Acquire(storetest.Context(t), m); err != nil || !r.GetAdmitted() {
		t.Errorf("Acquire of 1,023 limits = %v, %v, want admitted", r.GetAdmitted(), err)
	}
}

func TestARequestThatReservesTooMuchIsInvalid(t *testing.T) {
	s := serve(t, tokensPolicy)
	m := &weirv1.AcquireRequest{Domain: "d"}
	for i := range 129 {
		m.Descriptors = append(m.Descriptors, typed("tokens", strconv.Itoa(i)))
	}
	_, err := s.leases.Acquire(storetest.Context(t), m)
	expectInvalid(t, err, "the descriptors meet 129 limits that reserve, at most 128 may be reserved at once")
	m.Descriptors = m.Descriptors[1:]
	r, err := s.leases.Acquire(storetest.Context(t), m)
	if err != nil || reconcile(t, s.leases, used(r.GetLease().GetId(), "=0")) != "SETTLED-128" {
		t.Errorf("Acquire of 128 = %v, %v, want a lease whose 128 hits are given back", r.GetAdmitted(), err)
	}
}
