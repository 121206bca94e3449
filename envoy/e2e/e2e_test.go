// Package e2e tests weir behind the real thing: a stock Envoy with the
// configuration that we ship, a weir process, and an upstream that releases.
package e2e

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	servertest.Clean()
	os.Exit(code)
}

// stack is a client's view of Envoy, with weir and the upstream behind it.
type stack struct {
	weir     *servertest.Process   // the first of weirs
	weirs    []*servertest.Process // replicas
	upstream *upstream
	envoy    *envoy
	redis    *storetest.Redis // where the test has need of it
	client   *http.Client
	asked    atomic.Int64 // requests sent
}

// start runs a stack. Flags are weir's; changes are made to Envoy's configuration.
func start(t *testing.T, flags []string, changes ...change) *stack {
	t.Helper()
	return startReplicas(t, "testdata/policy.yaml", [][]string{flags}, changes...)
}

// startPolicy runs a stack with the policy of a file.
func startPolicy(t *testing.T, file string, flags []string, changes ...change) *stack {
	t.Helper()
	return startReplicas(t, file, [][]string{flags}, changes...)
}

// startReplicas runs a stack with a replica of weir for each list of flags.
func startReplicas(t *testing.T, policyFile string, flags [][]string, changes ...change) *stack {
	t.Helper()
	envoyBinary(t)
	var weirs []*servertest.Process
	for _, f := range flags {
		weirs = append(weirs, startWeir(t, policyFile, f...))
	}
	return startOn(t, weirs, changes...)
}

// startOn runs a stack on replicas that run.
func startOn(t *testing.T, weirs []*servertest.Process, changes ...change) *stack {
	t.Helper()
	s := &stack{client: &http.Client{Transport: new(http.Transport)}, weirs: weirs, weir: weirs[0]}
	s.upstream = startUpstream(t, weirv1.NewLeaseServiceClient(s.weir.Dial(t)))
	s.envoy = s.front(t, changes...)
	t.Cleanup(s.client.CloseIdleConnections)
	return s
}

func startWeir(t *testing.T, policyFile string, flags ...string) *servertest.Process {
	t.Helper()
	policy, err := os.ReadFile(policyFile)
	if err != nil {
		t.Fatal(err)
	}
	// The tests are about decisions. Nobody should fail open because the machine is slow.
	return servertest.Start(t, string(policy), append([]string{"--store-timeout", storetest.Deadline.String()}, flags...)...)
}

// front runs another Envoy in front of the stack.
func (s *stack) front(t *testing.T, changes ...change) *envoy {
	t.Helper()
	var weirs []string
	for _, w := range s.weirs {
		weirs = append(weirs, endpoint(t, w.GRPC))
	}
	config := configure(t, slices.Concat([]change{
		port("9901", "0"),
		port("10000", "0"),
		port("9000", portOf(t, s.upstream.Listener.Addr().String())),
		{weirEndpoint, strings.Join(weirs, "\n        ")},
		{"timeout: 0.3s", "timeout: 20s"},
		{"max_interval: 0.3s", "max_interval: 20s"},
	}, changes)...)
	return startEnvoy(t, strings.ReplaceAll(config, upstreamEndpoint, endpoint(t, s.upstream.Listener.Addr().String())))
}

func portOf(t *testing.T, address string) string {
	t.Helper()
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// answer is what a client got.
type answer struct {
	code   int
	header http.Header
	body   string
}

// get sends a request through Envoy, for an account unless it is "", with further
// headers given as name and value.
func (s *stack) get(t *testing.T, account, path string, headers ...string) answer {
	t.Helper()
	a, err := s.send(t.Context(), account, path, headers...)
	if err != nil {
		t.Fatalf("GET %s for %q: %v", path, account, err)
	}
	return a
}

func (s *stack) send(ctx context.Context, account, path string, headers ...string) (answer, error) {
	return s.sendBy(ctx, s.client, http.MethodGet, account, path, headers...)
}

func (s *stack) sendBy(ctx context.Context, client *http.Client, method, account, path string, headers ...string) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, storetest.Deadline)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, s.envoy.url+path, nil)
	if err != nil {
		return answer{}, err
	}
	if account != "" {
		r.Header.Set("x-account", account)
	}
	for h := range slices.Chunk(headers, 2) {
		r.Header.Set(h[0], h[1])
	}
	s.asked.Add(1)
	response, err := client.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, response.Header, string(body)}, err
}

