package main

import (
	"fmt"
	"math"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"weir/client"
	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
)

// The policy is that of the story, in its own time; only the pool is small, so that it is
// full now and then.
func TestEachAccountGetsItsBurstAndThenTheRefillToTheToken(t *testing.T) {
	const pool, capacity = 8, 10
	w := newWorld(t, policyWith(t, "max_in_flight: 200", fmt.Sprintf("max_in_flight: %d", pool), slots, ledger))
	var accounts sync.WaitGroup
	for n := range 4 {
		account := fmt.Sprint("account-", n)
		accounts.Go(func() {
			before := w.now()
			w.hammer(account, 1, "work=20ms", func(seen *tally) bool { return seen.admitted.Load() == 1 })
			after := w.now() // the bucket gains since some moment between these
			seen := w.hammer(account, 8, "work=20ms", func(seen *tally) bool { return seen.admitted.Load() >= capacity+1 })
			begun := w.now()
			left := w.state(account)
			ended := w.now()

			admitted := int(seen.admitted.Load()) + 1
			if most := capacity + ended.Sub(before).Seconds(); float64(admitted) > most {
				t.Errorf("%s: %d admitted in %v, want at most %v", account, admitted, ended.Sub(before), most)
			}
			expect(t, account+": begun in the instances", w.begun(account), admitted)
			expect(t, account+": counted by weir", left.taken, admitted)
			expect(t, account+": slots that are held", left.held, 0)
			least := math.Floor(capacity + begun.Sub(after).Seconds() - float64(admitted))
			most := math.Floor(capacity + ended.Sub(before).Seconds() - float64(admitted))
			if float64(left.tokens) < least && !w.idled(account, before) || float64(left.tokens) > most {
				t.Errorf("%s: %d tokens are left, want between %v and %v", account, left.tokens, least, most)
			}
			if seen.lane.Load() == 0 {
				t.Errorf("%s: nothing was refused: this tells nothing", account)
			}
			if got := w.most(account); got > 3 {
				t.Errorf("%s: %d jobs at once, want at most 3", account, got)
			}
		})
	}
	accounts.Wait()
	if got := w.most(""); got > pool || got < 2 {
		t.Errorf("%d jobs at once altogether, want at most %d, and more than 1", got, pool)
	}
	w.nothingHeld(t)
}

// idled reports whether the bucket of an account may have been full again since its first
// job, and so have gained less: it was if the nth job came n-1 seconds after that.
func (w *world) idled(account string, before time.Time) bool {
	jobs := 0
	for _, e := range w.events() {
		if e.Account == account && e.Message == "work begins" {
			if e.Time.Sub(before) > time.Duration(jobs)*time.Second && jobs > 0 {
				return true
			}
			jobs++
		}
	}
	return false
}

func TestEveryEndGivesTheSlotsBack(t *testing.T) {
	w := newWorld(t, policyWith(t, bucket, still, "max_in_flight: 200", "max_in_flight: 3"))
	for _, end := range []struct {
		name, query string
		code        int
		outcome     string
	}{
		{name: "success", query: "work=20ms", code: http.StatusOK},
		{name: "error", query: "work=20ms&end=error", code: http.StatusInternalServerError},
		{name: "panic", query: "work=20ms&end=panic", code: 0},
		{name: "badrequest", query: "work=soon", code: http.StatusBadRequest},
	} {
		var jobs sync.WaitGroup
		for n := range 3 {
			jobs.Go(func() {
				expect(t, end.name, w.post(t.Context(), n%2, end.name, end.query).code, end.code)
			})
		}
		jobs.Wait()
		// At once: whoever has an answer finds a slot.
		expect(t, end.name, w.state(end.name), state{tokens: 7})
	}

	release := w.hold(0, "alice", 3)
	full := w.post(t.Context(), 1, "alice", "")
	expect(t, "a full lane", full.code, http.StatusTooManyRequests)
	expect(t, "what is full", full.violated, "account pool")
	road := w.post(t.Context(), 1, "bob", "")
	expect(t, "a full pool", road.code, http.StatusServiceUnavailable)
	expect(t, "what is full", road.violated, "pool")
	expect(t, "bob, refused, has", w.state("bob"), state{tokens: 10})
	release() // her clients leave
	storetest.Eventually(t, "the slots of who left are free", func() bool { return w.state("alice").held == 0 })
	expect(t, "bob", w.post(t.Context(), 1, "bob", "").code, http.StatusOK)
	expect(t, "nobody", w.post(t.Context(), 0, "", "").code, http.StatusUnauthorized)
	w.nothingHeld(t)
}

