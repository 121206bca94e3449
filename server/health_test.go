package server_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"weir/envoy"
	"weir/limit"
	"weir/policy"
	weirv1 "weir/proto/weir/v1"
	"weir/server"
	"weir/store"
	"weir/store/memory"
	"weir/store/storetest"
)

const anyPolicy = `
domain: d
descriptors:
  - {key: a, token_bucket: {capacity: 5, refill: 1/d}}
`

// health returns what gRPC health says of every service that must be known, as
// one word if it is the same.
func health(t testing.TB, client healthpb.HealthClient) string {
	t.Helper()
	var all []string
	for _, name := range []string{"", "ratelimit", "envoy.service.ratelimit.v3.RateLimitService", "weir.v1.LeaseService"} {
		r, err := client.Check(storetest.Context(t), &healthpb.HealthCheckRequest{Service: name})
		if err != nil {
			t.Fatalf("health of %q: %v", name, err)
		}
		all = append(all, r.GetStatus().String())
	}
	return strings.Join(slices.Compact(all), ", ")
}

func healthz(t testing.TB, code int, body string) (int, server.Health) {
	t.Helper()
	var h server.Health
	if err := json.Unmarshal([]byte(body), &h); err != nil {
		t.Fatalf("/healthz: %q: %v", body, err)
	}
	return code, h
}

// missing is a memory store that is away while away is set.
type missing struct {
	*memory.Store
	away atomic.Bool
}

func (m *missing) Ping(ctx context.Context) error {
	if m.away.Load() {
		return store.ErrUnavailable
	}
	return m.Store.Ping(ctx)
}

func (m *missing) Decide(ctx context.Context, r limit.Request) (limit.Decision, error) {
	if m.away.Load() {
		return limit.Decision{}, store.ErrUnavailable
	}
	return m.Store.Decide(ctx, r)
}

func TestReadyOnceThePoliciesAreLoadedAndTheStoreIsFound(t *testing.T) {
	clock := storetest.NewClock()
	st := &missing{Store: memory.New(memory.Options{Now: clock.Now})}
	st.away.Store(true)
	s := serviceOn(t, st, clock, envoy.Options{})
	client := healthpb.NewHealthClient(s.conn)
	expect := func(when, wantGRPC string, wantCode int, want server.Health) {
		t.Helper()
		if got := health(t, client); got != wantGRPC {
			t.Errorf("%s: gRPC health is %s, want %s", when, got, wantGRPC)
		}
		for _, path := range []string{"/healthz", "/healthcheck"} {
			code, body := s.page(path)
			code, got := healthz(t, code, body)
			got.Policy = server.PolicyHealth{} // TestHealthTellsOfThePolicyFiles
			if code != wantCode {
				t.Errorf("%s: %s answers %d, want %d", when, path, code, wantCode)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: %s (-want +got):\n%s", when, path, diff)
			}
		}
		if got, want := s.metric(t, "weir_ready"), map[bool]float64{true: 1}[wantCode == 200]; got != want {
			t.Errorf("%s: weir_ready is %v, want %v", when, got, want)
		}
	}

	expect("at first", "NOT_SERVING", 503, server.Health{Status: "not_ready", Store: "not_found"})
	if _, err := s.envoy.ShouldRateLimit(storetest.Context(t), &rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(t, "[a=1]")}); status.Code(err) != codes.Unavailable {
		t.Errorf("ShouldRateLimit without policies answers %v, want UNAVAILABLE", err)
	}
	if _, err := s.leases.Acquire(storetest.Context(t), &weirv1.AcquireRequest{Domain: "d"}); status.Code(err) != codes.Unavailable {
		t.Errorf("Acquire without policies answers %v, want UNAVAILABLE", err)
	}

	s.setPolicy(t, anyPolicy)
	expect("with policies", "NOT_SERVING", 503, server.Health{Status: "not_ready", Policies: true, Domains: []string{"d"}, Store: "not_found"})

	s.run(t)
	st.away.Store(false)
	storetest.Eventually(t, "the store is found", func() bool { return s.metric(t, "weir_store_up") == 1 })
	expect("with a store", "SERVING", 200, server.Health{Status: "ok", Policies: true, Domains: []string{"d"}, Store: "up"})

	// The main path goes on without the store: degraded is ready.
	st.away.Store(true)
	if got, want := ask(t, s.envoy, "d", "[a=1]", 0), "OK [OK nil]"; got != want {
		t.Errorf("without the store [a=1] = %s, want %s", got, want)
	}
	expect("without the store", "SERVING", 200, server.Health{Status: "degraded", Policies: true, Domains: []string{"d"}, Store: "away"})
	st.away.Store(false)
	storetest.Eventually(t, "the store is back", func() bool { return s.metric(t, "weir_store_up") == 1 })

	s.Drain()
	expect("draining", "NOT_SERVING", 503, server.Health{Status: "draining", Policies: true, Domains: []string{"d"}, Store: "up"})
	if got, want := ask(t, s.envoy, "d", "[a=1]", 0), "OK [OK 4]"; got != want {
		t.Errorf("while draining [a=1] = %s, want %s: requests under way are still answered", got, want)
	}
}

