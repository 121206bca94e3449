package server_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	weirv1 "weir/proto/weir/v1"
	"weir/server"
	"weir/server/servertest"
	"weir/store/storetest"
)

const outagePolicy = `
domain: d
descriptors:
  - {key: a, token_bucket: {capacity: 1000, refill: 1/d}}
  - {key: one, token_bucket: {capacity: 1, refill: 1/d}}
  - {key: lane, concurrency: {max_in_flight: 3, lease: 1h}}
`

// replica is a process and its clients.
type replica struct {
	*servertest.Process
	conn   *grpc.ClientConn
	envoy  rls.RateLimitServiceClient
	leases weirv1.LeaseServiceClient
	health healthpb.HealthClient
}

func newReplica(t testing.TB, policy string, flags ...string) *replica {
	t.Helper()
	p := servertest.Start(t, policy, flags...)
	conn := p.Dial(t)
	return &replica{
		Process: p, conn: conn,
		envoy: rls.NewRateLimitServiceClient(conn), leases: weirv1.NewLeaseServiceClient(conn), health: healthpb.NewHealthClient(conn),
	}
}

func (r *replica) metric(t testing.TB, series string) float64 {
	t.Helper()
	return metricOf(t, r.Process, series)
}

func (r *replica) healthz(t testing.TB) (int, server.Health) {
	t.Helper()
	code, body := r.Get(t, "/healthz")
	return healthz(t, code, body)
}

func (r *replica) ready(t testing.TB) {
	t.Helper()
	storetest.Eventually(t, "the replica is ready", func() bool { return health(t, r.health) == "SERVING" })
}

// heldReaches waits until the replica counts n leases of domain d.
func (r *replica) heldReaches(t testing.TB, n float64) {
	t.Helper()
	storetest.Eventually(t, "the leases are given back", func() bool {
		_, text := r.Get(t, "/metrics")
		return strings.Contains(text, `weir_leases_held{domain="d"}`) && metricIn(t, text, `weir_leases_held{domain="d"}`) == n
	})
}

// decided asks and returns the answer's overall code, bypass and bypass_reason.
func (r *replica) decided(t testing.TB, descriptors string) (code, bypass, reason string) {
	t.Helper()
	m, err := r.envoy.ShouldRateLimit(storetest.Context(t), &rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(t, descriptors)})
	if err != nil {
		t.Fatalf("%s: %v", descriptors, err)
	}
	fields := m.GetDynamicMetadata().GetFields()
	return m.GetOverallCode().String(), fields["bypass"].GetStringValue(), fields["bypass_reason"].GetStringValue()
}

// recovered waits until the store decides again.
func (r *replica) recovered(t testing.TB) {
	t.Helper()
	storetest.Eventually(t, "the store decides again", func() bool {
		_, bypass, _ := r.decided(t, "[a=1]")
		return bypass == "" && r.metric(t, "weir_store_up") == 1
	})
}

// expectBypassed asks n times and wants each admitted, flagged and in time.
func (r *replica) expectBypassed(t testing.TB, n int, descriptors string, reasons ...string) {
	t.Helper()
	for range n {
		start := time.Now()
		code, bypass, reason := r.decided(t, descriptors)
		took := time.Since(start)
		if code != "OK" || bypass != "open" || !strings.Contains(strings.Join(reasons, " "), reason) || reason == "" {
			t.Errorf("%s = %s, bypass %q, bypass_reason %q; want OK, open, one of %q", descriptors, code, bypass, reason, reasons)
		}
		if took > 500*time.Millisecond {
			t.Errorf("%s took %v with a store-timeout of 100ms", descriptors, took)
		}
	}
}

// bypassed is how many checks of the limit were bypassed.
func (r *replica) bypassed(t testing.TB, limit string) float64 {
	t.Helper()
	total := 0.0
	for _, reason := range []string{"store_timeout", "store_unavailable", "store_error", "breaker_open"} {
		total += r.metric(t, `weir_bypassed_total{domain="d",limit="`+limit+`",mode="open",reason="`+reason+`"}`)
	}
	return total
}

