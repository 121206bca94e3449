package server_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"weir/envoy"
	"weir/limit"
	weirv1 "weir/proto/weir/v1"
	"weir/store"
	"weir/store/memory"
	"weir/store/storetest"
)

// Its waits are long, so that only what is meant to ends them.
const waitPolicy = `
domain: d
descriptors:
  - {key: lane, concurrency: {max_in_flight: 1, lease: 1h, max_wait: 20s}}
  - {key: pool, concurrency: {max_in_flight: 2, lease: 1h, max_wait: 20s}, reject_as: pool}
  - {key: gpu, concurrency: {max_in_flight: 2, lease: 1h, max_wait: 1m}}
  - {key: short, concurrency: {max_in_flight: 1, lease: 1h, max_wait: 1ms}}
  - {key: brief, concurrency: {max_in_flight: 1, lease: 1s}}
  - {key: never, concurrency: {max_in_flight: 1, lease: 1h, max_wait: 0s}}
  - {key: shadow, concurrency: {max_in_flight: 1, lease: 1h, max_wait: 0s}, shadow_mode: true}
  - {key: bucket, token_bucket: {capacity: 1, refill: 1/d}}
  - {key: over, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: under, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 1}}
`

// The release of a client's last request is told beside its next, and often comes
// behind it.
func TestASequentialClientOnALaneOfOneIsNeverRefused(t *testing.T) {
	s := serve(t, waitPolicy)
	var releases sync.WaitGroup
	for i := range 1000 {
		r := acquire(t, s.leases, typed("lane", "a"))
		if !r.GetAdmitted() {
			t.Fatalf("request %d is refused: %v", i, r.GetVerdict())
		}
		releases.Go(func() { release(t, s.leases, r.GetLease().GetId()) })
	}
	releases.Wait()
}

func TestARequestWaitsForASlotAndNotForWhatNobodyGivesBack(t *testing.T) {
	s := serve(t, waitPolicy)
	for _, c := range []struct {
		name        string
		descriptors []*weirv1.Descriptor
		waits       float64
	}{
		{"a short wait that nobody ends", []*weirv1.Descriptor{typed("short", "a")}, 1},
		{"the shortest of two", []*weirv1.Descriptor{typed("lane", "a"), typed("short", "a")}, 1},
		{"a limit that does not wait", []*weirv1.Descriptor{typed("never", "a")}, 0},
		{"one of two that does not", []*weirv1.Descriptor{typed("lane", "a"), typed("never", "a")}, 0},
		{"a bucket beside it", []*weirv1.Descriptor{typed("lane", "a"), typed("bucket", "a")}, 0},
		{"an exhausted quota beside it", []*weirv1.Descriptor{typed("short", "a"), typed("over", "a")}, 0},
		{"a quota with another that is free", []*weirv1.Descriptor{typed("short", "a"), typed("over", "a"), typed("under", "a")}, 1},
		{"a shadow beside it", []*weirv1.Descriptor{typed("short", "a"), typed("shadow", "a")}, 1},
	} {
		// Takes what can be taken; then the same is refused.
		for _, key := range []string{"lane", "short", "never", "shadow", "bucket", "over"} {
			acquire(t, s.leases, typed(key, "a"+c.name))
		}
		for _, d := range c.descriptors {
			d.Entries[0].Value = "a" + c.name
		}
		before := s.metric(t, `weir_waits_total{domain="d",verdict="refused"}`)
		if r := acquire(t, s.leases, c.descriptors...); r.GetAdmitted() {
			t.Errorf("%s: admitted", c.name)
		}
		if got := s.metric(t, `weir_waits_total{domain="d",verdict="refused"}`) - before; got != c.waits {
			t.Errorf("%s: %v requests waited, want %v", c.name, got, c.waits)
		}
	}
}

// As many wait as a limit has slots, and each slot that comes free wakes one.
func TestFewWaitAndEachSlotWakesOne(t *testing.T) {
	s := serve(t, waitPolicy)
	held := []*weirv1.Lease{acquire(t, s.leases, typed("pool", "p")).GetLease(), acquire(t, s.leases, typed("pool", "p")).GetLease()}
	answers := make(chan *weirv1.AcquireResponse)
	for range 2 {
		go func() { answers <- acquire(t, s.leases, typed("pool", "p")) }()
	}
	storetest.Eventually(t, "two wait", func() bool { return s.metric(t, "weir_waiting") == 2 })
	if r := acquire(t, s.leases, typed("pool", "p")); r.GetAdmitted() || s.metric(t, "weir_waiting") != 2 {
		t.Errorf("the third: %v, want a refusal while the two still wait", r)
	}
	for _, lease := range held {
		release(t, s.leases, lease.GetId())
		if r := <-answers; !r.GetAdmitted() {
			t.Errorf("woken and refused: %v", r)
		}
	}
	if got := s.metric(t, `weir_waits_total{domain="d",verdict="admitted"}`); got != 2 {
		t.Errorf("%v requests waited and were admitted, want 2", got)
	}
}

