package redis

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"weir/limit"
	"weir/store"
	"weir/store/storetest"
)

func laneOf(t testing.TB, domain string, n uint64) limit.Request {
	t.Helper()
	l, err := limit.NewConcurrency(1000, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return limit.Request{Domain: domain, Checks: []limit.Check{{Name: "k", Limit: l, Hits: 1, Key: limit.Key(domain, l, nil)}}, Lease: storetest.TestLease(domain, n)}
}

// What one domain's keys may not be used for is that domain's error, as it was when each
// decision was a call of its own.
func TestAnUserWithoutADomainDoesNotFailAnother(t *testing.T) {
	for version, bin := range storetest.RedisBinaries(t) {
		t.Run(version, func(t *testing.T) {
			server := storetest.StartRedis(t, bin)
			server.MustDo(t, "ACL", "SETUSER", "weir", "on", ">secret", "~weir:{a}*", "+@all")
			s := openPatient(t, strings.Replace(server.URL, "unix://", "unix://weir:secret@", 1), storetest.Deadline)
			ctx := storetest.Context(t)
			if _, err := s.Decide(ctx, laneOf(t, "a", 1)); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Decide(ctx, laneOf(t, "b", 1)); err == nil {
				t.Fatal("b may be used")
			}
			if err := syscall.Kill(server.PID(), syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			const n = 2 * connections * maxBatch
			var all sync.WaitGroup
			for i := range uint64(n) {
				all.Go(func() {
					domain := string('a' + rune(i%2))
					if _, err := s.Decide(ctx, laneOf(t, domain, 2+i)); (err != nil) != (domain == "b") {
						t.Errorf("%s beside the other: %v", domain, err)
					}
				})
			}
			storetest.Eventually(t, "some wait", func() bool { return s.Waiting() >= n-connections*maxBatch })
			if err := syscall.Kill(server.PID(), syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			all.Wait()
		})
	}
}

func TestTheKindOfAnItemsErrorIsKept(t *testing.T) {
	for version, bin := range storetest.RedisBinaries(t) {
		t.Run(version, func(t *testing.T) {
			server := storetest.StartRedis(t, bin)
			s := openPatient(t, server.URL, time.Second)
			ctx := storetest.Context(t)
			r := laneOf(t, "a", 1)
			server.MustDo(t, "SET", r.Checks[0].Key, "x")
			_, err := s.Decide(ctx, r)
			t.Logf("%v", err)
			if err == nil || !strings.Contains(err.Error(), "decide: WRONGTYPE") {
				t.Errorf("error %v, want WRONGTYPE first", err)
			}
		})
	}
}

// Of a shared call whose answer is lost each grant is undone.
func TestAllOfALostSharedCallAreUndone(t *testing.T) {
	server := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	p := newThief(t, server.Addr())
	s := openPatient(t, "redis://"+p.addr, time.Minute)
	ctx := storetest.Context(t)
	if _, err := s.Decide(ctx, laneOf(t, "a", 1)); err != nil {
		t.Fatal(err)
	}
	var batch []*call
	for n := range 30 {
		c := s.decideCall(laneOf(t, fmt.Sprint("a", n%3), uint64(10+n)))
		c.ctx = ctx
		batch = append(batch, c)
	}
	p.steal.Store(true)
	all := append([]*call(nil), batch...)
	s.routes.node("").pipes.send(batch, time.Second)
	for _, c := range all {
		if !errors.Is(classify(c.err), store.ErrUnavailable) {
			t.Errorf("err %v", c.err)
		}
	}
	storetest.Eventually(t, "all are undone", func() bool {
		n := int64(0)
		for i := range 3 {
			h, err := s.Held(ctx, fmt.Sprint("a", i))
			if err != nil {
				return false
			}
			n += h
		}
		return n == 0
	})
}

func TestARequestWithoutChecksInACluster(t *testing.T) {
	server := storetest.StartRedis(t, storetest.AnyRedis(t))
	s := openPatient(t, server.URL, time.Second)
	p := newPipes(s.routes.node("").client, time.Second, time.Second, true, func() string { return "" })
	defer p.close(time.Second)
	a, b := s.decideCall(limit.Request{Domain: "d"}), s.decideCall(limit.Request{Domain: "d"})
	a.ctx, b.ctx = t.Context(), t.Context()
	defer func() {
		if r := recover(); r != nil {
			t.Errorf("panics: %v", r)
		}
	}()
	p.send([]*call{a, b}, time.Second)
}

// Callers beyond what may wait are turned down without a look at those who wait, until many of
// these have left: the looks would take all the time there is.
func TestAFullQueueIsLookedThroughWhenManyHaveLeft(t *testing.T) {
	p := idlePipes()
	var all []*call
	for range maxWaiting + maxBatch {
		c := newCall(current.decide, "k")
		c.ctx = t.Context()
		all = append(all, c)
		if len(all) == maxBatch+1 {
			p.take(nil) // what was taken makes room
		}
		if err := p.queue(c); err != nil {
			t.Fatal(err)
		}
	}
	late := newCall(current.decide, "k")
	late.ctx = t.Context()
	for i, c := range all[maxBatch:] {
		if i == 1 && p.queue(late) == nil {
			t.Error("one more may wait, want that it is turned down")
		}
		c.settled.Store(true)
		p.left++
		if i < maxWaiting/2 && p.wait() != maxWaiting {
			t.Fatalf("%d wait after %d have left", p.wait(), i)
		}
	}
	if err := p.queue(late); err != nil || p.wait() != 1 {
		t.Errorf("after all have left: %v, and %d wait", err, p.wait())
	}
	if batch := p.take(nil); len(batch) != 1 || batch[0] != late {
		t.Errorf("%d calls are taken, want the last one", len(batch))
	}
}