func (r *replica) expectLogged(t testing.TB, message string, n int) {
	t.Helper()
	if got := strings.Count(r.Log(), message); got != n {
		t.Errorf("the log has %q %d times, want %d:\n%s", message, got, n, r.Log())
	}
}

// pause stops the Redis process where it is, until resume or the end of the test.
func pause(t testing.TB, r *storetest.Redis) { signal(t, r, syscall.SIGSTOP) }

func resume(t testing.TB, r *storetest.Redis) { signal(t, r, syscall.SIGCONT) }

func signal(t testing.TB, r *storetest.Redis, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(r.PID(), s); err != nil {
		t.Fatal(err)
	}
}

func TestRedisMayComeLate(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	redis.Kill()
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--store-timeout", "100ms")

	// It listens, says that it is not ready, and answers all the same.
	r.expectBypassed(t, 3, "[one=x]", "store_unavailable", "store_timeout", "breaker_open")
	if got := health(t, r.health); got != "NOT_SERVING" {
		t.Errorf("gRPC health is %s before Redis is there, want NOT_SERVING", got)
	}
	if code, h := r.healthz(t); code != 503 || h.Status != "not_ready" || h.Store != "not_found" {
		t.Errorf("/healthz is %d %+v before Redis is there, want 503, not_ready, not_found", code, h)
	}
	if got := r.bypassed(t, "one"); got != 3 {
		t.Errorf("%v checks were bypassed, want 3", got)
	}
	if got := r.metric(t, "weir_store_up"); got != 0 {
		t.Errorf("weir_store_up is %v, want 0", got)
	}

	redis.Start(t)
	r.ready(t)
	r.recovered(t)
	if code, h := r.healthz(t); code != 200 || h.Status != "ok" || h.Store != "up" {
		t.Errorf("/healthz is %d %+v with Redis, want 200, ok, up", code, h)
	}
	for _, want := range []string{"OK", "OVER_LIMIT"} {
		if code, bypass, _ := r.decided(t, "[one=x]"); code != want || bypass != "" {
			t.Errorf("[one=x] = %s, bypass %q; want %s by the store", code, bypass, want)
		}
	}
	r.expectLogged(t, "store failed", 1)
	r.expectLogged(t, "store answers", 1)
}

func TestAKilledRedisIsBypassedUntilItIsBack(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--store-timeout", "100ms")
	r.ready(t)
	if code, bypass, _ := r.decided(t, "[one=x]"); code != "OK" || bypass != "" {
		t.Fatalf("[one=x] = %s, bypass %q; want OK by the store", code, bypass)
	}

	redis.Kill()
	r.expectBypassed(t, 10, "[one=x]", "store_unavailable", "store_timeout", "breaker_open")
	if got := r.bypassed(t, "one"); got != 10 {
		t.Errorf("%v checks were bypassed, want 10", got)
	}
	if got := r.metric(t, `weir_decisions_total{domain="d",verdict="admitted"}`); got != 11 {
		t.Errorf("%v requests were admitted, want 11", got)
	}
	failed := 0.0
	for _, reason := range []string{"store_timeout", "store_unavailable", "breaker_open"} {
		failed += r.metric(t, `weir_store_errors_total{op="decide",reason="`+reason+`"}`)
	}
	if up := r.metric(t, "weir_store_up"); failed != 10 || up != 0 {
		t.Errorf("%v decisions of the store failed, want 10; weir_store_up is %v, want 0", failed, up)
	}
	// A release is not bypassed: it says that it must come again.
	if got := release(t, r.leases, strings.Repeat("A", 22)+".d"); got != "UNAVAILABLE" {
		t.Errorf("release without Redis = %s, want UNAVAILABLE", got)
	}
	if got := ask(t, r.envoy, "d", "[weir.event=release,weir.lease_id="+strings.Repeat("A", 22)+".d]", 0); got != "Unavailable" {
		t.Errorf("release by descriptor without Redis = %s, want UNAVAILABLE", got)
	}
	// Degraded is ready: the main path goes on.
	if code, h := r.healthz(t); code != 200 || h.Status != "degraded" || h.Store != "away" {
		t.Errorf("/healthz is %d %+v, want 200, degraded, away", code, h)
	}
	if got := health(t, r.health); got != "SERVING" {
		t.Errorf("gRPC health is %s, want SERVING", got)
	}

	redis.Start(t)
	r.recovered(t)
	storetest.Eventually(t, "/healthz is ok", func() bool { _, h := r.healthz(t); return h.Status == "ok" })
	// Redis has forgotten: one fresh burst, and then the limit holds.
	for _, want := range []string{"OK", "OVER_LIMIT"} {
		if code, bypass, _ := r.decided(t, "[one=x]"); code != want || bypass != "" {
			t.Errorf("[one=x] = %s, bypass %q; want %s by the store", code, bypass, want)
		}
	}
	storetest.Eventually(t, "the log tells of the return", func() bool { return strings.Count(r.Log(), "store answers") > 1 })
	r.expectLogged(t, "store failed", 1)
	r.expectLogged(t, "store answers", 2) // at the start, and now
	r.expectLogged(t, "store is not asked any more", 1)
	r.expectLogged(t, "store is asked again", 1)
}

