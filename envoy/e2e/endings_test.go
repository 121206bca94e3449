package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"weir/store/storetest"
)

// upstreamRoutes are those of the endings.
var upstreamRoutes = []change{
	{"                route: {cluster: upstream, timeout: 60s}\n", "                route: {cluster: upstream, timeout: 0s}\n"},
	route(`
              - match: {prefix: /timeout}
                route: {cluster: upstream, timeout: 0.3s, prefix_rewrite: /hold}
              - match: {prefix: /idle}
                route: {cluster: upstream, timeout: 0s, idle_timeout: 0.3s, prefix_rewrite: /hold}
              - match: {prefix: /duration}
                route: {cluster: upstream, timeout: 0s, max_stream_duration: {max_stream_duration: 0.3s}, prefix_rewrite: /drip}
              - match: {prefix: /dead}
                route: {cluster: dead}
              - match: {prefix: /retry}
                route:
                  cluster: upstream
                  prefix_rewrite: /flaky
                  retry_policy: {retry_on: 5xx, num_retries: 3, retry_back_off: {base_interval: 0.01s}}
              - match: {prefix: /redirect}
                route: {cluster: upstream, internal_redirect_policy: {max_internal_redirects: 1}}
              - match: {prefix: /direct}
                direct_response: {status: 200, body: {inline_string: direct}}`),
	cluster("dead", "- endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 1}}}"), // where nothing listens
	{"          stat_prefix: ingress\n", "          stat_prefix: ingress\n          upgrade_configs: [{upgrade_type: websocket}]\n"},
}

// route adds routes before the one that takes the rest. They begin with a new line.
func route(yaml string) change {
	return change{"\n              routes:", "\n              routes:" + yaml}
}

// cluster adds a cluster with an endpoint, and further lines of it.
func cluster(name, endpoint string, more ...string) change {
	return change{"\n  clusters:\n", `
  clusters:
  - name: ` + name + `
    type: STATIC
    connect_timeout: 1s
    load_assignment:
      cluster_name: ` + name + `
      endpoints:
      - lb_endpoints:
        ` + endpoint + `
` + strings.Join(more, "\n")}
}

// However a stream ends, what it held is free soon, by exactly one release, and the
// upstream was called or not.
func TestEveryEndingReleases(t *testing.T) {
	t.Parallel()
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	s := start(t, onRedis(redis), upstreamRoutes...)
	endAll(t, s, []ending{
		{"200", status("/ok", 200), 1, 1},
		{"500", status("/error", 500), 1, 1},
		{"a response in parts", status("/stream", 200), 1, 1},
		{"the upstream closes before it answers", status("/panic", 503), 1, 1},
		{"the upstream cuts its response", func(t *testing.T, s *stack, account string) {
			if a, err := s.send(t.Context(), account, "/cut"); err == nil {
				t.Errorf("got all of a response that was cut: %+v", a)
			}
		}, 1, 1},
		{"the client leaves before the answer", leaves("/hold"), 1, 1},
		{"the client leaves within the answer", leaves("/drip"), 1, 1},
		{"a client of HTTP/2 resets its stream", func(t *testing.T, s *stack, account string) {
			leaveBy(t, s, http2Client(t), account, "/drip")
		}, 1, 1},
		{"the route's time-out", status("/timeout", 504), 1, 1},
		{"the route's idle time-out", status("/idle", 504), 1, 1},
		{"the longest stream", func(t *testing.T, s *stack, account string) {
			if a, err := s.send(t.Context(), account, "/duration"); err == nil {
				t.Errorf("got all of a response without an end: %+v", a)
			}
		}, 1, 1},
		{"no connection to the upstream", status("/dead", 503), 1, 0},
		{"Envoy's retries", status("/retry", 200), 1, 3},
		{"an internal redirect", status("/redirect", 200), 2, 2},
		{"no upstream", status("/direct", 200), 0, 0},
		{"a WebSocket", webSocket, 1, 1},
		{"a refusal", func(t *testing.T, s *stack, account string) {
			var all []held
			for range 3 {
				all = append(all, s.hold(t, account))
			}
			s.get(t, account, "/ok").wantRefused(t, http.StatusTooManyRequests, "lane")
			for _, h := range all {
				h.end(t, s)
			}
		}, 3, 3},
		{"the client leaves while weir decides", func(t *testing.T, s *stack, account string) {
			signal(t, redis, syscall.SIGSTOP)
			ctx, leave := context.WithCancel(t.Context())
			left := make(chan error, 1)
			asked := s.envoy.counter(t, "cluster.weir.upstream_rq_total")
			go func() {
				_, err := s.send(ctx, account, "/ok")
				left <- err
			}()
			storetest.Eventually(t, "weir is asked", func() bool { return s.envoy.counter(t, "cluster.weir.upstream_rq_total") > asked })
			leave()
			if err := <-left; err == nil {
				t.Error("a client that left was answered")
			}
			signal(t, redis, syscall.SIGCONT)
		}, -1, 0}, // whether it was granted is a matter of who was first
	})
}