// want checks the code and the headers, given as name and value; "" is for absent.
func (a answer) want(t *testing.T, code int, headers ...string) {
	t.Helper()
	if a.code != code {
		t.Fatalf("answered %d %v %q, want %d", a.code, a.header, a.body, code)
	}
	for h := range slices.Chunk(headers, 2) {
		got := a.header.Values(h[0])
		if h[1] == "" && got != nil || h[1] != "" && !slices.Equal(got, []string{h[1]}) {
			t.Errorf("%s = %q, want %q", h[0], got, h[1])
		}
	}
}

// problem is the body of a refusal.
type problem struct {
	Type       string   `json:"type"`
	Title      string   `json:"title"`
	Status     int      `json:"status"`
	Detail     string   `json:"detail"`
	RetryAfter int      `json:"retry_after_ms"`
	Violated   []string `json:"violated-policies"`
	Retryable  bool     `json:"retryable"`
}

// wantRefused checks a refusal that a retry can help, by the limits named, and
// returns its Retry-After in milliseconds.
func (a answer) wantRefused(t *testing.T, code int, limits ...string) int {
	t.Helper()
	a.want(t, code, "content-type", "application/problem+json", "x-envoy-ratelimited", "true")
	var got problem
	if err := json.Unmarshal([]byte(a.body), &got); err != nil {
		t.Fatalf("body %q: %v", a.body, err)
	}
	want := problem{
		Type: "https://iana.org/assignments/http-problem-types#quota-exceeded", Title: "Quota Exceeded",
		Status: code, Violated: limits, Retryable: true,
		Detail: got.Detail, RetryAfter: got.RetryAfter,
	}
	if code == http.StatusServiceUnavailable {
		want.Type, want.Title = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity", "Temporary Reduced Capacity"
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("body (-want +got):\n%s", d)
	}
	if got.RetryAfter < 1 || got.Detail == "" {
		t.Errorf("body has retry_after_ms %d and detail %q, want both", got.RetryAfter, got.Detail)
	}
	a.want(t, code, "retry-after", strconv.Itoa(max(1, secondsUp(got.RetryAfter))))
	return got.RetryAfter
}

func secondsUp(millis int) int { return (millis + 999) / 1000 }

// held is a request that is at work in the upstream.
type held struct {
	visit visit
	ended chan result
}

type result struct {
	answer
	err error
}

// hold sends a request that stays at work, and waits until the upstream has it.
// If the test fails before held.end, the request ends with the test's context.
func (s *stack) hold(t *testing.T, account string) held {
	t.Helper()
	return s.holdAt(t, account, "/hold")
}

// holdAt is hold with another path, and further headers.
func (s *stack) holdAt(t *testing.T, account, path string, headers ...string) held {
	t.Helper()
	return s.holdBy(t, s.client, account, path, headers...)
}

func (s *stack) holdBy(t *testing.T, client *http.Client, account, path string, headers ...string) held {
	t.Helper()
	h := held{ended: make(chan result, 1)}
	go func() {
		a, err := s.sendBy(t.Context(), client, http.MethodGet, account, path, headers...)
		h.ended <- result{a, err}
	}()
	select {
	case h.visit = <-s.upstream.holding:
	case r := <-h.ended: // within send's deadline
		t.Fatalf("%q got %d %q (err %v), want it to reach the upstream", account, r.code, r.body, r.err)
	}
	return h
}

// end lets the request end, and waits until its client has the answer and its slot is
// free.
func (h held) end(t *testing.T, s *stack) {
	t.Helper()
	before := s.total(t, released)
	close(h.visit.leave)
	r := <-h.ended
	if r.err != nil {
		t.Fatal(r.err)
	}
	r.want(t, http.StatusOK)
	storetest.Eventually(t, "its lease is released", func() bool { return s.total(t, released) > before })
}

