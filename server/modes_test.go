package server_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weir/store/storetest"
)

const modesPolicy = `
domain: d
failure_mode: local
descriptors:
  - {key: open, failure_mode: open, token_bucket: {capacity: 2, refill: 1/d}}
  - {key: closed, failure_mode: closed, token_bucket: {capacity: 2, refill: 1/d}}
  - {key: tokens, token_bucket: {capacity: 10, refill: 1/d}}
  - {key: half, local_fraction: 0.5, rate_limit: {unit: day, requests_per_unit: 8}}
  - {key: few, token_bucket: {capacity: 1, refill: 1/d}}
  - {key: lane, concurrency: {max_in_flight: 2, lease: 1h}}
  - {key: banned, failure_mode: open, rate_limit: {unit: day, requests_per_unit: 0}}
`

// answer asks and tells of the answer its verdict, its bypass and, of a refusal, class
// and reason; with the answer itself.
func (r *replica) answer(t testing.TB, descriptors string) (string, *rls.RateLimitResponse) {
	t.Helper()
	m, err := r.envoy.ShouldRateLimit(storetest.Context(t), &rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(t, descriptors)})
	if err != nil {
		t.Fatalf("%s: %v", descriptors, err)
	}
	var parts []string
	for _, key := range []string{"verdict", "bypass", "reject_class", "reason"} {
		if f := m.GetDynamicMetadata().GetFields()[key]; f != nil {
			parts = append(parts, f.GetStringValue())
		}
	}
	return strings.Join(parts, " "), m
}

// expectAnswers asks n times, and wants the same answer.
func (r *replica) expectAnswers(t testing.TB, n int, descriptors, want string) {
	t.Helper()
	for i := range n {
		if got, _ := r.answer(t, descriptors); got != want {
			t.Errorf("%s, number %d: %s, want %s", descriptors, i+1, got, want)
		}
	}
}

func TestEachLimitIsDecidedByItsModeWithoutRedis(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	flags := []string{"--redis", redis.URL, "--replicas", "2", "--store-timeout", "1s"}
	one, other := newReplica(t, modesPolicy, flags...), newReplica(t, modesPolicy, flags...)
	for _, r := range []*replica{one, other} {
		r.ready(t)
		r.recovered(t)
	}
	one.expectAnswers(t, 3, "[tokens=x]", "admitted") // 3 of its 5
	_, granted := one.answer(t, "[lane=kept]")
	kept := granted.GetDynamicMetadata().GetFields()["lease_id"].GetStringValue()

	redis.Kill()
	one.expectAnswers(t, 5, "[open=x]", "admitted open")
	one.expectAnswers(t, 5, "[closed=x]", "refused closed pool store_unavailable")
	_, m := one.answer(t, "[closed=x][tokens=x]")
	if got := headersOf(m)["retry-after"]; got != "1" {
		t.Errorf("retry-after of a closed limit is %q, want 1", got)
	}
	if got := string(m.GetRawBody()); !strings.Contains(got, `"status":503`) || !strings.Contains(got, `"retry_after_ms":1000`) {
		t.Errorf("the body of a closed limit is %s, want 503 and its delay", got)
	}
	one.expectAnswers(t, 2, "[tokens=x]", "admitted local")
	one.expectAnswers(t, 2, "[tokens=x]", "refused local lane bucket_empty")
	other.expectAnswers(t, 5, "[tokens=x]", "admitted local")
	other.expectAnswers(t, 1, "[tokens=x]", "refused local lane bucket_empty")
	one.expectAnswers(t, 2, "[half=x]", "admitted local")
	one.expectAnswers(t, 1, "[half=x]", "refused local lane window_full")
	one.expectAnswers(t, 1, "[few=x]", "refused closed pool store_unavailable")
	one.expectAnswers(t, 1, "[banned=x]", "refused lane banned")

	// Slots: one each. A lease is kept where it was granted.
	one.expectAnswers(t, 1, "[lane=kept]", "refused local lane lane_full")
	got, m := one.answer(t, "[weir.stream_id=s1][lane=x][open=x]")
	if got != "admitted local" {
		t.Fatalf("[lane=x][open=x] is %s, want a lease", got)
	}
	lease := m.GetDynamicMetadata().GetFields()["lease_id"].GetStringValue()
	one.expectAnswers(t, 1, "[lane=x]", "refused local lane lane_full")
	ending := "[weir.event=release,weir.stream_id=s1,weir.lease_id=" + lease + "]"
	if got := ask(t, other.envoy, "d", ending, 0); got != "Unavailable" {
		t.Errorf("a release at the other replica: %s, want UNAVAILABLE, so that Envoy asks the other", got)
	}
	if got := renew(t, one.leases, lease); !strings.HasPrefix(got, "RENEWED") {
		t.Errorf("renew = %s, want RENEWED", got)
	}
	if got := release(t, one.leases, lease, kept); got != "RELEASED UNAVAILABLE" {
		t.Errorf("release of a lease of its own and one of the store = %s, want RELEASED UNAVAILABLE", got)
	}
	one.expectAnswers(t, 1, "[weir.stream_id=s2][lane=x]", "admitted local")
	if got := ask(t, one.envoy, "d", "[weir.event=release,weir.stream_id=s2]", 0); got != "OK [OK nil]" {
		t.Errorf("release by the stream = %s, want OK", got)
	}
	_, m = one.answer(t, "[lane=x]")
	last := m.GetDynamicMetadata().GetFields()["lease_id"].GetStringValue()

	for series, want := range map[string]float64{
		`domain="d",limit="open",mode="open"`:      6,
		`domain="d",limit="closed",mode="closed"`:  6,
		`domain="d",limit="tokens",mode="local"`:   5,
		`domain="d",limit="half",mode="local"`:     3,
		`domain="d",limit="few",mode="closed"`:     1,
		`domain="d",limit="lane",mode="local"`:     5,
		`domain="d",limit="banned",mode="open"`:    0,
		`domain="d",limit="override",mode="local"`: 0,
	} {
		total := 0.0
		for _, reason := range []string{"store_timeout", "store_unavailable", "store_error", "breaker_open"} {
			if text := `weir_bypassed_total{` + series + `,reason="` + reason + `"}`; hasMetric(t, one, text) {
				total += one.metric(t, text)
			}
		}
		if total != want {
			t.Errorf("weir_bypassed_total{%s} is %v, want %v", series, total, want)
		}
	}

	redis.Start(t)
	one.recovered(t)
	one.expectAnswers(t, 2, "[closed=x]", "admitted")
	one.expectAnswers(t, 1, "[closed=x]", "refused lane bucket_empty")
	// What was granted without the store is still given back.
	if got := release(t, one.leases, last); got != "RELEASED" {
		t.Errorf("release after the outage = %s, want RELEASED", got)
	}
	if got := release(t, one.leases, last); got != "NOT_HELD" {
		t.Errorf("another release = %s, want NOT_HELD", got)
	}
}

