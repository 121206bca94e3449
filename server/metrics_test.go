package server_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"weir/envoy"
	"weir/policy"
	weirv1 "weir/proto/weir/v1"
	"weir/server"
	"weir/store"
	"weir/store/memory"
	"weir/store/storetest"
)

const metricsPolicy = `
domain: d
descriptors:
  - {key: account, concurrency: {max_in_flight: 100, lease: 1m, name: lane}}
  - {key: bucket, token_bucket: {capacity: 1, refill: 1/d}}
  - {key: trial, token_bucket: {capacity: 1, refill: 1/d}, shadow_mode: true}
`

// everything makes the server count all that it can count, with values that must
// not be told.
func everything(t *testing.T, s *service) {
	t.Helper()
	const secret = "secret-4711"
	for _, domain := range []string{"d", "secret-domain"} {
		for range 2 { // the second is refused
			ask(t, s.envoy, domain, "[bucket="+secret+"][account="+secret+"][trial=x]", 0)
			ask(t, s.envoy, domain, "[trial=x]", 0)
			ask(t, s.envoy, domain, "[secret-key="+secret+"]", 0)
			ask(t, s.envoy, domain, "[account="+secret+";neg]", 0)
			ask(t, s.envoy, domain, "[bucket=y;limit=3/HOUR]", 0)
		}
		ask(t, s.envoy, domain, "[weir.event=release,weir.lease_id="+strings.Repeat("A", 22)+".secret-lease,weir.outcome="+secret+"]", 0)
		release(t, s.leases, strings.Repeat("A", 22)+"."+domain)
		renew(t, s.leases, strings.Repeat("A", 22)+"."+domain)
		inspect(t, s.leases, domain, "account", secret)
	}
	lease := acquire(t, s.leases, typed("account", secret)).GetLease().GetId()
	release(t, s.leases, lease)
}

func TestMetricsAreNamedAsPrometheusWantsThem(t *testing.T) {
	s := serve(t, metricsPolicy)
	everything(t, s)
	problems, err := testutil.GatherAndLint(s.registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestLabelsComeFromConfigurationOnly(t *testing.T) {
	clock := storetest.NewClock()
	st := &missing{Store: memory.New(memory.Options{Now: clock.Now})}
	s := serviceOn(t, st, clock, envoy.Options{})
	s.setPolicy(t, metricsPolicy)
	everything(t, s)
	st.away.Store(true)
	everythingBypassed := "[bucket=secret-4711][secret-key=secret-4711]"
	ask(t, s.envoy, "d", everythingBypassed, 0)
	ask(t, s.envoy, "secret-domain", everythingBypassed, 0)

	families, err := s.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := make(map[string][]string) // by label
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if !slices.Contains(values[l.GetName()], l.GetValue()) {
					values[l.GetName()] = append(values[l.GetName()], l.GetValue())
				}
			}
		}
	}
	for _, list := range values {
		slices.Sort(list)
	}
	want := map[string][]string{
		"area":         {"admin", "lease", "metrics", "ratelimit"},
		"by":           {"access_log", "admin", "give_back", "lease_service", "ratelimit_service"},
		"class":        {"lane"},
		"domain":       {"d", "unknown"},
		"grpc_code":    {"OK"},
		"grpc_method":  {"Acquire", "Inspect", "Release", "Renew", "ShouldRateLimit"},
		"grpc_service": {"envoy.service.ratelimit.v3.RateLimitService", "weir.v1.LeaseService"},
		"grpc_type":    {"unary"},
		"kind":         {"concurrency", "rate_limit", "token_bucket"},
		"limit":        {"bucket", "lane", "override", "trial"},
		"mode":         {"open"},
		"op":           {"decide", "held", "inspect", "leases", "ping", "release", "renew", "reset", "settle", "undo"},
		"reason":       {"breaker_open", "bucket_empty", "negative_hits_on_concurrency", "store_error", "store_timeout", "store_unavailable"},
		"result":       {"EXPIRED", "LINGERING", "NOT_HELD", "RELEASED", "failed", "lost", "ok", "over", "passed", "refused", "shadow_refused"},
		"state":        {"idle", "used"},
		"verdict":      {"admitted", "refused"},
		"version":      {s.version(t)},
	}
	if diff := cmp.Diff(want, values); diff != "" {
		t.Errorf("values of labels (-want +got):\n%s", diff)
	}
	if _, text := s.page("/metrics"); strings.Contains(text, "secret") {
		t.Errorf("a request's value is in the metrics:\n%s", text)
	}
}

