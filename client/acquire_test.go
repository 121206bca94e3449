package client_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weir/client"
	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
)

func account(name string) client.Request { return client.Ask(client.Describe("account", name)) }

func acquire(t testing.TB, c *client.Client, r client.Request) *client.Lease {
	t.Helper()
	l, err := c.Acquire(storetest.Context(t), r)
	if err != nil {
		t.Fatalf("Acquire(%+v): %v", r, err)
	}
	return l
}

func expectRefusal(t testing.TB, c *client.Client, r client.Request) *client.LimitedError {
	t.Helper()
	l, err := c.Acquire(storetest.Context(t), r)
	limited, ok := errors.AsType[*client.LimitedError](err)
	if l != nil || !ok {
		t.Fatalf("Acquire(%+v) = %v, %v, want a LimitedError", r, l, err)
	}
	return limited
}

func expect[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func TestALeaseIsHeldUntilItIsReleased(t *testing.T) {
	s := serve(t, images)
	w := newWatcher()
	c := newClient(t, s.conn, client.Options{Observer: w})
	l := acquire(t, c, account("alice"))
	expect(t, "slots while it is held", slots(t, s.conn, "alice"), 1)
	expect(t, "leases held", w.level(client.LeasesHeld), 1)
	for range 3 {
		l.Release(t.Context())
	}
	expect(t, "slots after the release", slots(t, s.conn, "alice"), 0)
	expect(t, "leases held", w.level(client.LeasesHeld), 0)
	expect(t, "releases", w.count("releases released"), 1)
	expect(t, "admitted", w.count("acquires admitted"), 1)
}

func TestARefusalIsTyped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		w := newWatcher()
		c := newClient(t, s.conn, client.Options{Observer: w})
		for range 3 {
			defer acquire(t, c, account("alice")).Release(t.Context())
		}
		lane := client.Violation{Limit: "account", Class: client.Lane, Reason: "lane_full", RetryAfter: time.Second, Estimated: true, Retryable: true}
		pool := client.Violation{Limit: "pool_gpu", Class: client.Pool, Reason: "pool_full", RetryAfter: time.Second, Estimated: true, Retryable: true}
		banned := client.Violation{Limit: "banned", Class: client.Lane, Reason: "banned"}

		got := expectRefusal(t, c, account("alice"))
		if diff := cmp.Diff([]client.Violation{lane}, got.Limits); diff != "" {
			t.Errorf("a full lane's limits (-want +got):\n%s", diff)
		}
		expect(t, "the text", got.Error(), `client: refused (lane): lane_full of limit "account"; retry after about 1s`)
		expect(t, "a lane's class", got.Class, client.Lane)
		expect(t, "a lane's Retry-After", got.RetryAfter, time.Second)

		for range 4 {
			defer acquire(t, c, client.Ask(client.Describe("pool", "gpu"))).Release(t.Context())
		}
		got = expectRefusal(t, c, client.Ask(client.Describe("pool", "gpu")))
		pool.Limit = got.Limit
		if diff := cmp.Diff([]client.Violation{pool}, got.Limits); diff != "" {
			t.Errorf("a full pool's limits (-want +got):\n%s", diff)
		}
		expect(t, "a pool's class", got.Class, client.Pool)

		got = expectRefusal(t, c, client.Ask(client.Describe("banned", "x")))
		if diff := cmp.Diff([]client.Violation{banned}, got.Limits); diff != "" {
			t.Errorf("a ban's limits (-want +got):\n%s", diff)
		}
		if got.Retryable || got.RetryAfter != 0 {
			t.Errorf("a ban is %+v, want it not retryable, and no Retry-After", got)
		}
		expect(t, "the text", got.Error(), `client: refused (lane): banned of limit "banned"; asking again does not help`)

		acquire(t, c, client.Ask(client.Describe("rate", "x")))
		got = expectRefusal(t, c, client.Ask(client.Describe("rate", "x")))
		if got.Estimated || got.RetryAfter <= 0 || got.RetryAfter > 500*time.Millisecond {
			t.Errorf("an empty bucket of 2/s is %+v, want an exact Retry-After of at most 500 ms", got)
		}
		expect(t, "lane refusals", w.count("acquires lane"), 3)
		expect(t, "pool refusals", w.count("acquires pool"), 1)
	})
}

