package server_test

import (
	"context"
	"strings"
	"testing"

	logpb "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"weir/envoy"
	"weir/limit"
	"weir/store/memory"
	"weir/store/storetest"
)

func TestCallsAreCountedByMethodAndCode(t *testing.T) {
	s := serve(t, hourPolicy)
	const method = `grpc_method="ShouldRateLimit",grpc_service="envoy.service.ratelimit.v3.RateLimitService",grpc_type="unary"}`
	if _, text := s.page("/metrics"); strings.Contains(text, method) {
		t.Errorf("/metrics has series of a method that nobody has called:\n%s", text)
	}
	ask(t, s.envoy, "d", "[a=1]", 0)
	ask(t, s.envoy, "d", "[a=1]", 0)
	if _, err := s.envoy.ShouldRateLimit(storetest.Context(t), &rls.RateLimitRequest{Domain: "d"}); status.Code(err) != codes.InvalidArgument {
		t.Fatalf("a request without descriptors: %v, want InvalidArgument", err)
	}
	l := logOf(t, s, "d")
	l.send(entry(logpb.AccessLogType_DownstreamEnd, "", "", nil))
	watch, err := healthpb.NewHealthClient(s.conn).Watch(storetest.Context(t), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	const (
		log   = `grpc_method="StreamAccessLogs",grpc_service="envoy.service.accesslog.v3.AccessLogService",grpc_type="client_stream"}`
		state = `grpc_method="Watch",grpc_service="grpc.health.v1.Health",grpc_type="server_stream"}`
	)
	storetest.Eventually(t, "the entry is read", func() bool { return s.metric(t, `grpc_server_msg_received_total{`+log) == 1 })
	storetest.Eventually(t, "the state is told", func() bool { return s.metric(t, `grpc_server_msg_sent_total{`+state) == 1 })
	s.expectMetrics(t, "after three calls and two streams", map[string]float64{
		`grpc_server_started_total{` + method:                             3,
		`grpc_server_msg_received_total{` + method:                        3,
		`grpc_server_msg_sent_total{` + method:                            2,
		`grpc_server_handled_total{grpc_code="OK",` + method:              2,
		`grpc_server_handled_total{grpc_code="InvalidArgument",` + method: 1,
		`grpc_server_started_total{` + log:                                1,
		`grpc_server_started_total{` + state:                              1,
		`grpc_server_msg_received_total{` + state:                         1,
	})
}

// panicking is a store with a bug.
type panicking struct{ *memory.Store }

func (panicking) Decide(context.Context, limit.Request) (limit.Decision, error) { panic("a bug") }

func TestAHandlerThatPanicsIsInternalAndCounted(t *testing.T) {
	clock := storetest.NewClock()
	s := serviceOn(t, panicking{memory.New(memory.Options{Now: clock.Now})}, clock, envoy.Options{})
	s.setPolicy(t, hourPolicy)
	for range 2 {
		_, err := s.envoy.ShouldRateLimit(storetest.Context(t), &rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(t, "[a=1]")})
		if status.Code(err) != codes.Internal || strings.Contains(err.Error(), "a bug") {
			t.Errorf("a handler that panics answers %v, want Internal without what the panic said", err)
		}
	}
	const method = `grpc_method="ShouldRateLimit",grpc_service="envoy.service.ratelimit.v3.RateLimitService",grpc_type="unary"}`
	s.expectMetrics(t, "two panics", map[string]float64{
		`grpc_server_handled_total{grpc_code="Internal",` + method: 2,
		`grpc_server_started_total{` + method:                      2,
	})
	if _, text := s.page("/metrics"); strings.Contains(text, `grpc_server_msg_sent_total{`+method) {
		t.Error("an answer is counted, and none was sent")
	}
}

func TestALimitThatComesBackIsCountedAnew(t *testing.T) {
	s := serve(t, hourPolicy)
	const series = `weir_checks_total{domain="d",kind="rate_limit",limit="a",result="passed"}`
	ask(t, s.envoy, "d", "[a=1]", 0)
	s.setPolicy(t, hourPolicy+"  - {key: b, rate_limit: {unit: hour, requests_per_unit: 4}}\n")
	ask(t, s.envoy, "d", "[a=1]", 0)
	s.expectMetrics(t, "a reload that keeps the limit", map[string]float64{series: 2})
	s.setPolicy(t, "domain: d\ndescriptors: [{key: b, rate_limit: {unit: hour, requests_per_unit: 4}}]\n")
	ask(t, s.envoy, "d", "[a=1][b=1]", 0)
	if _, text := s.page("/metrics"); strings.Contains(text, series) {
		t.Error("a limit that is gone is still counted")
	}
	s.setPolicy(t, hourPolicy)
	ask(t, s.envoy, "d", "[a=2]", 0)
	s.expectMetrics(t, "the limit is back", map[string]float64{series: 1, `weir_decisions_total{domain="d",verdict="admitted"}`: 4})
}
