package client_test

import (
	"context"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"weir/client"
	"weir/policy"
	weirv1 "weir/proto/weir/v1"
	"weir/server"
	"weir/server/servertest"
	"weir/store/memory"
	"weir/store/storetest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		servertest.Clean()
		os.Exit(code)
	}))
}

const images = `
domain: images
descriptors:
  - key: account
    token_bucket: {capacity: 10, refill: 1/s}
    concurrency: {max_in_flight: 3, lease: 30s}
  - key: pool
    value: gpu
    concurrency: {max_in_flight: 4, lease: 30s}
    reject_as: pool
  - {key: rate, token_bucket: {capacity: 1, refill: 2/s}}
  - {key: day, rate_limit: {unit: day, requests_per_unit: 100}}
  - {key: banned, rate_limit: {unit: day, requests_per_unit: 0}}
`

// service is weir's own server in this process, on a memory store and the clock of the
// test's bubble, if it is in one.
type service struct {
	*server.Server
	conn grpc.ClientConnInterface
}

func serve(t testing.TB, text string) *service {
	t.Helper()
	set, err := policy.Parse("test.yaml", []byte(text), policy.Options{})
	if err != nil {
		t.Fatal(err)
	}
	st := memory.New(memory.Options{})
	s := &service{Server: server.New(server.Options{
		Store: st, StoreTimeout: storetest.Deadline, Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), Registerer: prometheus.NewRegistry(),
	})}
	s.SetPolicy(t.Context(), policy.Reading{Set: set, Changed: true})
	s.conn = dial(t, s.GRPC())
	t.Cleanup(func() {
		s.Close()
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// dial serves g and connects to it, until the test ends.
func dial(t testing.TB, g *grpc.Server) *grpc.ClientConn {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = g.Serve(listener)
	}()
	conn, err := grpc.NewClient("passthrough:///bufconn", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		g.Stop()
		<-served
	})
	return conn
}

// wire is a connection on which messages may be lost.
type wire struct {
	grpc.ClientConnInterface

	// lose says what becomes of the nth call, from 1 on, of the method, like "Acquire".
	lose func(ctx context.Context, method string, n int, request proto.Message) loss

	mu    sync.Mutex
	calls map[string]int
	asked []*weirv1.AcquireRequest
}

// loss is what becomes of one call.
type loss struct {
	request error // instead of sending it
	reply   error // instead of what was answered
}

var (
	cut     = status.Error(codes.Unavailable, "the connection was cut")
	refused = status.Error(codes.Unavailable, "connection refused")
)

// hang waits until the call's time is over.
func hang(ctx context.Context) error {
	<-ctx.Done()
	return status.FromContextError(ctx.Err()).Err()
}

func (w *wire) Invoke(ctx context.Context, method string, request, reply any, opts ...grpc.CallOption) error {
	name := strings.TrimPrefix(method, "/weir.v1.LeaseService/") // "/grpc.health.v1.Health/Check" remains
	m, _ := request.(proto.Message)
	w.mu.Lock()
	if w.calls == nil {
		w.calls = make(map[string]int)
	}
	w.calls[name]++
	n := w.calls[name]
	if a, ok := request.(*weirv1.AcquireRequest); ok {
		w.asked = append(w.asked, a)
	}
	w.mu.Unlock()
	var l loss
	if w.lose != nil {
		l = w.lose(ctx, name, n, m)
	}
	if l.request != nil {
		return l.request
	}
	if err := w.ClientConnInterface.Invoke(ctx, method, request, reply, opts...); err != nil {
		return err
	}
	return l.reply
}

// count is how many calls of a method there were.
func (w *wire) count(method string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.calls[method]
}

// watcher is an Observer that remembers.
type watcher struct {
	mu     sync.Mutex
	counts map[string]int // "acquires admitted"
	levels map[client.Gauge]int
	took   map[client.Histogram][]time.Duration
}

func newWatcher() *watcher {
	return &watcher{counts: make(map[string]int), levels: make(map[client.Gauge]int), took: make(map[client.Histogram][]time.Duration)}
}

func (w *watcher) Count(c client.Counter, word string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.counts[string(c)+" "+word]++
}

func (w *watcher) Took(h client.Histogram, d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.took[h] = append(w.took[h], d)
}

func (w *watcher) Level(g client.Gauge, change int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.levels[g] += change
}

func (w *watcher) count(name string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.counts[name]
}

func (w *watcher) level(g client.Gauge) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.levels[g]
}

// newClient is a client of conn in the domain images, closed with the test. It is patient,
// so that a machine that is busy is no service that is away.
func newClient(t testing.TB, conn grpc.ClientConnInterface, o client.Options) *client.Client {
	t.Helper()
	if o.Domain == "" {
		o.Domain = "images"
	}
	if o.Timeout == 0 {
		o.Timeout = storetest.Deadline
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	c := client.New(conn, o)
	t.Cleanup(c.Close)
	return c
}

// slots is how many leases the account's limit has.
func slots(t testing.TB, conn grpc.ClientConnInterface, account string) int {
	t.Helper()
	m, err := weirv1.NewLeaseServiceClient(conn).Inspect(storetest.Context(t), &weirv1.InspectRequest{
		Domain: "images", Entries: []*weirv1.Entry{{Key: "account", Value: account}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range m.GetLimits() {
		if l.GetKind() == weirv1.LimitKind_LIMIT_KIND_CONCURRENCY {
			return int(l.GetCount())
		}
	}
	t.Fatalf("no concurrency limit meets account=%s", account)
	return 0
}

// tokens is how many are left in the account's bucket.
func tokens(t testing.TB, conn grpc.ClientConnInterface, account string) int {
	t.Helper()
	m, err := weirv1.NewLeaseServiceClient(conn).Inspect(storetest.Context(t), &weirv1.InspectRequest{
		Domain: "images", Entries: []*weirv1.Entry{{Key: "account", Value: account}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range m.GetLimits() {
		if l.GetKind() != weirv1.LimitKind_LIMIT_KIND_CONCURRENCY {
			return int(l.GetRemaining())
		}
	}
	t.Fatalf("no bucket meets account=%s", account)
	return 0
}
