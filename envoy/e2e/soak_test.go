package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"weir/store/storetest"
)

// The limits of testdata/soak.yaml.
const (
	soakLane = 2
	soakPool = 6
)

// watcher is an upstream that counts what runs at once.
//
// Of a lane it counts the time for which a slot is surely taken: from when the
// upstream has the request until its handler returns, which is before the response
// ends, or until its client makes up its mind to leave, which is before it does.
// Whenever that is more than the limit, two had the same slot. From when a client
// leaves, or Envoy's patience is over, until the upstream notices, its slot may
// rightly be another's; so requests that wait for Envoy's patience are not counted.
//
// A lane that lingers counts all of every handler, and they go on for a while when
// nobody listens any more: that is what the linger is for.
type watcher struct {
	t *testing.T

	mu      sync.Mutex // guards what follows
	visits  map[string]*soakVisit
	running map[string]int // by lane, and in the pool
	most    map[string]int
	handled int
}

// soakVisit is a request of a client.
type soakVisit struct {
	id       string
	wanted   bool          // its client has not left, and Envoy will not end it
	begun    bool          // began is closed
	began    chan struct{} // closed when the upstream has it, or its client gives up
	handlers []*soakHandler
}

// soakHandler is the upstream's work for it.
type soakHandler struct {
	lingers bool
	counted []string // lane and pool
}

// announce is called by the client before it sends the request. Not wanted: Envoy will
// end it.
func (w *watcher) announce(id string, wanted bool) *soakVisit {
	v := &soakVisit{id: id, wanted: wanted, began: make(chan struct{})}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.visits[id] = v
	return v
}

// leave is called by the client before it leaves.
func (w *watcher) leave(v *soakVisit) {
	w.mu.Lock()
	defer w.mu.Unlock()
	v.wanted = false
	v.begin()
	for _, h := range v.handlers {
		w.uncount(h, !h.lingers)
	}
}

// forget is called by the client in the end.
func (w *watcher) forget(v *soakVisit) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.visits, v.id)
}

func (v *soakVisit) begin() {
	if !v.begun {
		v.begun = true
		close(v.began)
	}
}

// begin is called by a handler.
func (w *watcher) begin(id, account string) *soakHandler {
	h := &soakHandler{lingers: strings.HasPrefix(account, "gpu-")}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.handled++
	v := w.visits[id]
	if v == nil { // its client has gone
		v = &soakVisit{begun: true}
	}
	v.begin()
	v.handlers = append(v.handlers, h)
	if v.wanted || h.lingers {
		w.count(h, account, soakLane)
	}
	if v.wanted {
		w.count(h, "pool", soakPool)
	}
	return h
}

// end is called by a handler in the end.
func (w *watcher) end(h *soakHandler) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.uncount(h, true)
}

func (w *watcher) count(h *soakHandler, limit string, most int) {
	h.counted = append(h.counted, limit)
	w.running[limit]++
	w.most[limit] = max(w.most[limit], w.running[limit])
	if n := w.running[limit]; n > most {
		w.t.Errorf("%d at once in %s, want at most %d", n, limit, most)
	}
}

// uncount takes h out of the pool, and out of its lane.
func (w *watcher) uncount(h *soakHandler, lane bool) {
	h.counted = slices.DeleteFunc(h.counted, func(limit string) bool {
		if limit != "pool" && !lane {
			return false
		}
		w.running[limit]--
		return true
	})
}