// ending is a way in which a stream ends.
type ending struct {
	name   string
	end    func(t *testing.T, s *stack, account string)
	leases int // granted; -1 for any number
	visits int // of the upstream; -1 for any number
}

// endAll checks of each ending that it leaves nothing, by one release for each lease.
func endAll(t *testing.T, s *stack, endings []ending) {
	t.Helper()
	for _, c := range endings {
		t.Run(c.name, func(t *testing.T) {
			account := strings.NewReplacer(" ", "-", "'", "").Replace(c.name)
			granted := s.metric(t, `weir_leases_granted_total{domain="inference"}`)
			released := s.metric(t, `weir_leases_released_total{domain="inference",result="RELEASED"}`)
			c.end(t, s, account)
			storetest.Eventually(t, "its slots are free", func() bool { return s.metric(t, `weir_leases_held{domain="inference"}`) == 0 })
			granted = s.metric(t, `weir_leases_granted_total{domain="inference"}`) - granted
			if c.leases >= 0 && granted != c.leases {
				t.Errorf("%d leases were granted, want %d", granted, c.leases)
			}
			storetest.Eventually(t, "as many releases as leases are counted", func() bool {
				return s.metric(t, `weir_leases_released_total{domain="inference",result="RELEASED"}`)-released == granted
			})
			if got := len(s.upstream.of(account)); c.visits >= 0 && got != c.visits {
				t.Errorf("the upstream was called %d times, want %d", got, c.visits)
			}
		})
	}
	if got := s.metric(t, `weir_leases_expired_total{domain="inference"}`); got != 0 {
		t.Errorf("%d leases ended by expiry, want 0", got)
	}
}

func signal(t *testing.T, r *storetest.Redis, signal syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(r.PID(), signal); err != nil {
		t.Fatal(err)
	}
}

// status is a stream that ends by itself.
func status(path string, code int) func(*testing.T, *stack, string) {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		s.get(t, account, path).want(t, code)
	}
}

// http2Client speaks HTTP/2 from the first byte.
func http2Client(t *testing.T) *http.Client {
	t.Helper()
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// leaves is a stream whose client goes when the upstream has it, and has begun to
// answer if it does.
func leaves(path string) func(*testing.T, *stack, string) {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		leaveBy(t, s, s.client, account, path)
	}
}

func leaveBy(t *testing.T, s *stack, client *http.Client, account, path string) {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.envoy.url+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("x-account", account)
	done := make(chan error, 1)
	began := make(chan struct{})
	go func() {
		response, err := client.Do(r)
		if err == nil {
			close(began)
			_, err = io.Copy(io.Discard, response.Body)
			_ = response.Body.Close()
		}
		done <- err
	}()
	if path == "/hold" {
		<-s.upstream.holding
	} else {
		<-began
	}
	leave()
	if err := <-done; err == nil {
		t.Error("a client that left was answered in full")
	}
}

// dial connects to Envoy.
func (s *stack) dial(t *testing.T) net.Conn {
	t.Helper()
	c, err := net.DialTimeout("tcp", strings.TrimPrefix(s.envoy.url, "http://"), storetest.Deadline)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(storetest.Deadline))
	return c
}

// webSocket speaks over an upgraded connection, and then leaves.
func webSocket(t *testing.T, s *stack, account string) {
	t.Helper()
	c := s.dial(t)
	defer func() { _ = c.Close() }()
	_, err := fmt.Fprintf(c, "GET /socket HTTP/1.1\r\nHost: x\r\nX-Account: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", account)
	if err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(c)
	response, err := http.ReadResponse(in, nil)
	if err != nil || response.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("upgrade: %v, %v", response, err)
	}
	if _, err := io.WriteString(c, "ping\n"); err != nil {
		t.Fatal(err)
	}
	if got, err := in.ReadString('\n'); err != nil || got != "ping\n" {
		t.Errorf("echo = %q, %v", got, err)
	}
	if got := s.metric(t, `weir_leases_held{domain="inference"}`); got != 1 {
		t.Errorf("%d leases are held while the socket is open, want 1", got)
	}
}
