package e2e

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"weir/store/storetest"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	grpcstatus "google.golang.org/grpc/status"
)

// client is one of gRPC.
type client = healthpb.HealthClient

// calls is a stream that is a call through Envoy.
func calls(call func(ctx context.Context, t *testing.T, c client)) stream {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		conn, err := grpc.NewClient("passthrough:///"+strings.TrimPrefix(s.envoy.url, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "x-account", account), storetest.Deadline)
		defer cancel()
		call(ctx, t, healthpb.NewHealthClient(conn))
	}
}

func wantCode(t *testing.T, err error, want string) {
	t.Helper()
	if got := grpcstatus.Code(err).String(); got != want {
		t.Errorf("%v, want %v", err, want)
	}
}

// check is a call that ends with a code.
func check(service, code string) func(ctx context.Context, t *testing.T, c client) {
	return func(ctx context.Context, t *testing.T, c client) {
		t.Helper()
		_, err := c.Check(ctx, &healthpb.HealthCheckRequest{Service: service})
		wantCode(t, err, code)
	}
}

// callsInVain is told that by a code of gRPC.
func callsInVain(t *testing.T, s *stack, account string) {
	t.Helper()
	calls(check("", "Unavailable"))(t, s, account)
}

// watch begins a stream without an end, and reads its first message.
func watch(ctx context.Context, t *testing.T, c client) healthpb.Health_WatchClient {
	t.Helper()
	stream, err := c.Watch(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	return stream
}

func watchAll(ctx context.Context, t *testing.T, c client) {
	t.Helper()
	stream := watch(metadata.AppendToOutgoingContext(ctx, "x-brief", "1"), t, c)
	if _, err := stream.Recv(); err != io.EOF { //nolint:errorlint // as grpc documents it
		t.Errorf("%v, want the end", err)
	}
}

func watchAndCancel(ctx context.Context, t *testing.T, c client) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	stream := watch(ctx, t, c)
	cancel()
	_, err := stream.Recv()
	wantCode(t, err, "Canceled")
}

func watchUntilDeadline(ctx context.Context, t *testing.T, c client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	stream, err := c.Watch(ctx, &healthpb.HealthCheckRequest{})
	for err == nil {
		_, err = stream.Recv()
	}
	wantCode(t, err, "DeadlineExceeded")
}

// deadlineOfEnvoy is a call whose route obeys the deadline that its client has sent,
// and whose upstream does not.
func deadlineOfEnvoy(t *testing.T, s *stack, account string) {
	t.Helper()
	a, err := s.sendBy(t.Context(), http2(t), http.MethodGet, account, "/obey", "content-type", "application/grpc", "te", "trailers", "grpc-timeout", "300m")
	if err != nil {
		t.Fatal(err)
	}
	a.want(t, http.StatusOK, "grpc-status", strconv.Itoa(int(codes.DeadlineExceeded)))
}
