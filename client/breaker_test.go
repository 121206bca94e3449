package client_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weir/client"
	weirv1 "weir/proto/weir/v1"
)

// A service that fails on one request answers the others: nobody can open the breaker for
// all by sending what it fails on.
func TestWhatTheServiceFailsOnOpensNoBreaker(t *testing.T) {
	s := serve(t, images)
	conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, _ string, n int, _ proto.Message) loss {
		if n <= 20 {
			return loss{request: status.Error(codes.Internal, "a bug")}
		}
		return loss{}
	}}
	c := newClient(t, conn, client.Options{Tries: 1})
	for range 20 {
		expect(t, "bypass", acquire(t, c, account("alice")).Bypass(), client.BypassClient)
	}
	l := acquire(t, c, account("alice"))
	expect(t, "bypass of the next", l.Bypass(), client.NoBypass)
	l.Release(t.Context())
}

func TestASilentServiceHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		var silent atomic.Bool
		silent.Store(true)
		conn := &wire{ClientConnInterface: s.conn, lose: func(ctx context.Context, method string, _ int, _ proto.Message) loss {
			if silent.Load() && method == "Acquire" {
				return loss{request: hang(ctx)}
			}
			return loss{}
		}}
		c := client.New(conn, client.Options{Domain: "images"})
		defer c.Close()
		var took []time.Duration
		for range 5 {
			start := time.Now()
			l := acquire(t, c, account("alice"))
			expect(t, "bypass", l.Bypass(), client.BypassClient)
			took = append(took, time.Since(start))
		}
		for i, d := range took[:3] {
			if d < 500*time.Millisecond || d > 520*time.Millisecond {
				t.Errorf("ask %d took %v, want two tries of 250 ms", i+1, d)
			}
		}
		expect(t, "the fourth", took[3], 0)
		expect(t, "tries", conn.count("Acquire"), 6)

		silent.Store(false)
		time.Sleep(1100 * time.Millisecond)
		l := acquire(t, c, account("alice"))
		expect(t, "bypass when the service is back", l.Bypass(), client.NoBypass)
		l.Release(t.Context())
	})
}

// A connection that is cut fails all that are on it, and another replica answers them.
func TestACutConnectionOpensNoBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const asks = 20
		s := serve(t, images)
		var under sync.WaitGroup // ways
		under.Add(asks)
		conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, _ string, _ int, m proto.Message) loss {
			if a, ok := m.(*weirv1.AcquireRequest); ok && a.GetAttempt() == 1 {
				under.Done()
				under.Wait()
				return loss{request: cut}
			}
			return loss{}
		}}
		c := client.New(conn, client.Options{Domain: "images", Retry: client.Retry{Budget: 10}})
		defer c.Close()
		var clients sync.WaitGroup
		for n := range asks {
			clients.Go(func() {
				l := acquire(t, c, account(fmt.Sprint(n)))
				expect(t, "bypass", l.Bypass(), client.NoBypass)
				l.Release(t.Context())
			})
		}
		clients.Wait()
	})
}

// hangs is a service that is silent while it is set, in the midst of every call.
func hangs(s *service, isSilent *atomic.Bool) *wire {
	return &wire{ClientConnInterface: s.conn, lose: func(ctx context.Context, method string, _ int, _ proto.Message) loss {
		if method != "Inspect" && isSilent.Load() {
			return loss{request: hang(ctx)}
		}
		return loss{}
	}}
}

// Nobody's patience is needed to find out that the service hangs, and when it is back.
func TestAServiceThatHangsIsGivenUpByCallersInAHurry(t *testing.T) {
	for _, tt := range []struct {
		patience time.Duration
		leave    int // at most, of 100 that come every 100 ms
	}{
		{time.Millisecond, 10},
		{100 * time.Millisecond, 10},
		{200 * time.Millisecond, 5},
		{250 * time.Millisecond, 5},
		{260 * time.Millisecond, 0}, // it has waited for Timeout, and there is time for nothing more
		{270 * time.Millisecond, 0},
		{300 * time.Millisecond, 0},
		{500 * time.Millisecond, 0},
		{510 * time.Millisecond, 0},
	} {
		t.Run(tt.patience.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := serve(t, metered)
				var isSilent atomic.Bool
				isSilent.Store(true)
				c := newClient(t, hangs(s, &isSilent), client.Options{Timeout: 250 * time.Millisecond, CloseTimeout: time.Millisecond})
				ask := func() (*client.Lease, error) {
					ctx, cancel := context.WithTimeout(t.Context(), tt.patience)
					defer cancel()
					l, err := c.Acquire(ctx, account("alice"))
					if err == nil && ctx.Err() != nil {
						t.Error("it is admitted when its context is over")
					}
					if err != nil && !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("Acquire: %v, want the deadline's error", err)
					}
					return l, err
				}
				left := 0
				for range 100 {
					if l, err := ask(); err != nil {
						left++
					} else {
						expect(t, "bypass", l.Bypass(), client.BypassClient)
					}
					time.Sleep(100 * time.Millisecond)
				}
				if left > tt.leave {
					t.Errorf("%d of 100 were not admitted, want at most %d", left, tt.leave)
				}
				isSilent.Store(false)
				time.Sleep(time.Second)
				_, _ = ask() // which may look
				time.Sleep(time.Second)
				l, err := ask()
				if err != nil || l.Bypass() != client.NoBypass {
					t.Errorf("when the service is back: %v, bypass %q", err, l.Bypass())
				}
				l.Release(t.Context())
			})
		})
	}
}

// Who may choose a deadline must not open the breaker of a service that needs more, but
// answers: that would be a way around the limits.
func TestCallersInAHurryOpenNoBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		conn := &wire{ClientConnInterface: s.conn, lose: func(ctx context.Context, _ string, _ int, _ proto.Message) loss {
			select {
			case <-time.After(5 * time.Millisecond):
				return loss{}
			case <-ctx.Done():
				return loss{request: status.FromContextError(ctx.Err()).Err()}
			}
		}}
		c := newClient(t, conn, client.Options{Timeout: 250 * time.Millisecond})
		for i := range 2000 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			if i%2 == 0 {
				ctx, cancel = context.WithCancel(t.Context())
				time.AfterFunc(time.Millisecond, cancel)
			}
			if l, err := c.Acquire(ctx, account("alice")); err == nil {
				t.Fatalf("ask %d is admitted, bypass %q", i, l.Bypass())
			}
			cancel()
		}
		l := acquire(t, c, account("bob"))
		expect(t, "bypass of who waits", l.Bypass(), client.NoBypass)
		l.Release(t.Context())
		if n := conn.count("/grpc.health.v1.Health/Check"); n == 0 || n > 12 {
			t.Errorf("%d looks in 2 s, want one in each Timeout at most", n)
		}
	})
}