func TestHealthTellsOfThePolicyFiles(t *testing.T) {
	s := newService(t, envoy.Options{})
	set := parse(t, anyPolicy)
	for _, c := range []struct {
		name     string
		reading  policy.Reading
		want     server.PolicyHealth
		ok, fail float64 // readings so far
	}{
		{"broken at first", policy.Reading{Err: errors.New("a.yaml:1: bad\nb.yaml:2: bad"), Wrong: 2}, server.PolicyHealth{Wrong: 2, Errors: []string{"a.yaml:1: bad", "b.yaml:2: bad"}}, 0, 1},
		{"loaded", policy.Reading{Set: set}, server.PolicyHealth{Version: set.Version()}, 1, 1},
		{"broken again", policy.Reading{Set: set, Err: errors.New("a.yaml:1: bad"), Wrong: 1}, server.PolicyHealth{Version: set.Version(), Wrong: 1, Errors: []string{"a.yaml:1: bad"}}, 1, 2},
		{"very wrong", policy.Reading{Set: set, Err: errors.New(strings.TrimSpace(strings.Repeat("bad\n", 1000))), Wrong: 1}, server.PolicyHealth{Version: set.Version(), Wrong: 1, Errors: slices.Repeat([]string{"bad"}, 20)}, 1, 3},
		{"mended", policy.Reading{Set: set}, server.PolicyHealth{Version: set.Version()}, 2, 3},
	} {
		s.SetPolicy(t.Context(), c.reading)
		code, body := s.page("/healthz")
		_, h := healthz(t, code, body)
		got := h.Policy
		if loaded := !got.LoadedAt.IsZero(); loaded != (c.reading.Set != nil) || got.AgeSeconds < 0 || loaded && time.Since(got.LoadedAt) > storetest.Deadline {
			t.Errorf("%s: loaded at %v, %d s ago", c.name, got.LoadedAt, got.AgeSeconds)
		}
		got.LoadedAt, got.AgeSeconds = time.Time{}, 0
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: (-want +got):\n%s", c.name, diff)
		}
		for name, want := range map[string]float64{
			`weir_policy_wrong_files`:                  float64(c.want.Wrong),
			`weir_policy_loads_total{result="ok"}`:     c.ok,
			`weir_policy_loads_total{result="failed"}`: c.fail,
		} {
			if got := s.metric(t, name); got != want {
				t.Errorf("%s: %s is %v, want %v", c.name, name, got, want)
			}
		}
	}
}

// A request is decided by one set of policies, however often they change meanwhile.
func TestRequestsUnderWayKeepTheirPolicies(t *testing.T) {
	s := serve(t, anyPolicy)
	// Both descriptors have the same limit in each set, and never in two.
	text := "domain: d\ndescriptors:\n- {key: a, token_bucket: {capacity: %[1]d, refill: 1000/s}}\n- {key: b, token_bucket: {capacity: %[1]d, refill: 1000/s}}\n"
	sets := []*policy.Set{parse(t, fmt.Sprintf(text, 1_000_000)), parse(t, fmt.Sprintf(text, 2_000_000))}
	s.SetPolicy(t.Context(), policy.Reading{Set: sets[0]})
	done := make(chan struct{})
	var changing sync.WaitGroup
	changing.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
				s.SetPolicy(t.Context(), policy.Reading{Set: sets[i%2]})
			}
		}
	})
	m := &rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(t, "[a=1][b=1]")}
	for range 500 {
		r, err := s.envoy.ShouldRateLimit(storetest.Context(t), m)
		if err != nil {
			t.Fatal(err)
		}
		a, b := r.GetStatuses()[0].GetCurrentLimit().GetRequestsPerUnit(), r.GetStatuses()[1].GetCurrentLimit().GetRequestsPerUnit()
		if a != b {
			t.Fatalf("limits %d and %d in one answer: of two sets of policies", a, b)
		}
	}
	close(done)
	changing.Wait()
}