// R21.
func TestAStoppedRedisIsBypassedInTime(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--store-timeout", "100ms")
	r.ready(t)
	r.recovered(t)
	if got := acquire(t, r.leases, typed("lane", "x")); !got.GetAdmitted() || got.GetBypass() != weirv1.Bypass_BYPASS_UNSPECIFIED {
		t.Fatalf("Acquire(lane=x) = %v, want a lease", got)
	} else if got := release(t, r.leases, got.GetLease().GetId()); got != "RELEASED" {
		t.Fatalf("release = %s", got)
	}

	pause(t, redis)
	// These are granted late, when nobody waits for them any more.
	r.expectBypassed(t, 3, "[lane=x]", "store_timeout")
	got := acquire(t, r.leases, typed("lane", "x"), typed("a", "1"))
	if !got.GetAdmitted() || got.GetBypass() != weirv1.Bypass_BYPASS_OPEN || got.GetBypassReason() != "store_timeout" || got.GetLease() != nil {
		t.Errorf("Acquire = %v, want admission without a lease and with its bypass", got)
	}
	if got := health(t, r.health); got != "SERVING" {
		t.Errorf("gRPC health is %s, want SERVING", got)
	}
	if code, h := r.healthz(t); code != 200 || h.Status != "degraded" {
		t.Errorf("/healthz is %d %+v, want 200, degraded", code, h)
	}

	resume(t, redis)
	r.recovered(t)
	r.heldReaches(t, 0)
	var leases []string
	for range 3 {
		got := acquire(t, r.leases, typed("lane", "x"))
		if !got.GetAdmitted() || got.GetLease() == nil {
			t.Errorf("Acquire(lane=x) = %v, want a lease: those of the outage were given back", got)
		}
		leases = append(leases, got.GetLease().GetId())
	}
	if got := acquire(t, r.leases, typed("lane", "x")); got.GetAdmitted() {
		t.Errorf("a fourth in a lane of 3: %v", got)
	}
	if got, want := release(t, r.leases, leases...), "RELEASED RELEASED RELEASED"; got != want {
		t.Errorf("release = %s, want %s", got, want)
	}
	r.heldReaches(t, 0)
	r.expectLogged(t, "store failed", 1)
}

// call is a request under way.
type call struct {
	cancel context.CancelFunc
	stream grpc.ClientStream
}