func TestANoisyNeighbourTakesNothingOfAQuietAccount(t *testing.T) {
	w := newWorld(t, policyWith(t, slots, ledger))
	var stop atomic.Bool
	loud := make(chan struct{})
	var isLoud sync.Once
	noisy := make(chan *tally)
	before := w.now()
	go func() {
		noisy <- w.hammer("noisy", 50, "work=20ms", func(seen *tally) bool {
			if seen.lane.Load() >= 100 {
				isLoud.Do(func() { close(loud) })
			}
			return stop.Load()
		})
	}()
	select {
	case <-loud:
	case <-time.After(storetest.Deadline):
		t.Error("the neighbour is not noisy")
	}
	for n := range 3 {
		quiet := fmt.Sprint("quiet-", n)
		for range 10 {
			if a := w.post(t.Context(), n%2, quiet, "work=1ms"); a.code != http.StatusOK || a.bypassed != "" {
				t.Errorf("%s got %+v, want each request admitted at once", quiet, a)
			}
		}
		expect(t, quiet+" has taken", w.state(quiet).taken, 10)
	}
	stop.Store(true)
	seen := <-noisy
	elapsed := w.now().Sub(before)
	if n := float64(seen.admitted.Load()); n > 10+elapsed.Seconds() {
		t.Errorf("the neighbour got %v in %v, want at most ten and one a second", n, elapsed)
	}
	expect(t, "the neighbour has taken", w.state("noisy").taken, int(seen.admitted.Load()))
	if got := w.most("noisy"); got > 3 {
		t.Errorf("the neighbour worked at %d at once, want at most 3", got)
	}
	w.nothingHeld(t)
}

// The attack of 12:00:59, with windows of two seconds: use the allowance up at the very
// end of a window, and again when the next begins.
func TestABurstAtAWindowsEdgeIsOneBurst(t *testing.T) {
	const (
		capacity, rate = 10, 5.0 // as much in a window as the bucket gains in its length
		window         = 2 * time.Second
	)
	w := newWorld(t, policyWith(t, bucket, "{capacity: 10, refill: 5/s}")+
		"  - {key: boxes, rate_limit: {unit: second, unit_multiplier: 2, requests_per_unit: 10}}\n")
	leases := w.leases()
	// box asks the fixed window, for comparison.
	box := func(account string) (admitted int) {
		for {
			m, err := leases.Acquire(storetest.Context(t), &weirv1.AcquireRequest{
				Domain: "images", Descriptors: []*weirv1.Descriptor{{Entries: []*weirv1.Entry{{Key: "boxes", Value: account}}}},
			})
			if err != nil {
				t.Fatal(err)
			}
			if !m.GetAdmitted() {
				return admitted
			}
			admitted++
		}
	}
	// burst is as much as the account's three slots get, until it is refused.
	burst := func(account string) int {
		return int(w.hammer(account, 3, "", func(seen *tally) bool { return seen.lane.Load() > 0 }).admitted.Load())
	}
	windowOf := func(at time.Time) int64 { return at.UnixMilli() / window.Milliseconds() }

	for n := range 10 {
		account := fmt.Sprint("mallory-", n)
		storetest.Eventually(t, "the window is about to end", func() bool {
			left := window.Milliseconds() - w.now().UnixMilli()%window.Milliseconds()
			return left > 150 && left < 500
		})
		before := w.now()
		boxed, got := box(account), burst(account)
		edge := windowOf(w.now())
		storetest.Eventually(t, "the next window begins", func() bool { return windowOf(w.now()) > edge })
		boxed, got = boxed+box(account), got+burst(account)
		elapsed := w.now().Sub(before)
		bound := capacity + rate*elapsed.Seconds()
		if float64(got) > bound {
			t.Fatalf("the bucket admitted %d in %v, want at most %v", got, elapsed, bound)
		}
		if got < capacity {
			t.Fatalf("the bucket admitted %d, want its burst", got)
		}
		if edge == windowOf(before) && windowOf(w.now()) == edge+1 { // else the machine was too slow for the attack
			expect(t, "admitted by fixed windows", boxed, 2*capacity)
			if float64(boxed) <= bound {
				t.Errorf("fixed windows admitted %d in %v: this tells nothing", boxed, elapsed)
			}
			return
		}
	}
	t.Error("this machine is too slow for the attack")
}

