package server_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"weir/envoy"
	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
)

func inspect(t testing.TB, client weirv1.LeaseServiceClient, domain string, entries ...string) *weirv1.InspectResponse {
	t.Helper()
	r, err := client.Inspect(storetest.Context(t), &weirv1.InspectRequest{Domain: domain, Entries: typed(entries...).GetEntries()})
	if err != nil {
		t.Fatalf("Inspect(%q): %v", entries, err)
	}
	return r
}

// short is a lease's id as others may see it.
func short(r *weirv1.AcquireResponse) string { return r.GetLease().GetId()[:8] + "…" }

func TestInspectTellsHowLimitsStand(t *testing.T) {
	s := serve(t, lanePolicy)
	bucket := func(remaining uint64, reset time.Duration) *weirv1.LimitState {
		return &weirv1.LimitState{
			Name: "account", Kind: weirv1.LimitKind_LIMIT_KIND_TOKEN_BUCKET, Class: weirv1.Class_CLASS_LANE, Capacity: 10,
			Remaining: remaining, Level: int64(remaining), ResetAfter: durationpb.New(reset),
		}
	}
	slots := func(name string, class weirv1.Class, capacity, remaining uint64, holders ...*weirv1.Holder) *weirv1.LimitState {
		return &weirv1.LimitState{
			Name: name, Kind: weirv1.LimitKind_LIMIT_KIND_CONCURRENCY, Class: class, Capacity: capacity,
			Remaining: remaining, Count: uint64(len(holders)), Holders: holders,
		}
	}
	guessed := func(l *weirv1.LimitState) *weirv1.LimitState {
		l.RetryAfter, l.Estimated = durationpb.New(time.Second), true
		return l
	}
	holder := func(r *weirv1.AcquireResponse, left time.Duration) *weirv1.Holder {
		return &weirv1.Holder{Lease: short(r), ExpiresAfter: durationpb.New(left)}
	}
	expect := func(what string, entries []string, want *weirv1.InspectResponse) {
		t.Helper()
		for range 2 { // looking changes nothing
			expectAnswer(t, what, inspect(t, s.leases, "d", entries...), want)
		}
	}
	alice, pool := []string{"account", "alice"}, []string{"pool", "images"}

	expect("a new account", alice, &weirv1.InspectResponse{Limits: []*weirv1.LimitState{
		bucket(10, 0), slots("account", weirv1.Class_CLASS_LANE, 2, 2),
	}})
	a := acquire(t, s.leases, typed(alice...), typed(pool...))
	s.clock.Advance(100 * time.Millisecond)
	b := acquire(t, s.leases, costing(9, typed(alice...)))
	expect("a full lane, an empty bucket", alice, func() *weirv1.InspectResponse {
		empty := bucket(0, 9900*time.Millisecond)
		empty.RetryAfter = durationpb.New(900 * time.Millisecond)
		lane := guessed(slots("account", weirv1.Class_CLASS_LANE, 2, 0, holder(a, 90*time.Second-100*time.Millisecond), holder(b, 2*time.Minute)))
		return &weirv1.InspectResponse{Limits: []*weirv1.LimitState{empty, lane}}
	}())
	expect("a full pool", pool, &weirv1.InspectResponse{Limits: []*weirv1.LimitState{
		guessed(slots("pool", weirv1.Class_CLASS_POOL, 1, 0, holder(a, 90*time.Second-100*time.Millisecond))),
	}})

	// The guess is that of a refusal: mean hold / max_in_flight.
	s.clock.Advance(30 * time.Second)
	release(t, s.leases, a.GetLease().GetId())
	c := acquire(t, s.leases, typed(pool...))
	full := slots("pool", weirv1.Class_CLASS_POOL, 1, 0, holder(c, 90*time.Second))
	full.RetryAfter, full.Estimated = durationpb.New(30*time.Second+100*time.Millisecond), true
	expect("a full pool after a release", pool, &weirv1.InspectResponse{Limits: []*weirv1.LimitState{full}})

	// Windows, shadows, unlimited, nothing.
	untilMidnight := durationpb.New(12*time.Hour - 30*time.Second - 100*time.Millisecond)
	acquire(t, s.leases, costing(5, typed("day", "x")))
	expect("a full window", []string{"day", "x"}, &weirv1.InspectResponse{Limits: []*weirv1.LimitState{{
		Name: "day", Kind: weirv1.LimitKind_LIMIT_KIND_WINDOW, Class: weirv1.Class_CLASS_LANE, Capacity: 5, Count: 5,
		RetryAfter: untilMidnight, ResetAfter: untilMidnight,
	}}})
	acquire(t, s.leases, typed("trial", "x"))
	expect("a shadow", []string{"trial", "x"}, &weirv1.InspectResponse{Limits: []*weirv1.LimitState{{
		Name: "trial", Kind: weirv1.LimitKind_LIMIT_KIND_TOKEN_BUCKET, Class: weirv1.Class_CLASS_LANE, Shadow: true, Capacity: 1,
		RetryAfter: durationpb.New(10 * time.Second), ResetAfter: durationpb.New(10 * time.Second),
	}}})
	expect("unlimited", []string{"free", "x"}, &weirv1.InspectResponse{Unlimited: true})
	expect("no match", []string{"nobody", "x"}, &weirv1.InspectResponse{})
	expectAnswer(t, "no policy", inspect(t, s.leases, "other", alice...), &weirv1.InspectResponse{})

	// Reserved entries are none of the descriptor's.
	expect("with reserved entries", append([]string{"weir.stream_id", "s"}, pool...), &weirv1.InspectResponse{Limits: []*weirv1.LimitState{full}})
	expect("reserved entries alone", []string{"weir.event", "release"}, &weirv1.InspectResponse{})

	s.expectMetrics(t, "afterwards", map[string]float64{
		`weir_leases_held{domain="d"}`:                        2,
		`weir_decisions_total{domain="d",verdict="admitted"}`: 5,
		`weir_store_duration_seconds_count{op="inspect"}`:     14,
	})
}

