package e2e

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	grpcstatus "google.golang.org/grpc/status"

	"weir/store/storetest"
)

// grpcUpstream serves gRPC health until the test ends, and returns its address. A
// stream of a client with x-brief ends after a message.
func grpcUpstream(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
		if md, _ := metadata.FromIncomingContext(stream.Context()); md.Get("x-brief") != nil {
			return stream.SendMsg(&healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING})
		}
		return handle(srv, stream)
	}))
	healthpb.RegisterHealthServer(server, health.NewServer())
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return l.Addr().String()
}

// grpcRoutes lead there.
func grpcRoutes(t *testing.T, address string) []change {
	t.Helper()
	return []change{
		route("\n              - match: {prefix: /grpc.health.v1.Health/}\n                route: {cluster: health, timeout: 0s}"),
		cluster("health", endpoint(t, address), `    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
`),
	}
}

// calls is a stream that is a call through Envoy.
func calls(call func(ctx context.Context, t *testing.T, c healthpb.HealthClient)) func(*testing.T, *stack, string) {
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

func wantCode(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if got := grpcstatus.Code(err); got != want {
		t.Errorf("%v, want %v", err, want)
	}
}

// watch begins a stream without an end, and reads its first message.
func watch(ctx context.Context, t *testing.T, c healthpb.HealthClient) healthpb.Health_WatchClient {
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

func TestEveryKindOfStreamReleases(t *testing.T) {
	t.Parallel()
	s := start(t, onRedis(storetest.StartRedis(t, storetest.AnyRedis(t))), append(grpcRoutes(t, grpcUpstream(t)),
		change{"request_timeout: 30s", "request_timeout: 0.3s"})...)
	endAll(t, s, []ending{
		{"a call", calls(func(ctx context.Context, t *testing.T, c healthpb.HealthClient) {
			_, err := c.Check(ctx, &healthpb.HealthCheckRequest{})
			wantCode(t, err, codes.OK)
		}), 1, 0},
		{"a call that fails", calls(func(ctx context.Context, t *testing.T, c healthpb.HealthClient) {
			_, err := c.Check(ctx, &healthpb.HealthCheckRequest{Service: "nobody's"})
			wantCode(t, err, codes.NotFound)
		}), 1, 0},
		{"a stream of messages", calls(func(ctx context.Context, t *testing.T, c healthpb.HealthClient) {
			stream := watch(metadata.AppendToOutgoingContext(ctx, "x-brief", "1"), t, c)
			if _, err := stream.Recv(); err != io.EOF { //nolint:errorlint // as grpc documents it
				t.Errorf("%v, want the end", err)
			}
		}), 1, 0},
		{"a stream of messages that its client cancels", calls(func(ctx context.Context, t *testing.T, c healthpb.HealthClient) {
			ctx, cancel := context.WithCancel(ctx)
			stream := watch(ctx, t, c)
			cancel()
			_, err := stream.Recv()
			wantCode(t, err, codes.Canceled)
		}), 1, 0},
		{"a deadline of its client", calls(func(ctx context.Context, t *testing.T, c healthpb.HealthClient) {
			ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			defer cancel()
			stream, err := c.Watch(ctx, &healthpb.HealthCheckRequest{})
			for err == nil {
				_, err = stream.Recv()
			}
			wantCode(t, err, codes.DeadlineExceeded)
		}), -1, 0}, // on a slow machine it never began
		{"a client of gRPC that vanishes", calls(func(ctx context.Context, t *testing.T, c healthpb.HealthClient) { watch(ctx, t, c) }), 1, 0},
		{"events", func(t *testing.T, s *stack, account string) {
			a := s.get(t, account, "/events")
			a.want(t, 200, "content-type", "text/event-stream")
			if want := "data: 0\n\ndata: 1\n\ndata: 2\n\n"; a.body != want {
				t.Errorf("events %q, want %q", a.body, want)
			}
		}, 1, 1},
		{"HEAD", func(t *testing.T, s *stack, account string) {
			head(t, s, account, "/ok").want(t, 200)
		}, 1, 1},
		{"HEAD that the upstream cuts", func(t *testing.T, s *stack, account string) {
			head(t, s, account, "/panic").want(t, 503)
		}, 1, 1},
		{"a client of HTTP/2 resets before the answer", func(t *testing.T, s *stack, account string) {
			leaveBy(t, s, http2Client(t), account, "/hold")
		}, 1, 1},
		{"a client closes its half", closesHalf, 1, 1},
		{"an upload that stalls", stalls, 1, -1}, // whether it reached the upstream is a matter of buffers
		{"the client leaves within its upload", func(t *testing.T, s *stack, account string) {
			c := s.dial(t)
			if _, err := fmt.Fprintf(c, "POST /upload HTTP/1.1\r\nHost: x\r\nX-Account: %s\r\nContent-Length: 10\r\n\r\nhalf", account); err != nil {
				t.Fatal(err)
			}
			_ = c.Close()
		}, -1, -1},
		{"the client leaves around the answer", func(t *testing.T, s *stack, account string) { leaveAround(t, s, account, "/ok") }, -1, -1},
		{"the client leaves around a first part", func(t *testing.T, s *stack, account string) { leaveAround(t, s, account, "/stream") }, -1, -1},
	})

	// An upload may stall for 30 s again; nothing else may stall at all.
	s.envoy = s.front(t, change{"stream_idle_timeout: 60s", "stream_idle_timeout: 0.3s"})
	endAll(t, s, []ending{
		{"an upstream that says nothing", status("/hold", http.StatusGatewayTimeout), 1, 1},
	})
}

func head(t *testing.T, s *stack, account, path string) answer {
	t.Helper()
	a, err := s.sendBy(t.Context(), s.client, http.MethodHead, account, path)
	if err != nil {
		t.Fatalf("HEAD %s: %v", path, err)
	}
	return a
}

// leaveAround sends requests whose clients leave at any moment up to about twice the
// time that an answer takes.
func leaveAround(t *testing.T, s *stack, account, path string) {
	t.Helper()
	begin := time.Now()
	for range 5 {
		s.get(t, account, path)
	}
	usual := time.Since(begin) / 5
	http2 := http2Client(t)
	var clients sync.WaitGroup
	for i := range 4 {
		client := []*http.Client{s.client, http2}[i%2]
		clients.Go(func() {
			for range 50 {
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(2*usual))
				_, _ = s.sendBy(ctx, client, http.MethodGet, account, path)
				cancel()
			}
		})
	}
	clients.Wait()
}

// closesHalf is a client that has no more to say, and listens.
func closesHalf(t *testing.T, s *stack, account string) {
	t.Helper()
	c := s.dial(t)
	defer func() { _ = c.Close() }()
	if _, err := fmt.Fprintf(c, "GET /hold HTTP/1.1\r\nHost: x\r\nX-Account: %s\r\n\r\n", account); err != nil {
		t.Fatal(err)
	}
	<-s.upstream.holding
	half, ok := c.(*net.TCPConn)
	if !ok {
		t.Fatalf("%T is no TCP", c)
	}
	if err := half.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); len(b) > 0 || err != nil {
		t.Errorf("%q, %v, want an end without an answer", b, err)
	}
}

