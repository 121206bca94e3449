package faults

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"weir/store/storetest"
)

// TestSoak lets one fault after another befall the same replicas, at random, while
// clients ask: for ten seconds, or as long as WEIR_SOAK says. Then all must be as after
// a single one. Its report, of ten minutes, is in docs/faults.md.
func TestSoak(t *testing.T) {
	lasts := 10 * time.Second
	if text := os.Getenv("WEIR_SOAK"); text != "" {
		var err error
		if lasts, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	// Those of a single Redis that forgets nothing: of the others it is not known what
	// must be left. It writes all to disk before it answers, so that it can be killed:
	// with everysec Redis keeps some in its memory while the disk is slow.
	some := slices.DeleteFunc(slices.Clone(faults), func(f fault) bool {
		return f.forgets != nothing || f.on != nil && f.name != "Redis is killed and has kept all"
	})
	f := fault{name: "soak", on: keepingAll}
	w := newWorld(t, f, storetest.AnyRedis(t))
	before := w.goroutines()
	memory := w.memory()
	healed := make(map[string][]time.Duration)
	begin := time.Now()
	for time.Since(begin) < lasts && !t.Failed() {
		f := some[rand.IntN(len(some))]
		_, took := w.befall(f)
		healed[f.name] = append(healed[f.name], took)
		for _, r := range w.replicas { // what was added to connections goes with them
			r.proxy.cut()
			r.proxy.start()
		}
		w.load.mark()
		w.load.storeAnswers(20)
	}
	w.load.end()
	w.check(f, before)

	var report strings.Builder
	fmt.Fprintf(&report, "%v, %s\n\n| fault | times | until the store decided everywhere again: median, longest |\n|---|---|---|\n", time.Since(begin).Round(time.Second), w.load)
	for _, f := range some {
		if list := healed[f.name]; len(list) > 0 {
			slices.Sort(list)
			fmt.Fprintf(&report, "| %s | %d | %v, %v |\n", f.name, len(list), list[len(list)/2].Round(time.Millisecond), list[len(list)-1].Round(time.Millisecond))
		}
	}
	for i, r := range w.replicas {
		fmt.Fprintf(&report, "\nreplica %d: %v goroutines at first, %v at the end; %v and %v MiB\n", i, before[i], r.metrics(t)["go_goroutines"], memory[i], w.memory()[i])
	}
	t.Log(report.String())
}

// memory is how much each replica has, in MiB.
func (w *world) memory() (n []int) {
	w.t.Helper()
	for _, r := range w.replicas {
		n = append(n, int(r.metrics(w.t)["process_resident_memory_bytes"])>>20)
	}
	return n
}