// What is shown of a holder names the lease, and ends none.
func TestAShortenedLeaseReleasesNothing(t *testing.T) {
	s := serve(t, lanePolicy)
	a := acquire(t, s.leases, typed("pool", "images"))
	id := a.GetLease().GetId()
	shown := inspect(t, s.leases, "d", "pool", "images").GetLimits()[0].GetHolders()[0].GetLease()
	if !strings.HasPrefix(id, strings.TrimSuffix(shown, "…")) {
		t.Errorf("the holder %s does not name the lease %s", shown, id)
	}
	start := strings.TrimSuffix(shown, "…")
	for _, guess := range []string{shown, shown + ".d", start, start + ".d", start + strings.Repeat("A", 14) + ".d", strings.Repeat(start, 3)[:22] + ".d"} {
		if got := release(t, s.leases, guess); got != "NOT_HELD" {
			t.Errorf("release of %s = %s, want NOT_HELD", guess, got)
		}
		if got := renew(t, s.leases, guess); got != "LOST" {
			t.Errorf("renewal of %s = %s, want LOST", guess, got)
		}
	}
	if got := release(t, s.leases, id); got != "RELEASED" {
		t.Errorf("release of the whole id = %s, want RELEASED", got)
	}
}

func TestInspectTellsAHundredHolders(t *testing.T) {
	s := serve(t, `
domain: d
descriptors: [{key: pool, concurrency: {max_in_flight: 500, lease: 2m}}]
`)
	var first []string
	for range 101 {
		first = append(first, short(acquire(t, s.leases, typed("pool", "x"))))
	}
	s.clock.Advance(time.Second)
	last := short(acquire(t, s.leases, typed("pool", "x")))
	pool := inspect(t, s.leases, "d", "pool", "x").GetLimits()[0]
	if pool.GetCount() != 102 || len(pool.GetHolders()) != 100 || pool.GetRemaining() != 398 {
		t.Errorf("Inspect tells of %d leases and %d holders, want 102 and 100", pool.GetCount(), len(pool.GetHolders()))
	}
	for _, h := range pool.GetHolders() {
		if h.GetLease() == last || !slices.Contains(first, h.GetLease()) {
			t.Errorf("%s is told, which is not one of those that expire first", h.GetLease())
		}
	}
}