// begin sends a request and returns when the server has it.
func (r *replica) begin(t testing.TB, descriptors string) call {
	t.Helper()
	ctx, cancel := context.WithCancel(storetest.Context(t))
	stream, err := r.conn.NewStream(ctx, &grpc.StreamDesc{}, shouldRateLimit)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.SendMsg(&rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(t, descriptors)}); err != nil {
		t.Fatal(err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	health(t, r.health) // on the same connection: the server reads one after the other
	return call{cancel, stream}
}

// leave cancels the call, and returns when the server knows it.
func (c call) leave(t testing.TB, r *replica) {
	t.Helper()
	c.cancel()
	if err := c.stream.RecvMsg(&rls.RateLimitResponse{}); status.Code(err) != codes.Canceled {
		t.Fatalf("a call that was cancelled: %v, want Canceled", err)
	}
	health(t, r.health) // on the same connection: the server reads one after the other
}

// end waits for the answer.
func (c call) end() (*rls.RateLimitResponse, error) {
	defer c.cancel()
	m := &rls.RateLimitResponse{}
	return m, c.stream.RecvMsg(m)
}

// T18: what a caller was granted after it had gone is given back, slots and hits.
func TestTheLeaseOfACallerThatHasGoneIsGivenBack(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--store-timeout", "20s")
	r.ready(t)
	pause(t, redis)
	for range 3 {
		r.begin(t, "[lane=x][a=x]").leave(t, r)
	}
	resume(t, redis)
	r.recovered(t)
	// The server gives back what it was told of; the store, what came even later.
	storetest.Eventually(t, "all three are decided", func() bool {
		return r.metric(t, `weir_leases_given_back_total{domain="d"}`)+r.bypassed(t, "lane") == 3
	})
	r.heldReaches(t, 0)
	storetest.Eventually(t, "the hits are there again", func() bool { return ask(t, r.envoy, "d", "[a=x;hits=0]", 0) == "OK [OK 1000]" })
	if code, bypass, _ := r.decided(t, "[lane=x]"); code != "OK" || bypass != "" {
		t.Errorf("[lane=x] = %s, bypass %q; want OK by the store", code, bypass)
	}
	r.heldReaches(t, 1)
}

// An outage that is longer than a connection waits: what Redis grants when it
// goes on is given back all the same.
func TestNoLeaseIsLeftOverFromALongOutage(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--store-timeout", "100ms")
	r.ready(t)
	together := func(n int, f func(i int)) {
		var work sync.WaitGroup
		for i := range n {
			work.Go(func() { f(i) })
		}
		work.Wait()
	}
	together(200, func(int) { r.decided(t, "[a=1]") }) // so that all connections are open
	r.recovered(t)

	pause(t, redis)
	together(50, func(i int) { r.decided(t, fmt.Sprintf("[lane=%d]", i)) })
	storetest.Eventually(t, "the store was looked for in vain, for a second each time", func() bool {
		return r.metric(t, `weir_store_errors_total{op="ping",reason="store_timeout"}`)+
			r.metric(t, `weir_store_errors_total{op="ping",reason="store_unavailable"}`) >= 3
	})
	resume(t, redis)
	r.recovered(t)
	r.heldReaches(t, 0)
}

// Somebody else's value under a key of ours, and a Redis without memory: the one is
// about that key alone, the other is an outage, and neither fills the log.
func TestErrorsOfOneKeyAreNoOutage(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--store-timeout", "1s")
	r.ready(t)
	client := redisClient(t, redis)
	if err := client.LPush(storetest.Context(t), "weir:{d}:b:a=poisoned", "x").Err(); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if code, bypass, reason := r.decided(t, "[a=poisoned]"); code != "OK" || bypass != "open" || reason != "store_error" {
			t.Errorf("a poisoned key = %s, bypass %q, reason %q, want OK, open, store_error", code, bypass, reason)
		}
		if code, bypass, _ := r.decided(t, "[lane=x]"); code == "" || bypass != "" {
			t.Errorf("another key = %s, bypass %q, want no bypass", code, bypass)
		}
	}
	if code, h := r.healthz(t); code != 200 || h.Status != "ok" {
		t.Errorf("healthz = %d %+v, want ok", code, h)
	}
	r.expectLogged(t, "store failed", 0)

	if err := client.ConfigSet(storetest.Context(t), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if code, bypass, reason := r.decided(t, "[a=1]"); code != "OK" || bypass != "open" || reason != "store_error" {
			t.Errorf("without memory = %s, bypass %q, reason %q, want OK, open, store_error", code, bypass, reason)
		}
	}
	if code, h := r.healthz(t); code != 200 || h.Status != "degraded" {
		t.Errorf("healthz = %d %+v, want degraded", code, h)
	}
	r.expectLogged(t, "store failed", 1)
	if err := client.ConfigSet(storetest.Context(t), "maxmemory", "0").Err(); err != nil {
		t.Fatal(err)
	}
	r.recovered(t)
}