func TestWhatHoldsNothingCanBeReleased(t *testing.T) {
	s := serve(t, images)
	w := newWatcher()
	c := newClient(t, s.conn, client.Options{Observer: w, NoOperations: true})
	l := acquire(t, c, client.Ask(client.Describe("rate", "x")))
	if l == nil || l.ID() != "" || l.Answer() == nil {
		t.Fatalf("a bucket's lease is %+v, want one without an id, and with an answer", l)
	}
	for _, l := range []*client.Lease{l, nil, client.FromContext(t.Context())} {
		l.Release(t.Context())
		l.Use("rate", 7)
		if err := l.End(t.Context(), client.Ending{Outcome: "ok"}); err != nil {
			t.Errorf("End: %v", err)
		}
		if got, err := l.Reconcile(t.Context(), map[string]uint64{"rate": 7}); got != nil || err != nil {
			t.Errorf("Reconcile = %v, %v, want nothing", got, err)
		}
		if got := l.Context(t.Context()); got != t.Context() {
			t.Errorf("its context is %v, want the given one", got)
		}
		select {
		case <-l.Lost():
			t.Error("it is lost")
		default:
		}
	}
	expect(t, "releases", w.count("releases released")+w.count("releases not_held"), 0)
}

func TestACallersErrorAdmitsNobody(t *testing.T) {
	s := serve(t, images)
	c := newClient(t, s.conn, client.Options{})
	for _, tt := range []struct {
		r    client.Request
		want codes.Code
	}{
		{client.Request{}, codes.InvalidArgument},
		{client.Ask(client.Describe("", "alice")), codes.InvalidArgument},
		{client.Ask(client.Describe("account", "\xff")), codes.InvalidArgument},
		{client.Ask(client.Describe("\xff", "alice")), codes.InvalidArgument},
		{client.Request{Domain: "\xff", Descriptors: account("alice").Descriptors}, codes.InvalidArgument},
		{client.Request{Operation: "\xff", Descriptors: account("alice").Descriptors}, codes.InvalidArgument},
		{account(strings.Repeat("a", 5<<20)), codes.ResourceExhausted},
	} {
		l, err := c.Acquire(t.Context(), tt.r)
		if l != nil || status.Code(err) != tt.want {
			t.Errorf("Acquire(%.100q) = %v, %v, want %v", fmt.Sprint(tt.r), l, err, tt.want)
		}
		if l, err := c.Wait(t.Context(), tt.r); l != nil || status.Code(err) != tt.want {
			t.Errorf("Wait(%.100q) = %v, %v, want %v", fmt.Sprint(tt.r), l, err, tt.want)
		}
	}
	for _, code := range []codes.Code{codes.FailedPrecondition, codes.Unimplemented, codes.PermissionDenied, codes.Unauthenticated} {
		c := newClient(t, &wire{ClientConnInterface: s.conn, lose: func(context.Context, string, int, proto.Message) loss {
			return loss{request: status.Error(code, "no")}
		}}, client.Options{})
		if l, err := c.Acquire(t.Context(), account("alice")); l != nil || status.Code(err) != code {
			t.Errorf("Acquire when the service says %v = %v, %v, want an error", code, l, err)
		}
	}
}

// S17 from the client's side: what was lost is asked for again under the same id.
func TestALostReplyCostsNothingTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		w := newWatcher()
		conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, method string, n int, _ proto.Message) loss {
			if method == "Acquire" && n < 3 {
				return loss{reply: cut}
			}
			return loss{}
		}}
		c := newClient(t, conn, client.Options{Observer: w, Tries: 3})
		l := acquire(t, c, account("alice"))
		expect(t, "slots", slots(t, s.conn, "alice"), 1)
		expect(t, "tokens", tokens(t, s.conn, "alice"), 9)
		expect(t, "replayed", l.Answer().GetReplayed(), true)
		l.Release(t.Context())
		expect(t, "slots after the release", slots(t, s.conn, "alice"), 0)
		expect(t, "retries", w.count("retries lost"), 2)
		for i, m := range conn.asked {
			expect(t, "attempt", m.GetAttempt(), uint32(i+1))
			expect(t, "operation", m.GetOperationId(), conn.asked[0].GetOperationId())
		}
	})
}

