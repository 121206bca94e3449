// Package server answers weir's RPCs and HTTP pages: it is where a decision is
// asked for, counted and told, and where it is said what happens when the store
// is away.
package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/health"

	"weir/envoy"
	"weir/limit"
	"weir/policy"
	"weir/store"
)

// tellStreams is how long those who watch the health have to be told of the drain
// before their streams end.
const tellStreams = 50 * time.Millisecond

// detachedTimeout bounds work that outlives its caller: releases, and the giving
// back of what nobody waits for.
const detachedTimeout = time.Second

// Options configure a server. Store, Logger and Registerer are required.
type Options struct {
	Store store.Store
	// StoreTimeout bounds each call of the store; 0 means 10 ms. It should be
	// below the time that Envoy waits (20 ms by default).
	StoreTimeout time.Duration
	Logger       *slog.Logger
	Registerer   prometheus.Registerer
	// Encode says what goes into the answers of ShouldRateLimit.
	Encode envoy.Options
}

// Server decides requests by the current policies and the store. Use [New].
type Server struct {
	store        store.Store
	storeTimeout time.Duration
	log          *slog.Logger
	encode       envoy.Options
	metrics      *metrics
	holds        *holds
	health       *health.Server

	policies atomic.Pointer[policy.Set] // nil until the first are loaded
	loaded   atomic.Pointer[loaded]     // what is told of them

	storeAway   atomic.Bool  // a call failed, and no look since was quiet
	storeFound  atomic.Bool  // it has answered once
	failures    atomic.Int64 // since the last look
	lastStrange atomic.Int64 // the second of the last log line about an error that is no failure
	draining    atomic.Bool

	reporting sync.Mutex // held while health is told, so that the newest is told last

	detached sync.WaitGroup // calls that outlive their callers

	streams    context.Context // of all streams: ends with the drain
	endStreams context.CancelFunc
}

// New returns a server without policies: it answers UNAVAILABLE until
// [Server.SetPolicy] brings some.
func New(o Options) *Server {
	s := &Server{
		store:        o.Store,
		storeTimeout: o.StoreTimeout,
		log:          o.Logger,
		encode:       o.Encode,
		holds:        newHolds(),
		health:       health.NewServer(),
	}
	s.streams, s.endStreams = context.WithCancel(context.Background())
	if s.storeTimeout == 0 {
		s.storeTimeout = 10 * time.Millisecond
	}
	s.loaded.Store(&loaded{})
	s.metrics = newMetrics(o.Registerer, s)
	s.reportHealth()
	return s
}

// decide asks the store for all checks at once, counts what it decided, and
// judges. It never fails: without an answer the request is admitted, counted and
// flagged.
func (s *Server) decide(ctx context.Context, set *policy.Set, domain string, checks []limit.Check) (limit.Decision, limit.Verdict) {
	r := limit.Request{Domain: domain, Checks: checks}
	if limit.NeedsLease(checks) {
		var random [16]byte
		_, _ = rand.Read(random[:]) // it never fails
		r.Lease = limit.NewLeaseID(domain, random)
	}
	d := limit.Decision{Admitted: true}
	if len(checks) > 0 {
		d = s.ask(ctx, r)
	}
	v := limit.Judge(checks, d, func(c limit.Check) time.Duration { return s.holds.estimate(domain, c) })
	s.metrics.decided(label(set, domain), checks, d, v)
	if d.Lease != "" && ctx.Err() != nil {
		// The caller has gone: nobody will release what it was granted.
		s.metrics.givenBack.WithLabelValues(label(set, domain)).Inc()
		s.detached.Go(func() {
			ctx, cancel := detach(ctx)
			defer cancel()
			_, _ = s.release(ctx, d.Lease) // if it fails, the lease expires
		})
	}
	return d, v
}

// ask calls the store. The call does not end with the caller: its answer says
// whether there is a lease to give back.
func (s *Server) ask(ctx context.Context, r limit.Request) limit.Decision {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.storeTimeout)
	defer cancel()
	start := time.Now()
	d, err := s.store.Decide(ctx, r)
	s.observe(ctx, "decide", start, err)
	if err != nil {
		return limit.FailOpen(r, reason(err))
	}
	return d
}

// detach returns a context for work that must be finished although its caller
// has gone, within a second.
func detach(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), detachedTimeout)
}

