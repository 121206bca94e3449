package faults

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

// remembered is how long replicas remember refusals here: as long as by default.
const remembered = 250 * time.Millisecond

// remembering are replicas that do, each with a way of its own to Redis.
func remembering(t *testing.T, redis *storetest.Redis) (all []*replica) {
	t.Helper()
	for range 3 {
		p := newProxy(t, redis.Addr())
		r := &replica{Process: servertest.Start(t, linearPolicy, "--redis", "redis://"+p.Listen, "--store-timeout", "20s", "--remember-refusals", remembered.String()), proxy: p}
		r.leases = weirv1.NewLeaseServiceClient(r.Dial(t))
		all = append(all, r)
	}
	for _, r := range all {
		storetest.Eventually(t, "a replica is well", func() bool {
			return r.acquire(t, "open", of("bucket", "well")).GetBypass() == weirv1.Bypass_BYPASS_UNSPECIFIED
		})
	}
	return all
}

// unaskedOf is how many requests replicas have refused unasked.
func unaskedOf(t *testing.T, all []*replica) (n float64) {
	t.Helper()
	for _, r := range all {
		n += r.metrics(t)[`weir_refused_unasked_total{domain="open"}`]
	}
	return n
}

// While nothing is given back, replicas that remember refusals are linearizable as those that
// ask each time are (TestReplicasAreLinearizable), by the same model: answers are late, and
// none is lost, so that none is taken back.
func TestReplicasThatRememberAreLinearizable(t *testing.T) {
	for version, bin := range storetest.RedisBinaries(t) {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			replicas := remembering(t, storetest.StartRedisTCP(t, bin))
			const rounds = 30
			for round := range rounds {
				for _, r := range replicas {
					if round%3 > 0 {
						r.proxy.to("downstream", "latency", rand.IntN(4))
					}
				}
				h := storetest.History{}
				var clients sync.WaitGroup
				asked := &linear{t: t, subject: fmt.Sprint(round), leases: make(map[int]string)}
				for n := range 6 {
					clients.Go(func() { h.Client(n, 12, asked.at(replicas[n%len(replicas)])) })
				}
				clients.Wait()
				for _, r := range replicas {
					r.proxy.heal()
				}
				if n := h.Unknown(); n > 0 {
					t.Errorf("%d outcomes are unknown, want none", n)
				}
				if !h.Check(t) {
					t.Error("a round was not checked")
				}
			}
			n := unaskedOf(t, replicas)
			t.Logf("%v refusals were unasked", n)
			if n < rounds {
				t.Errorf("%v refusals were unasked, want more: nothing is shown", n)
			}
		})
	}
}

// tokensAsked is a take of so many tokens, or if it is negative a refund.
type tokensAsked int

// tokensTold is what a client was told. Left is -1 if it was refused.
type tokensTold struct {
	ok   bool
	left int
}

// oneBucket is a bucket that gains nothing meanwhile.
var oneBucket = porcupine.Model{
	Init: func() any { return storetest.LinearTokens },
	Step: func(state, input, output any) (bool, any) {
		tokens, _ := state.(int)
		asked, _ := input.(tokensAsked)
		told, _ := output.(tokensTold)
		if left := min(storetest.LinearTokens, tokens-int(asked)); left >= 0 {
			return told == tokensTold{true, left}, left
		}
		return told == tokensTold{false, -1}, tokens
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
}

// What another replica gives back is honoured within the time that refusals are remembered:
// without the refusals that were asked for sooner after something was given back, what all
// clients were told fits one order of events.
func TestWhatReplicasGiveBackIsLinearizableInTime(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	replicas := remembering(t, redis)
	began := time.Now()
	const rounds = 5
	// One client gives back at these asks of its own, counted from the first that was refused: while
	// that is remembered.
	const firstRefund, secondRefund = 10, 100
	late := 0
	for round := range rounds {
		var mu sync.Mutex // guards the history
		var history []porcupine.Operation
		var given []porcupine.Operation // the refunds
		var clients sync.WaitGroup
		for n := range 4 {
			clients.Go(func() {
				since := 0 // asks, from the first that was refused on
				end := time.Now().Add(4 * remembered)
				for asks := 0; time.Now().Before(end); asks++ {
					hits := 1 // of another cost it is asked for each time
					if n == 0 && (since == firstRefund || since == secondRefund) {
						hits = -1 - round%3
					}
					call := time.Since(began)
					at := replicas[0] // the others give back, and so it hears nothing of it
					if hits < 0 || n == 3 && round%2 == 1 {
						at = replicas[1+asks%2]
					}
					told := at.take(t, fmt.Sprint("given", round), hits)
					back := time.Since(began)
					if since > 0 || !told.ok {
						since++
					}
					mu.Lock()
					o := porcupine.Operation{ClientId: n, Input: tokensAsked(hits), Output: told, Call: call.Nanoseconds(), Return: back.Nanoseconds()}
					history = append(history, o)
					if hits < 0 {
						given = append(given, o)
					}
					mu.Unlock()
				}
			})
		}
		clients.Wait()
		var kept []porcupine.Operation
		for _, o := range history {
			if told, _ := o.Output.(tokensTold); !told.ok && soonAfter(given, o) {
				late++
				continue
			}
			kept = append(kept, o)
		}
		switch result, info := porcupine.CheckOperationsVerbose(oneBucket, kept, storetest.Deadline); result {
		case porcupine.Ok:
			t.Logf("round %d: %d answers, %d of them to refunds; %d are kept", round, len(history), len(given), len(kept))
		case porcupine.Unknown:
			t.Errorf("round %d of %d answers was not checked", round, len(kept))
		case porcupine.Illegal:
			path := t.ArtifactDir() + "/history.html"
			if err := porcupine.VisualizePath(oneBucket, info, path); err != nil {
				t.Error(err)
			}
			t.Fatalf("no order of events explains what clients were told; see %s", path)
		}
	}
	if n := unaskedOf(t, replicas); n == 0 || late == 0 {
		t.Errorf("%v refusals were unasked, and %d soon after a refund, want some of both: nothing is shown", n, late)
	}
}

// soonAfter reports whether o was asked for not later than replicas remember after one of
// some refunds, or at the same time.
func soonAfter(refunds []porcupine.Operation, o porcupine.Operation) bool {
	return slices.ContainsFunc(refunds, func(g porcupine.Operation) bool {
		return g.Call < o.Return && o.Call < g.Return+remembered.Nanoseconds()
	})
}

// take takes so many tokens, or gives them back.
func (r *replica) take(t testing.TB, subject string, hits int) tokensTold {
	d := of("bucket", subject)
	cost := uint64(max(hits, -hits))
	d.Hits, d.Refund = &cost, hits < 0
	m := r.acquire(t, "open", d)
	if m.GetBypass() != weirv1.Bypass_BYPASS_UNSPECIFIED {
		t.Errorf("%s was decided without Redis: %v", subject, m)
	}
	if !m.GetAdmitted() {
		return tokensTold{false, -1}
	}
	return tokensTold{true, int(m.GetStatuses()[0].GetLimits()[0].GetRemaining())}
}