// stalls is a client that sends half of what it has announced.
func stalls(t *testing.T, s *stack, account string) {
	t.Helper()
	c := s.dial(t)
	defer func() { _ = c.Close() }()
	if _, err := fmt.Fprintf(c, "POST /upload HTTP/1.1\r\nHost: x\r\nX-Account: %s\r\nContent-Length: 10\r\n\r\nhalf", account); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(c)
	response, err := http.ReadResponse(in, nil)
	if err != nil || response.StatusCode != http.StatusRequestTimeout {
		t.Errorf("%v, %v, want 408", response, err)
	}
}

// breaks is a client of HTTP/2 that sends some frames, in hex, when the upstream has its
// stream, which is the first.
func breaks(frames string) func(*testing.T, *stack, string) {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		c := s.dial(t)
		defer func() { _ = c.Close() }()
		// SETTINGS; HEADERS: GET, http, and the path, authority and account as they are.
		request := "\x82\x86\x04\x05/hold\x01\x01x\x00\x09x-account" + string(rune(len(account))) + account
		_, err := io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"+"\x00\x00\x00\x04\x00\x00\x00\x00\x00"+
			"\x00\x00"+string(rune(len(request)))+"\x01\x05\x00\x00\x00\x01"+request)
		if err != nil {
			t.Fatal(err)
		}
		<-s.upstream.holding
		b, err := hex.DecodeString(frames)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		s.eventually(t, heldNow, 0)
	}
}

