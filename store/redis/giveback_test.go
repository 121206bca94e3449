package redis

import (
	"context"
	"errors"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"weir/limit"
	"weir/store"
	"weir/store/storetest"
)

// A decision that Redis sees only after its lease was given back takes nothing.
func TestADecisionThatWasGivenUpTakesNothing(t *testing.T) {
	server := storetest.StartRedis(t, storetest.AnyRedis(t))
	s, err := Open(Options{URL: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	ctx := storetest.Context(t)
	l, err := limit.NewConcurrency(2, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	r := limit.Request{
		Domain: "d",
		Checks: []limit.Check{{Name: "k", Limit: l, Hits: 1, Key: limit.Key("d", l, nil)}},
		Lease:  storetest.TestLease("d", 1),
	}
	if failed := s.routes.all()[0].giveBackAll([]giveBack{{lease: r.Lease}}); len(failed) > 0 {
		t.Fatal("not given back")
	}
	if d, err := s.Decide(ctx, r); err == nil || errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Decide of a lease that was given back = %+v, %v, want an error of its own", d, err)
	}
	// The mark is nobody's lease.
	if got, err := s.Release(ctx, limit.Ending{Lease: r.Lease}); err != nil || got.Result != limit.NotHeld {
		t.Errorf("Release = %v, %v, want NOT_HELD", got, err)
	}
	if got, err := s.Renew(ctx, limit.Extension{Lease: r.Lease}); err != nil || got.Renewed {
		t.Errorf("Renew = %v, %v, want LOST", got, err)
	}
	r.Lease = storetest.TestLease("d", 2)
	if d, err := s.Decide(ctx, r); err != nil || d.Results[0].Remaining != 1 {
		t.Errorf("Decide = %+v, %v, want one slot left of two", d, err)
	}
}

func TestASecondCloseDoesNothing(t *testing.T) {
	s, err := Open(Options{URL: "redis://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	if _, err := s.Decide(storetest.Context(t), limit.Request{}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Decide after Close: %v, want ErrUnavailable", err)
	}
}

// A stop gives back what a stalled Redis may have granted, if Redis goes on
// before its connections give up.
func TestCloseGivesBack(t *testing.T) {
	server := storetest.StartRedis(t, storetest.AnyRedis(t))
	s, err := Open(Options{URL: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	l, err := limit.NewConcurrency(100, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(ctx context.Context, n uint64) error {
		_, err := s.Decide(ctx, limit.Request{
			Domain: "d",
			Checks: []limit.Check{{Name: "k", Limit: l, Hits: 1, Key: limit.Key("d", l, nil)}},
			Lease:  storetest.TestLease("d", n),
		})
		return err
	}
	if err := ask(storetest.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(server.PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(server.PID(), syscall.SIGCONT) }()
	for n := range uint64(3) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		if err := ask(ctx, n+2); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("Decide on a stopped server: %v, want ErrUnavailable", err)
		}
		cancel()
	}
	closed := make(chan error)
	go func() { closed <- s.Close() }()
	if err := syscall.Kill(server.PID(), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	again, err := Open(Options{URL: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = again.Close() }()
	if n, err := again.Held(storetest.Context(t), "d"); err != nil || n != 1 {
		t.Errorf("Held = %d, %v, want the one that was told", n, err)
	}
}

// A node that is dropped, as one whose slots are elsewhere now, passes on all leases
// that are; it being away does not matter.
func TestADroppedNodePassesLeasesOn(t *testing.T) {
	var mu sync.Mutex
	released := ""
	heir := startFake(t, func(command string, args []string) string {
		if command == "evalsha" {
			mu.Lock()
			defer mu.Unlock()
			released += strings.Join(args, " ")
		}
		return pong(command, args)
	})
	const away = "127.0.0.1:1"
	s := unkept(t, "redis+cluster://"+away)
	mine, moved := storetest.TestLease("d", 1), storetest.TestLease("e", 2)
	here := limit.KeySlot(limit.LeaseKey(mine))
	if limit.KeySlot(limit.LeaseKey(moved)) == here {
		t.Fatal("both domains are in one slot")
	}
	s.routes.apply([]span{{0, clusterSlots - 1, heir}, {here, here, away}})
	n := s.routes.node(limit.LeaseKey(mine))
	n.stop()
	n.tended.Wait() // or it would pass it on, a second later
	for range 2 * giveBackBatch {
		n.undo(giveBack{lease: mine})
	}
	n.undo(giveBack{lease: moved})
	if err := n.close(); err != nil {
		t.Error(err)
	}
	storetest.Eventually(t, "the lease is given back", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return strings.Contains(released, moved.Token())
	})
}

func TestAConcurrencyNeedsALeaseID(t *testing.T) {
	s, err := Open(Options{URL: "redis://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	r := limit.Request{Domain: "d", Checks: []limit.Check{{Limit: limit.Concurrency{Max: 1, Lease: time.Second}, Key: "k"}}}
	if _, err := s.Decide(storetest.Context(t), r); err == nil || errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Decide without a lease id: %v, want an error of its own", err)
	}
}
