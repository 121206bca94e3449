package client_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weir/client"
	weirv1 "weir/proto/weir/v1"
)

// away loses every message of the method while it is set.
func away(method string, isAway *atomic.Bool, why error) func(context.Context, string, int, proto.Message) loss {
	return func(_ context.Context, m string, _ int, _ proto.Message) loss {
		if m == method && isAway.Load() {
			return loss{request: why}
		}
		return loss{}
	}
}

func lost(l *client.Lease) bool {
	select {
	case <-l.Lost():
		return true
	default:
		return false
	}
}

func TestAReleaseIsSentThoughItsContextIsOver(t *testing.T) {
	s := serve(t, images)
	c := newClient(t, s.conn, client.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	l, err := c.Acquire(ctx, account("alice"))
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	l.Release(ctx)
	expect(t, "slots", slots(t, s.conn, "alice"), 0)
}

func TestALeaseIsRenewedWhileItIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		w := newWatcher()
		c := newClient(t, s.conn, client.Options{Observer: w})
		l := acquire(t, c, account("alice"))
		time.Sleep(595 * time.Second) // nearly 20 of its lives
		expect(t, "lost", lost(l), false)
		expect(t, "slots", slots(t, s.conn, "alice"), 1)
		expect(t, "renewals", w.count("renewals renewed"), 59)
		l.Release(t.Context())
		time.Sleep(10 * time.Minute)
		expect(t, "renewals, also after the release", w.count("renewals renewed"), 59)
		expect(t, "lost after the release", lost(l), false)
	})
}

const wide = `
domain: images
descriptors:
  - {key: account, concurrency: {max_in_flight: 5000, lease: 30s}}
  - {key: short, concurrency: {max_in_flight: 5000, lease: 3s}}
`

func TestAllLeasesAreRenewedTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, wide)
		conn := &wire{ClientConnInterface: s.conn}
		c := newClient(t, conn, client.Options{})
		var held []*client.Lease
		for i := range 1500 {
			held = append(held, acquire(t, c, account(fmt.Sprint(i%3))))
			time.Sleep(time.Millisecond)
		}
		time.Sleep(100*time.Second - 1500*time.Millisecond)
		// Of 1500 leases, every 10 s, in calls of at most 1000.
		if got := conn.count("Renew"); got < 18 || got > 20 {
			t.Errorf("%d calls renewed 1500 leases in 100 s, want two every 10 s", got)
		}
		for _, l := range held {
			if lost(l) {
				t.Fatal("a lease is lost")
			}
			l.Release(t.Context())
		}
		expect(t, "slots", slots(t, s.conn, "0"), 0)
	})
}

func TestALeaseThatEndedElsewhereIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		w := newWatcher()
		c := newClient(t, s.conn, client.Options{Observer: w})
		l := acquire(t, c, account("alice"))
		before := l.Context(t.Context())
		if _, err := weirv1.NewLeaseServiceClient(s.conn).Release(t.Context(), &weirv1.ReleaseRequest{LeaseIds: []string{l.ID()}}); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		<-l.Lost()
		expect(t, "it took", time.Since(start).Round(time.Millisecond), 10*time.Second)
		<-before.Done()
		for _, ctx := range []context.Context{before, l.Context(t.Context())} {
			if err := context.Cause(ctx); !errors.Is(err, client.ErrLost) {
				t.Errorf("its context ends for %v, want ErrLost", err)
			}
		}
		expect(t, "lost", w.count("lost_leases ended"), 1)
		expect(t, "held", w.level(client.LeasesHeld), 0)
		l.Release(t.Context())
		expect(t, "releases", w.count("releases not_held"), 1)
	})
}

func TestALeaseIsLostWhenItsLifeIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		var isAway atomic.Bool
		isAway.Store(true)
		w := newWatcher()
		// The answer takes its time, which is of the lease's life.
		slow := func(ctx context.Context, m string, n int, r proto.Message) loss {
			if m == "Acquire" {
				time.Sleep(100 * time.Millisecond)
			}
			return away("Renew", &isAway, refused)(ctx, m, n, r)
		}
		conn := &wire{ClientConnInterface: s.conn, lose: slow}
		c := newClient(t, conn, client.Options{Observer: w})
		start := time.Now()
		l := acquire(t, c, account("alice"))
		<-l.Lost()
		expect(t, "lost after", time.Since(start), 30*time.Second)
		expect(t, "lost", w.count("lost_leases expired"), 1)
		if got := w.count("renewals unavailable"); got < 6 || got > 9 {
			t.Errorf("%d renewals were tried from 10 s to 30 s, want one every 2.5 s", got)
		}

		// If one of them arrives in time, it is not lost.
		l = acquire(t, c, account("bob"))
		time.Sleep(25 * time.Second)
		isAway.Store(false)
		time.Sleep(60 * time.Second)
		expect(t, "lost though renewed", lost(l), false)
		expect(t, "bob's slots", slots(t, s.conn, "bob"), 1)
		l.Release(t.Context())
	})
}

func TestAShortLeaseIsNotHeldUpByALongOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, wide)
		c := newClient(t, s.conn, client.Options{})
		long := acquire(t, c, account("alice"))
		short := acquire(t, c, client.Ask(client.Describe("short", "alice")))
		time.Sleep(time.Minute)
		expect(t, "long lost", lost(long), false)
		expect(t, "short lost", lost(short), false)
		long.Release(t.Context())
		short.Release(t.Context())
	})
}

func TestAContextEndsWithTheRelease(t *testing.T) {
	s := serve(t, images)
	c := newClient(t, s.conn, client.Options{})
	l := acquire(t, c, account("alice"))
	ctx := l.Context(t.Context())
	if err := ctx.Err(); err != nil {
		t.Errorf("the context of a lease that is held: %v", err)
	}
	l.Release(t.Context())
	for _, ctx := range []context.Context{ctx, l.Context(t.Context())} {
		if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("after the release: %v, want Canceled", err)
		}
	}
}

func TestWhatTheServiceDidNotHearIsSentAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		var isAway atomic.Bool
		isAway.Store(true)
		w := newWatcher()
		conn := &wire{ClientConnInterface: s.conn, lose: away("Release", &isAway, refused)}
		c := newClient(t, conn, client.Options{Observer: w})
		for _, name := range []string{"alice", "alice", "bob"} {
			l := acquire(t, c, account(name))
			if err := l.End(t.Context(), client.Ending{Outcome: "ok"}); status.Code(err) != codes.Unavailable {
				t.Errorf("End while the service is away: %v, want UNAVAILABLE", err)
			}
			if err := l.End(t.Context(), client.Ending{}); err != nil {
				t.Errorf("End again: %v, want nothing", err)
			}
		}
		expect(t, "pending", w.level(client.ReleasesPending), 3)
		time.Sleep(3 * time.Second)
		isAway.Store(false)
		time.Sleep(6 * time.Second)
		expect(t, "pending when the service is back", w.level(client.ReleasesPending), 0)
		expect(t, "released", w.count("releases released"), 3)
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
		sent := conn.count("Release")
		time.Sleep(time.Minute)
		expect(t, "calls afterwards", conn.count("Release"), sent)
	})
}

func TestAReleaseIsGivenUpWhenItsLeaseHasExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		var isAway atomic.Bool
		isAway.Store(true)
		w := newWatcher()
		conn := &wire{ClientConnInterface: s.conn, lose: away("Release", &isAway, refused)}
		c := newClient(t, conn, client.Options{Observer: w})
		acquire(t, c, account("alice")).Release(t.Context())
		time.Sleep(40 * time.Second)
		expect(t, "given up", w.count("releases gave_up"), 1)
		expect(t, "pending", w.level(client.ReleasesPending), 0)
		sent := conn.count("Release")
		time.Sleep(time.Minute)
		expect(t, "calls afterwards", conn.count("Release"), sent)
	})
}

func TestCloseWaitsForReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		var isAway atomic.Bool
		isAway.Store(true)
		conn := &wire{ClientConnInterface: s.conn, lose: away("Release", &isAway, refused)}
		c := newClient(t, conn, client.Options{CloseTimeout: 2 * time.Second})
		acquire(t, c, account("alice")).Release(t.Context())
		time.AfterFunc(time.Second, func() { isAway.Store(false) })
		start := time.Now()
		c.Close()
		if d := time.Since(start); d < time.Second || d > 1300*time.Millisecond {
			t.Errorf("Close took %v, want as long as the service was away, 1 s", d)
		}
		expect(t, "slots", slots(t, s.conn, "alice"), 0)

		isAway.Store(true)
		w := newWatcher()
		c = newClient(t, conn, client.Options{CloseTimeout: 2 * time.Second, Observer: w})
		acquire(t, c, account("alice")).Release(t.Context())
		acquire(t, c, account("alice")).Release(t.Context())
		held := acquire(t, c, account("alice"))
		start = time.Now()
		c.Close()
		expect(t, "Close took", time.Since(start), 2*time.Second)
		expect(t, "given up", w.count("releases gave_up"), 2)
		expect(t, "pending", w.level(client.ReleasesPending), 0)
		held.Release(t.Context())
		expect(t, "given up after Close", w.count("releases gave_up"), 3)
	})
}

// accounting is a service whose Release and Reconcile settle, and remember.
type accounting struct {
	*wire
	mu      sync.Mutex
	endings []*weirv1.ReleaseRequest
	status  weirv1.SettlementStatus
	refuse  bool
}

func (a *accounting) Invoke(ctx context.Context, method string, request, reply any, opts ...grpc.CallOption) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	settle := func(list []*weirv1.LeaseUsage) (out []*weirv1.ReconcileResult) {
		for _, u := range list {
			r := &weirv1.ReconcileResult{}
			for _, l := range u.GetLimits() {
				r.Limits = append(r.Limits, &weirv1.Settlement{Status: a.status, Difference: int64(l.GetHits()) - 10})
			}
			out = append(out, r)
		}
		return out
	}
	switch m := request.(type) {
	case *weirv1.ReleaseRequest:
		a.endings = append(a.endings, m)
		if a.refuse && len(m.GetUsage()) > 0 {
			return status.Error(codes.InvalidArgument, "no such limit")
		}
		if err := a.wire.Invoke(ctx, method, &weirv1.ReleaseRequest{LeaseIds: m.GetLeaseIds()}, reply, opts...); err != nil {
			return err
		}
		proto.Merge(reply.(proto.Message), &weirv1.ReleaseResponse{Usage: settle(m.GetUsage())}) //nolint:errcheck // it is one
		return nil
	case *weirv1.ReconcileRequest:
		proto.Merge(reply.(proto.Message), &weirv1.ReconcileResponse{Results: settle(m.GetUsage())}) //nolint:errcheck // it is one
		return nil
	}
	return a.wire.Invoke(ctx, method, request, reply, opts...)
}

func TestAReleaseBringsTheUsage(t *testing.T) {
	s := serve(t, images)
	w := newWatcher()
	a := &accounting{wire: &wire{ClientConnInterface: s.conn}, status: weirv1.SettlementStatus_SETTLEMENT_STATUS_SETTLED}
	c := newClient(t, a, client.Options{Observer: w})
	l := acquire(t, c, account("alice"))
	l.Use("tokens", 1)
	l.Use("tokens", 7)
	l.Use("pages", 3)
	if err := l.End(t.Context(), client.Ending{Outcome: "ok", Usage: map[string]uint64{"pages": 4}}); err != nil {
		t.Fatal(err)
	}
	l.Use("tokens", 8)
	want := &weirv1.ReleaseRequest{LeaseIds: []string{l.ID()}, Outcome: "ok", Usage: []*weirv1.LeaseUsage{{
		LeaseId: l.ID(), Limits: []*weirv1.LimitUsage{{Limit: "pages", Hits: 4}, {Limit: "tokens", Hits: 7}},
	}}}
	if len(a.endings) != 1 || !proto.Equal(a.endings[0], want) {
		t.Errorf("it was told %v, want %v", a.endings, want)
	}
	expect(t, "settlements", w.count("settlements settled"), 2)
}

