package client_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"weir/client"
	weirv1 "weir/proto/weir/v1"
)

// gate is a service that always answers the same.
type gate struct {
	grpc.ClientConnInterface
	answer *weirv1.AcquireResponse
	asks   []time.Time
	asked  []*weirv1.AcquireRequest
}

// refusing is a service that refuses everything.
func refusing(v *weirv1.Verdict) *gate { return &gate{answer: &weirv1.AcquireResponse{Verdict: v}} }

func (g *gate) Invoke(_ context.Context, _ string, request, reply any, _ ...grpc.CallOption) error {
	m, _ := request.(*weirv1.AcquireRequest)
	g.asks, g.asked = append(g.asks, time.Now()), append(g.asked, m)
	proto.Merge(reply.(proto.Message), g.answer) //nolint:errcheck // it is one
	return nil
}

func after(d time.Duration) *weirv1.Verdict {
	return &weirv1.Verdict{Class: weirv1.Class_CLASS_LANE, Reason: "bucket_empty", Limit: "rate", Retryable: true, RetryAfter: durationpb.New(d)}
}

func expectGaveUp(t *testing.T, err error, why string, asks int) {
	t.Helper()
	gaveUp, ok := errors.AsType[*client.GaveUpError](err)
	if !ok || gaveUp.Why != why || gaveUp.Asks != asks {
		t.Errorf("Wait: %v, want that it gave up after %d asks for %s", err, asks, why)
	}
	if _, ok := errors.AsType[*client.LimitedError](err); !ok {
		t.Errorf("Wait: %v, want a LimitedError in its chain", err)
	}
}

func TestWaitComesBackAfterRetryAfterAndSomeJitter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		w := newWatcher()
		c := newClient(t, s.conn, client.Options{Observer: w})
		r := client.Ask(client.Describe("rate", "x")) // one token, two a second
		start := time.Now()
		for range 20 {
			before := time.Now()
			l, err := c.Wait(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			l.Release(t.Context())
			if d := time.Since(before); d > 750*time.Millisecond {
				t.Errorf("Wait took %v, want at most Retry-After and 250 ms", d)
			}
		}
		if d := time.Since(start); d < 19*500*time.Millisecond {
			t.Errorf("20 of 2 a second took %v", d)
		}
		expect(t, "retries", w.count("retries refused"), w.count("acquires lane"))
	})
}

func TestTheJitterIsPositiveAndSmall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, tt := range []struct {
			jitter, most time.Duration
		}{{0, 250 * time.Millisecond}, {time.Hour, 250 * time.Millisecond}, {10 * time.Millisecond, 10 * time.Millisecond}} {
			g := refusing(after(2 * time.Second))
			c := newClient(t, g, client.Options{Retry: client.Retry{Attempts: 40, Jitter: tt.jitter, Budget: 100}})
			_, err := c.Wait(t.Context(), account("alice"))
			expectGaveUp(t, err, "attempts", 40)
			var least, most time.Duration = time.Hour, 0
			for i := range g.asks[1:] {
				d := g.asks[i+1].Sub(g.asks[i]) - 2*time.Second
				least, most = min(least, d), max(most, d)
			}
			if least <= 0 || most > tt.most || most < tt.most/2 {
				t.Errorf("jitter %v: from %v to %v, want above 0 and at most %v", tt.jitter, least, most, tt.most)
			}
		}
	})
}

func TestAMissingRetryAfterIsASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := refusing(&weirv1.Verdict{Class: weirv1.Class_CLASS_LANE, Reason: "something_new", Retryable: true})
		c := newClient(t, g, client.Options{Retry: client.Retry{Attempts: 2}})
		_, err := c.Wait(t.Context(), account("alice"))
		expectGaveUp(t, err, "attempts", 2)
		if d := g.asks[1].Sub(g.asks[0]); d < time.Second || d > 1250*time.Millisecond {
			t.Errorf("it came back after %v, want 1 s and at most 250 ms", d)
		}
	})
}

func TestWaitIsOneOperation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := refusing(after(time.Second))
		c := newClient(t, g, client.Options{})
		for range 2 {
			_, err := c.Wait(t.Context(), account("alice"))
			expectGaveUp(t, err, "attempts", 5)
		}
		for i, m := range g.asked {
			expect(t, "attempt", m.GetAttempt(), uint32(i%5+1))
			expect(t, "operation", m.GetOperationId(), g.asked[i/5*5].GetOperationId())
		}
		if g.asked[0].GetOperationId() == g.asked[5].GetOperationId() {
			t.Error("two Waits are one operation")
		}
	})
}

func TestNobodyWaitsForWhatComesAfterTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := refusing(after(4 * time.Second))
		w := newWatcher()
		c := newClient(t, g, client.Options{Observer: w, Retry: client.Retry{Patience: 10 * time.Second}})
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		start := time.Now()
		_, err := c.Wait(ctx, account("alice"))
		expectGaveUp(t, err, "deadline", 1)
		expect(t, "it took", time.Since(start), 0)

		_, err = c.Wait(t.Context(), account("alice"))
		expectGaveUp(t, err, "deadline", 3)

		// Nor for what comes in ages.
		g = refusing(&weirv1.Verdict{Retryable: true, RetryAfter: &durationpb.Duration{Seconds: 1 << 50}})
		c = newClient(t, g, client.Options{Observer: w})
		_, err = c.Wait(t.Context(), account("alice"))
		expectGaveUp(t, err, "deadline", 1)
		expect(t, "gave up", w.count("gave_up deadline"), 3)
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := refusing(after(4 * time.Second))
		c := newClient(t, g, client.Options{})
		left := errors.New("left")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(left) })
		start := time.Now()
		if _, err := c.Wait(ctx, account("alice")); !errors.Is(err, left) {
			t.Errorf("Wait: %v, want the context's cause", err)
		}
		expect(t, "it took", time.Since(start), time.Second)
	})
}

func TestWhatAskingAgainDoesNotHelpIsNotAskedAgain(t *testing.T) {
	s := serve(t, images)
	conn := &wire{ClientConnInterface: s.conn}
	c := newClient(t, conn, client.Options{})
	_, err := c.Wait(t.Context(), client.Ask(client.Describe("banned", "x")))
	if limited, ok := err.(*client.LimitedError); !ok || limited.Reason != "banned" { //nolint:errorlint // it must be the error itself
		t.Errorf("Wait for what is banned: %v, want the refusal", err)
	}
	if _, err := c.Wait(t.Context(), client.Request{}); err == nil {
		t.Error("Wait for nothing: no error")
	}
	expect(t, "asks", conn.count("Acquire"), 2)
}

// The budget is a share of the requests, but for ten a second.
func TestTheBudgetBoundsRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := refusing(after(time.Millisecond))
		w := newWatcher()
		c := newClient(t, g, client.Options{Observer: w, Retry: client.Retry{Attempts: 100, Jitter: 1, Budget: 0.5}})
		_, err := c.Wait(t.Context(), account("alice"))
		expectGaveUp(t, err, "budget", 11) // the ten that are free
		for range 99 {
			_, _ = c.Wait(t.Context(), account("alice"))
		}
		elapsed := g.asks[len(g.asks)-1].Sub(g.asks[0]).Seconds()
		if got, most := len(g.asks)-100, 10+50+int(10*elapsed)+1; got < 50 || got > most {
			t.Errorf("%d retries of 100 requests in %v s, want 60 at once and 10 a second, %d", got, elapsed, most)
		}
		expect(t, "retries", w.count("retries refused"), len(g.asks)-100)

		// With time, there are free ones again.
		time.Sleep(time.Minute)
		before := len(g.asks)
		_, err = c.Wait(t.Context(), account("alice"))
		expectGaveUp(t, err, "budget", len(g.asks)-before)
		if got := len(g.asks) - before; got < 11 || got > 12 {
			t.Errorf("%d asks after a quiet minute, want 11", got)
		}
	})
}

func TestLostAnswersSpendTheBudgetToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		var first atomic.Bool // try of an Acquire
		conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, method string, _ int, _ proto.Message) loss {
			if method == "Acquire" && first.Swap(false) {
				return loss{request: cut}
			}
			return loss{}
		}}
		w := newWatcher()
		c := newClient(t, conn, client.Options{Observer: w, Retry: client.Retry{Budget: 0.01}})
		for range 30 {
			first.Store(true)
			acquire(t, c, client.Ask(client.Describe("day", "x")))
		}
		if got := w.count("retries lost"); got < 10 || got > 12 {
			t.Errorf("%d of 30 lost answers were asked for again, want the 10 that are free, and what some ms gain", got)
		}
		expect(t, "bypassed", w.count("bypasses service_unavailable"), 30-w.count("retries lost"))
	})
}