func TestInspectionsOutOfBoundsAreInvalid(t *testing.T) {
	s := serve(t, lanePolicy)
	for _, test := range []struct {
		name    string
		domain  string
		entries []string
		want    string // in the error; "" for none
	}{
		{"no domain", "", []string{"day", "x"}, "domain is empty"},
		{"a domain of 256 bytes", strings.Repeat("d", 256), []string{"day", "x"}, ""},
		{"a longer domain", strings.Repeat("d", 257), []string{"day", "x"}, "domain has 257 bytes"},
		{"no entries", "d", nil, "entries is empty"},
		{"64 entries", "d", slices.Repeat([]string{"day", "x"}, 64), ""},
		{"more entries", "d", slices.Repeat([]string{"day", "x"}, 65), "entries has 65 elements"},
		{"an empty key", "d", []string{"day", "x", "", "y"}, "entries[1].key is empty"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := s.leases.Inspect(storetest.Context(t), &weirv1.InspectRequest{Domain: test.domain, Entries: typed(test.entries...).GetEntries()})
			expectInvalid(t, err, test.want)
		})
	}
}

func TestInspectBeforeAnyPolicyIsUnavailable(t *testing.T) {
	s := newService(t, envoy.Options{})
	_, err := s.leases.Inspect(storetest.Context(t), &weirv1.InspectRequest{Domain: "d", Entries: typed("day", "x").GetEntries()})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("Inspect without a policy: %v, want UNAVAILABLE", err)
	}
}

// An inspection never fails open: it says that nobody knows, in time, and tells
// nothing of the request to the log.
func TestInspectNeverFailsOpen(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--store-timeout", "100ms", "--log-level", "debug")
	r.ready(t)
	r.recovered(t)
	const secret = "secret-4711"
	ask := func() (*weirv1.InspectResponse, error) {
		return r.leases.Inspect(storetest.Context(t), &weirv1.InspectRequest{Domain: "d", Entries: typed("a", secret).GetEntries()})
	}
	if got, err := ask(); err != nil || got.GetLimits()[0].GetLevel() != 1000 {
		t.Fatalf("Inspect = %v, %v, want 1000 tokens", got, err)
	}
	failed := func(when string) {
		t.Helper()
		start := time.Now()
		got, err := ask()
		if status.Code(err) != codes.Unavailable {
			t.Errorf("%s: Inspect = %v, %v, want UNAVAILABLE", when, got, err)
		}
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("%s: Inspect took %v with a store-timeout of 100ms", when, took)
		}
		for _, text := range []string{status.Convert(err).Message(), r.Log()} {
			if strings.Contains(text, secret) || strings.Contains(text, redis.URL) {
				t.Errorf("%s: a value is told: %s", when, text)
			}
		}
	}
	client := redisClient(t, redis)
	if err := client.LPush(storetest.Context(t), "weir:{d}:b:a="+secret, "x").Err(); err != nil {
		t.Fatal(err)
	}
	failed("a strange value")
	pause(t, redis)
	failed("a stopped Redis")
	resume(t, redis)
	r.recovered(t)
	redis.Kill()
	failed("a killed Redis")
	total := 0.0
	for _, reason := range []string{"store_timeout", "store_unavailable", "store_error"} {
		total += r.metric(t, `weir_store_errors_total{op="inspect",reason="`+reason+`"}`)
	}
	if total != 3 {
		t.Errorf("%v inspections failed by the metrics, want 3", total)
	}
}