// release ends a lease, and counts what it found. Its ctx is one of detach.
func (s *Server) release(ctx context.Context, id limit.LeaseID) (limit.ReleaseResult, error) {
	start := time.Now()
	r, err := s.store.Release(ctx, id)
	s.observe(ctx, "release", start, err)
	if err != nil {
		return 0, err
	}
	domain := id.Domain()
	for _, name := range r.Limits {
		s.holds.add(domain, name, r.HeldFor)
	}
	s.metrics.released.WithLabelValues(label(s.policies.Load(), domain), r.Result.String()).Inc()
	return r.Result, nil
}

// observe counts a call of the store, and logs when the store goes: not each call
// that fails from then on.
func (s *Server) observe(ctx context.Context, op string, start time.Time, err error) {
	s.metrics.storeSeconds.WithLabelValues(op).Observe(time.Since(start).Seconds())
	switch {
	case err == nil:
		if !s.storeFound.Load() && s.storeFound.CompareAndSwap(false, true) {
			s.reportHealth()
		}
		return
	case !errors.Is(err, store.ErrUnavailable):
		// A bug or misuse, say somebody else's value under a key of ours: it is about
		// that key, and says nothing about the store.
		if now := start.Unix(); s.lastStrange.Swap(now) != now {
			s.log.ErrorContext(ctx, "store answered with an error: the decision is bypassed", "op", op, "err", err)
		}
	default:
		s.failures.Add(1)
		if !s.storeAway.Load() && s.storeAway.CompareAndSwap(false, true) {
			s.log.ErrorContext(ctx, "store failed: what it does not answer in time is bypassed", "op", op, "err", err)
		}
	}
	s.metrics.storeErrors.WithLabelValues(op, reason(err)).Inc()
}

// Run looks after the store until ctx ends, and returns then. It alone says that a
// store has come back, when it answers and no call has failed since the last look,
// so that one that answers now and then does not fill the log.
func (s *Server) Run(ctx context.Context) {
	const usual, atFirst = time.Second, 50 * time.Millisecond // between two looks
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		s.look(ctx)
		if s.storeFound.Load() {
			timer.Reset(usual)
		} else {
			timer.Reset(atFirst)
		}
	}
}

// look asks whether the store is there.
func (s *Server) look(ctx context.Context) {
	ping, cancel := context.WithTimeout(ctx, detachedTimeout)
	defer cancel()
	first := !s.storeFound.Load()
	quiet := s.failures.Swap(0) == 0
	start := time.Now()
	err := s.store.Ping(ping)
	if ctx.Err() != nil {
		return // we stop: it says nothing about the store
	}
	s.observe(ctx, "ping", start, err)
	if err != nil {
		return
	}
	if quiet && s.storeAway.CompareAndSwap(true, false) || first && !s.storeAway.Load() {
		s.log.InfoContext(ctx, "store answers")
	}
}

// Drain makes the server say that it is not ready, so that no new callers come,
// and ends streams, which only watch. It goes on answering.
func (s *Server) Drain() {
	s.draining.Store(true)
	s.reportHealth()
	time.AfterFunc(tellStreams, s.endStreams)
}

// Close waits for calls that outlived their callers, at most about a second. No
// request may come any more.
func (s *Server) Close() {
	s.endStreams()
	s.detached.Wait()
}

// maxChecks is how many limits one request may meet: a script that decides as many
// takes Redis most of the usual store timeout.
const maxChecks = 1024

// checkCount bounds what one request may ask of the store.
func checkCount(n int) error {
	if n > maxChecks {
		return badRequest(fmt.Sprintf("the descriptors meet %d limits, at most %d may be decided at once; send fewer descriptors", n, maxChecks))
	}
	return nil
}

// reason is the word of metrics and metadata for a store's error.
func reason(err error) string {
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return "store_timeout"
	case errors.Is(err, store.ErrUnavailable):
		return "store_unavailable"
	}
	return "store_error"
}

// label is the domain in metrics: labels come from configuration only.
func label(set *policy.Set, domain string) string {
	if set != nil && set.Has(domain) {
		return domain
	}
	return "unknown"
}

// errNoPolicy is the answer before the first policies are loaded.
var errNoPolicy = errors.New("no policy is loaded yet")