// A slot lingers if the upstream may still work. That is told by Envoy's words for how
// a stream has ended.
func TestASlotLingersIfTheStreamEndsEarly(t *testing.T) {
	t.Parallel()
	s := start(t, onRedis(storetest.StartRedis(t, storetest.AnyRedis(t))), slices.Concat(upstreamRoutes, grpcRoutes(t, grpcUpstream(t)),
		[]change{{"request_timeout: 30s", "request_timeout: 0.3s"}})...)
	cancels := calls(func(ctx context.Context, t *testing.T, c healthpb.HealthClient) {
		ctx, cancel := context.WithCancel(ctx)
		watch(ctx, t, c)
		cancel()
	})
	check := func(name string, end func(*testing.T, *stack, string), lingers bool) {
		t.Run(name, func(t *testing.T) {
			results := func() (n [2]int) {
				for i, result := range []string{"RELEASED", "LINGERING"} {
					n[i] = s.metric(t, `weir_leases_released_total{domain="inference",result="`+result+`"}`)
				}
				return n
			}
			want := results()
			if lingers {
				want[1]++
			} else {
				want[0]++
			}
			end(t, s, "gpu-1")
			storetest.Eventually(t, "it is released, as it should", func() bool { return results() == want })
			storetest.Eventually(t, "its slots are free", func() bool { return s.metric(t, `weir_leases_held{domain="inference"}`) == 0 })
		})
	}
	for name, end := range map[string]func(*testing.T, *stack, string){
		"200": status("/ok", 200), "500": status("/error", 500), "the upstream closes": status("/panic", 503), "no connection": status("/dead", 503),
	} {
		check(name, end, false)
	}
	for name, end := range map[string]func(*testing.T, *stack, string){
		"the client leaves before the answer": leaves("/hold"),
		"the client leaves within the answer": leaves("/drip"),
		"HTTP/2 reset before the answer":      func(t *testing.T, s *stack, a string) { leaveBy(t, s, http2Client(t), a, "/hold") },
		"HTTP/2 reset within the answer":      func(t *testing.T, s *stack, a string) { leaveBy(t, s, http2Client(t), a, "/drip") },
		"a client closes its half":            closesHalf,
		"a call is cancelled":                 cancels,
		"a client of gRPC vanishes":           calls(func(ctx context.Context, t *testing.T, c healthpb.HealthClient) { watch(ctx, t, c) }),
		"a WebSocket":                         webSocket,
		"the route's time-out":                status("/timeout", 504),
		"the route's idle time-out":           status("/idle", 504),
		"an upload that stalls":               stalls,
		"HTTP/2 reset without an error":       breaks("000004030000000001" + "00000000"),
		"HTTP/2 data of no stream":            breaks("00000100000000000078"),
		"HTTP/2 an empty window update":       breaks("000004080000000001" + "00000000"),
		"HTTP/2 too large a window":           breaks("000004080000000001" + "7fffffff"),
		"HTTP/2 headers behind the end":       breaks("000005010500000001" + "0001410161"),
		"HTTP/1 a bad chunk": func(t *testing.T, s *stack, account string) {
			t.Helper()
			c := s.dial(t)
			defer func() { _ = c.Close() }()
			if _, err := fmt.Fprintf(c, "POST /hold HTTP/1.1\r\nHost: x\r\nX-Account: %s\r\nTransfer-Encoding: chunked\r\n\r\n", account); err != nil {
				t.Fatal(err)
			}
			close((<-s.upstream.holding).leave)
			_, _ = io.WriteString(c, "zz\r\n")
			_, _ = io.Copy(io.Discard, c)
		},
		"the longest stream": func(t *testing.T, s *stack, account string) {
			if a, err := s.send(t.Context(), account, "/duration"); err == nil {
				t.Errorf("got all of a response without an end: %+v", a)
			}
		},
	} {
		check(name, end, true)
	}
	s.envoy = s.front(t, change{"stream_idle_timeout: 60s", "stream_idle_timeout: 0.3s"})
	check("the longest silence", status("/hold", 504), true)
	check("the longest silence within the answer", func(t *testing.T, s *stack, account string) {
		if a, err := s.send(t.Context(), account, "/mute"); err == nil {
			t.Errorf("got all of a response without an end: %+v", a)
		}
	}, true)
}