func TestAPolicyIsWatchedInShadowAndThenEnforced(t *testing.T) {
	file := filepath.Join(t.TempDir(), "images.yaml")
	policy := policyWith(t, bucket, still)
	write(t, file, policyWith(t, bucket, still, "shadow_mode: false", "shadow_mode: true"))
	// The file that newWorld writes is of another domain; this one is what is changed.
	w := newWorld(t, "{domain: other, descriptors: [{key: k, token_bucket: {capacity: 1, refill: 1/s}}]}", "--policy", file)
	const refused, wouldRefuse = `weir_checks_total{domain="images",kind="token_bucket",limit="account",result="refused"}`,
		`weir_checks_total{domain="images",kind="token_bucket",limit="account",result="shadow_refused"}`

	for n := range 14 {
		a := w.post(t.Context(), n%2, "alice", "")
		expect(t, "in shadow", a, answer{code: http.StatusOK})
	}
	expect(t, "would refuse", w.total(wouldRefuse), 4)
	expect(t, "refused", w.total(refused), 0)

	write(t, file, policy)
	for _, r := range w.weirs {
		storetest.Eventually(t, "the policy is read again", func() bool { return r.metrics(t)[`weir_policy_loads_total{result="ok"}`] == 2 })
	}
	for n := range 6 { // the bucket is as empty as she left it
		expect(t, "enforced", w.post(t.Context(), n%2, "alice", "").code, http.StatusTooManyRequests)
	}
	expect(t, "bob", w.post(t.Context(), 0, "bob", "").code, http.StatusOK)
	expect(t, "would refuse", w.total(wouldRefuse), 4)
	expect(t, "refused", w.total(refused), 6)
	expect(t, "alice has", w.state("alice"), state{})
	w.nothingHeld(t)
}

func TestTheServiceGoesOnWithoutRedisAndCountsIt(t *testing.T) {
	w := newWorld(t, policyWith(t, bucket, still))
	burst := func(account string) {
		t.Helper()
		for n := range 12 {
			want := http.StatusOK
			if n >= 10 {
				want = http.StatusTooManyRequests
			}
			if a := w.post(t.Context(), n%2, account, ""); a.code != want || a.bypassed != "" {
				t.Errorf("request %d of %s: %+v, want %d", n+1, account, a, want)
			}
		}
	}
	burst("alice")
	release := w.hold(0, "carol", 2)
	expect(t, "bypasses before", w.bypasses(), 0)

	w.redis.Kill()
	for n := range 20 {
		if a := w.post(t.Context(), n%2, "alice", ""); a.code != http.StatusOK || a.bypassed == "" {
			t.Errorf("without Redis: %+v, want 200 and that it was not checked", a)
		}
	}
	release()
	storetest.Eventually(t, "the releases that reach nobody are kept", func() bool {
		return w.instances[0].metrics(t)[`weir_client_level{of="releases_pending"}`] == 2
	})
	// Each asked for a bucket, a lane and a pool.
	expect(t, "bypassed limits", w.bypasses(), 3*20)
	told := 0
	for _, i := range w.instances {
		for name, n := range i.metrics(t) {
			var reason string
			if _, err := fmt.Sscanf(name, `weir_client_events_total{event="bypasses",result=%q}`, &reason); err == nil && reason != client.ReasonServiceAway {
				told += int(n)
			}
		}
	}
	expect(t, "bypasses that the instances were told of", told, 20)

	w.redis.Start(t)
	storetest.Eventually(t, "both replicas find Redis", func() bool {
		for i := range w.instances {
			w.post(t.Context(), i, "probe", "")
			w.post(t.Context(), i, "probe", "")
		}
		return w.weirs[0].found(t) && w.weirs[1].found(t)
	})
	burst("bob") // to the token
	burst("alice")
	for _, i := range w.instances {
		storetest.Eventually(t, "no release is pending", func() bool { return i.metrics(t)[`weir_client_level{of="releases_pending"}`] == 0 })
	}
	expect(t, "carol has", w.state("carol"), state{tokens: 10}) // Redis kept nothing
	w.nothingHeld(t)
}

func TestTheServiceGoesOnWithoutWeirAndCountsIt(t *testing.T) {
	w := newWorld(t, policyWith(t))
	for _, r := range w.weirs {
		r.proxy.Stop()
	}
	for n := range 20 {
		expect(t, "without weir", w.post(t.Context(), n%2, "alice", ""), answer{code: http.StatusOK, bypassed: client.ReasonServiceAway})
	}
	expect(t, "bypasses", w.counted("bypasses", client.ReasonServiceAway), 20)
	for _, r := range w.weirs {
		if err := r.proxy.Start(); err != nil {
			t.Fatal(err)
		}
	}
	for i := range w.instances {
		storetest.Eventually(t, "weir is asked again", func() bool { return w.post(t.Context(), i, "alice", "").bypassed == "" })
	}
	w.nothingHeld(t)
}

// bypasses is how many limits all replicas have decided without Redis.
func (w *world) bypasses() (n int) {
	w.t.Helper()
	for _, r := range w.weirs {
		for name, value := range r.metrics(w.t) {
			var domain string
			if _, err := fmt.Sscanf(name, `weir_bypassed_total{domain=%q,`, &domain); err == nil {
				n += int(value)
			}
		}
	}
	return n
}

// found reports whether a replica has its Redis again.
func (r *replica) found(t testing.TB) bool {
	t.Helper()
	m := r.metrics(t)
	return m["weir_store_up"] == 1 && m[`weir_store_breaker_open{domain="images"}`] == 0
}
