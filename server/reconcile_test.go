package server_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
)

const tokensPolicy = `
domain: d
descriptors:
  - {key: tokens, rate_limit: {unit: day, requests_per_unit: 1000, reserve: 10m}}
  - {key: output, token_bucket: {capacity: 100, refill: 1/s, reserve: 10m}}
  - {key: lane, concurrency: {max_in_flight: 2, lease: 1m}}
`

// used is the usage of a lease: words like tokens=5; =5 is for all limits.
func used(lease string, limits ...string) *weirv1.LeaseUsage {
	u := &weirv1.LeaseUsage{LeaseId: lease}
	for _, word := range limits {
		name, hits, _ := strings.Cut(word, "=")
		n, err := strconv.ParseUint(hits, 10, 64)
		if err != nil {
			panic(err) // of a test
		}
		u.Limits = append(u.Limits, &weirv1.LimitUsage{Limit: name, Hits: n})
	}
	return u
}

// settled tells results in words.
func settled(results []*weirv1.ReconcileResult) string {
	var words []string
	for _, r := range results {
		for _, l := range r.GetLimits() {
			words = append(words, fmt.Sprintf("%s%+d", strings.TrimPrefix(l.GetStatus().String(), "SETTLEMENT_STATUS_"), l.GetDifference()))
		}
	}
	return strings.Join(words, " ")
}

func reconcile(t testing.TB, client weirv1.LeaseServiceClient, usage ...*weirv1.LeaseUsage) string {
	t.Helper()
	r, err := client.Reconcile(storetest.Context(t), &weirv1.ReconcileRequest{Usage: usage})
	if err != nil {
		t.Fatalf("Reconcile(%v): %v", usage, err)
	}
	return settled(r.GetResults())
}