func (s *service) expectMetrics(t *testing.T, when string, want map[string]float64) {
	t.Helper()
	for series, want := range want {
		if got := s.metric(t, series); got != want {
			t.Errorf("%s: %s is %v, want %v", when, series, got, want)
		}
	}
}

func TestDecisionsAreCounted(t *testing.T) {
	s := serve(t, metricsPolicy)
	ask(t, s.envoy, "d", "[bucket=1][trial=1]", 0)
	ask(t, s.envoy, "d", "[bucket=1][trial=2]", 0) // refused by the bucket
	ask(t, s.envoy, "d", "[trial=1]", 0)           // would be, by the shadow
	ask(t, s.envoy, "other", "[bucket=1]", 0)
	s.expectMetrics(t, "after four requests", map[string]float64{
		`weir_decisions_total{domain="d",verdict="admitted"}`:                                     2,
		`weir_decisions_total{domain="d",verdict="refused"}`:                                      1,
		`weir_decisions_total{domain="unknown",verdict="admitted"}`:                               1,
		`weir_checks_total{domain="d",kind="token_bucket",limit="bucket",result="passed"}`:        1,
		`weir_checks_total{domain="d",kind="token_bucket",limit="bucket",result="refused"}`:       1,
		`weir_checks_total{domain="d",kind="token_bucket",limit="trial",result="passed"}`:         2,
		`weir_checks_total{domain="d",kind="token_bucket",limit="trial",result="shadow_refused"}`: 1,
		`weir_store_duration_seconds_count{op="decide"}`:                                          3,
		`weir_store_up`: 1,
	})
}

// partial is a store one of whose domains is away, as with a dead node of a cluster.
type partial struct {
	*memory.Store
	away string
}

func (p partial) Held(ctx context.Context, domain string) (int64, error) {
	if domain == p.away {
		return 0, store.ErrUnavailable
	}
	return p.Store.Held(ctx, domain)
}