// A slot that came free for a request which another limit refuses is the next one's.
func TestASlotThatIsNotTakenWakesTheNext(t *testing.T) {
	s := serve(t, waitPolicy)
	held := acquire(t, s.leases, typed("gpu", "a")).GetLease()
	acquire(t, s.leases, typed("gpu", "a"))
	answers := [2]chan *weirv1.AcquireResponse{make(chan *weirv1.AcquireResponse, 1), make(chan *weirv1.AcquireResponse, 1)}
	for i, descriptors := range [2][]*weirv1.Descriptor{{typed("gpu", "a"), typed("bucket", "x")}, {typed("gpu", "a")}} {
		go func() { // nobody waits for these but the test, so they wait as long as the policy says
			r, err := s.leases.Acquire(context.WithoutCancel(t.Context()), &weirv1.AcquireRequest{Domain: "d", Descriptors: descriptors})
			if err != nil {
				t.Errorf("Acquire: %v", err)
			}
			answers[i] <- r
		}()
		storetest.Eventually(t, "it waits", func() bool { return s.metric(t, "weir_waiting") == float64(i+1) })
	}
	acquire(t, s.leases, typed("bucket", "x")) // the last token
	release(t, s.leases, held.GetId())
	expectSecondAdmitted(t, answers)
}

// expectSecondAdmitted wants the first to be refused, and the second to be admitted.
func expectSecondAdmitted(t *testing.T, answers [2]chan *weirv1.AcquireResponse) {
	t.Helper()
	for i, want := range []bool{false, true} {
		var r *weirv1.AcquireResponse
		storetest.Eventually(t, "it is answered", func() bool {
			select {
			case r = <-answers[i]:
			default:
			}
			return r != nil
		})
		if r.GetAdmitted() != want {
			t.Errorf("request %d: %v, want admitted %t", i, r, want)
		}
	}
}

// A slot that another replica gave back is found at the end of the wait.
func TestAWaitEndsWithALook(t *testing.T) {
	clock := storetest.NewClock()
	st := memory.New(memory.Options{Now: clock.Now})
	one, two := serviceOn(t, st, clock, envoy.Options{}), serviceOn(t, st, clock, envoy.Options{})
	const policy = "domain: d\ndescriptors:\n  - {key: lane, concurrency: {max_in_flight: 1, lease: 1h, max_wait: 300ms}}\n"
	one.setPolicy(t, policy)
	two.setPolicy(t, policy)
	lease := acquire(t, one.leases, typed("lane", "a")).GetLease()
	answer := make(chan *weirv1.AcquireResponse)
	go func() { answer <- acquire(t, two.leases, typed("lane", "a")) }()
	storetest.Eventually(t, "it waits", func() bool { return two.metric(t, "weir_waiting") == 1 })
	release(t, one.leases, lease.GetId())
	if r := <-answer; !r.GetAdmitted() {
		t.Errorf("refused: %v", r.GetVerdict())
	}
}

// A caller that does not wait so long is answered in time.
func TestAWaitIsShorterThanTheCallers(t *testing.T) {
	s := serve(t, waitPolicy)
	acquire(t, s.leases, typed("lane", "a"))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	r, err := s.leases.Acquire(ctx, &weirv1.AcquireRequest{Domain: "d", Descriptors: []*weirv1.Descriptor{typed("lane", "a")}})
	if err != nil || r.GetAdmitted() {
		t.Errorf("Acquire = %v, %v, want a refusal before the caller leaves", r, err)
	}
}

// Whoever leaves while it waits takes nothing.
func TestACallerThatLeavesWhileItWaitsTakesNothing(t *testing.T) {
	s := serve(t, waitPolicy)
	lease := acquire(t, s.leases, typed("lane", "a")).GetLease()
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error)
	go func() {
		_, err := s.leases.Acquire(ctx, &weirv1.AcquireRequest{Domain: "d", Descriptors: []*weirv1.Descriptor{typed("lane", "a")}})
		left <- err
	}()
	storetest.Eventually(t, "it waits", func() bool { return s.metric(t, "weir_waiting") == 1 })
	leave()
	if err := <-left; err == nil {
		t.Error("a caller that left was answered")
	}
	release(t, s.leases, lease.GetId())
	storetest.Eventually(t, "the lane is free", func() bool { return s.metric(t, `weir_leases_held{domain="d"}`) == 0 })
	if r := acquire(t, s.leases, typed("lane", "a")); !r.GetAdmitted() {
		t.Errorf("the next is refused: %v", r.GetVerdict())
	}
}

// A lease that expired is counted, whichever of a request's asks finds it.
func TestWhatARequestFindsExpiredIsCountedThoughItWaits(t *testing.T) {
	s := serve(t, waitPolicy)
	acquire(t, s.leases, typed("short", "a"))
	acquire(t, s.leases, typed("brief", "a"))
	s.clock.Advance(time.Second)
	if r := acquire(t, s.leases, typed("short", "a")); r.GetAdmitted() {
		t.Error("admitted, although the lane is full")
	}
	if got := s.metric(t, `weir_leases_expired_total{domain="d"}`); got != 1 {
		t.Errorf("%v leases expired, want 1", got)
	}
}

