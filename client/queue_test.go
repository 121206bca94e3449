package client_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"weir/client"
)

func TestThreeWorkersFitThreeSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		w := newWatcher()
		conn := &wire{ClientConnInterface: s.conn}
		c := newClient(t, conn, client.Options{Observer: w})
		q := c.NewQueue(client.QueueOptions{})
		var working, most atomic.Int64
		var jobs sync.WaitGroup
		start := time.Now()
		for i := range 50 {
			jobs.Go(func() {
				r := client.Ask(client.Describe("account", "alice"), client.Describe("job", fmt.Sprintf("%02d", i)))
				err := q.Do(t.Context(), "alice", r, func(ctx context.Context, l *client.Lease) error {
					most.Store(max(most.Load(), working.Add(1)))
					defer working.Add(-1)
					if client.FromContext(ctx) != l || l.ID() == "" {
						t.Error("the work has no lease")
					}
					time.Sleep(2 * time.Second)
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
			synctest.Wait() // so that they come in order
		}
		expect(t, "working", working.Load(), 3)
		expect(t, "depth", q.Depth(), 47)
		expect(t, "depth as observed", w.level(client.QueueDepth), 47)
		expect(t, "working as observed", w.level(client.QueueWorking), 3)
		jobs.Wait()
		expect(t, "most at once", most.Load(), 3)
		var order []string
		for _, m := range conn.asked {
			order = append(order, m.GetDescriptors()[1].GetEntries()[0].GetValue())
		}
		if order = slices.Compact(order); !slices.IsSorted(order) || len(order) != 50 {
			t.Errorf("they asked in the order %v, want that in which they came", order)
		}
		// Ten tokens and one a second: the last of fifty comes after 40 s.
		if d := time.Since(start); d < 42*time.Second || d > 62*time.Second {
			t.Errorf("50 jobs took %v, want 42 s and some jitter", d)
		}
		// They wait in line, so that a token is asked for by one of them.
		if got := w.count("retries refused"); got > 41 {
			t.Errorf("%d retries for 40 tokens, want one each", got)
		}
		expect(t, "waits observed", len(w.took[client.QueueWait]), 50)
		expect(t, "accounts", q.Accounts(), 0)
		expect(t, "depth", w.level(client.QueueDepth), 0)
		expect(t, "working", w.level(client.QueueWorking), 0)
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
	})
}

func TestAFullAccountDoesNotKeepOthersWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		c := newClient(t, s.conn, client.Options{})
		q := c.NewQueue(client.QueueOptions{Depth: 2, Total: 4})
		stop := make(chan struct{})
		ended := make(chan error, 10)
		long := func(ctx context.Context, _ *client.Lease) error { <-stop; return ctx.Err() }
		done := func(err error) { ended <- err }
		add := func(name string) error {
			defer synctest.Wait()
			return q.Go(t.Context(), name, account(name), long, done)
		}
		for i := range 5 { // three work and two wait
			if err := add("alice"); err != nil {
				t.Errorf("alice's job %d: %v", i, err)
			}
		}
		if err := add("alice"); !errors.Is(err, client.ErrQueueFull) {
			t.Errorf("a job beyond the depth: %v, want ErrQueueFull", err)
		}
		if err := q.Do(t.Context(), "alice", account("alice"), long); !errors.Is(err, client.ErrQueueFull) {
			t.Errorf("Do beyond the depth: %v, want ErrQueueFull", err)
		}
		start := time.Now()
		if err := q.Do(t.Context(), "bob", account("bob"), func(context.Context, *client.Lease) error { return nil }); err != nil {
			t.Errorf("bob's job: %v", err)
		}
		expect(t, "bob waited", time.Since(start), 0)
		for range 5 {
			if err := add("carol"); err != nil {
				t.Errorf("carol's job: %v", err)
			}
		}
		expect(t, "waiting", q.Depth(), 4)
		if err := add("dave"); !errors.Is(err, client.ErrQueueFull) {
			t.Errorf("a job beyond the total: %v, want ErrQueueFull", err)
		}
		expect(t, "accounts", q.Accounts(), 2)
		close(stop)
		if err := q.Close(t.Context()); err != nil {
			t.Errorf("Close: %v", err)
		}
		for range 10 { // Close has waited for them
			if err := <-ended; err != nil {
				t.Errorf("a job: %v", err)
			}
		}
		if err := add("alice"); !errors.Is(err, client.ErrClosed) {
			t.Errorf("a job after Close: %v, want ErrClosed", err)
		}
	})
}