// ServeHTTP does what the path says.
func (w *watcher) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	h := w.begin(r.Header.Get("x-soak"), r.Header.Get("x-account"))
	defer w.end(h)
	flush := func() { _ = http.NewResponseController(out).Flush() }
	work := func(most time.Duration) {
		select {
		case <-time.After(rand.N(most)):
		case <-r.Context().Done():
		}
	}
	defer func() {
		if r.Context().Err() != nil && h.lingers {
			<-time.After(rand.N(200 * time.Millisecond)) // it works on
		}
	}()
	switch path, _, _ := strings.Cut(r.URL.Path[1:], "/"); path {
	case "ok":
		work(40 * time.Millisecond)
		_, _ = io.WriteString(out, "done")
	case "error":
		http.Error(out, "failed", http.StatusInternalServerError)
	case "stream":
		for range 3 {
			_, _ = io.WriteString(out, "part")
			flush()
			work(20 * time.Millisecond)
		}
	case "close":
		work(20 * time.Millisecond)
		panic(http.ErrAbortHandler)
	case "cut":
		_, _ = io.WriteString(out, "part")
		flush()
		work(20 * time.Millisecond)
		panic(http.ErrAbortHandler)
	case "upload":
		_, _ = io.Copy(io.Discard, r.Body)
	case "hold":
		<-r.Context().Done()
	case "drip":
		for r.Context().Err() == nil {
			_, _ = io.WriteString(out, "drop")
			flush()
			work(10 * time.Millisecond)
		}
	case "flaky":
		if r.Header.Get("x-envoy-attempt-count") != "3" {
			http.Error(out, "not yet", http.StatusServiceUnavailable)
		}
	case "redirect":
		out.Header().Set("location", "http://"+r.Host+"/ok") // whole, or Envoy passes it on
		out.WriteHeader(http.StatusFound)
	case "socket":
		c, in, err := http.NewResponseController(out).Hijack()
		if err != nil {
			return
		}
		// Whoever hijacks a connection ends it: only when it is not counted any more.
		defer func() { w.end(h); _ = c.Close() }()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: ICX+Yqv66kxgM0FcWaLWlFLwTAI=\r\n\r\n")
		for {
			line, err := in.ReadString('\n')
			if err != nil || line == "bye\n" {
				return
			}
			_, _ = io.WriteString(c, line)
		}
	default:
		http.NotFound(out, r)
	}
}

// soaker is one of the clients.
type soaker struct {
	s       *stack
	w       *watcher
	clients []*http.Client
	random  *rand.Rand
	name    int
	sent    int
	endings map[string]int // that happened, by kind; and refusals
}

// soakEndings are how a request ends: by its upstream, by Envoy or by its client.
var soakEndings = map[string]func(c *soaker, t *testing.T, account string) int{
	"ok":       byUpstream("ok"),
	"error":    byUpstream("error"),
	"stream":   byUpstream("stream"),
	"closed":   byUpstream("close"),
	"cut":      byUpstream("cut"),
	"retries":  byUpstream("retry"),
	"redirect": byUpstream("redirect"),
	"HEAD": func(c *soaker, t *testing.T, account string) int {
		return c.send(t, http.MethodHead, account, "ok", true, nil)
	},
	"dead":             byUpstream("dead"),
	"direct":           byUpstream("direct"),
	"time-out":         byEnvoy("timeout"),
	"idle":             byEnvoy("idle"),
	"too long":         byEnvoy("duration"),
	"left before":      byClient("hold", func(v *soakVisit, _ *soaker, _ <-chan struct{}) { <-v.began }),
	"left within":      byClient("drip", func(_ *soakVisit, _ *soaker, answered <-chan struct{}) { <-answered }),
	"left some time":   byClient("ok", soon),
	"left a stream":    byClient("stream", soon),
	"left a redirect":  byClient("redirect", soon),
	"left retries":     byClient("retry", soon),
	"left an upload":   func(c *soaker, t *testing.T, account string) int { return c.raw(t, account, "upload", true) },
	"WebSocket":        func(c *soaker, t *testing.T, account string) int { return c.raw(t, account, "socket", false) },
	"left a WebSocket": func(c *soaker, t *testing.T, account string) int { return c.raw(t, account, "socket", true) },
}

// soon is a moment around the answer.
func soon(_ *soakVisit, c *soaker, _ <-chan struct{}) {
	<-time.After(time.Duration(c.random.Int64N(int64(8 * time.Millisecond))))
}

func byUpstream(path string) func(*soaker, *testing.T, string) int {
	return func(c *soaker, t *testing.T, account string) int {
		return c.send(t, http.MethodGet, account, path, true, nil)
	}
}

func byEnvoy(path string) func(*soaker, *testing.T, string) int {
	return func(c *soaker, t *testing.T, account string) int {
		return c.send(t, http.MethodGet, account, path, false, nil)
	}
}

func byClient(path string, until func(*soakVisit, *soaker, <-chan struct{})) func(*soaker, *testing.T, string) int {
	return func(c *soaker, t *testing.T, account string) int {
		return c.send(t, http.MethodGet, account, path, true, until)
	}
}

