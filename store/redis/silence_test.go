package redis_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"weir/limit"
	"weir/store"
	"weir/store/redis"
	"weir/store/storetest"
)

// A decision waits for its turn, however long, while the server answers others; and for
// one that answers nobody only so long.
func TestADecisionWaitsForItsTurnAndNotForASilentServer(t *testing.T) {
	t.Parallel()
	server := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	const silence = 2 * time.Second
	s, err := redis.Open(redis.Options{URL: server.URL, ReplyTimeout: storetest.Deadline, Silence: silence})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	ctx := storetest.Context(t)
	r := limit.Request{Domain: "d", Checks: []limit.Check{check(bucket(t, 1000, time.Hour), "a")}}

	// 300 calls of 10 ms each, of which the server takes one after the other.
	begin := time.Now()
	var all sync.WaitGroup
	for range 300 {
		all.Go(func() {
			if err := redis.Busy(ctx, s, 10*time.Millisecond); err != nil {
				t.Errorf("a call that waits for its turn: %v", err)
			}
		})
		all.Go(func() {
			if _, err := s.Decide(ctx, r); err != nil {
				t.Errorf("a decision that waits for its turn: %v", err)
			}
		})
	}
	all.Wait()
	if took := time.Since(begin); took < silence {
		t.Errorf("all took %v, want longer than the silence of %v", took, silence)
	}

	if err := syscall.Kill(server.PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(server.PID(), syscall.SIGCONT) })
	_, err = s.Decide(ctx, r)
	if !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, os.ErrDeadlineExceeded) || ctx.Err() != nil {
		t.Errorf("with a server that is silent: %v, want that it is, before the caller leaves", err)
	}
	// What has a deadline alone, as a release, waits as long as that.
	short, cancel := context.WithTimeout(ctx, silence/10)
	defer cancel()
	if _, err := s.Release(short, limit.Ending{Lease: storetest.TestLease("d", 1)}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Release = %v, want its own deadline", err)
	}
}

// A context that is never done ends decisions at its deadline all the same: those that were
// sent, and those that wait for a connection.
func TestDecisionsEndAtADeadlineOfWhichTheirContextTellsNothing(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, _ := open(t, server, nil)
		r := request(check(bucket(t, 1000, time.Hour), "a"))
		decide(t, s, r)
		if err := syscall.Kill(server.PID(), syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = syscall.Kill(server.PID(), syscall.SIGCONT) })
		end := time.Now().Add(100 * time.Millisecond)
		var all sync.WaitGroup
		for range 2 * redis.MaxOut {
			all.Go(func() {
				_, err := s.Decide(store.Until(t.Context(), end), r)
				if !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Decide = %v, want its deadline", err)
				}
				if now := time.Now(); now.Before(end) {
					t.Errorf("it ended %v before its deadline", end.Sub(now))
				}
			})
		}
		all.Wait()
	})
}