func TestCloseCutsTheJobsThatItCannotWaitFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		c := newClient(t, s.conn, client.Options{})
		q := c.NewQueue(client.QueueOptions{Workers: 1})
		ended := make(chan error, 2)
		for range 2 {
			err := q.Go(t.Context(), "alice", account("alice"), func(ctx context.Context, _ *client.Lease) error {
				<-ctx.Done()
				return context.Cause(ctx)
			}, func(err error) { ended <- err })
			if err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		if err := q.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Close: %v, want the deadline's error", err)
		}
		expect(t, "Close took", time.Since(start), time.Second)
		for range 2 { // Close has waited for them
			if err := <-ended; !errors.Is(err, client.ErrClosed) {
				t.Errorf("a job that was cut: %v, want ErrClosed", err)
			}
		}
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
	})
}

func TestAJobThatLeavesGivesItsPlaceBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		c := newClient(t, s.conn, client.Options{})
		q := c.NewQueue(client.QueueOptions{Workers: 1, Retry: client.Retry{Attempts: 2}})
		left := errors.New("left")
		nothing := func(context.Context, *client.Lease) error { return nil }
		held := acquire(t, c, client.Ask(client.Describe("rate", "x")))
		defer held.Release(t.Context())

		// One waits for the service, and two for the worker.
		ctx, cancel := context.WithCancelCause(t.Context())
		var jobs sync.WaitGroup
		for range 3 {
			jobs.Go(func() {
				if err := q.Do(ctx, "alice", client.Ask(client.Describe("rate", "x")), nothing); !errors.Is(err, left) {
					t.Errorf("the job of who left: %v, want the context's cause", err)
				}
			})
		}
		time.Sleep(10 * time.Millisecond)
		expect(t, "depth", q.Depth(), 3)
		cancel(left)
		jobs.Wait()
		expect(t, "depth", q.Depth(), 0)
		expect(t, "accounts", q.Accounts(), 0)

		// A refusal ends the job too.
		err := q.Do(t.Context(), "alice", client.Ask(client.Describe("banned", "x")), nothing)
		if limited, ok := errors.AsType[*client.LimitedError](err); !ok || limited.Reason != "banned" {
			t.Errorf("the job of who is banned: %v, want the refusal", err)
		}
		failed := fmt.Errorf("failed")
		if err := q.Do(t.Context(), "alice", account("alice"), func(context.Context, *client.Lease) error { return failed }); !errors.Is(err, failed) {
			t.Errorf("the job whose work fails: %v, want its error", err)
		}
		expect(t, "accounts", q.Accounts(), 0)
	})
}

func TestAJobThatPanicsGivesItsSlotBack(t *testing.T) {
	s := serve(t, images)
	c := newClient(t, s.conn, client.Options{})
	q := c.NewQueue(client.QueueOptions{Workers: 1})
	for range 2 {
		func() {
			defer func() {
				if p := recover(); p != "oh" {
					t.Errorf("it panicked with %v, want what the work did", p)
				}
			}()
			_ = q.Do(t.Context(), "alice", account("alice"), func(context.Context, *client.Lease) error { panic("oh") })
		}()
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
		expect(t, "accounts", q.Accounts(), 0)
	}
	if err := q.Close(t.Context()); err != nil {
		t.Errorf("Close: %v", err)
	}
}