func (c *soaker) announce(wanted bool) *soakVisit {
	c.sent++
	return c.w.announce(fmt.Sprintf("%d-%d", c.name, c.sent), wanted)
}

// send sends a request, and returns the code of its answer, or 0. With until it
// leaves then.
func (c *soaker) send(t *testing.T, method, account, path string, wanted bool, until func(*soakVisit, *soaker, <-chan struct{})) int {
	v := c.announce(wanted)
	defer c.w.forget(v)
	ctx, cancel := context.WithTimeout(t.Context(), storetest.Deadline)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, c.s.envoy.url+"/"+path, nil)
	if err != nil {
		t.Error(err)
		return 0
	}
	r.Header.Set("x-account", account)
	r.Header.Set("x-soak", v.id)
	client := c.clients[c.random.IntN(len(c.clients))]
	answered, done := make(chan struct{}), make(chan struct{})
	code := 0
	go func() {
		defer close(done)
		response, err := client.Do(r)
		if err != nil {
			return
		}
		code = response.StatusCode
		close(answered)
		_, _ = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
	}()
	if until != nil {
		reached := make(chan struct{})
		go func() {
			defer close(reached)
			until(v, c, answered)
		}()
		select {
		case <-reached:
		case <-done: // it was refused, say
		}
		c.w.leave(v)
		cancel()
		<-done
		select {
		case <-answered:
		default:
			close(answered) // for who waits for it
		}
		<-reached
	}
	<-done
	if ctx.Err() != nil && until == nil {
		t.Errorf("%s for %q does not end", path, account)
	}
	return code
}

// raw speaks HTTP itself: half an upload, or a WebSocket, that it leaves or not.
func (c *soaker) raw(t *testing.T, account, path string, leaves bool) int {
	v := c.announce(true)
	defer c.w.forget(v)
	conn := c.s.dial(t)
	defer func() {
		c.w.leave(v)
		_ = conn.Close()
	}()
	head := fmt.Sprintf("Host: x\r\nX-Account: %s\r\nX-Soak: %s\r\n", account, v.id)
	if path == "upload" {
		_, _ = fmt.Fprintf(conn, "POST /upload HTTP/1.1\r\n%sContent-Length: 10\r\n\r\nhalf", head)
		soon(v, c, nil)
		return 0
	}
	_, _ = fmt.Fprintf(conn, "GET /socket HTTP/1.1\r\n%sConnection: Upgrade\r\nUpgrade: websocket\r\n"+
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", head)
	in := bufio.NewReader(conn)
	response, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Errorf("upgrade: %v", err)
		return 0
	}
	if response.StatusCode != http.StatusSwitchingProtocols {
		return response.StatusCode
	}
	if _, err := io.WriteString(conn, "ping\n"); err != nil {
		t.Error(err)
	}
	if got, err := in.ReadString('\n'); err != nil || got != "ping\n" {
		t.Errorf("echo = %q, %v", got, err)
	}
	if !leaves {
		_, _ = io.WriteString(conn, "bye\n")
		_, _ = io.Copy(io.Discard, in)
	}
	return response.StatusCode
}

// unknown is how many releases Redis answered after weir had given up, on a machine
// that was busy for a second: they are done, and not counted.
func (s *stack) unknown(t *testing.T) (n int) {
	t.Helper()
	for _, reason := range []string{"store_timeout", "store_unavailable", "store_error"} {
		n += s.total(t, `weir_store_errors_total{op="release",reason="`+reason+`"}`)
	}
	return n
}