func TestLimitsHoldBehindEnvoy(t *testing.T) {
	t.Parallel()
	for _, variant := range []struct {
		name   string
		flags  func(t *testing.T) []string
		header bool // the upstream releases, before Envoy does
	}{
		{"memory", func(*testing.T) []string { return nil }, false},
		{"redis", func(t *testing.T) []string { return onRedis(storetest.StartRedis(t, storetest.AnyRedis(t))) }, false},
		{"lease header", func(*testing.T) []string { return []string{"--lease-header"} }, true},
	} {
		t.Run(variant.name, func(t *testing.T) {
			t.Parallel()
			s := start(t, append(variant.flags(t), "--ratelimit-headers"))
			// One after the other: they share the pool, and the last counts.
			t.Run("a slot is free when its response has ended", s.freeAtOnce)
			t.Run("a full lane refuses", s.fullLane)
			t.Run("a full pool refuses", s.fullPool)
			t.Run("an empty bucket refuses", s.emptyBucket)
			t.Run("a shadow limit is logged and changes nothing", s.shadow)
			if variant.header {
				t.Run("a client cannot name a lease", s.forgedLease)
			}
			t.Run("a client cannot name a stream", s.forgedStream)
			t.Run("a client cannot order retries", s.orderedRetries)
			t.Run("nothing is left", s.nothingLeft)
		})
	}
}

func onRedis(r *storetest.Redis) []string { return []string{"--redis", r.URL} }

func (s *stack) freeAtOnce(t *testing.T) {
	codes := map[string]int{
		"/ok": http.StatusOK, "/stream": http.StatusOK, "/error": http.StatusInternalServerError,
		"/panic": http.StatusServiceUnavailable, // Envoy's own answer: the upstream closes the connection
	}
	const n = 200
	for i := range n {
		path := []string{"/ok", "/stream", "/error", "/panic"}[i%4]
		s.get(t, "sequential", path).want(t, codes[path], "x-envoy-ratelimited", "", "retry-after", "")
	}
	if got := len(s.upstream.of("sequential")); got != n {
		t.Errorf("%d of %d requests reached the upstream", got, n)
	}
}

// idle waits until nothing is held: Envoy releases beside the answer.
func (s *stack) idle(t *testing.T) {
	t.Helper()
	storetest.Eventually(t, "nothing is held", func() bool { return s.metric(t, `weir_leases_held{domain="inference"}`) == 0 })
}

func (s *stack) fullLane(t *testing.T) {
	s.idle(t)
	const account = "alice"
	var all []held
	for range 3 {
		all = append(all, s.hold(t, account))
	}
	for range 2 { // a refusal takes nothing, and leaves nothing
		a := s.get(t, account, "/ok")
		a.wantRefused(t, http.StatusTooManyRequests, "lane")
		a.want(t, http.StatusTooManyRequests, "x-ratelimit-limit", "3", "x-ratelimit-remaining", "0")
	}
	if got := len(s.upstream.of(account)); got != 3 {
		t.Errorf("%d requests reached the upstream, want 3", got)
	}
	s.get(t, "bob", "/ok").want(t, http.StatusOK)
	all[1].end(t, s)
	s.get(t, account, "/ok").want(t, http.StatusOK)
	all[0].end(t, s)
	all[2].end(t, s)
}

