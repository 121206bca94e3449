package client_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"google.golang.org/protobuf/proto"

	"weir/client"
	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
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

// After Close nothing is renewed, so the work of a lease is told that its life is over.
func TestALeaseThatExpiresAfterCloseIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, metered)
		w := newWatcher()
		gate := make(chan struct{})
		conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, method string, n int, _ proto.Message) loss {
			if method == "Acquire" && n == 3 {
				<-gate
			}
			return loss{}
		}}
		c := client.New(conn, client.Options{Domain: "images", Observer: w, Timeout: time.Hour})
		first := acquire(t, c, account("alice"))
		ctx := first.Context(t.Context())
		time.Sleep(15 * time.Second) // it was renewed after 10
		second := acquire(t, c, account("alice"))
		time.Sleep(time.Second)
		late := make(chan *client.Lease)
		go func() { late <- acquire(t, c, account("alice")) }()
		synctest.Wait()
		closed := time.Now()
		c.Close()
		time.Sleep(time.Second)
		close(gate)
		third := <-late

		<-ctx.Done()
		expect(t, "the first is lost after", time.Since(closed), 24*time.Second)
		if err := context.Cause(ctx); !errors.Is(err, client.ErrLost) {
			t.Errorf("its context ends for %v, want ErrLost", err)
		}
		<-second.Lost()
		expect(t, "the second is lost after", time.Since(closed), 29*time.Second)
		expect(t, "held", w.level(client.LeasesHeld), 1)
		third.Release(t.Context()) // it was acquired while the client was closed
		time.Sleep(time.Minute)
		expect(t, "lost", lost(third), false)
		expect(t, "held", w.level(client.LeasesHeld), 0)
		expect(t, "lost leases", w.count("lost_leases expired"), 2)
		expect(t, "renewals", w.count("renewals renewed"), 1)
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
	})
}

// A stream that makes a context for each message does not grow.
func TestALeaseForgetsContextsThatAreOver(t *testing.T) {
	s := serve(t, metered)
	c := newClient(t, s.conn, client.Options{})
	l := acquire(t, c, account("alice"))
	defer l.Release(t.Context())
	type payload struct{ _ [1 << 16]byte }
	type key struct{}
	made := make([]weak.Pointer[payload], 50)
	for i := range made {
		p := new(payload)
		made[i] = weak.Make(p)
		ctx, cancel := context.WithCancel(context.WithValue(context.Background(), key{}, p))
		_ = l.Context(ctx)
		cancel()
	}
	storetest.Eventually(t, "the contexts that are over are forgotten", func() bool {
		runtime.GC()
		kept := 0
		for _, p := range made {
			if p.Value() != nil {
				kept++
			}
		}
		return kept <= 1 // the last may be on the stack
	})
}
