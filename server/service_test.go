package server_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"testing"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"weir/envoy"
	"weir/policy"
	weirv1 "weir/proto/weir/v1"
	"weir/server"
	"weir/server/servertest"
	"weir/store"
	"weir/store/memory"
	"weir/store/storetest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		servertest.Clean()
		os.Exit(code)
	}))
}

// service is a server in this process, and its clients.
type service struct {
	*server.Server
	registry *prometheus.Registry
	clock    *storetest.Clock // of its store
	conn     *grpc.ClientConn
	envoy    rls.RateLimitServiceClient
	leases   weirv1.LeaseServiceClient
}

// newService returns a server without policies on an empty memory store, and
// its clients. It ends with the test.
func newService(t testing.TB, o envoy.Options) *service {
	t.Helper()
	clock := storetest.NewClock()
	return serviceOn(t, memory.New(memory.Options{Now: clock.Now}), clock, o)
}

func serviceOn(t testing.TB, st store.Store, clock *storetest.Clock, e envoy.Options) *service {
	t.Helper()
	return serviceWith(t, st, clock, func(o *server.Options) { o.Encode = e })
}

// serviceWith is a service with other options.
func serviceWith(t testing.TB, st store.Store, clock *storetest.Clock, change func(*server.Options)) *service {
	t.Helper()
	s := &service{registry: prometheus.NewRegistry(), clock: clock}
	_, instant := st.(*memory.Store)
	options := server.Options{
		Store:   st,
		Instant: instant,
		// Not a minute of machine time, however busy: the memory store answers at once.
		StoreTimeout: storetest.Deadline,
		Logger:       slog.New(slog.NewTextHandler(t.Output(), nil)),
		Registerer:   s.registry,
		StoreLoad:    func() (connections, idle, waiting int) { return 3, 1, 5 },
	}
	change(&options)
	s.Server = server.New(options)
	listener := bufconn.Listen(1 << 20)
	g := s.GRPC()
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = g.Serve(listener)
	}()
	dial := func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }
	conn, err := grpc.NewClient("passthrough:///bufconn", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dial))
	if err != nil {
		t.Fatal(err)
	}
	s.conn, s.envoy, s.leases = conn, rls.NewRateLimitServiceClient(conn), weirv1.NewLeaseServiceClient(conn)
	t.Cleanup(func() {
		_ = conn.Close()
		g.Stop()
		<-served
		s.Close()
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// serve returns a server with the policy, whose store has answered.
func serve(t testing.TB, text string) *service {
	t.Helper()
	s := newService(t, envoy.Options{})
	s.setPolicy(t, text)
	s.run(t)
	storetest.Eventually(t, "the store answers", func() bool { return s.metric(t, "weir_ready") == 1 })
	return s
}

// run looks after the store until the test ends.
func (s *service) run(t testing.TB) {
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		s.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ran
	})
}

// setPolicy puts a policy in force.
func (s *service) setPolicy(t testing.TB, text string) {
	t.Helper()
	s.SetPolicy(t.Context(), policy.Reading{Set: parse(t, text), Changed: true})
}