// Whom the store has refused is not let pass since it is away when it is asked again.
func TestAWaitDoesNotTurnARefusalIntoABypass(t *testing.T) {
	clock := storetest.NewClock()
	asks := 0
	s := serviceOn(t, &hooked{Store: memory.New(memory.Options{Now: clock.Now}), decided: func(d limit.Decision) (limit.Decision, error) {
		if asks++; asks == 3 {
			return limit.Decision{}, store.ErrUnavailable
		}
		return d, nil
	}}, clock, envoy.Options{})
	s.setPolicy(t, waitPolicy)
	acquire(t, s.leases, typed("short", "a"))
	if r := acquire(t, s.leases, typed("short", "a")); r.GetAdmitted() || asks != 3 {
		t.Errorf("after %d asks: %v, want a refusal after 3", asks, r)
	}
}

// hooked is a store with a say in what it decides, and before a release.
type hooked struct {
	store.Store
	decided   func(limit.Decision) (limit.Decision, error)
	releasing func(limit.Ending)
}

func (h *hooked) Decide(ctx context.Context, r limit.Request) (limit.Decision, error) {
	d, err := h.Store.Decide(ctx, r)
	if err == nil && h.decided != nil {
		return h.decided(d)
	}
	return d, err
}

func (h *hooked) Release(ctx context.Context, e limit.Ending) (limit.Release, error) {
	if h.releasing != nil {
		h.releasing(e)
	}
	return h.Store.Release(ctx, e)
}

// A slot for which somebody was woken whose ask was lost is the next one's.
func TestASlotWhoseAskIsLostWakesTheNext(t *testing.T) {
	clock := storetest.NewClock()
	var lose atomic.Bool
	s := serviceOn(t, &hooked{Store: memory.New(memory.Options{Now: clock.Now}), decided: func(d limit.Decision) (limit.Decision, error) {
		if lose.Swap(false) {
			return limit.Decision{}, store.ErrUnavailable
		}
		return d, nil
	}}, clock, envoy.Options{})
	s.setPolicy(t, waitPolicy)
	held := acquire(t, s.leases, typed("gpu", "a")).GetLease()
	acquire(t, s.leases, typed("gpu", "a"))
	answers := [2]chan *weirv1.AcquireResponse{make(chan *weirv1.AcquireResponse, 1), make(chan *weirv1.AcquireResponse, 1)}
	for i, descriptors := range [2][]*weirv1.Descriptor{{typed("gpu", "a"), typed("bucket", "x")}, {typed("gpu", "a")}} {
		go func() {
			r, err := s.leases.Acquire(context.WithoutCancel(t.Context()), &weirv1.AcquireRequest{Domain: "d", Descriptors: descriptors})
			if err != nil {
				t.Errorf("Acquire: %v", err)
			}
			answers[i] <- r
		}()
		storetest.Eventually(t, "it waits", func() bool { return s.metric(t, "weir_waiting") == float64(i+1) })
	}
	acquire(t, s.leases, typed("bucket", "x")) // the last token
	lose.Store(true)
	release(t, s.leases, held.GetId())
	expectSecondAdmitted(t, answers)
}

// Callers without time must not have others believe that the store is away: what they
// met would pass then.
func TestCallersInAHurryOpenNoBreaker(t *testing.T) {
	const n = 2 * 5 // twice as many as open it
	clock := storetest.NewClock()
	s := serviceOn(t, &slow{memory.New(memory.Options{Now: clock.Now})}, clock, envoy.Options{})
	s.setPolicy(t, "domain: d\ndescriptors:\n  - {key: lane, concurrency: {max_in_flight: 10, lease: 1h, max_wait: 1ms}}\n")
	s.run(t)
	storetest.Eventually(t, "the store is found", func() bool { return s.metric(t, "weir_store_up") == 1 })
	for range n {
		acquire(t, s.leases, typed("lane", "a"))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 1200*time.Millisecond) // less than slow wants, when they ask again
	defer cancel()
	var work sync.WaitGroup
	for range n {
		work.Go(func() {
			r, err := s.leases.Acquire(ctx, &weirv1.AcquireRequest{Domain: "d", Descriptors: []*weirv1.Descriptor{typed("lane", "a")}})
			if err == nil && r.GetAdmitted() {
				t.Error("admitted, although the lane is full")
			}
		})
	}
	work.Wait()
	storetest.Eventually(t, "their asks are lost", func() bool {
		return s.metric(t, `weir_store_errors_total{op="decide",reason="store_timeout"}`) >= n/2
	})
	if open, up := s.metric(t, `weir_store_breaker_open{domain="d"}`), s.metric(t, "weir_store_up"); open != 0 || up != 1 {
		t.Errorf("the breaker is %v and the store %v, want it closed, and up", open, up)
	}
}

// slow is a store that answers only who has time: others would not hear it.
type slow struct{ store.Store }

func (s *slow) Decide(ctx context.Context, r limit.Request) (limit.Decision, error) {
	if end, ok := ctx.Deadline(); ok && time.Until(end) < time.Second {
		return limit.Decision{}, fmt.Errorf("%w: %w", store.ErrUnavailable, context.DeadlineExceeded)
	}
	return s.Store.Decide(ctx, r)
}
