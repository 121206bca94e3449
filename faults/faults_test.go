// Package faults breaks what weir stands on, the network and Redis, while clients ask
// several replicas, and looks whether what docs/promises.md says is kept: meanwhile,
// and afterwards.
package faults

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"weir/server/servertest"
	"weir/store/storetest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	servertest.Clean()
	os.Exit(code)
}

// TestFaults is the table: each fault strikes and ends while clients ask in all three
// modes.
func TestFaults(t *testing.T) {
	for _, f := range faults {
		for version, bin := range storetest.RedisBinaries(t) {
			t.Run(f.name+"/"+version, func(t *testing.T) {
				t.Parallel()
				newWorld(t, f, bin).suffer(f)
			})
		}
	}
}

// recovery is how long it may take from the end of a fault until the store decides again
// in every place, on a machine that is busy: a dial (1.2 s at most), a breaker, and a
// cluster's node that joins again. What it takes usually is in docs/faults.md.
const recovery = 10 * time.Second

// suffer lets the fault come and go, and then looks after everything.
func (w *world) suffer(f fault) {
	t := w.t
	before := w.goroutines()
	lasted, healed := w.befall(f)
	w.load.storeAnswers(20)
	w.load.end()
	w.check(f, before)
	t.Logf("%v, healed in %v; %s", lasted.Round(time.Millisecond), healed.Round(time.Millisecond), w.load)
}

// goroutines is how many each replica has, when its clients have asked for a while.
func (w *world) goroutines() (n []float64) {
	w.t.Helper()
	w.load.storeAnswers(20)
	for _, r := range w.replicas {
		n = append(n, r.metrics(w.t)["go_goroutines"])
	}
	return n
}

// befall lets the fault come, and go when it has been felt, and tells how long that took,
// and from then on until the store decided everywhere again.
func (w *world) befall(f fault) (lasted, healed time.Duration) {
	t := w.t
	t.Helper()
	begin := time.Now()
	w.load.mark()
	f.strike(w)
	storetest.Eventually(t, "answers are bypassed where it strikes, and are the store's elsewhere, when "+f.name, func() bool {
		seen := false
		return f.bypass == "" || w.load.each(func(p place, y *tally) bool {
			if f.strikes != nil && !f.strikes(w, p) {
				return y.since >= 20
			}
			// Breakers may have opened before, by a time-out of a busy machine.
			seen = seen || y.reasons[f.bypass]+y.reasons["breaker_open"] > 0
			return sum(y.reasons) >= 20
		}) && seen
	})
	if f.meanwhile != nil {
		f.meanwhile(w)
	}
	lasted = time.Since(begin)
	if f.mend != nil {
		f.mend(w)
	}

	begin = time.Now()
	w.load.mark()
	w.load.storeAnswers(1)
	if healed = time.Since(begin); healed > recovery {
		t.Errorf("it took %v until the store decided everywhere again, want %v at most", healed, recovery)
	}
	return lasted, healed
}

// check looks whether all is as it was, once the clients have ended.
func (w *world) check(f fault, goroutines []float64) {
	t := w.t
	t.Helper()
	for _, r := range w.replicas {
		storetest.Eventually(t, "health is ok", func() bool {
			code, body := r.Get(t, "/healthz")
			return code == 200 && strings.Contains(body, `"status":"ok"`) && r.metrics(t)["weir_store_up"] == 1
		})
	}
	// Nothing is left of what was granted to nobody, and no slot is lost.
	for _, domain := range domains {
		for _, r := range w.replicas {
			storetest.Eventually(t, "no lease is left of "+domain, func() bool {
				held, ok := r.metrics(t)[`weir_leases_held{domain="`+domain+`"}`]
				return ok && held == 0
			})
		}
		storetest.Eventually(t, "all slots are free of "+domain, func() bool {
			n, ok := w.replicas[0].left(domain, "lane", "x")
			return ok && n == slots
		})
		w.checkCharges(f, domain)
	}
	for i, r := range w.replicas {
		w.checkCounters(i, r.metrics(t))
	}
	// The limits are exact again, at once.
	for _, domain := range domains {
		w.together(domain, "burst", burst)
		w.together(domain, "lane", slots)
	}
	for i, r := range w.replicas {
		const more = 5 // connections come and go
		storetest.Eventually(t, "no goroutines are left over", func() bool { return r.metrics(t)["go_goroutines"] <= goroutines[i]+more })
	}
}

// checkCharges: what was admitted was charged, once; what nobody knows the end of, once
// or not at all.
func (w *world) checkCharges(f fault, domain string) {
	t := w.t
	t.Helper()
	left := 0
	storetest.Eventually(t, "Inspect answers", func() (ok bool) {
		left, ok = w.replicas[0].left(domain, "all", "x")
		return ok
	})
	least, most := 0, 0
	w.load.each(func(p place, y *tally) bool {
		if p.domain == domain {
			least += y.admitted
			most += y.admitted + y.unsure
		}
		return true
	})
	if f.forgets != nothing {
		least = 0
	}
	if charged := tokens - left; charged < least || charged > most {
		t.Errorf("%s: %d tokens were charged, want %d to %d", domain, charged, least, most)
	}
}

// checkCounters: what is counted is what the clients were told.
func (w *world) checkCounters(i int, metrics map[string]float64) {
	t := w.t
	t.Helper()
	for _, domain := range domains {
		y := w.load.tallies[place{domain, i}]
		want := map[string]float64{}
		for b, n := range y.bypassed {
			for _, limit := range []string{"all", "lane"} {
				want[fmt.Sprintf(`weir_bypassed_total{domain=%q,limit=%q,mode=%q,reason=%q}`, domain, limit, b.mode, b.reason)] = float64(n)
			}
		}
		for series, n := range metrics {
			ofClients := strings.HasPrefix(series, `weir_bypassed_total{domain="`+domain+`",limit="all"`) ||
				strings.HasPrefix(series, `weir_bypassed_total{domain="`+domain+`",limit="lane"`)
			if ofClients && n != want[series] {
				t.Errorf("replica %d: %s is %v, the clients were told so %v times", i, series, n, want[series])
			}
			delete(want, series)
		}
		for series, n := range want {
			t.Errorf("replica %d: %s is missing, want %v", i, series, n)
		}
		if n := metrics[`weir_store_breaker_open{domain="`+domain+`"}`]; n != 0 {
			t.Errorf("replica %d: the breaker of %s is open", i, domain)
		}
	}
}

// String says what the clients were told.
func (l *load) String() string {
	stored, slowest := 0, time.Duration(0)
	by := make(map[string]int)
	l.each(func(_ place, y *tally) bool {
		stored += y.stored
		slowest = max(slowest, y.slowest)
		for b, n := range y.bypassed {
			by[b.mode+" "+b.reason] += n
		}
		return true
	})
	return fmt.Sprintf("%d answers of the store, bypassed %v, slowest %v", stored, by, slowest.Round(time.Millisecond))
}
