package client_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weir/client"
)

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

// A lease that is told again has what is left of its life, and a renewal whose answer is
// lost extends it by all of it.
func TestAReleaseIsSentUntilTheLeaseHasExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, metered)
		var away atomic.Bool
		conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, method string, _ int, _ proto.Message) loss {
			switch {
			case method == "Inspect":
			case method == "Renew":
				return loss{reply: cut}
			case away.Load():
				return loss{request: refused}
			}
			return loss{}
		}}
		r := account("alice")
		r.Operation = "job-1"
		died := client.New(s.conn, client.Options{Domain: "images"}) // a process that holds it, and dies
		if _, err := died.Acquire(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		died.Close()
		time.Sleep(24 * time.Second) // 6 of its 30 s are left
		c := newClient(t, conn, client.Options{})
		l := acquire(t, c, r)
		time.Sleep(3 * time.Second) // it is renewed, and the answer is lost
		away.Store(true)
		l.Release(t.Context())
		time.Sleep(8 * time.Second)
		away.Store(false)
		time.Sleep(10 * time.Second) // the release is sent again within 7.5 s
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
	})
}

// weir takes 4 MiB a call: the usage of 1,000 leases may be more.
func TestReleasesWithMuchUsageAreSentInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, roomy)
		var away atomic.Bool
		conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, method string, _ int, _ proto.Message) loss {
			if away.Load() {
				return loss{request: refused}
			}
			return loss{}
		}}
		c := newClient(t, conn, client.Options{})
		var leases []*client.Lease
		for range 1000 {
			leases = append(leases, acquire(t, c, estimated(10)))
		}
		away.Store(true)
		for _, l := range leases {
			l.Use("tokens", 3)
			for i := range 40 {
				l.Use(fmt.Sprintf("a-limit-of-somebody-with-a-name-as-long-as-the-path-to-it-in-the-policy-which-may-have-a-hundred-and-28-bytes-%d", i), 1)
			}
			l.Release(t.Context())
		}
		away.Store(false)
		time.Sleep(20 * time.Second)
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
	})
}