func (s *stack) fullPool(t *testing.T) {
	s.idle(t)
	const account = "carol"
	var all []held
	for _, a := range []string{account, account, account, "", ""} {
		all = append(all, s.hold(t, a))
	}
	before := len(s.upstream.of(""))
	s.get(t, "", "/ok").wantRefused(t, http.StatusServiceUnavailable, "images")
	s.get(t, "dave", "/ok").wantRefused(t, http.StatusServiceUnavailable, "images")
	// Lane and pool: the caller's own allowance is the reason.
	s.get(t, account, "/ok").wantRefused(t, http.StatusTooManyRequests, "images", "lane")
	if got := len(s.upstream.of("")) - before + len(s.upstream.of("dave")) + len(s.upstream.of(account)); got != 3 {
		t.Errorf("%d requests reached the upstream, want 3", got)
	}
	all[3].end(t, s)
	s.get(t, "dave", "/ok").want(t, http.StatusOK)
	for _, i := range []int{0, 1, 2, 4} {
		all[i].end(t, s)
	}
}

func (s *stack) emptyBucket(t *testing.T) {
	const policies = `"bucket";q=2;w=120, "images";q=5;qu="concurrent-requests"`
	s.idle(t)
	begin := time.Now()
	s.get(t, "bucket", "/ok").want(t, http.StatusOK,
		"x-ratelimit-limit", `2, 2;w=120;name="bucket"`, "x-ratelimit-remaining", "1", "x-ratelimit-reset", "60",
		"ratelimit", `"bucket";r=1;t=60, "images";r=4`, "ratelimit-policy", policies,
		"retry-after", "", "x-envoy-ratelimited", "")
	s.idle(t)
	s.get(t, "bucket", "/ok").want(t, http.StatusOK,
		"x-ratelimit-limit", `2, 2;w=120;name="bucket"`, "x-ratelimit-remaining", "0", "retry-after", "")
	s.idle(t)
	a := s.get(t, "bucket", "/ok")
	millis := a.wantRefused(t, http.StatusTooManyRequests, "bucket")
	// A token comes a minute after the first was taken.
	if elapsed := int(time.Since(begin).Milliseconds()) + 1; millis > 60_000 || millis < 60_000-elapsed {
		t.Errorf("retry_after_ms = %d after %d ms, want the rest of a minute", millis, elapsed)
	}
	seconds := strconv.Itoa(secondsUp(millis))
	a.want(t, http.StatusTooManyRequests, "retry-after", seconds,
		"x-ratelimit-limit", `2, 2;w=120;name="bucket"`, "x-ratelimit-remaining", "0", "x-ratelimit-reset", seconds,
		"ratelimit", `"bucket";r=0;t=`+seconds+`, "images";r=5`, "ratelimit-policy", policies)
	if got := len(s.upstream.of("bucket")); got != 2 {
		t.Errorf("%d requests reached the upstream, want 2", got)
	}
}

func (s *stack) shadow(t *testing.T) {
	s.idle(t)
	passes := s.get(t, "shadow", "/ok/shadow/1")
	s.idle(t)
	refuses := s.get(t, "shadow", "/ok/shadow/2")
	for _, a := range []answer{passes, refuses} {
		a.want(t, http.StatusOK, "x-ratelimit-limit", "5", "x-ratelimit-remaining", "4", "retry-after", "")
		for _, varies := range []string{"Date", "X-Envoy-Upstream-Service-Time"} {
			a.header.Del(varies)
		}
	}
	if d := cmp.Diff(passes, refuses, cmp.AllowUnexported(answer{})); d != "" {
		t.Errorf("the client sees the shadow (-passes +refuses):\n%s", d)
	}
	for path, limits := range map[string][]string{"/ok/shadow/1": nil, "/ok/shadow/2": {"tried_out"}} {
		want := logEntry{Path: path, Status: http.StatusOK, Details: "via_upstream", Verdict: "admitted", Limits: limits}
		if d := cmp.Diff(want, s.envoy.logged(t, path)); d != "" {
			t.Errorf("access log (-want +got):\n%s", d)
		}
	}
}

func (s *stack) forgedLease(t *testing.T) {
	victim := s.hold(t, "victim")
	if len(victim.visit.leases) != 1 {
		t.Fatalf("x-weir-lease = %q, want one lease", victim.visit.leases)
	}
	lease := victim.visit.leases[0]
	s.get(t, "attacker", "/ok", "X-Weir-Lease", lease).want(t, http.StatusOK)
	if got := s.upstream.of("attacker")[0].leases; len(got) != 1 || got[0] == lease {
		t.Errorf("x-weir-lease = %q, want one lease that is not the forged %q", got, lease)
	}
	if got := s.metric(t, `weir_leases_held{domain="inference"}`); got != 1 {
		t.Errorf("%d leases are held, want the victim's", got)
	}
	victim.end(t, s)
}

