package faults

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

// Nobody waits for a slot: whose second ask is lost is told the refusal of its first, and
// what the second took is given back (docs/promises.md).
const linearPolicy = `
domain: open
descriptors:
  - {key: bucket, token_bucket: {capacity: 12, refill: 1/d}}
  - {key: lane, concurrency: {max_in_flight: 3, lease: 1h, max_wait: 0s}}
`

// Clients ask three replicas at the same time, while replies are lost and connections cut
// between them and Redis: what they are told fits one order of events.
func TestReplicasAreLinearizable(t *testing.T) {
	for version, bin := range storetest.RedisBinaries(t) {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			redis := storetest.StartRedisTCP(t, bin)
			var replicas []*replica
			for range 3 {
				p := newProxy(t, redis.Addr())
				// A refusal that is remembered does not see what another replica gives back, for as
				// long as the decision record says: what is looked at here is the store's order. See
				// TestReplicasThatRememberAreLinearizable and TestWhatReplicasGiveBackIsLinearizableInTime.
				r := &replica{Process: servertest.Start(t, linearPolicy, "--redis", "redis://"+p.Listen, "--store-timeout", "20s", "--remember-refusals", "0"), proxy: p}
				r.leases = weirv1.NewLeaseServiceClient(r.Dial(t))
				replicas = append(replicas, r)
			}
			unknown, checked := 0, 0
			const rounds = 30
			for round := range rounds {
				for _, r := range replicas {
					storetest.Eventually(t, "a replica is well", func() bool {
						m := r.acquire(t, "open", of("bucket", fmt.Sprint("well", round)))
						return m.GetBypass() == weirv1.Bypass_BYPASS_UNSPECIFIED
					})
				}
				h := storetest.History{}
				var clients sync.WaitGroup
				asked := &linear{t: t, subject: fmt.Sprint(round), leases: make(map[int]string)}
				if round%3 > 0 { // replies are cut after so many bytes of each connection
					for _, r := range replicas {
						r.proxy.to("downstream", "limit_data", 100+rand.IntN(600))
					}
				}
				for n := range 6 {
					clients.Go(func() { h.Client(n, 5, asked.at(replicas[n%len(replicas)])) })
				}
				if round%3 == 0 {
					redis.MustDo(t, "CLIENT", "KILL", "TYPE", "normal")
				}
				clients.Wait()
				for _, r := range replicas {
					r.proxy.heal()
				}
				unknown += h.Unknown()
				if h.Check(t) {
					checked++
				}
			}
			t.Logf("%d of %d rounds were checked, %d outcomes were unknown", checked, rounds, unknown)
			if checked < rounds*3/4 || unknown == 0 {
				t.Errorf("%d rounds were checked, want %d; %d outcomes were unknown, want some", checked, rounds*3/4, unknown)
			}
		})
	}
}

// linear asks replicas. Leases are known to all of them.
type linear struct {
	t       testing.TB
	subject string

	mu     sync.Mutex // guards leases
	leases map[int]string
}

// at asks one of the replicas.
func (l *linear) at(r *replica) storetest.Linear { return linearAt{l, r} }

type linearAt struct {
	asked *linear
	*replica
}

func (l linearAt) lease(n int) string {
	l.asked.mu.Lock()
	defer l.asked.mu.Unlock()
	return l.asked.leases[n]
}

// Take implements [storetest.Linear].
func (l linearAt) Take(lease, hits int) storetest.Outcome {
	tokens := of("bucket", l.asked.subject)
	cost := uint64(hits)
	tokens.Hits = &cost
	m := l.acquire(l.asked.t, "open", tokens, of("lane", l.asked.subject))
	if m.GetBypass() != weirv1.Bypass_BYPASS_UNSPECIFIED {
		return storetest.Outcome{Unknown: true}
	}
	l.asked.mu.Lock()
	defer l.asked.mu.Unlock()
	l.asked.leases[lease] = m.GetLease().GetId()
	if !m.GetAdmitted() && len(m.GetStatuses()[1].GetLimits()) == 0 { // of the lane nothing is known
		return storetest.Outcome{OnlyOK: true}
	}
	left := func(i int) int { return int(m.GetStatuses()[i].GetLimits()[0].GetRemaining()) }
	return storetest.Outcome{OK: m.GetAdmitted(), Remaining: left(0), Free: left(1)}
}

// Release implements [storetest.Linear].
func (l linearAt) Release(lease int) storetest.Outcome {
	s := l.release(l.asked.t, l.lease(lease))
	return storetest.Outcome{Unknown: s == unreleased, OK: s == released}
}

// Renew implements [storetest.Linear].
func (l linearAt) Renew(lease int) storetest.Outcome {
	s := l.renew(l.asked.t, l.lease(lease))
	return storetest.Outcome{Unknown: s == unrenewed, OK: s == renewed}
}
