package server

import (
	"context"
	"errors"
	"os"
	"time"

	"weir/limit"
	"weir/store"
)

// detachedTimeout bounds work that outlives its caller: releases, and the giving
// back of what nobody waits for.
const detachedTimeout = time.Second

// detach returns a context for work that must be finished although its caller
// has gone, within a second.
func detach(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), detachedTimeout)
}

// release ends some work, and counts what it found. Its ctx is one of detach.
func (s *Server) release(ctx context.Context, e limit.Ending) (limit.ReleaseResult, error) {
	start := time.Now()
	r, err := s.store.Release(ctx, e)
	s.observe(ctx, "release", start, err)
	if err != nil {
		return 0, err
	}
	domain := e.Domain
	if e.Lease != "" {
		domain = e.Lease.Domain()
	}
	for _, f := range r.Freed {
		s.holds.add(domain, f.Limit, r.HeldFor)
		s.waits.wake(f.Key)
	}
	s.metrics.released.WithLabelValues(label(s.policies(), domain), r.Result.String()).Inc()
	return r.Result, nil
}

// charge charges usage, and counts it. Its ctx is one of detach.
func (s *Server) charge(ctx context.Context, u limit.Usage) error {
	start := time.Now()
	charged, err := s.store.Charge(ctx, u)
	s.observe(ctx, "charge", start, err)
	if err != nil {
		return err
	}
	for i, c := range u.Checks {
		result := "charged"
		if !charged[i] {
			result = "again"
		}
		s.metrics.usage.WithLabelValues(label(s.policies(), u.Domain), c.Name, result).Inc()
	}
	return nil
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
			s.log.ErrorContext(ctx, "store answered with an error", "op", op, "err", err)
		}
	default:
		s.failures.Add(1)
		if !s.storeAway.Load() && s.storeAway.CompareAndSwap(false, true) {
			s.log.ErrorContext(ctx, "store failed", "op", op, "err", err)
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

// The words of metrics and metadata for what a store's error means.
const (
	storeTimeout     = "store_timeout"
	storeUnavailable = "store_unavailable"
	storeError       = "store_error"
)

var reasons = []string{storeTimeout, storeUnavailable, storeError}

// reason is the word for an error.
func reason(err error) string {
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return storeTimeout
	case errors.Is(err, store.ErrUnavailable):
		return storeUnavailable
	}
	return storeError
}
