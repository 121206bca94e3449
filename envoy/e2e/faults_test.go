package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"syscall"
	"testing"

	"weir/server/servertest"
	"weir/store/storetest"
)

// Samples of weir's metrics.
const (
	heldNow   = `weir_leases_held{domain="inference"}`
	granted   = `weir_leases_granted_total{domain="inference"}`
	released  = `weir_leases_released_total{domain="inference",result="RELEASED"}`
	lingering = `weir_leases_released_total{domain="inference",result="LINGERING"}`
	notHeld   = `weir_leases_released_total{domain="inference",result="NOT_HELD"}`
	expired   = `weir_leases_expired_total{domain="inference"}`
	broken    = `weir_access_logs_broken_total`
	renewals  = `weir_access_log_entries_total{domain="inference",kind="renewal"}`
	ends      = `weir_access_log_entries_total{domain="inference",kind="end"}`
)

// eventually waits until a sample has a value.
func (s *stack) eventually(t *testing.T, sample string, want int) {
	t.Helper()
	got := 0
	defer func() {
		if t.Failed() {
			t.Logf("%s is %d, want %d", sample, got, want)
		}
	}()
	storetest.Eventually(t, fmt.Sprintf("%s is %d", sample, want), func() bool {
		got, _ = sampleOf(t, s.weirs[0], sample) // it is not there while the store is away
		return got == want
	})
}

// wantFree checks how many more of an account's requests find a slot.
func (s *stack) wantFree(t *testing.T, account string, want int) {
	t.Helper()
	var all []held
	for range want {
		all = append(all, s.hold(t, account))
	}
	if a := s.get(t, account, "/ok"); a.code != http.StatusTooManyRequests {
		t.Errorf("%q has more than %d free slots", account, want)
	}
	for _, h := range all {
		h.end(t, s)
	}
}

// startOnRedis runs a stack with a Redis of its own.
func startOnRedis(t *testing.T, changes ...change) *stack {
	t.Helper()
	r := storetest.StartRedis(t, storetest.AnyRedis(t))
	s := start(t, onRedis(r), changes...)
	s.redis = r
	return s
}

// wantEnded waits until nothing is taken any more, and checks how the leases of all
// replicas have ended: each once.
func (s *stack) wantEnded(t *testing.T, byRelease, byExpiry int) {
	t.Helper()
	storetest.Eventually(t, "Redis has nothing that is taken", func() bool { return s.taken(t) == "" })
	s.eventually(t, heldNow, 0)
	storetest.Eventually(t, "every lease has ended", func() bool { return s.total(t, released)+s.total(t, expired) >= byRelease+byExpiry })
	if r, e := s.total(t, released), s.total(t, expired); r != byRelease || e != byExpiry {
		t.Errorf("%d leases were released and %d expired, want %d and %d", r, e, byRelease, byExpiry)
	}
}