func TestHealthOfAnUnknownServiceIsNotFound(t *testing.T) {
	s := serve(t, anyPolicy)
	_, err := healthpb.NewHealthClient(s.conn).Check(storetest.Context(t), &healthpb.HealthCheckRequest{Service: "nobody"})
	if status.Code(err) != codes.NotFound {
		t.Errorf("health of an unknown service: %v, want NOT_FOUND", err)
	}
}

func TestWatchersAreToldOfTheStop(t *testing.T) {
	s := serve(t, anyPolicy)
	watch, err := healthpb.NewHealthClient(s.conn).Watch(storetest.Context(t), &healthpb.HealthCheckRequest{Service: "ratelimit"})
	if err != nil {
		t.Fatal(err)
	}
	next := func() healthpb.HealthCheckResponse_ServingStatus {
		t.Helper()
		r, err := watch.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return r.GetStatus()
	}
	if got := next(); got != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("at first: %v, want SERVING", got)
	}
	s.Drain()
	if got := next(); got != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Errorf("after Drain: %v, want NOT_SERVING", got)
	}
}

func TestReflectionListsTheServices(t *testing.T) {
	s := serve(t, anyPolicy)
	stream, err := reflectionpb.NewServerReflectionClient(s.conn).ServerReflectionInfo(storetest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(stream.Send(&reflectionpb.ServerReflectionRequest{
		MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{},
	}), stream.CloseSend()); err != nil {
		t.Fatal(err)
	}
	r, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range r.GetListServicesResponse().GetService() {
		got = append(got, s.GetName())
	}
	for _, want := range []string{"envoy.service.ratelimit.v3.RateLimitService", "weir.v1.LeaseService", "grpc.health.v1.Health"} {
		if !slices.Contains(got, want) {
			t.Errorf("reflection lists %q, want also %s", got, want)
		}
	}
}

// A domain that is renamed while the store is away does not leave weir degraded for
// ever.
func TestADomainThatGoesInAnOutageIsForgotten(t *testing.T) {
	clock := storetest.NewClock()
	var away atomic.Bool
	s := serviceOn(t, &sometimes{memory.New(memory.Options{Now: clock.Now}), &away}, clock, envoy.Options{})
	const text = "domain: %s\ndescriptors:\n  - {key: a, token_bucket: {capacity: 1000, refill: 1/d}}\n"
	s.setPolicy(t, fmt.Sprintf(text, "old"))
	s.run(t)
	storetest.Eventually(t, "the store is found", func() bool { return s.metric(t, "weir_store_up") == 1 })
	away.Store(true)
	for range 10 {
		ask(t, s.envoy, "old", "[a=1]", 0)
	}
	if got := s.metric(t, `weir_store_breaker_open{domain="old"}`); got != 1 {
		t.Fatalf("the breaker is %v, want it open", got)
	}
	s.setPolicy(t, fmt.Sprintf(text, "new"))
	away.Store(false)
	storetest.Eventually(t, "the store is up again", func() bool { return s.metric(t, "weir_store_up") == 1 })
	if got := s.metric(t, `weir_store_breaker_open{domain="old"}`); got != 0 {
		t.Errorf("the breaker of the domain that is gone is %v, want it closed", got)
	}
}

// sometimes is a store that answers pings alone while it is away.
type sometimes struct {
	store.Store
	away *atomic.Bool
}

func (s *sometimes) Decide(ctx context.Context, r limit.Request) (limit.Decision, error) {
	if s.away.Load() {
		return limit.Decision{}, store.ErrUnavailable
	}
	return s.Store.Decide(ctx, r)
}

func (s *sometimes) Held(ctx context.Context, domain string) (int64, error) {
	if s.away.Load() {
		return 0, store.ErrUnavailable
	}
	return s.Store.Held(ctx, domain)
}