func TestADomainThatIsNotCountedHidesNoOther(t *testing.T) {
	clock := storetest.NewClock()
	s := serviceOn(t, partial{memory.New(memory.Options{Now: clock.Now}), "b"}, clock, envoy.Options{})
	var files []string
	for _, domain := range []string{"a", "b", "c"} {
		file := filepath.Join(t.TempDir(), domain+".yaml")
		if err := os.WriteFile(file, []byte("domain: "+domain+"\ndescriptors: [{key: k, concurrency: {max_in_flight: 1, lease: 1m}}]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	set, err := policy.Load(files, policy.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s.SetPolicy(t.Context(), policy.Reading{Set: set, Changed: true})
	_, text := s.page("/metrics")
	for domain, want := range map[string]bool{"a": true, "b": false, "c": true} {
		if got := strings.Contains(text, `weir_leases_held{domain="`+domain+`"}`); got != want {
			t.Errorf("leases of domain %s are counted: %v, want %v", domain, got, want)
		}
	}
}

// Each lease that nobody released is counted once, though only the next ask for a
// lease finds it, and at most 64 at a time.
func TestLeasesAreCountedToTheirEnd(t *testing.T) {
	s := serve(t, metricsPolicy)
	take := func(n int) (ids []string) {
		for i := range n {
			ids = append(ids, acquire(t, s.leases, typed("account", fmt.Sprint(i))).GetLease().GetId())
		}
		return ids
	}
	ids := take(70)
	s.expectMetrics(t, "70 granted", map[string]float64{
		`weir_leases_granted_total{domain="d"}`: 70, `weir_leases_held{domain="d"}`: 70, `weir_leases_expired_total{domain="d"}`: 0,
	})
	release(t, s.leases, ids[0])
	release(t, s.leases, ids[0])
	s.clock.Advance(time.Minute)
	release(t, s.leases, ids[1])
	renew(t, s.leases, ids[2])
	s.expectMetrics(t, "one released, 69 expired", map[string]float64{
		`weir_leases_held{domain="d"}`:                             0,
		`weir_leases_released_total{domain="d",result="RELEASED"}`: 1,
		`weir_leases_released_total{domain="d",result="NOT_HELD"}`: 1,
		`weir_leases_released_total{domain="d",result="EXPIRED"}`:  1,
	})
	take(5)
	s.expectMetrics(t, "5 more granted", map[string]float64{
		`weir_leases_granted_total{domain="d"}`: 75, `weir_leases_held{domain="d"}`: 5, `weir_leases_expired_total{domain="d"}`: 69,
	})
}

func TestARefundOfABucketIsNoMisuse(t *testing.T) {
	s := serve(t, metricsPolicy)
	if _, err := s.leases.Acquire(storetest.Context(t), &weirv1.AcquireRequest{Domain: "d", Descriptors: []*weirv1.Descriptor{
		refunding(typed("bucket", "x")), typed("account", "x"),
	}}); err != nil {
		t.Fatal(err)
	}
	s.expectMetrics(t, "a refund of a bucket", map[string]float64{`weir_misuse_total{domain="d",reason="negative_hits_on_concurrency"}`: 0})
}

// An alert on an increase needs a series that exists before the first event.
func TestWhatAlertsWatchIsThereBeforeItHappens(t *testing.T) {
	s := serve(t, hourPolicy)
	_, text := s.page("/metrics")
	for _, series := range []string{
		`weir_bypassed_total{domain="d",limit="a",mode="open",reason="store_timeout"} 0`,
		`weir_store_errors_total{op="decide",reason="store_unavailable"} 0`,
		`weir_store_errors_total{op="inspect",reason="store_timeout"} 0`,
		`weir_leases_expired_total{domain="d"} 0`,
	} {
		if !strings.Contains(text, series+"\n") {
			t.Errorf("/metrics has no %s", series)
		}
	}
}

// A reload creates what is new, and looks up nothing twice.
func TestAfterAReloadAlertsWatchWhatTheyWouldAfterAStart(t *testing.T) {
	const one = "domain: one\ndescriptors:\n  - {key: a, rate_limit: {name: a, unit: hour, requests_per_unit: 1}}\n"
	const more = one + "  - {key: b, token_bucket: {name: a, capacity: 1, refill: 1/s}}\n  - {key: c, failure_mode: closed, concurrency: {max_in_flight: 1, lease: 1s}}\n"
	const other = "domain: other\ndescriptors:\n  - {key: a, rate_limit: {unit: hour, requests_per_unit: 1}}\n"
	set := func(files ...string) *policy.Set {
		dir := t.TempDir()
		for i, text := range files {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.yaml", i)), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		s, err := policy.Load([]string{dir}, policy.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	series := func(sets ...*policy.Set) []string {
		store := memory.New(memory.Options{})
		registry := prometheus.NewRegistry()
		s := server.New(server.Options{Store: store, Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), Registerer: registry})
		defer func() { s.Close(); _ = store.Close() }()
		for _, set := range sets {
			s.SetPolicy(t.Context(), policy.Reading{Set: set})
		}
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		var list []string
		for _, f := range families {
			for _, m := range f.GetMetric() {
				list = append(list, fmt.Sprint(f.GetName(), m.GetLabel()))
			}
		}
		return list
	}
	before, now := set(one), set(more, other)
	if diff := cmp.Diff(series(now), series(before, now)); diff != "" {
		t.Errorf("series after a reload (-after a start, +after a reload):\n%s", diff)
	}
	if diff := cmp.Diff(series(now), series(before, now, before, now)); diff != "" {
		t.Errorf("series after a domain went and came (-after a start, +then):\n%s", diff)
	}
}