func (s *stack) forgedStream(t *testing.T) {
	victim := s.hold(t, "victim")
	s.get(t, "attacker", "/ok", "x-weir-stream", victim.visit.stream).want(t, http.StatusOK)
	visits := s.upstream.of("attacker")
	if got := visits[len(visits)-1].stream; got == "" || got == victim.visit.stream {
		t.Errorf("x-weir-stream = %q, want another than the forged %q", got, victim.visit.stream)
	}
	storetest.Eventually(t, "only the victim's lease is held", func() bool { return s.metric(t, `weir_leases_held{domain="inference"}`) == 1 })
	victim.end(t, s)
}

func (s *stack) orderedRetries(t *testing.T) {
	// An upstream that is tried again has released at the end of its first try.
	s.get(t, "impatient", "/error", "x-envoy-retry-on", "5xx", "x-envoy-max-retries", "3",
		"x-forwarded-for", "127.0.0.1").want(t, http.StatusInternalServerError)
	if got := len(s.upstream.of("impatient")); got != 1 {
		t.Errorf("the upstream was tried %d times, want once", got)
	}
}

func (s *stack) nothingLeft(t *testing.T) {
	s.idle(t)
	granted := s.metric(t, `weir_leases_granted_total{domain="inference"}`)
	released := s.metric(t, `weir_leases_released_total{domain="inference",result="RELEASED"}`)
	if granted == 0 || granted != released {
		t.Errorf("%d leases granted, %d released, want the same", granted, released)
	}
	// Every request was decided by weir.
	refused := s.metric(t, `weir_decisions_total{domain="inference",verdict="refused"}`)
	want := map[string]int{"ok": granted, "over_limit": refused}
	if d := cmp.Diff(want, s.envoy.counters(t)); d != "" {
		t.Errorf("Envoy's counters (-want +got):\n%s", d)
	}
	if asked := int(s.asked.Load()); asked != granted+refused {
		t.Errorf("%d requests sent, %d admitted and %d refused", asked, granted, refused)
	}
}

// metric returns a sample of weir's metrics; it must be there.
func (s *stack) metric(t *testing.T, sample string) int {
	t.Helper()
	return metricOf(t, s.weir, sample)
}

// total is the sum of a sample over all replicas.
func (s *stack) total(t *testing.T, sample string) (sum int) {
	t.Helper()
	for _, w := range s.weirs {
		sum += metricOf(t, w, sample)
	}
	return sum
}

func metricOf(t *testing.T, w *servertest.Process, sample string) int {
	t.Helper()
	n, page := sampleOf(t, w, sample)
	if n < 0 {
		t.Fatalf("no %s in\n%s", sample, page)
	}
	return n
}

// sampleOf returns a sample, or -1 if it is not there, and the page.
func sampleOf(t *testing.T, w *servertest.Process, sample string) (int, string) {
	t.Helper()
	_, page := w.Get(t, "/metrics")
	m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(sample) + ` (\d+)$`).FindStringSubmatch(page)
	if m == nil {
		return -1, page
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		t.Fatal(err)
	}
	return n, page
}

