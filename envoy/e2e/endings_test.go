package e2e

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"weir/store/storetest"
)

// ending is a way in which streams end, and what it takes and leaves.
type ending struct {
	name   string
	end    func(t *testing.T, s *stack, account string)
	leases int  // granted, or unknown
	visits int  // of the upstream, or unknown
	early  bool // it ends before its upstream has answered all: slots linger, if their limit does
}

const unknown = -1

const (
	answered = false
	early    = true
)

// endings are those of a patient Envoy.
var endings = []ending{
	// The upstream ends it.
	{"200", status("/ok", 200), 1, 1, answered},
	{"500", status("/error", 500), 1, 1, answered},
	{"HEAD", by(http1, http.MethodHead, "/ok", 200), 1, 1, answered},
	{"HEAD that fails", by(http1, http.MethodHead, "/panic", 503), 1, 1, answered},
	{"a response in parts", status("/stream", 200), 1, 1, answered},
	{"server-sent events", events, 1, 1, answered},
	{"early hints", status("/hints", 200), 1, 1, answered},
	{"HTTP/2 on both sides", by(http2, http.MethodGet, "/h2/stream", 200), 1, 1, answered},
	{"trailers", trailers, 1, 1, answered},
	{"an upload", uploads("", "4", "done"), 1, 1, answered},
	{"an upload that asks first", uploads("Expect: 100-continue\r\n", "4", "done"), 1, 1, answered},
	{"an answer before the upload ends", answersEarly, 1, 1, answered},
	{"requests in one breath", pipelined, 2, 2, answered},
	{"a client that reads slowly", readsSlowly, 1, 1, answered},
	{"the upstream closes before it answers", status("/panic", 503), 1, 1, answered},
	{"the upstream resets before it answers", by(http2, http.MethodGet, "/h2/panic", 503), 1, 1, answered},
	{"the upstream cuts its response", cut(http1, "/cut"), 1, 1, answered},
	{"the upstream resets its response", cut(http2, "/h2/cut"), 1, 1, answered},
	{"the upstream says GOAWAY", status("/h2/away", 200), 1, 1, answered},
	{"the upstream speaks no HTTP", status("/garbage", 502), 1, 1, answered},
	{"the upstream closes a WebSocket", webSocket("bye\n"), 1, 1, answered},
	{"the upstream refuses an upgrade", status("/error", 500, "connection", "upgrade", "upgrade", "websocket"), 1, 1, answered},

	// Its client ends it.
	{"the client leaves before the answer", leaves(http1, "/hold"), 1, 1, early},
	{"the client leaves within the answer", leaves(http1, "/drip"), 1, 1, early},
	{"the client resets before the answer", leaves(http2, "/hold"), 1, 1, early},
	{"the client resets within the answer", leaves(http2, "/drip"), 1, 1, early},
	{"the client resets what is HTTP/2 on both sides", leaves(http2, "/h2/drip"), 1, 1, early},
	{"the client closes its half", closesHalf, 1, 1, early},
	{"the client closes a connection of three streams", losesConnection(false), 3, 3, early},
	{"the client resets a connection of three streams", losesConnection(true), 3, 3, early},
	{"the client says GOAWAY", saysGoAway, 1, 1, answered},
	{"the client resets without an error", breaks("000004030000000001" + "00000000"), 1, 1, early},
	{"the client sends data of no stream", breaks("00000100000000000078"), 1, 1, early},
	{"the client sends an empty window update", breaks("000004080000000001" + "00000000"), 1, 1, early},
	{"the client opens too large a window", breaks("000004080000000001" + "7fffffff"), 1, 1, early},
	{"the client sends headers behind its end", breaks("000005010500000001" + "0001410161"), 1, 1, early},
	{"the client leaves what it does not read", stopsReading, 1, 1, early},
	{"the client leaves a WebSocket", webSocket(""), 1, 1, early},
	{"the client leaves within its upload", uploads("", "10", ""), unknown, unknown, early},
	{"the client leaves within its head", breaksOff("GET /ok HTTP/1.1\r\nHost: x\r\nX-Acc"), 0, 0, early},
	{"the client leaves while Envoy waits to try again", leavesRetry, 1, 1, early},
	{"the client leaves around the answer", leavesAround("/ok"), unknown, unknown, early},
	{"the client leaves around a first part", leavesAround("/stream"), unknown, unknown, early},
	{"the client leaves around an internal redirect", leavesAround("/redirect"), unknown, unknown, early},
	{"the client leaves while weir decides", leavesDecision(http1), unknown, 0, early},
	{"the client resets while weir decides", leavesDecision(http2), unknown, 0, early},

	// Envoy ends it, or begins it again.
	{"the route's time-out", status("/timeout", 504), 1, 1, early},
	{"the route's idle time-out", status("/idle", 504), 1, 1, early},
	{"the longest stream", cut(http1, "/duration"), 1, 1, early},
	{"the longest stream of the cluster", status("/brief", 504), 1, 1, early},
	{"time-outs of all tries", status("/tries", 504), 1, 2, early},
	{"idle time-outs of all tries", status("/dull", 504), 1, 2, early},
	{"a time-out of the first try", status("/again", 200), 1, unknown, answered},
	{"a hedge", hedged, 1, unknown, answered},
	{"retries", status("/retry", 200), 1, 3, answered},
	{"a mirror", status("/mirror", 200), 1, 2, answered},
	{"an internal redirect", status("/redirect", 200), 2, 2, answered},
	{"no connection to the upstream", status("/dead", 503), 1, 0, answered},
	{"no upstream that is healthy", status("/empty", 503), 1, 0, answered},
	{"an upstream with too much to do", status("/narrow", 503), 1, 0, answered},
	{"a filter behind weir answers", status("/ok", 418, "x-envoy-fault-abort-request", "418"), 1, 0, answered},
	{"a body that is no HTTP", garbles, 1, 1, early},
	{"a direct response", status("/direct", 200), 0, 0, answered},
	{"a redirect of Envoy's", status("/elsewhere", 301), 0, 0, answered},
	{"an upgrade that Envoy refuses", status("/ok", 403, "connection", "upgrade", "upgrade", "unheard-of"), 0, 0, answered},
	{"CONNECT", speaks("CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n", 404), 0, 0, answered},
	{"HTTP/1.0", speaks("GET /ok HTTP/1.0\r\n", 426), 0, 0, answered},

	// weir refuses it. What it refuses takes nothing; what filled its lane does.
	{"a full lane", fullLane(func(t *testing.T, s *stack, account string) {
		s.get(t, account, "/ok").wantRefused(t, http.StatusTooManyRequests, laneOf(account))
	}), 3, 3, answered},
	{"a full lane for an upload", fullLane(uploadsInVain), 3, 3, answered},
	{"a full lane for a call", fullLane(callsInVain), 3, 3, answered},
	{"a full pool", fullPool, 5, 3, answered},

	// gRPC.
	{"a call", calls(check("", "OK")), 1, 1, answered},
	{"a call that fails", calls(check("nobody's", "NotFound")), 1, 1, answered},
	{"a stream of messages", calls(watchAll), 1, 1, answered},
	{"a stream of messages that its client cancels", calls(watchAndCancel), 1, 1, early},
	{"a deadline of its client", calls(watchUntilDeadline), unknown, unknown, early}, // on a slow machine it never began
	{"a deadline of its client that Envoy sees first", deadlineOfEnvoy, 1, 1, early},
	{"a client of gRPC that vanishes", calls(func(ctx context.Context, t *testing.T, c client) { watch(ctx, t, c) }), 1, 1, early},
}