const openPolicy = `
domain: d
failure_mode: open
descriptors:
  - {key: tokens, rate_limit: {unit: day, requests_per_unit: 1000, reserve: 10m}}
  - {key: plain, token_bucket: {capacity: 10, refill: 1/s}}
`

// While limits are open nobody is refused, whatever others settle.
func TestUsageRefusesNobodyWhileTheStoreIsAwayAndLimitsAreOpen(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	r := newReplica(t, openPolicy, "--redis", redis.URL)
	r.ready(t)
	redis.Kill()
	refused, reason := 0, ""
	for range 50 {
		l := acquire(t, r.leases, costing(400, typed("tokens", "a")))
		if !l.GetAdmitted() {
			refused, reason = refused+1, l.String()
			continue
		}
		reconcile(t, r.leases, used(l.GetLease().GetId(), "tokens=150"))
		if other := acquire(t, r.leases, typed("plain", "b")); !other.GetAdmitted() {
			refused, reason = refused+1, other.String()
		}
	}
	if refused > 0 {
		t.Errorf("%d requests are refused in failure mode open, such as %s", refused, reason)
	}
}

const localPolicy = `
domain: d
failure_mode: local
descriptors:
  - {key: bucket, token_bucket: {capacity: 10, refill: 1/d}}
  - {key: plain, token_bucket: {capacity: 10, refill: 1/d}}
  - {key: trial, token_bucket: {capacity: 1, refill: 1/d, reserve: 10m}, shadow_mode: true}
`

func TestAnOperationThatAsksAgainTakesNothingWhileTheStoreIsAway(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	r := newReplica(t, localPolicy, "--redis", redis.URL)
	r.ready(t)
	redis.Kill()
	for attempt := range 3 {
		operate(t, r.leases, "A", uint32(attempt+1), costing(3, typed("bucket", "x")))
	}
	if got := acquire(t, r.leases, costing(7, typed("bucket", "x"))); !got.GetAdmitted() {
		t.Errorf("7 of 10 are not there after three tries of one operation that costs 3: %v", got)
	}
}

// What the store admits beside a limit in shadow that reserves, and is over, counts too.
func TestThereIsNoFreshBurstBesideAShadowThatReserves(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	r := newReplica(t, localPolicy, "--redis", redis.URL, "--store-timeout", "5s")
	r.ready(t)
	r.recovered(t)
	acquire(t, r.leases, typed("trial", "x")) // it is over from now on
	for i := range 10 {
		if got := acquire(t, r.leases, typed("plain", "x"), typed("trial", "x")); !got.GetAdmitted() || got.GetBypass() != weirv1.Bypass_BYPASS_UNSPECIFIED {
			t.Fatalf("number %d: %v", i+1, got)
		}
	}
	redis.Kill()
	if got := acquire(t, r.leases, typed("plain", "x")); got.GetAdmitted() {
		t.Errorf("an 11th is admitted by a share of 10 that has been used up: %v", got)
	}
}