// Thousands of requests end at random, two replicas decide. Nobody ever runs beyond
// a limit, and nothing is left. WEIR_SOAK, say 10m, is how long, instead of some
// seconds.
func TestSoak(t *testing.T) {
	t.Parallel()
	length, most := 10*time.Second, int64(6000)
	if v := os.Getenv("WEIR_SOAK"); v != "" {
		var err error
		if length, err = time.ParseDuration(v); err != nil {
			t.Fatal(err)
		}
		most = 1 << 62
	}
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	w := &watcher{t: t, visits: make(map[string]*soakVisit), running: make(map[string]int), most: make(map[string]int)}
	s := &stack{upstream: &upstream{Server: httptest.NewServer(w)}, client: &http.Client{Transport: new(http.Transport)}}
	t.Cleanup(s.upstream.Close)
	t.Cleanup(s.client.CloseIdleConnections)
	for range 2 {
		s.weirs = append(s.weirs, startWeir(t, "testdata/soak.yaml", onRedis(redis)...))
	}
	s.weir = s.weirs[0]
	s.envoy = s.front(t, append(slices.Clone(endingRoutes),
		change{"route: {cluster: upstream, timeout: 0.3s,", "route: {cluster: upstream, timeout: 0.05s,"},
		change{"idle_timeout: 0.3s,", "idle_timeout: 0.05s,"},
		change{"max_stream_duration: 0.3s", "max_stream_duration: 0.05s"},
		change{"            filter: {log_type_filter: {types: [DownstreamEnd]}}", "            filter: {log_type_filter: {types: [DownstreamStart]}}"}, // none
		change{"              domains: [\"*\"]\n", "              domains: [\"*\"]\n              include_request_attempt_count: true\n"},
	)...)
	accounts := []string{"a", "b", "c", "d", "a", "b", "c", "d", "gpu-1"}
	kinds := slices.Sorted(maps.Keys(soakEndings))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	end := time.Now().Add(length)
	var clients sync.WaitGroup
	var left atomic.Int64
	left.Store(most)
	all := make([]*soaker, 24)
	for i := range all {
		c := &soaker{
			s: s, w: w, name: i, clients: []*http.Client{http1(t), http2(t)},
			random: rand.New(rand.NewPCG(seed, uint64(i))), endings: make(map[string]int),
		}
		all[i] = c
		clients.Go(func() {
			for time.Now().Before(end) && left.Add(-1) >= 0 && !t.Failed() {
				kind := kinds[c.random.IntN(len(kinds))]
				switch code := soakEndings[kind](c, t, accounts[c.random.IntN(len(accounts))]); {
				case code == http.StatusTooManyRequests, code == http.StatusServiceUnavailable && kind != "closed" && kind != "dead":
					c.endings["refused"]++
				default:
					c.endings[kind]++
				}
			}
		})
	}
	clients.Wait()

	endings, sum := make(map[string]int), 0
	for _, c := range all {
		for kind, n := range c.endings {
			endings[kind] += n
			sum += n
		}
	}
	s.eventually(t, heldNow, 0)
	s.get(t, "last", "/ok") // what lingered is counted when somebody asks
	storetest.Eventually(t, "every lease has ended once", func() bool {
		left := s.total(t, granted) - s.total(t, released) - s.total(t, expired)
		return left >= 0 && left <= s.unknown(t)
	})
	s.eventually(t, heldNow, 0)
	w.mu.Lock()
	defer w.mu.Unlock()
	lingered := s.total(t, `weir_leases_released_total{domain="inference",result="LINGERING"}`)
	t.Logf("%d requests, %d in the upstream; %d leases granted, %d released, %d lingered and %d did until their end, %d given back, %d unknown; most at once %v; endings %v",
		sum, w.handled, s.total(t, granted), s.total(t, released), lingered, s.total(t, expired),
		s.total(t, `weir_leases_given_back_total{domain="inference"}`), s.unknown(t), w.most, endings)
	if got := s.total(t, expired); got > lingered+s.unknown(t) {
		t.Errorf("%d leases expired, want no more than the %d that lingered", got, lingered)
	}
	for _, kind := range kinds {
		if endings[kind] == 0 {
			t.Errorf("no stream ended by %q", kind)
		}
	}
	if c := s.envoy.counters(t); c["error"] != 0 || c["failure_mode_allowed"] != 0 {
		t.Errorf("Envoy's counters %v, want every request decided", c)
	}
	for _, lane := range []string{"a", "b", "c", "d"} {
		if w.most[lane] < soakLane {
			t.Errorf("lane %q was never full: the soak shows nothing", lane)
		}
	}
	// Nor has Redis a slot that weir would not count.
	const live = `local now, n = redis.call('TIME'), 0
		for _, key in ipairs(redis.call('KEYS', '*')) do
			if redis.call('TYPE', key).ok == 'zset' then n = n + redis.call('ZCOUNT', key, '(' .. now[1] * 1000 + math.floor(now[2] / 1000), '+inf') end
		end
		return n`
	storetest.Eventually(t, "Redis has no slot that is taken", func() bool { return redis.MustDo(t, "EVAL", live, "0") == "0" })
}