// stalls are those of an Envoy that has no patience with silence.
var stalls = []ending{
	{"an upload that stalls", stallsUpload, 1, unknown, early}, // whether it reached the upstream is a matter of buffers
	{"an upstream that says nothing", status("/hold", 504), 1, 1, early},
	{"an upstream that says no more", cut(http1, "/mute"), 1, 1, early},
	{"an upstream over HTTP/2 that says no more", cut(http2, "/h2/mute"), 1, 1, early},
	{"a client that does not read", neverReads, 1, 1, early},
	{"a WebSocket that says nothing", webSocket("ping\n"), 1, 1, early},
}

var impatient = []change{
	{"stream_idle_timeout: 60s", "stream_idle_timeout: 0.5s"},
	{"request_timeout: 30s", "request_timeout: 0.5s"},
}

// endingRoutes lead to them.
var endingRoutes = []change{
	{"                route: {cluster: upstream, timeout: 60s}\n", "                route: {cluster: upstream, timeout: 0s}\n"},
	route(`
              - match: {prefix: /timeout}
                route: {cluster: upstream, timeout: 0.3s, prefix_rewrite: /hold}
              - match: {prefix: /idle}
                route: {cluster: upstream, timeout: 0s, idle_timeout: 0.3s, prefix_rewrite: /hold}
              - match: {prefix: /duration}
                route: {cluster: upstream, timeout: 0s, max_stream_duration: {max_stream_duration: 0.3s}, prefix_rewrite: /drip}
              - match: {prefix: /brief}
                route: {cluster: brief, timeout: 0s, prefix_rewrite: /hold}
              - match: {prefix: /tries}
                route:
                  cluster: upstream
                  timeout: 0s
                  prefix_rewrite: /hold
                  retry_policy: {retry_on: 5xx, num_retries: 1, per_try_timeout: 0.2s}
              - match: {prefix: /dull}
                route:
                  cluster: upstream
                  timeout: 0s
                  prefix_rewrite: /hold
                  retry_policy: {retry_on: 5xx, num_retries: 1, per_try_idle_timeout: 0.2s}
              - match: {prefix: /again}
                route:
                  cluster: upstream
                  timeout: 0s
                  prefix_rewrite: /slow
                  retry_policy: {retry_on: 5xx, num_retries: 20, per_try_timeout: 0.2s}
              - match: {prefix: /hedge}
                route:
                  cluster: upstream
                  timeout: 0s
                  prefix_rewrite: /slow
                  hedge_policy: {hedge_on_per_try_timeout: true}
                  retry_policy: {retry_on: 5xx, num_retries: 5, per_try_timeout: 0.2s}
              - match: {prefix: /retry}
                route:
                  cluster: upstream
                  prefix_rewrite: /flaky
                  retry_policy: {retry_on: 5xx, num_retries: 3, retry_back_off: {base_interval: 0.01s}}
              - match: {prefix: /later}
                route:
                  cluster: upstream
                  timeout: 0s
                  prefix_rewrite: /error
                  retry_policy:
                    retry_on: 5xx
                    # The answer's x-after says when to try again.
                    rate_limited_retry_back_off: {reset_headers: [{name: x-after, format: SECONDS}], max_interval: 300s}
              - match: {prefix: /mirror}
                route: {cluster: upstream, prefix_rewrite: /ok, request_mirror_policies: [{cluster: upstream}]}
              - match: {prefix: /redirect}
                route: {cluster: upstream, internal_redirect_policy: {max_internal_redirects: 1}}
              - match: {prefix: /dead}
                route: {cluster: dead}
              - match: {prefix: /empty}
                route: {cluster: empty}
              - match: {prefix: /narrow}
                route: {cluster: narrow}
              - match: {prefix: /direct}
                direct_response: {status: 200, body: {inline_string: direct}}
              - match: {prefix: /elsewhere}
                redirect: {path_redirect: /ok}
              - match: {prefix: /h2/}
                route: {cluster: http2, timeout: 0s, prefix_rewrite: /}
              - match: {prefix: /obey}
                route: {cluster: http2, timeout: 0s, prefix_rewrite: /hold, max_stream_duration: {grpc_timeout_header_max: 0s}}
                request_headers_to_remove: [content-type]
              - match: {prefix: /grpc.health.v1.Health/}
                route: {cluster: http2, timeout: 0s}`),
	cluster("dead", "- endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 1}}}"), // where nothing listens
	cluster("empty", "[]"),
	cluster("narrow", upstreamEndpoint, "    circuit_breakers: {thresholds: [{max_connections: 0, max_pending_requests: 0}]}"),
	cluster("http2", upstreamEndpoint, httpOptions("explicit_http_config: {http2_protocol_options: {}}")),
	cluster("brief", upstreamEndpoint, httpOptions("common_http_protocol_options: {max_stream_duration: 0.2s}\n        explicit_http_config: {http_protocol_options: {}}")),
	{"          stat_prefix: ingress\n", "          stat_prefix: ingress\n          upgrade_configs: [{upgrade_type: websocket}]\n"},
	{"          - name: envoy.filters.http.router\n", `          - name: envoy.filters.http.fault
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault
              abort: {header_abort: {}, percentage: {numerator: 100}}
          - name: envoy.filters.http.router
`},
}