func TestAUsageThatIsNotTakenKeepsNoSlot(t *testing.T) {
	s := serve(t, images)
	w := newWatcher()
	a := &accounting{wire: &wire{ClientConnInterface: s.conn}, refuse: true}
	c := newClient(t, a, client.Options{Observer: w})
	l := acquire(t, c, account("alice"))
	l.Use("tokens", 7)
	if err := l.End(t.Context(), client.Ending{}); err == nil || !strings.Contains(err.Error(), "no such limit") {
		t.Errorf("End = %v, want the service's error", err)
	}
	expect(t, "slots", slots(t, s.conn, "alice"), 0)
	expect(t, "refused", w.count("settlements refused"), 1)

	l = acquire(t, c, account("alice"))
	if err := l.End(t.Context(), client.Ending{Outcome: "\xff" + strings.Repeat("a", 5<<20)}); err != nil {
		t.Errorf("End with an outcome that is no word: %v", err)
	}
	expect(t, "slots", slots(t, s.conn, "alice"), 0)

	l = acquire(t, c, account("alice"))
	for i := range 65 {
		l.Use(fmt.Sprint(i), 1)
	}
	if err := l.End(t.Context(), client.Ending{}); err == nil || !strings.Contains(err.Error(), "usage of 65 limits, at most 64") {
		t.Errorf("End with usage of 65 limits: %v", err)
	}
	expect(t, "slots", slots(t, s.conn, "alice"), 0)
}

func TestUsageIsSentAgainAfterTheRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		w := newWatcher()
		a := &accounting{wire: &wire{ClientConnInterface: s.conn}, status: weirv1.SettlementStatus_SETTLEMENT_STATUS_UNAVAILABLE}
		c := newClient(t, a, client.Options{Observer: w})
		l := acquire(t, c, account("alice"))
		l.Use("tokens", 7)
		if err := l.End(t.Context(), client.Ending{}); err == nil {
			t.Error("End = nil though the usage was not settled")
		}
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
		time.Sleep(5 * time.Minute) // long after the lease has expired
		a.mu.Lock()
		a.status = weirv1.SettlementStatus_SETTLEMENT_STATUS_SETTLED
		a.mu.Unlock()
		time.Sleep(10 * time.Second)
		expect(t, "settled", w.count("settlements settled"), 1)
		expect(t, "released", w.count("releases released"), 1)
		expect(t, "pending", w.level(client.ReleasesPending), 0)
	})
}

func TestReconcileTellsWhatBecameOfEachLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		w := newWatcher()
		a := &accounting{wire: &wire{ClientConnInterface: s.conn}, status: weirv1.SettlementStatus_SETTLEMENT_STATUS_SETTLED}
		c := newClient(t, a, client.Options{Observer: w})
		l := acquire(t, c, account("alice"))
		for range 2 {
			got, err := l.Reconcile(t.Context(), map[string]uint64{"tokens": 7, "pages": 12})
			if err != nil {
				t.Fatal(err)
			}
			expect(t, "tokens", got["tokens"], client.Settlement{Status: "settled", Difference: -3})
			expect(t, "pages", got["pages"], client.Settlement{Status: "settled", Difference: 2})
			l.Release(t.Context())
		}
		a.mu.Lock()
		a.status = weirv1.SettlementStatus_SETTLEMENT_STATUS_UNAVAILABLE
		a.mu.Unlock()
		if got, err := l.Reconcile(t.Context(), map[string]uint64{"tokens": 7}); got != nil || err == nil {
			t.Errorf("Reconcile while the store is away = %v, %v, want an error", got, err)
		}
		expect(t, "unavailable", w.count("settlements unavailable"), 2)
	})
}

func TestAStormOfReleasesIsSentInBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, wide)
		var isAway atomic.Bool
		isAway.Store(true)
		w := newWatcher()
		a := &accounting{wire: &wire{ClientConnInterface: s.conn, lose: away("Release", &isAway, refused)}}
		c := newClient(t, a, client.Options{Observer: w})
		var held []*client.Lease
		for i := range 1200 {
			held = append(held, acquire(t, c, account(fmt.Sprint(i))))
		}
		var work sync.WaitGroup
		for part := range slices.Chunk(held, 100) {
			work.Go(func() {
				for _, l := range part {
					l.Release(t.Context())
				}
			})
		}
		work.Wait()
		expect(t, "pending", w.level(client.ReleasesPending), 1200)
		isAway.Store(false)
		a.mu.Lock()
		before := len(a.endings)
		a.mu.Unlock()
		time.Sleep(10 * time.Second)
		expect(t, "released", w.count("releases released"), 1200)
		expect(t, "calls", len(a.endings)-before, 2)
	})
}