func TestWithoutWeirEnvoyLetsPassUnlessToldOtherwise(t *testing.T) {
	t.Parallel()
	s := start(t, nil)
	s.get(t, "alice", "/ok").want(t, http.StatusOK)
	s.weir.Terminate(t)
	if code := s.weir.Wait(t); code != 0 {
		t.Errorf("weir ended with %d, want 0", code)
	}

	// Envoy lets pass what it could not ask about.
	s.get(t, "alice", "/ok/unasked", "x-weir-lease", "forged").want(t, http.StatusOK, "x-ratelimit-limit", "")
	if visits := s.upstream.of("alice"); len(visits) != 2 || len(visits[1].leases) != 0 {
		t.Errorf("the upstream has %v, want two visits, the second without a lease", visits)
	}
	want := logEntry{Path: "/ok/unasked", Status: http.StatusOK, Details: "via_upstream"}
	if d := cmp.Diff(want, s.envoy.logged(t, "/ok/unasked")); d != "" {
		t.Errorf("access log (-want +got):\n%s", d)
	}
	if d := cmp.Diff(map[string]int{"ok": 1, "error": 1, "failure_mode_allowed": 1}, s.envoy.counters(t)); d != "" {
		t.Errorf("Envoy's counters (-want +got):\n%s", d)
	}

	// Or not, if told so.
	s.envoy = s.front(t, change{"failure_mode_deny: false", "failure_mode_deny: true"})
	s.get(t, "alice", "/ok/denied").want(t, http.StatusInternalServerError)
	want = logEntry{Path: "/ok/denied", Status: http.StatusInternalServerError, Details: "rate_limiter_error"}
	if d := cmp.Diff(want, s.envoy.logged(t, "/ok/denied")); d != "" {
		t.Errorf("access log (-want +got):\n%s", d)
	}
	if got := len(s.upstream.of("alice")); got != 2 {
		t.Errorf("the upstream has %d visits, want still 2", got)
	}
}

// Weir is there and cannot decide.
func TestWithoutRedisWeirLetsPassAndSaysSo(t *testing.T) {
	t.Parallel()
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	s := start(t, append(onRedis(redis), "--ratelimit-headers"))
	s.get(t, "alice", "/ok").want(t, http.StatusOK)
	redis.Kill()
	s.get(t, "alice", "/ok/undecided").want(t, http.StatusOK, "x-ratelimit-limit", "", "ratelimit", "", "retry-after", "")
	if visits := s.upstream.of("alice"); len(visits) != 2 || len(visits[1].leases) != 0 {
		t.Errorf("the upstream has %v, want two visits, the second without a lease", visits)
	}
	want := logEntry{Path: "/ok/undecided", Status: http.StatusOK, Details: "via_upstream", Verdict: "admitted", Bypass: "open"}
	if d := cmp.Diff(want, s.envoy.logged(t, "/ok/undecided")); d != "" {
		t.Errorf("access log (-want +got):\n%s", d)
	}
	if d := cmp.Diff(map[string]int{"ok": 2}, s.envoy.counters(t)); d != "" {
		t.Errorf("Envoy's counters (-want +got):\n%s", d)
	}
}

// Envoy takes the limit from metadata.
func TestARequestBringsItsOwnLimit(t *testing.T) {
	t.Parallel()
	const (
		filter  = "          - name: envoy.filters.http.ratelimit\n"
		account = "- request_headers: {header_name: x-account, descriptor_key: account}\n"
	)
	s := start(t, nil,
		change{filter, `          - name: envoy.filters.http.set_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
              metadata:
              - metadata_namespace: tariff
                value: {account: {requests_per_unit: 2, unit: YEAR}}
` + filter},
		change{account, account + `                limit: {dynamic_metadata: {metadata_key: {key: tariff, path: [{key: account}]}}}
`})
	for i := range 2 {
		s.get(t, "alice", "/ok").want(t, http.StatusOK, "x-ratelimit-remaining", strconv.Itoa(1-i))
	}
	s.get(t, "bob", "/ok").want(t, http.StatusOK)
	// Years begin every 365 days: whoever tests just then gets a new one.
	s.get(t, "alice", "/ok/over").wantRefused(t, http.StatusTooManyRequests, "override")
	want := logEntry{
		Path: "/ok/over", Status: http.StatusTooManyRequests, Details: "request_rate_limited",
		Verdict: "refused", Reason: "window_full", Limits: []string{"override"},
	}
	if d := cmp.Diff(want, s.envoy.logged(t, "/ok/over")); d != "" {
		t.Errorf("access log (-want +got):\n%s", d)
	}
}