// upstreamEndpoint is where Envoy finds the upstream: front says where that is.
const upstreamEndpoint = "- endpoint: of the upstream"

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
` + strings.Join(more, "\n") + "\n"}
}

// httpOptions are such lines.
func httpOptions(options string) string {
	return `    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        ` + options
}

// However a stream ends, what it held is free soon, by exactly one release, whichever
// way that takes; and the upstream was called or not.
func TestEveryEndingReleases(t *testing.T) {
	t.Parallel()
	nowhere := cluster("nowhere", "- endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 1}}}")
	for _, variant := range []struct {
		name    string
		tellers int  // that tell weir of an end
		early   bool // they are heard if they tell it before weir has decided
		changes []change
	}{
		{"by both", 2, true, nil},
		{"by the filter", 1, true, []change{nowhere, {ofTheLog, strings.Replace(ofTheLog, "weir_release", "nowhere", 1)}}},
		{"by the access log", 1, false, []change{nowhere, {ofTheFilter, strings.Replace(ofTheFilter, "weir_release", "nowhere", 1)}}},
	} {
		t.Run(variant.name, func(t *testing.T) {
			t.Parallel()
			changes := slices.Concat(endingRoutes, variant.changes)
			s := startOnRedis(t, changes...)
			var took []time.Duration
			endAll := func(endings []ending) {
				for _, e := range endings {
					if e.leases == unknown && !variant.early {
						continue
					}
					t.Run(e.name, func(t *testing.T) {
						account := strings.NewReplacer(" ", "-", "'", "", "/", "").Replace(e.name)
						took = append(took, e.check(t, s, account, variant.tellers, false))
						e.check(t, s, "gpu-"+account, variant.tellers, true)
					})
				}
			}
			endAll(endings)
			patient := s.envoy
			s.envoy = s.front(t, slices.Concat(changes, impatient)...)
			endAll(stalls)
			s.envoy = patient

			if slices.Sort(took); len(took) > 0 { // none if -run has left all out
				t.Logf("all that %d endings held was seen to be free after %v (median), %v at most", len(took), took[len(took)/2], took[len(took)-1])
			}
			s.get(t, "gpu-last", "/ok").want(t, http.StatusOK) // what lingered is counted when somebody asks
			s.eventually(t, heldNow, 0)
			storetest.Eventually(t, "every lease has ended once", func() bool { return s.metric(t, granted) == s.metric(t, released)+s.metric(t, expired) })
			if got, most := s.metric(t, expired), s.metric(t, lingering); got > most {
				t.Errorf("%d leases ended by expiry, want no more than the %d that lingered", got, most)
			}
		})
	}
}

// The clusters of what tells weir of an end.
const (
	ofTheLog    = "                grpc_service: {envoy_grpc: {cluster_name: weir_release}}\n"
	ofTheFilter = "                  envoy_grpc: {cluster_name: weir_release}\n"
)

// tally is what weir counts of leases.
type tally struct{ granted, released, lingering, notHeld int }

func (s *stack) tally(t *testing.T) tally {
	t.Helper()
	return tally{s.total(t, granted), s.total(t, released), s.total(t, lingering), s.total(t, notHeld)}
}

func (a tally) minus(b tally) tally {
	return tally{a.granted - b.granted, a.released - b.released, a.lingering - b.lingering, a.notHeld - b.notHeld}
}

// check lets streams of an account end, and checks that they leave nothing, that each
// lease is released once, and the other teller finds nothing to release. The account's
// lane lingers or not. It returns how long it took until all was seen to be free.
func (e ending) check(t *testing.T, s *stack, account string, tellers int, lingers bool) time.Duration {
	t.Helper()
	before := s.tally(t)
	e.end(t, s, account)
	ended := time.Now()
	var taken string
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%q left in Redis: %s", account, taken)
		}
	})
	storetest.Eventually(t, "Redis has nothing that is taken", func() bool { taken = s.taken(t); return taken == "" })
	took := time.Since(ended)
	s.eventually(t, heldNow, 0)

	var got tally
	storetest.Eventually(t, "every end has been told", func() bool {
		got = s.tally(t).minus(before)
		freed := got.released + got.lingering
		if e.leases == unknown { // one that lingers and is given back is told twice
			return got.released <= got.granted && got.granted <= freed
		}
		return freed == e.leases && got.notHeld >= (tellers-1)*e.leases
	})
	if e.leases != unknown {
		want := tally{granted: e.leases, released: e.leases, notHeld: got.notHeld}
		if lingers && e.early {
			want.released, want.lingering = 0, e.leases
		}
		if got != want {
			t.Errorf("%q left %+v, want %+v", account, got, want)
		}
	}
	if e.visits != unknown {
		storetest.Eventually(t, fmt.Sprintf("%d visits", e.visits), func() bool { return len(s.upstream.of(account)) >= e.visits })
		if got := len(s.upstream.of(account)); got != e.visits {
			t.Errorf("the upstream was called %d times for %q, want %d", got, account, e.visits)
		}
	}
	return took
}

// taken names what Redis has of leases that live: their records, and their slots in
// lanes, pools and the index.
func (s *stack) taken(t *testing.T) string {
	t.Helper()
	return s.redis.MustDo(t, "EVAL", `
		local time, taken = redis.call('TIME'), {}
		local now = time[1] * 1000 + math.floor(time[2] / 1000)
		for _, key in ipairs(redis.call('KEYS', '*')) do
			local live = 0
			if redis.call('TYPE', key).ok == 'zset' then
				live = redis.call('ZCOUNT', key, '(' .. now, '+inf')
			elseif key:find('}:lease:', 1, true) then -- format, life, granted, expiry
				local record = {cmsgpack.unpack(redis.call('GET', key))}
				if record[4] > now then live = 1 end
			end
			if live > 0 then taken[#taken + 1] = key end
		end
		return taken`, "0")
}

func signal(t *testing.T, r *storetest.Redis, signal syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(r.PID(), signal); err != nil {
		t.Fatal(err)
	}
}