func TestAnOperationOfTheCallersKeepsItsNumbers(t *testing.T) {
	s := serve(t, images)
	for _, tt := range []struct {
		r    client.Request
		want []uint32
	}{
		{client.Request{Operation: "job-1", Descriptors: account("a").Descriptors}, []uint32{0, 0}},
		{client.Request{Operation: "job-2", Attempt: 7, Descriptors: account("b").Descriptors}, []uint32{7, 8}},
	} {
		conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, method string, n int, _ proto.Message) loss {
			if method == "Acquire" && n == 1 {
				return loss{reply: cut}
			}
			return loss{}
		}}
		c := newClient(t, conn, client.Options{NoOperations: true})
		acquire(t, c, tt.r).Release(t.Context())
		var got []uint32
		for _, m := range conn.asked {
			got = append(got, m.GetAttempt())
			expect(t, "operation", m.GetOperationId(), tt.r.Operation)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("attempts of %q from %d: %v, want %v", tt.r.Operation, tt.r.Attempt, got, tt.want)
		}
	}
}

func TestWhileTheServiceIsAwayTheFailureModeDecides(t *testing.T) {
	s := serve(t, images)
	w := newWatcher()
	conn := &wire{ClientConnInterface: s.conn, lose: func(context.Context, string, int, proto.Message) loss { return loss{request: refused} }}

	c := newClient(t, conn, client.Options{Observer: w})
	l := acquire(t, c, account("alice"))
	expect(t, "bypass", l.Bypass(), client.BypassClient)
	expect(t, "reason", l.BypassReason(), client.ReasonServiceAway)
	expect(t, "id", l.ID(), "")
	l.Release(t.Context())
	expect(t, "tries", conn.count("Acquire"), 2)
	expect(t, "bypasses", w.count("bypasses service_unavailable"), 1)
	expect(t, "retries", w.count("retries lost"), 1)

	c = newClient(t, conn, client.Options{Observer: w, FailureMode: client.FailClosed})
	got := expectRefusal(t, c, account("alice"))
	expect(t, "class", got.Class, client.Pool)
	expect(t, "bypass", got.Bypass, client.BypassClient)
	expect(t, "Retry-After", got.RetryAfter, time.Second)
	expect(t, "retryable", got.Retryable, true)
	expect(t, "its cause", status.Code(got.Unwrap()), codes.Unavailable)
	expect(t, "bypasses", w.count("bypasses service_unavailable"), 2)
}

func TestWithoutAnOperationNothingIsAskedTwice(t *testing.T) {
	s := serve(t, images)
	conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, method string, _ int, _ proto.Message) loss {
		if method == "Acquire" {
			return loss{reply: cut}
		}
		return loss{}
	}}
	c := newClient(t, conn, client.Options{NoOperations: true})
	expect(t, "bypass", acquire(t, c, account("alice")).Bypass(), client.BypassClient)
	expect(t, "tries", conn.count("Acquire"), 1)
	expect(t, "operation", conn.asked[0].GetOperationId(), "")
}

// What the service decided without its store is counted by its reason.
func TestTheServicesBypassesAreSeen(t *testing.T) {
	for _, tt := range []struct {
		in   *weirv1.AcquireResponse
		want client.Bypass
	}{
		{&weirv1.AcquireResponse{Admitted: true, Bypass: weirv1.Bypass_BYPASS_OPEN, BypassReason: "timeout"}, client.BypassOpen},
		{&weirv1.AcquireResponse{Admitted: true, Bypass: weirv1.Bypass_BYPASS_LOCAL, BypassReason: "timeout"}, client.BypassLocal},
		{&weirv1.AcquireResponse{Verdict: after(time.Second), Bypass: weirv1.Bypass_BYPASS_LOCAL, BypassReason: "timeout"}, client.BypassLocal},
		{&weirv1.AcquireResponse{Verdict: after(time.Second), Bypass: weirv1.Bypass_BYPASS_CLOSED, BypassReason: "timeout"}, client.BypassClosed},
	} {
		w := newWatcher()
		c := newClient(t, &gate{answer: tt.in}, client.Options{Observer: w})
		l, err := c.Acquire(t.Context(), account("alice"))
		got, reason := l.Bypass(), l.BypassReason()
		if limited, ok := errors.AsType[*client.LimitedError](err); ok {
			got, reason = limited.Bypass, "timeout"
		}
		expect(t, "bypass", got, tt.want)
		expect(t, "reason", reason, "timeout")
		expect(t, "counted", w.count("bypasses timeout"), 1)
	}
}

func TestACallerThatLeavesIsNotAdmitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		left := fmt.Errorf("left")
		conn := &wire{ClientConnInterface: s.conn, lose: func(ctx context.Context, method string, n int, _ proto.Message) loss {
			if method == "Acquire" && n <= 20 {
				return loss{request: hang(ctx)}
			}
			return loss{}
		}}
		c := newClient(t, conn, client.Options{})
		for range 10 {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(100*time.Millisecond, func() { cancel(left) })
			if l, err := c.Acquire(ctx, account("alice")); l != nil || !errors.Is(err, left) {
				t.Errorf("Acquire of who left = %v, %v, want the context's cause", l, err)
			}
		}
		for range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			if l, err := c.Acquire(ctx, account("alice")); l != nil || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Acquire after the deadline = %v, %v, want its error", l, err)
			}
			cancel()
		}
		// The service may see a deadline pass before its caller does.
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		early := &wire{ClientConnInterface: s.conn, lose: func(context.Context, string, int, proto.Message) loss {
			return loss{request: status.Error(codes.DeadlineExceeded, "too late")}
		}}
		if l, err := newClient(t, early, client.Options{}).Acquire(ctx, account("alice")); l != nil || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Acquire when the service sees the deadline pass = %v, %v, want the deadline's error", l, err)
		}
		// They were no fault of the service, which is asked at once.
		l := acquire(t, c, account("alice"))
		expect(t, "bypass", l.Bypass(), client.NoBypass)
		l.Release(t.Context())
	})
}

// What was granted to nobody does not keep a slot until it expires.
func TestWhatNobodyHeardOfIsGivenBack(t *testing.T) {
	lost := loss{reply: cut}
	for _, tt := range []struct {
		name     string
		lose     func(n int) loss
		ask      func(*client.Client) error
		abandons bool
	}{
		{"fail open", func(n int) loss { return []loss{lost, lost, {}}[min(n-1, 2)] }, func(c *client.Client) error {
			_, err := c.Acquire(context.Background(), account("alice"))
			return err
		}, true},
		{"fail open while the service goes away", func(n int) loss { return []loss{lost, lost, {request: refused}, {}}[min(n-1, 3)] }, func(c *client.Client) error {
			_, err := c.Acquire(context.Background(), account("alice"))
			return err
		}, true},
		{"it never arrived", func(n int) loss { return []loss{{request: refused}, {request: refused}, {}}[min(n-1, 2)] }, func(c *client.Client) error {
			_, err := c.Acquire(context.Background(), account("alice"))
			return err
		}, false},
		{"the caller leaves", func(n int) loss { return []loss{lost, {}}[min(n-1, 1)] }, func(c *client.Client) error {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
			defer cancel()
			if _, err := c.Acquire(ctx, account("alice")); !errors.Is(err, context.DeadlineExceeded) {
				return fmt.Errorf("Acquire of who leaves: %w", err)
			}
			return nil
		}, true},
		{"Wait finds it itself", func(n int) loss { return []loss{lost, lost, {}}[min(n-1, 2)] }, func(c *client.Client) error {
			l, err := c.Wait(context.Background(), account("alice"))
			l.Release(context.Background())
			return err
		}, false},
		{"the caller's own operation is the caller's", func(n int) loss { return []loss{lost, {}}[min(n-1, 1)] }, func(c *client.Client) error {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
			defer cancel()
			r := account("alice")
			r.Operation = "job-1"
			if l, err := c.Acquire(ctx, r); l != nil {
				return fmt.Errorf("Acquire of who leaves = %v, %w", l, err)
			}
			time.Sleep(10 * time.Second) // nobody takes it away meanwhile
			l, err := c.Acquire(context.Background(), r)
			if !l.Answer().GetReplayed() {
				return fmt.Errorf("asked again: not the same lease, %w", err)
			}
			l.Release(context.Background())
			return err
		}, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := serve(t, images)
			w := newWatcher()
			conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, method string, n int, _ proto.Message) loss {
				if method != "Acquire" {
					return loss{}
				}
				return tt.lose(n)
			}}
			o := client.Options{Observer: w}
			if strings.HasPrefix(tt.name, "Wait") {
				o.FailureMode = client.FailClosed
			}
			c := newClient(t, conn, o)
			if err := tt.ask(c); err != nil {
				t.Errorf("%s: %v", tt.name, err)
			}
			time.Sleep(5 * time.Second)
			expect(t, tt.name+": slots", slots(t, s.conn, "alice"), 0)
			expect(t, tt.name+": abandoned", w.count("retries abandoned") > 0, tt.abandons)
			expect(t, tt.name+": pending", w.level(client.ReleasesPending), 0)
			if tt.abandons {
				expect(t, tt.name+": operations", conn.asked[len(conn.asked)-1].GetOperationId(), conn.asked[0].GetOperationId())
			}
		})
	}
}

