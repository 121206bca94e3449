package client_test

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weir/client"
	"weir/server/servertest"
	"weir/store/storetest"
)

// dialed connects by the function that opens its connections.
func dialed(t testing.TB, dial func(context.Context, string) (net.Conn, error)) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///weir", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dial))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// shortConn is a connection that is cut when so many bytes have come.
type shortConn struct {
	net.Conn
	left int
}

func (c *shortConn) Read(b []byte) (int, error) {
	if c.left == 0 {
		_ = c.Close()
		return 0, io.ErrUnexpectedEOF
	}
	n, err := c.Conn.Read(b[:min(len(b), c.left)])
	c.left -= n
	return n, err
}

// S17: every connection is cut in the middle of some reply, and nothing is taken twice.
func TestCutRepliesCostNothingTwice(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	s := servertest.Start(t, `
domain: images
descriptors:
  - key: account
    rate_limit: {unit: year, requests_per_unit: 1000000}
    concurrency: {max_in_flight: 100, lease: 1h}
`, "--redis", redis.URL, "--store-timeout", "20s")
	direct := s.Dial(t)
	connections := 0
	conn := dialed(t, func(ctx context.Context, _ string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", s.GRPC)
		connections++ // each is opened when the last has ended
		return &shortConn{c, 600 + 37*connections%300}, err
	})
	w := newWatcher()
	c := newClient(t, conn, client.Options{Observer: w, Tries: 10, Timeout: 5 * time.Second, CloseTimeout: storetest.Deadline, Retry: client.Retry{Budget: 10}})
	const jobs = 100
	for range jobs {
		l := acquire(t, c, account("bob"))
		if l.Bypass() != client.NoBypass {
			t.Fatalf("it was admitted by %s, want the service to be asked until it is heard", l.Bypass())
		}
		l.Release(t.Context())
	}
	c.Close()
	if w.count("retries lost") < jobs/10 {
		t.Errorf("%d replies to Acquire were lost, want more to tell anything", w.count("retries lost"))
	}
	if w.count("retries release") == 0 {
		t.Error("no release was sent again: this tells nothing of them")
	}
	expect(t, "charged", 1_000_000-tokens(t, direct, "bob"), jobs)
	expect(t, "slots", slots(t, direct, "bob"), 0)
}

func TestAServiceThatStandsIsNotWaitedFor(t *testing.T) {
	s := servertest.Start(t, images)
	w := newWatcher()
	c := newClient(t, s.Dial(t), client.Options{Observer: w, Timeout: time.Second})
	held, other := acquire(t, c, account("alice")), acquire(t, c, account("alice"))
	s.Pause(t)
	other.Release(t.Context())
	start := time.Now()
	for range 20 {
		l := acquire(t, c, account("alice"))
		expect(t, "bypass", l.Bypass(), client.BypassClient)
		l.Release(t.Context())
	}
	if d := time.Since(start); d > 15*time.Second {
		t.Errorf("20 asks took %v, want two tries of 1 s until the breaker opens, and then no time", d)
	}
	expect(t, "bypasses", w.count("bypasses service_unavailable"), 20)
	s.Signal(t, syscall.SIGCONT)
	storetest.Eventually(t, "the release arrives", func() bool { return slots(t, s.Dial(t), "alice") == 1 })
	storetest.Eventually(t, "the service is asked again", func() bool {
		l := acquire(t, c, account("alice"))
		defer l.Release(t.Context())
		return l.Bypass() == client.NoBypass
	})
	expect(t, "lost", lost(held), false)
	held.Release(t.Context())
	expect(t, "slots", slots(t, s.Dial(t), "alice"), 0)
}

// A replica with its state in memory dies, and another takes its place.
func TestTheLeasesOfAServiceThatForgotThemAreLost(t *testing.T) {
	const policy = "domain: images\ndescriptors: [{key: account, concurrency: {max_in_flight: 3, lease: 3s}}]"
	first := servertest.Start(t, policy)
	var address atomic.Pointer[string]
	address.Store(&first.GRPC)
	conn := dialed(t, func(ctx context.Context, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", *address.Load())
	})
	w := newWatcher()
	c := newClient(t, conn, client.Options{Observer: w})
	l := acquire(t, c, account("alice"))
	work := l.Context(t.Context())
	storetest.Eventually(t, "it is renewed", func() bool { return w.count("renewals renewed") > 0 })
	second := servertest.Start(t, policy)
	first.Signal(t, syscall.SIGKILL)
	address.Store(&second.GRPC)
	select {
	case <-work.Done():
	case <-time.After(storetest.Deadline):
		t.Fatal("the lease is not lost")
	}
	if err := context.Cause(work); err != client.ErrLost { //nolint:errorlint // it must be the error itself
		t.Errorf("the work ends for %v, want ErrLost", err)
	}
	l.Release(t.Context())
	storetest.Eventually(t, "the new one is asked", func() bool {
		l := acquire(t, c, account("alice"))
		defer l.Release(t.Context())
		return l.Bypass() == client.NoBypass
	})
	expect(t, "slots", slots(t, second.Dial(t), "alice"), 0)
}