func parse(t testing.TB, text string) *policy.Set {
	t.Helper()
	set, err := policy.Parse("test.yaml", []byte(text), policy.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// page asks an HTTP page and returns its code and body.
// openMetrics is what Prometheus scrapes if it asks for OpenMetrics.
func (s *service) openMetrics(t testing.TB) string {
	t.Helper()
	r := httptest.NewRequest("GET", "/metrics", nil)
	r.Header.Set("Accept", "application/openmetrics-text; version=1.0.0")
	w := httptest.NewRecorder()
	s.HTTP(s.registry).ServeHTTP(w, r)
	return w.Body.String()
}

func (s *service) page(path string) (int, string) {
	w := httptest.NewRecorder()
	s.HTTP(s.registry).ServeHTTP(w, httptest.NewRequest("GET", path, nil))
	body, _ := io.ReadAll(w.Result().Body)
	return w.Code, string(body)
}

// metric returns the value of a series, 0 if there is none.
func (s *service) metric(t testing.TB, series string) float64 {
	t.Helper()
	_, text := s.page("/metrics")
	return metricIn(t, text, series)
}

// version is that of the policies in force.
func (s *service) version(t testing.TB) string {
	t.Helper()
	_, h := healthz(t, 0, second(s.page("/healthz")))
	return h.Policy.Version
}

func second[A, B any](_ A, b B) B { return b }

// metricOf returns the value of a series of a process.
func metricOf(t testing.TB, p *servertest.Process, series string) float64 {
	t.Helper()
	_, text := p.Get(t, "/metrics")
	return metricIn(t, text, series)
}

func metricIn(t testing.TB, text, series string) float64 {
	t.Helper()
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			return v
		}
	}
	return 0
}

// ask sends a request and returns the answer, both in short:
//
//	ask(t, client, "d", "[a=1;hits=5][b=2,c=3;neg]", 0)  "OVER [OVER 0][OK 3]"
//
// A descriptor is written as in the scenarios of store/testdata: its entries and
// then hits=N (hits_addend), neg (is_negative_hits), limit=N/UNIT (an override, with
// any of Envoy's units or the number of one). A status is its code and what remains,
// nil if it has no limit. An error is its code.
func ask(t testing.TB, client rls.RateLimitServiceClient, domain, descriptors string, hits uint32) string {
	t.Helper()
	r, err := client.ShouldRateLimit(storetest.Context(t), &rls.RateLimitRequest{Domain: domain, Descriptors: descriptorsOf(t, descriptors), HitsAddend: hits})
	if err != nil {
		return status.Code(err).String()
	}
	return answerText(r)
}

func answerText(r *rls.RateLimitResponse) string {
	var b strings.Builder
	b.WriteString(strings.TrimSuffix(r.GetOverallCode().String(), "_LIMIT"))
	b.WriteByte(' ')
	for _, s := range r.GetStatuses() {
		remaining := "nil"
		if s.GetCurrentLimit() != nil {
			remaining = strconv.FormatUint(uint64(s.GetLimitRemaining()), 10)
		}
		fmt.Fprintf(&b, "[%s %s]", strings.TrimSuffix(s.GetCode().String(), "_LIMIT"), remaining)
	}
	return b.String()
}

func descriptorsOf(t testing.TB, text string) []*ratelimit.RateLimitDescriptor {
	t.Helper()
	var list []*ratelimit.RateLimitDescriptor
	for part := range strings.SplitSeq(strings.TrimSuffix(strings.TrimPrefix(text, "["), "]"), "][") {
		words := strings.Split(part, ";")
		d := &ratelimit.RateLimitDescriptor{}
		for entry := range strings.SplitSeq(words[0], ",") {
			key, value, _ := strings.Cut(entry, "=")
			d.Entries = append(d.Entries, &ratelimit.RateLimitDescriptor_Entry{Key: key, Value: value})
		}
		for _, word := range words[1:] {
			key, value, _ := strings.Cut(word, "=")
			switch key {
			case "hits":
				n, err := strconv.ParseUint(value, 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				d.HitsAddend = wrapperspb.UInt64(n)
			case "neg":
				d.IsNegativeHits = true
			case "limit":
				count, unit, _ := strings.Cut(value, "/")
				n, err := strconv.ParseUint(count, 10, 32)
				if err != nil {
					t.Fatal(err)
				}
				u, ok := typev3.RateLimitUnit_value[unit]
				if !ok {
					number, err := strconv.ParseInt(unit, 10, 32)
					if err != nil {
						t.Fatal(err)
					}
					u = int32(number)
				}
				d.Limit = &ratelimit.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: uint32(n), Unit: typev3.RateLimitUnit(u)}
			default:
				t.Fatalf("what is %q?", word)
			}
		}
		list = append(list, d)
	}
	return list
}
