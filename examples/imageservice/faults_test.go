package main

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"weir/store/storetest"
)

// plenty is a bucket that is never empty, and gains nothing to speak of.
const plenty = "{capacity: 100000, refill: 1/d}"

// exact checks that weir has counted what the instances have begun, and not one more.
func (w *world) exact(t testing.TB, accounts ...string) {
	t.Helper()
	w.nothingHeld(t)
	for _, account := range accounts {
		n := w.begun(account)
		expect(t, account, w.state(account), state{tokens: 100_000 - n, taken: n})
		if got := w.most(account); got > 3 {
			t.Errorf("%s: %d jobs at once, want at most 3", account, got)
		}
	}
	expect(t, "bypasses", w.bypasses()+w.counted("bypasses", "service_unavailable"), 0)
}

func TestTheSlotsOfADeadInstanceComeBackAndNobodyElses(t *testing.T) {
	w := newWorld(t, policyWith(t, bucket, plenty, slots, ledger, "lease: 2m", "lease: 3s"))
	w.hold(0, "alice", 2)
	w.hold(0, "bob", 1)
	release := w.hold(1, "alice", 1)
	expect(t, "a fourth", w.post(t.Context(), 1, "alice", "").code, http.StatusTooManyRequests)

	w.instances[0].kill(t)
	storetest.Eventually(t, "the slots of the dead one's leases are free", func() bool {
		return w.state("alice").held == 1 && w.state("bob").held == 0
	})
	expect(t, "alice, again", w.post(t.Context(), 1, "alice", "").code, http.StatusOK)
	m := w.instances[1].metrics(t)
	expect(t, "jobs of the other instance", m["imageservice_jobs"], 1)
	for _, how := range []string{"ended", "expired"} {
		expect(t, "leases that it has lost", m[fmt.Sprintf("weir_client_events_total{event=\"lost_leases\",result=%q}", how)], 0)
	}
	release()
	storetest.Eventually(t, "the last slot is free", func() bool { return w.state("alice").held == 0 })
	w.instances = w.instances[1:]
	storetest.Eventually(t, "both of its jobs were released in time", func() bool { return w.counted("releases", "released") == 2 })
	expect(t, "releases that did not", w.counted("releases", "expired")+w.counted("releases", "not_held"), 0)
	expect(t, "alice has", w.state("alice"), state{tokens: 100_000 - 4, taken: 4})
	expect(t, "bob has", w.state("bob"), state{tokens: 100_000 - 1, taken: 1})
	w.nothingHeld(t)
}

func TestAReplicaRestartsAndNoTokenOrSlotIsLost(t *testing.T) {
	w := newWorld(t, policyWith(t, bucket, plenty, slots, ledger))
	accounts := []string{"alice", "bob"}
	var done atomic.Bool
	var load sync.WaitGroup
	for _, account := range accounts {
		load.Go(func() {
			w.hammer(account, 2, "work=2ms", func(*tally) bool { return done.Load() })
		})
	}
	storetest.Eventually(t, "the load is on", func() bool { return w.begun("alice") > 20 && w.begun("bob") > 20 || t.Failed() })
	for n := 0; n < 10 && w.counted("retries", "lost") == 0; n++ { // until somebody waited for the one that died
		w.weirs[0].restart(w)
		storetest.Eventually(t, "the new replica is asked", func() bool {
			return w.weirs[0].metrics(t)[`weir_decisions_total{domain="images",verdict="admitted"}`] >= 20 || t.Failed()
		})
	}
	done.Store(true)
	load.Wait()
	if w.counted("retries", "lost") == 0 {
		t.Error("no answer was lost: this tells nothing")
	}
	w.exact(t, accounts...)
}

func TestCutRepliesTakeNothingTwiceAndKeepNoSlot(t *testing.T) {
	w := newWorld(t, policyWith(t, bucket, plenty, slots, ledger))
	for _, r := range w.weirs {
		r.cut(t, 2000)
	}
	accounts := []string{"alice", "bob"}
	var load sync.WaitGroup
	for n, account := range accounts {
		load.Go(func() {
			// A client of each instance at a time: a cut takes all replies of a connection.
			for n := n; !t.Failed() && (w.counted("retries", "lost") < 10 || w.counted("retries", "release") < 3); n++ {
				for range 20 {
					expect(t, account, w.post(t.Context(), n%2, account, "work=1ms"), answer{code: http.StatusOK})
				}
			}
		})
	}
	load.Wait()
	w.exact(t, accounts...)
}