func hasMetric(t testing.TB, r *replica, series string) bool {
	t.Helper()
	_, text := r.Get(t, "/metrics")
	return strings.Contains(text, series+" ")
}

func headersOf(m *rls.RateLimitResponse) map[string]string {
	all := make(map[string]string)
	for _, h := range m.GetResponseHeadersToAdd() {
		all[h.GetKey()] = h.GetValue()
	}
	return all
}

func TestTheServicesModeIsForLimitsThatSayNone(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--failure-mode", "closed", "--store-timeout", "100ms")
	r.ready(t)
	r.recovered(t)
	pause(t, redis)
	r.expectAnswers(t, 3, "[one=x]", "refused closed pool store_unavailable")
	resume(t, redis)
	r.recovered(t)
}

// A store that hangs is waited for by the first few, and by nobody after them.
func TestAStoreThatHangsIsWaitedForByFew(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--store-timeout", "500ms")
	r.ready(t)
	r.recovered(t)
	pause(t, redis)
	const askers, each = 16, 500
	var work sync.WaitGroup
	for i := range askers {
		work.Go(func() {
			for range each {
				r.decided(t, fmt.Sprintf("[a=%d]", i))
			}
			// A release neither waits nor is forgotten.
			_, err := r.envoy.ShouldRateLimit(storetest.Context(t), &rls.RateLimitRequest{
				Domain: "d", Descriptors: descriptorsOf(t, "[weir.event=release,weir.stream_id=s]"),
			})
			if got := status.Code(err); got != codes.Unavailable {
				t.Errorf("a release: %v, want UNAVAILABLE", err)
			}
		})
	}
	work.Wait()
	waited := 0.0
	for _, op := range []string{"decide", "release"} {
		waited += r.metric(t, `weir_store_errors_total{op="`+op+`",reason="store_timeout"}`) + r.metric(t, `weir_store_errors_total{op="`+op+`",reason="store_unavailable"}`)
	}
	if waited > askers+5 {
		t.Errorf("%v calls waited for the store, want %d at most", waited, askers+5)
	}
	if got := r.bypassed(t, "a"); got != askers*each {
		t.Errorf("%v checks were bypassed, want %d", got, askers*each)
	}
	if got := r.metric(t, `weir_store_breaker_open{domain="d"}`); got != 1 {
		t.Errorf("weir_store_breaker_open is %v, want 1", got)
	}
	// Nobody asks meanwhile, and the store is found all the same.
	resume(t, redis)
	storetest.Eventually(t, "the store is asked again", func() bool { return r.metric(t, `weir_store_breaker_open{domain="d"}`) == 0 })
	storetest.Eventually(t, "/healthz is ok", func() bool { _, h := r.healthz(t); return h.Status == "ok" })
	r.recovered(t)
}

func TestUnreadyWithoutTheStoreIfAsked(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--unready-without-store")
	r.ready(t)
	redis.Kill()
	storetest.Eventually(t, "the replica is not ready", func() bool { return health(t, r.health) == "NOT_SERVING" })
	if code, h := r.healthz(t); code != 503 || h.Status != "not_ready" || h.Store != "away" {
		t.Errorf("/healthz is %d %+v, want 503, not_ready, away", code, h)
	}
	redis.Start(t)
	r.ready(t) // though nobody has asked
}