func TestNothingIsAskedAfterClose(t *testing.T) {
	s := serve(t, images)
	c := newClient(t, s.conn, client.Options{})
	l := acquire(t, c, account("alice"))
	for range 2 {
		c.Close()
	}
	if _, err := c.Acquire(t.Context(), account("alice")); !errors.Is(err, client.ErrClosed) {
		t.Errorf("Acquire after Close: %v, want ErrClosed", err)
	}
	l.Release(t.Context())
	expect(t, "slots after a release after Close", slots(t, s.conn, "alice"), 0)
}

// When a lease that nobody was told of has expired, to ask for it would take all of it
// anew.
func TestAnAbandonedRequestIsNotChargedTwice(t *testing.T) {
	for _, tt := range []struct {
		life        string
		known       bool // by a lease before it
		away        time.Duration
		slots, left int // at once when the service is back
	}{
		{"10s", false, 15 * time.Second, 0, 99},
		{"10s", true, 15 * time.Second, 0, 98},
		{"3s", true, 3100 * time.Millisecond, 0, 98},
		{"100s", true, 50 * time.Second, 0, 98}, // it is found
		{"100s", false, 2 * time.Second, 0, 99},
		{"100s", true, 70 * time.Second, 1, 98}, // it may have expired, for all that is known
	} {
		t.Run(fmt.Sprint(tt), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := serve(t, `
domain: images
descriptors:
  - key: account
    rate_limit: {unit: day, requests_per_unit: 100}
    concurrency: {max_in_flight: 3, lease: `+tt.life+`}
`)
				var isAway, lose atomic.Bool
				conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, method string, _ int, _ proto.Message) loss {
					switch {
					case method == "Inspect":
					case isAway.Load():
						return loss{request: refused}
					case lose.Load():
						isAway.Store(true)
						return loss{reply: cut}
					}
					return loss{}
				}}
				c := newClient(t, conn, client.Options{FailureMode: client.FailClosed})
				if tt.known {
					acquire(t, c, account("alice")).Release(t.Context())
				}
				lose.Store(true)
				if _, err := c.Acquire(t.Context(), account("alice")); err == nil {
					t.Fatal("it is admitted without an answer")
				}
				lose.Store(false)
				time.Sleep(tt.away)
				isAway.Store(false)
				time.Sleep(8 * time.Second)
				expect(t, "slots", slots(t, s.conn, "alice"), tt.slots)
				expect(t, "left", tokens(t, s.conn, "alice"), tt.left)
			})
		})
	}
}

// 0 would be "not told", and never late.
func TestAttemptsDoNotWrapAround(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, metered)
		conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, method string, n int, _ proto.Message) loss {
			if method == "Acquire" && n == 1 {
				return loss{reply: cut}
			}
			return loss{}
		}}
		c := newClient(t, conn, client.Options{})
		r := account("alice")
		r.Operation, r.Attempt = "o", math.MaxUint32
		acquire(t, c, r).Release(t.Context())
		expect(t, "tries", len(conn.asked), 2)
		for _, m := range conn.asked {
			expect(t, "attempt", m.GetAttempt(), math.MaxUint32)
		}
	})
}
