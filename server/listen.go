package server

import (
	"context"
	"errors"
	"net/http"
	"runtime/debug"
	"time"

	als "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc/filters"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers it
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	weirv1 "weir/proto/weir/v1"
)

// What one client may take.
const (
	maxMessage           = 4 << 20 // bytes; more is RESOURCE_EXHAUSTED
	maxConcurrentStreams = 10_000  // a connection
	maxHeaderBytes       = 64 << 10
	maxScrapes           = 8               // at once: each asks the store
	handshakeTimeout     = 5 * time.Second // a connection that says nothing ends
)

// ageGrace is how much longer than its streams a connection may last that its client
// does not leave when asked.
const ageGrace = time.Minute

// workers are goroutines that answer one request after the other, so that their
// stacks need not grow each time. With more at once, each gets its own.
const workers = 64

// GRPC returns a gRPC server with all of weir's services.
func (s *Server) GRPC() *grpc.Server {
	options := []grpc.ServerOption{
		grpc.Creds(s.credentials),
		grpc.ForceServerCodecV2(wire{encoding.GetCodecV2("proto")}),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxConcurrentStreams(maxConcurrentStreams),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: 30 * time.Second, Timeout: 10 * time.Second,
			MaxConnectionAge: s.maxAge, MaxConnectionAgeGrace: s.maxAge + ageGrace,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.NumStreamWorkers(workers),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.WaitForHandlers(true),
		grpc.ChainStreamInterceptor(s.ending, s.stream),
		grpc.UnaryInterceptor(s.unary),
	}
	if s.traces != nil {
		options = append(options, grpc.StatsHandler(otelgrpc.NewServerHandler(
			otelgrpc.WithTracerProvider(s.traces), otelgrpc.WithMeterProvider(metricnoop.NewMeterProvider()),
			otelgrpc.WithPropagators(propagation.TraceContext{}), otelgrpc.WithFilter(filters.Not(filters.HealthCheck())),
		)))
	}
	g := grpc.NewServer(options...)
	services := tolerant{g}
	rateLimit{Server: s}.register(s.guard(areaRateLimit, g))
	weirv1.RegisterLeaseServiceServer(s.guard(areaLeases, services), leases{Server: s})
	als.RegisterAccessLogServiceServer(s.guard(areaRateLimit, services), accessLog{Server: s})
	healthpb.RegisterHealthServer(g, s.health)
	reflection.Register(g)
	s.calls.serve(g.GetServiceInfo())
	return g
}

// ending lets a stream end with the drain: somebody who watches the health would
// hold up a stop for ever. And when it is as old as a connection gets, so that the
// connection on which it came, which takes no new ones, can end in peace.
func (s *Server) ending(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	end := func() { cancel(errEnding) }
	defer context.AfterFunc(s.streams, end)()
	if s.maxAge > 0 {
		defer time.AfterFunc(s.maxAge, end).Stop()
	}
	return handle(srv, endingStream{stream, ctx})
}

// errEnding is why the context of a stream ends if the server ends it.
var errEnding = errors.New("the server ends its streams")

type endingStream struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements [grpc.ServerStream].
func (e endingStream) Context() context.Context { return e.ctx }

// recovered answers a request whose handler panicked: a bug, which must not take
// the other requests with it.
func (s *Server) recovered(ctx context.Context, p any) error {
	s.log.ErrorContext(ctx, "bug: a handler panicked", "panic", p, "stack", string(debug.Stack()))
	return status.Error(codes.Internal, "weir failed on this request; its log says how")
}

// HTTP returns the pages: /healthz (and /healthcheck, as envoyproxy/ratelimit
// has it), /metrics, /json, which decides, and the status page.
func (s *Server) HTTP(g prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("GET /healthcheck", s.healthz)
	mux.Handle("POST /json", s.guardPage(areaRateLimit, http.HandlerFunc(s.shouldRateLimit)))
	mux.Handle("GET /metrics", s.guardPage(areaMetrics, promhttp.HandlerFor(g, promhttp.HandlerOpts{EnableOpenMetrics: true, MaxRequestsInFlight: maxScrapes})))
	s.page.Register(mux, func(h http.Handler) http.Handler { return s.guardPage(areaMetrics, h) })
	return mux
}
