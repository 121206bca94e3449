package client

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	weirv1 "weir/proto/weir/v1"
)

// What stands in for zero in Options.
const (
	defaultTimeout      = 250 * time.Millisecond
	defaultTries        = 2
	defaultCloseTimeout = 5 * time.Second
)

// FailureMode says what becomes of an Acquire that the service does not answer.
type FailureMode uint8

const (
	// FailOpen admits it, without a check and without a lease.
	FailOpen FailureMode = iota
	// FailClosed refuses it: a [LimitedError] of class pool, to be asked again.
	FailClosed
)

// Options configure a Client. The zero value is good for a service beside weir; most
// callers set Domain and Observer.
type Options struct {
	// Domain is that of a Request without one.
	Domain string
	// FailureMode decides while the service is away.
	FailureMode FailureMode
	// Timeout is how long one try of a call may take; 0 means 250 ms. An Acquire takes
	// at most Tries times as long, and some ms between them. If the service hangs and a
	// context ends before that, but after 1.1 times Timeout, FailureMode decides before
	// it ends.
	Timeout time.Duration
	// Tries is how often an Acquire is sent at most if its answers are lost; 0 means 2.
	Tries int
	// NoOperations leaves operation ids out, where a Request has none: then a lost
	// answer is not asked for again, and a request that takes no slot needs no lease.
	NoOperations bool
	// Retry is the patience of Wait, and its budget that of lost answers too.
	Retry Retry
	// CloseTimeout is how long Close waits for releases that the service has not heard
	// of; 0 means 5 s.
	CloseTimeout time.Duration
	// Observer is told what happens; nil: nobody is.
	Observer Observer
	// Logger tells when the service goes away and comes back, what releases were given
	// up, and, once a name, of usage that no reservation of that name was there for; nil:
	// nobody.
	Logger *slog.Logger
}

// Client asks one weir service. It may be used by many goroutines. Use [New].
type Client struct {
	service      weirv1.LeaseServiceClient
	options      Options
	closeTimeout time.Duration
	observer     Observer
	log          *slog.Logger
	breaker      *breaker
	patience     *patience

	warnedMu sync.Mutex
	warned   map[string]bool // limits whose usage was told in vain

	heartbeat *heartbeat
	releases  *releases

	closed     atomic.Bool
	background sync.WaitGroup // the goroutines of heartbeat, releases and breaker
	life       context.Context
	end        context.CancelFunc
}

// New returns a client of the service that conn connects to. The connection stays the
// caller's, and must be open until Close has returned. A client has two goroutines, and a
// third while it looks whether the service is there.
func New(conn grpc.ClientConnInterface, o Options) *Client {
	c := &Client{
		service:      weirv1.NewLeaseServiceClient(conn),
		options:      o,
		closeTimeout: cmp.Or(max(0, o.CloseTimeout), defaultCloseTimeout),
		observer:     o.Observer,
		log:          o.Logger,
		warned:       make(map[string]bool),
	}
	c.options.Timeout = cmp.Or(max(0, o.Timeout), defaultTimeout)
	c.options.Tries = cmp.Or(max(0, o.Tries), defaultTries)
	if c.observer == nil {
		c.observer = nobody{}
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	c.patience = newPatience(o.Retry, defaultAttempts, defaultBudget)
	c.breaker = newBreaker(c, conn)
	c.life, c.end = context.WithCancel(context.Background())
	c.heartbeat, c.releases = newHeartbeat(c), newReleases(c)
	c.background.Go(c.heartbeat.run)
	c.background.Go(c.releases.run)
	return c
}

// ErrClosed is the error of what begins after Close.
var ErrClosed = errors.New("client: closed")

// Close waits for releases that the service has not heard of yet, at most
// CloseTimeout, and ends the client's goroutines. What is given up then is counted and
// logged: those slots are free when their leases expire. Leases that are still held are
// not renewed any more, so that they are lost when their life is over; they can be
// released, by one try. Close the queues first.
func (c *Client) Close() {
	if !c.closed.Swap(true) {
		c.releases.close(c.closeTimeout)
		c.breaker.close()
		c.end()
	}
	c.background.Wait()
	if n := c.releases.giveUpAll(); n > 0 {
		c.log.WarnContext(context.Background(), "leases could not be released and end when they expire", "leases", n)
	}
}