// An operator drains an Envoy before it ends: nothing is left to expire.
func TestADrainedEnvoyLeavesNothing(t *testing.T) {
	t.Parallel()
	s := startOnRedis(t)
	var all []held
	for range 3 {
		all = append(all, s.hold(t, "alice"))
	}
	r, err := http.Post(s.envoy.admin+"/drain_listeners?graceful", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Body.Close()
	s.get(t, "bob", "/ok").want(t, http.StatusOK) // who comes meanwhile
	for _, h := range all {
		close(h.visit.leave)
		r := <-h.ended
		if r.err != nil {
			t.Fatal(r.err)
		}
		r.want(t, http.StatusOK)
	}
	storetest.Eventually(t, "no request is under way", func() bool { return s.envoy.counter(t, "http.ingress.downstream_rq_active") == 0 })
	// The last releases may still be under way, the more so if they are the first and
	// Envoy connects for them: an operator waits for a second more.
	s.eventually(t, heldNow, 0)
	s.envoy.end(t, syscall.SIGTERM)
	s.wantEnded(t, 4, 0)
}

// An Envoy that dies tells nobody. Its access log breaks, which is counted, and its
// slots are free when their leases expire.
func TestTheSlotsOfAnEnvoyThatDiesExpire(t *testing.T) {
	t.Parallel()
	s := startOnRedis(t)
	s.get(t, "brief", "/ok").want(t, http.StatusOK)
	s.eventually(t, ends, 1) // the access log is open
	var all []held
	for range 3 {
		all = append(all, s.hold(t, "brief"))
	}
	if got := s.metric(t, broken); got != 0 {
		t.Errorf("%d access logs are broken, want 0", got)
	}
	s.envoy.end(t, syscall.SIGKILL)
	for _, h := range all {
		if r := <-h.ended; r.err == nil {
			t.Error("an Envoy that is dead has answered")
		}
	}
	storetest.Eventually(t, "the broken access log is counted", func() bool { return s.metric(t, broken) >= 1 })
	s.eventually(t, heldNow, 0)
	s.envoy = s.front(t)
	s.wantFree(t, "brief", 3)
	s.wantEnded(t, 4, 3)
	if got := len(s.upstream.of("brief")); got != 7 {
		t.Errorf("the upstream was called %d times, want 7", got)
	}
}

// A stream may be longer than its lease, as long as its Envoy lives.
func TestHeartbeatsKeepALease(t *testing.T) {
	t.Parallel()
	s := startOnRedis(t, change{"access_log_flush_interval: 30s", "access_log_flush_interval: 0.1s"})
	h := s.hold(t, "brief")
	storetest.Eventually(t, "the stream has lived for longer than its lease of 2 s", func() bool {
		got, _ := sampleOf(t, s.weir, renewals)
		return got >= 30
	})
	if got := s.metric(t, heldNow); got != 1 {
		t.Errorf("%d leases are held, want 1", got)
	}
	s.wantFree(t, "brief", 2)
	h.end(t, s)
	s.eventually(t, heldNow, 0)

	h = s.hold(t, "brief")
	s.envoy.end(t, syscall.SIGKILL)
	<-h.ended
	s.eventually(t, heldNow, 0)
	s.envoy = s.front(t)
	s.wantFree(t, "brief", 3)
	s.wantEnded(t, 6, 1)
}

// pair runs a stack of two replicas that share a Redis, and can be restarted.
func pair(t *testing.T, r *storetest.Redis) (s *stack, restart func(i int)) {
	t.Helper()
	flags := func(address string) []string { return append(onRedis(r), "--grpc-listen", address) }
	s = startReplicas(t, "testdata/policy.yaml", [][]string{flags(servertest.LoopbackAddr() + ":0"), flags(servertest.LoopbackAddr() + ":0")})
	s.redis = r
	return s, func(i int) {
		s.weirs[i] = startWeir(t, "testdata/policy.yaml", flags(s.weirs[i].GRPC)...)
		s.weir = s.weirs[0]
	}
}

func stop(t *testing.T, w *servertest.Process) {
	t.Helper()
	w.Terminate(t)
	if code := w.Wait(t); code != 0 {
		t.Errorf("weir ended with %d, want 0", code)
	}
}

// While one replica is restarted the other decides; no slot is lost, and none given
// twice.
func TestReplicasAreRestartedOneAfterTheOther(t *testing.T) {
	t.Parallel()
	s, restart := pair(t, storetest.StartRedis(t, storetest.AnyRedis(t)))
	var all []held
	for range 3 {
		all = append(all, s.hold(t, "alice"))
	}
	for i := range 2 {
		both := s.weirs
		stop(t, both[i])
		s.weirs = []*servertest.Process{both[1-i]}
		for range 20 {
			s.get(t, "bob", "/ok").want(t, http.StatusOK)
			s.get(t, "alice", "/ok").wantRefused(t, http.StatusTooManyRequests, "lane")
		}
		all[i].end(t, s)
		all[i] = s.hold(t, "alice")
		s.weirs = both
		restart(i)
	}
	for _, h := range all {
		h.end(t, s)
	}
	storetest.Eventually(t, "Redis has nothing that is taken", func() bool { return s.taken(t) == "" })
	if got := s.total(t, expired); got != 0 {
		t.Errorf("%d leases expired, want 0", got)
	}
	if got := s.envoy.counters(t)["failure_mode_allowed"]; got != 0 {
		t.Errorf("%d requests passed unasked, want 0", got)
	}
	if a, b := len(s.upstream.of("alice")), len(s.upstream.of("bob")); a != 5 || b != 40 {
		t.Errorf("the upstream was called %d times for alice and %d for bob, want 5 and 40", a, b)
	}
}

// While there is no weir requests pass. The release of what ends meanwhile is tried
// again until there is one.
func TestAReleaseWaitsForWeir(t *testing.T) {
	t.Parallel()
	s, restart := pair(t, storetest.StartRedis(t, storetest.AnyRedis(t)))
	h := s.hold(t, "alice")
	for _, w := range s.weirs {
		stop(t, w)
	}
	s.get(t, "alice", "/ok").want(t, http.StatusOK)
	close(h.visit.leave)
	if r := <-h.ended; r.err != nil || r.code != http.StatusOK {
		t.Errorf("%+v", r)
	}
	// For some seconds: as long as a restart takes.
	storetest.Eventually(t, "a release is tried again", func() bool { return s.envoy.counter(t, "cluster.weir_release.upstream_rq_retry") > 12 })
	restart(0)
	restart(1)
	s.wantEnded(t, 1, 0)
	s.wantFree(t, "alice", 3)
}

// What passed while there was no weir runs beside the limit, and takes nobody's slot
// when it ends.
func TestWhatPassedUnaskedReleasesNothing(t *testing.T) {
	t.Parallel()
	s, restart := pair(t, storetest.StartRedis(t, storetest.AnyRedis(t)))
	asked := []held{s.hold(t, "alice"), s.hold(t, "alice")}
	for _, w := range s.weirs {
		stop(t, w)
	}
	unasked := s.hold(t, "alice")
	restart(0)
	restart(1)
	asked = append(asked, s.hold(t, "alice"))
	s.get(t, "alice", "/ok").wantRefused(t, http.StatusTooManyRequests, "lane")
	close(unasked.visit.leave)
	if r := <-unasked.ended; r.err != nil || r.code != http.StatusOK {
		t.Errorf("%+v, want 200", r)
	}
	// The filter tells its end, and so does the access log.
	storetest.Eventually(t, "it is released, in vain", func() bool { return s.total(t, notHeld) >= 1 })
	if got := s.metric(t, heldNow); got != 3 {
		t.Errorf("%d leases are held, want 3", got)
	}
	s.get(t, "alice", "/ok").wantRefused(t, http.StatusTooManyRequests, "lane")
	for _, h := range asked {
		h.end(t, s)
	}
	s.wantEnded(t, 3, 0)
	if got := len(s.upstream.of("alice")); got != 4 {
		t.Errorf("the upstream was called %d times, want 4", got)
	}
}

// Redis comes back empty: nothing is held, and what began before frees nobody's slot.
func TestAnEmptyRedisHoldsNothing(t *testing.T) {
	t.Parallel()
	s := startOnRedis(t)
	var old, young []held
	for range 3 {
		old = append(old, s.hold(t, "alice"))
	}
	s.redis.Kill()
	s.redis.Start(t)
	s.eventually(t, heldNow, 0)
	for range 2 {
		young = append(young, s.hold(t, "alice"))
	}
	for _, h := range old {
		close(h.visit.leave)
		<-h.ended
	}
	storetest.Eventually(t, "the old ones are released, in vain", func() bool { return s.metric(t, notHeld) >= 3 })
	if got := s.metric(t, heldNow); got != 2 {
		t.Errorf("%d leases are held, want 2", got)
	}
	s.wantFree(t, "alice", 1)
	for _, h := range young {
		h.end(t, s)
	}
	s.wantEnded(t, 3, 0)
}

// Redis comes back with what it had.
func TestARedisThatRemembersHoldsTheSlots(t *testing.T) {
	t.Parallel()
	r := storetest.StartRedis(t, storetest.AnyRedis(t), "--appendonly", "yes", "--appendfsync", "always")
	s := start(t, onRedis(r))
	s.redis = r
	var all []held
	for range 3 {
		all = append(all, s.hold(t, "alice"))
	}
	s.redis.Kill()
	// An end that is told while Redis is away is told again.
	close(all[0].visit.leave)
	if r := <-all[0].ended; r.err != nil || r.code != http.StatusOK {
		t.Errorf("%+v, want 200", r)
	}
	s.redis.Start(t)
	s.eventually(t, heldNow, 2)
	all[0] = s.hold(t, "alice")
	s.get(t, "alice", "/ok").wantRefused(t, http.StatusTooManyRequests, "lane")
	for _, h := range all {
		h.end(t, s)
	}
	s.wantEnded(t, 4, 0)
}

// Envoy asks for a release again if weir is slow to answer: Redis was, and does both
// when it can.
func TestAReleaseThatComesTwiceFreesOneSlot(t *testing.T) {
	t.Parallel()
	s := startOnRedis(t)
	h, other := s.hold(t, "alice"), s.hold(t, "alice")
	signal(t, s.redis, syscall.SIGSTOP)
	close(h.visit.leave)
	answer := <-h.ended
	storetest.Eventually(t, "Envoy asks again", func() bool { return s.envoy.counter(t, "cluster.weir_release.upstream_rq_retry") > 0 })
	signal(t, s.redis, syscall.SIGCONT)
	if answer.err != nil {
		t.Error(answer.err)
	}
	s.eventually(t, heldNow, 1)
	storetest.Eventually(t, "it is released again, in vain", func() bool { return s.metric(t, notHeld) >= 1 })
	// A release that took longer than weir waits for it is an error, and has been done.
	late, _ := sampleOf(t, s.weir, `weir_store_errors_total{op="release",reason="store_timeout"}`)
	if got := s.metric(t, released); got > 1 || got+late < 1 {
		t.Errorf("%d leases released, and of %d it is not known; want 1", got, late)
	}
	s.wantFree(t, "alice", 2)
	other.end(t, s)
	s.eventually(t, heldNow, 0)
}

// Envoy does not wait for weir. What weir grants all the same is given back.
func TestAnAnswerThatCameTooLateLeavesNothing(t *testing.T) {
	t.Parallel()
	s := startOnRedis(t)
	s.envoy = s.front(t, change{"timeout: 20s", "timeout: 0.02s"}, change{"max_interval: 20s", "max_interval: 0.02s"})
	s.get(t, "alice", "/ok").want(t, http.StatusOK)
	for range 10 {
		s.weir.Pause(t)
		s.get(t, "alice", "/ok").want(t, http.StatusOK)
		s.weir.Signal(t, syscall.SIGCONT)
	}
	if got := s.envoy.counters(t)["failure_mode_allowed"]; got < 10 {
		t.Errorf("%d requests passed unasked, want 10", got)
	}
	storetest.Eventually(t, "every lease is released", func() bool {
		return s.metric(t, heldNow) == 0 && s.metric(t, granted) == s.metric(t, released)
	})
	s.envoy = s.front(t) // one that waits
	s.wantFree(t, "carol", 3)
	if got := s.metric(t, expired); got != 0 {
		t.Errorf("%d leases expired, want 0", got)
	}
}

// A refused request costs weir one question, whatever headers its client invents.
func TestARefusalCostsNoRelease(t *testing.T) {
	t.Parallel()
	s := start(t, nil)
	var all []held
	for range 3 {
		all = append(all, s.hold(t, "alice"))
	}
	const calls = "cluster.weir_release.upstream_rq_total"
	before := s.envoy.counter(t, calls)
	s.get(t, "alice", "/ok").wantRefused(t, http.StatusTooManyRequests, "lane")
	for range 10 {
		s.get(t, "alice", "/ok", "no-such-header", "x", "none", "x").wantRefused(t, http.StatusTooManyRequests, "lane")
	}
	c := s.dial(t)
	defer func() { _ = c.Close() }()
	if _, err := io.WriteString(c, "GET /ok HTTP/1.1\r\nHost: x\r\nX-Account: alice\r\n:none: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if r, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || r.StatusCode != http.StatusBadRequest {
		t.Errorf("%v, %v, want 400", r, err)
	}
	for _, h := range all {
		h.end(t, s)
	}
	s.eventually(t, heldNow, 0)
	storetest.Eventually(t, "the three are released", func() bool { return s.envoy.counter(t, calls) >= before+3 })
	if got := s.envoy.counter(t, calls) - before; got > 5 { // with the log of each worker
		t.Errorf("%d calls, want the releases of three streams", got)
	}
}