func TestUsageSettlesWhatALeaseReserved(t *testing.T) {
	s := serve(t, tokensPolicy)
	grant := func() string {
		t.Helper()
		return acquire(t, s.leases, costing(400, typed("tokens", "a")), costing(50, typed("output", "a")), typed("lane", "a")).GetLease().GetId()
	}
	stands := func(want string) {
		t.Helper()
		var got []string
		for _, key := range []string{"tokens", "output"} {
			m, err := s.leases.Inspect(storetest.Context(t), &weirv1.InspectRequest{Domain: "d", Entries: typed(key, "a").GetEntries()})
			if err != nil {
				t.Fatal(err)
			}
			for _, l := range m.GetLimits() {
				got = append(got, fmt.Sprint(l.GetRemaining(), l.GetLevel()))
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("remaining and level are %v, want %s", got, want)
		}
	}
	a, b := grant(), grant()
	stands("200 0 0 0")
	if got, want := reconcile(t, s.leases, used(a, "tokens=100", "output=70", "lane=1"), used("no lease", "=1")), "SETTLED-300 SETTLED+20 NOT_RESERVED+0 NOT_RESERVED+0"; got != want {
		t.Errorf("the usage of a: %s, want %s", got, want)
	}
	stands("500 0 0 -20")
	// With the release, before it; once.
	r, err := s.leases.Release(storetest.Context(t), &weirv1.ReleaseRequest{LeaseIds: []string{b}, Usage: []*weirv1.LeaseUsage{used(b, "=0"), used(a, "tokens=9")}})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := settled(r.GetUsage()), "SETTLED-450 ALREADY_SETTLED+0"; got != want || r.GetResults()[0].GetStatus() != weirv1.ReleaseStatus_RELEASE_STATUS_RELEASED {
		t.Errorf("a release with usage: %s %v, want %s and RELEASED", got, r.GetResults(), want)
	}
	stands("900 0 30 30")
	// After the release, too; but not after the expiry.
	s.clock.Advance(time.Hour)
	c, d := grant(), grant()
	release(t, s.leases, c)
	if got, want := reconcile(t, s.leases, used(c, "tokens=410")), "SETTLED+10"; got != want {
		t.Errorf("the usage of c: %s, want %s", got, want)
	}
	s.clock.Advance(time.Minute)
	if got, want := reconcile(t, s.leases, used(d, "=0")), "LATE+0"; got != want {
		t.Errorf("the usage of d: %s, want %s", got, want)
	}
	for series, want := range map[string]float64{
		`weir_usage_total{domain="d",limit="tokens",result="settled"}`:            2,
		`weir_usage_total{domain="d",limit="tokens",result="already_settled"}`:    1,
		`weir_usage_total{domain="d",limit="*",result="late"}`:                    1,
		`weir_usage_total{domain="d",limit="unknown",result="not_reserved"}`:      1,
		`weir_reserved_hits_total{domain="d",limit="tokens"}`:                     1600,
		`weir_settled_hits_total{direction="refunded",domain="d",limit="tokens"}`: 300,
		`weir_settled_hits_total{direction="refunded",domain="d",limit="*"}`:      450,
		`weir_settled_hits_total{direction="charged",domain="d",limit="output"}`:  20,
		`weir_leases_released_total{domain="d",result="RELEASED"}`:                2,
	} {
		if got := s.metric(t, series); got != want {
			t.Errorf("%s = %v, want %v", series, got, want)
		}
	}
}

func TestUsageHasBounds(t *testing.T) {
	s := serve(t, tokensPolicy)
	lease := acquire(t, s.leases, costing(400, typed("tokens", "a"))).GetLease().GetId()
	many := make([]*weirv1.LeaseUsage, 1001)
	for i := range many {
		many[i] = used(lease, "tokens=1")
	}
	wide := used(lease)
	for i := range 65 {
		wide.Limits = append(wide.Limits, &weirv1.LimitUsage{Limit: fmt.Sprint(i)})
	}
	for _, test := range []struct {
		want  string
		usage []*weirv1.LeaseUsage
	}{
		{"no usage", nil},
		{"usage of 1001 leases", many},
		{"usage[0] has 0 limits", []*weirv1.LeaseUsage{used(lease)}},
		{"usage[1] has 65 limits", []*weirv1.LeaseUsage{used(lease, "tokens=1"), wide}},
		{"usage[0].limits[0] has a name of 129 bytes", []*weirv1.LeaseUsage{used(lease, strings.Repeat("x", 129)+"=1")}},
		{"usage[0].limits[1] stands for a limit that another does", []*weirv1.LeaseUsage{used(lease, "tokens=1", "tokens=2")}},
		{"usage[0].limits[1] stands for a limit that another does", []*weirv1.LeaseUsage{used(lease, "tokens=1", "=2")}},
	} {
		_, err := s.leases.Reconcile(storetest.Context(t), &weirv1.ReconcileRequest{Usage: test.usage})
		expectInvalid(t, err, test.want)
		if test.usage != nil {
			_, err = s.leases.Release(storetest.Context(t), &weirv1.ReleaseRequest{LeaseIds: []string{lease}, Usage: test.usage})
			expectInvalid(t, err, test.want)
		}
	}
	huge := &weirv1.LeaseUsage{LeaseId: lease, Limits: []*weirv1.LimitUsage{{Limit: "tokens", Hits: 1<<64 - 1}}}
	if got, want := reconcile(t, s.leases, huge), "SETTLED+9007199254740591"; got != want {
		t.Errorf("usage of 2^64 - 1: %s, want %s", got, want)
	}
}

// The usage of a stream settles what Envoy's estimate reserved, by the stream or by the
// lease, and is charged once where nothing was reserved.
func TestTheUsageOfAStreamSettlesItsEstimate(t *testing.T) {
	s := serve(t, tokensPolicy+"  - {key: plain, rate_limit: {unit: day, requests_per_unit: 1000}}\n")
	stands := func(want string) {
		t.Helper()
		if got := ask(t, s.envoy, "d", "[tokens=a;hits=0][plain=a;hits=0]", 0); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	if got, want := ask(t, s.envoy, "d", "[tokens=a;hits=300][plain=a;hits=1][weir.stream_id=s1]", 0), "OK [OK 700][OK 999][OK nil]"; got != want {
		t.Fatalf("%s, want %s", got, want)
	}
	for range 2 {
		ask(t, s.envoy, "d", "[weir.event=usage,weir.stream_id=s1,tokens=a;hits=120][weir.event=usage,weir.stream_id=s1,plain=a;hits=20][weir.event=release,weir.stream_id=s1]", 0)
		stands("OK [OK 880][OK 979]")
	}
	// By the lease, and nothing was used.
	r, err := s.envoy.ShouldRateLimit(storetest.Context(t), &rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(t, "[tokens=a;hits=300][weir.stream_id=s2]")})
	if err != nil {
		t.Fatal(err)
	}
	lease := r.GetDynamicMetadata().GetFields()["lease_id"].GetStringValue()
	ask(t, s.envoy, "d", "[weir.event=usage,weir.stream_id=s2,weir.lease_id="+lease+",tokens=a;hits=0]", 0)
	stands("OK [OK 880][OK 979]")
	for descriptors, want := range map[string]string{
		"[weir.event=usage,weir.stream_id=s2,weir.lease_id=x,tokens=a;hits=1]":                                             "InvalidArgument",
		"[weir.event=usage,weir.stream_id=s2,weir.lease_id=" + strings.Replace(lease, ".d", ".e", 1) + ",tokens=a;hits=1]": "InvalidArgument",
	} {
		if got := ask(t, s.envoy, "d", descriptors, 0); got != want {
			t.Errorf("%s = %s, want %s", descriptors, got, want)
		}
	}
}
