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

// opDecide is the operation of decisions, in metrics.
const opDecide = "decide"

// call makes a call of the store, counted, unless the domain's breaker is open: then
// it fails at once.
func (s *Server) call(ctx context.Context, op, domain string, f func() error) error {
	return s.callBy(ctx, s.breakers.of(s.label(domain)), op, f)
}

func (s *Server) callBy(ctx context.Context, b *breaker, op string, f func() error) error {
	err := b.call(func() error { return s.observed(ctx, op, f) })
	if errors.Is(err, errBreakerOpen) {
		s.metrics.storeErrors.WithLabelValues(op, breakerOpen).Inc()
	}
	return err
}

// observed makes a call of the store, counted.
func (s *Server) observed(ctx context.Context, op string, f func() error) error {
	start := time.Now()
	span := s.tracer.startCall(ctx, op)
	err := f()
	endCall(span, err)
	s.observe(ctx, op, start, err)
	return err
}

// What tells of the end of a lease, in metrics.
const (
	byLeaseService     = "lease_service"
	byRateLimitService = "ratelimit_service"
	byAccessLog        = "access_log"
	byGiveBack         = "give_back"
	byAdmin            = "admin"
)

// release ends some work, and counts what it found and by what. Its ctx is one of detach.
func (s *Server) release(ctx context.Context, e limit.Ending, by string) (limit.ReleaseResult, error) {
	r, err := s.releaseInFull(ctx, e, by)
	return r.Result, err
}

// releaseInFull is release, and tells which slots are free now.
func (s *Server) releaseInFull(ctx context.Context, e limit.Ending, by string) (limit.Release, error) {
	domain := e.Domain
	if e.Lease != "" {
		domain = e.Lease.Domain()
	}
	return s.releaseBy(ctx, e, by, domain, "release", func() (limit.Release, error) { return s.store.Release(ctx, e) })
}

// undo gives back what r was granted, and counts it as a release. Its ctx is one of
// detach. Of a lease of this process only the slots are given back.
func (s *Server) undo(ctx context.Context, r limit.Request) error {
	defer s.givingBack(keysOf(r.Checks))()
	_, err := s.releaseBy(ctx, limit.Ending{Lease: r.Lease}, byGiveBack, r.Domain, "undo", func() (limit.Release, error) { return s.store.Undo(ctx, r) })
	return err
}

// releaseBy ends what was granted here, or has the store end it by a call of f.
func (s *Server) releaseBy(ctx context.Context, e limit.Ending, by, domain, op string, f func() (limit.Release, error)) (limit.Release, error) {
	r, mine, err := s.standby.Release(e)
	if !mine {
		err = s.call(ctx, op, domain, func() (err error) {
			r, err = f()
			return err
		})
	}
	if err != nil {
		return limit.Release{}, err
	}
	domain = s.loaded.Load().name(domain)
	for _, f := range r.Freed {
		s.holds.add(domain, f.Limit, r.HeldFor)
		s.waits.wake(f.Key)
	}
	label := s.label(domain)
	s.metrics.released.WithLabelValues(label, r.Result.String()).Inc()
	if r.Result == limit.Released || r.Result == limit.Lingering {
		s.metrics.ended.WithLabelValues(label, by).Inc()
	}
	return r, nil
}

// settling is givingBack for what usage may settle.
func (s *Server) settling(u limit.Usage) (after func()) {
	if s.unasked != nil && len(u.Limits) > 0 { // by their names: any that the lease has reserved of
		return s.unasked.GiveAny(u.Domain)
	}
	return s.givingBack(keysOf(u.Checks))
}

// keysOf are the keys of checks.
func keysOf(checks []limit.Check) []string {
	keys := make([]string, len(checks))
	for i, c := range checks {
		keys[i] = c.Key
	}
	return keys
}

// settle settles usage, and counts it. Its ctx is one of detach.
func (s *Server) settle(ctx context.Context, u limit.Usage) ([]limit.Settlement, error) {
	all, rest, err := s.standby.Settle(u)
	if err != nil {
		return nil, err
	}
	if len(rest.Checks)+len(rest.Limits) > 0 {
		defer s.settling(rest)()
		var settled []limit.Settlement
		err := s.call(ctx, "settle", u.Domain, func() (err error) {
			settled, err = s.store.Settle(ctx, rest)
			return err
		})
		if err != nil {
			return nil, err
		}
		s.standby.FollowUsage(rest, settled)
		for i := range all {
			if all[i].Result == limit.NotReserved && len(settled) > 0 { // rest has it, in order
				all[i], settled = settled[0], settled[1:]
			}
		}
	}
	s.metrics.settled(s.label(u.Domain), u, all)
	return all, nil
}

// renew extends a lease. Its ctx is one of detach.
func (s *Server) renew(ctx context.Context, e limit.Extension) (limit.Renewal, error) {
	n, mine, err := s.standby.Renew(e)
	if !mine {
		err = s.call(ctx, "renew", e.Lease.Domain(), func() (err error) {
			n, err = s.store.Renew(ctx, e)
			return err
		})
	}
	result := "renewed"
	switch {
	case err != nil:
		result = "unavailable"
	case !n.Renewed:
		result = "lost"
	}
	s.metrics.renewals.WithLabelValues(s.label(e.Lease.Domain()), result).Inc()
	return n, err
}

// observe counts a call of the store, and logs when the store goes: not each call
// that fails from then on.
func (s *Server) observe(ctx context.Context, op string, start time.Time, err error) {
	s.metrics.took(ctx, s.metrics.ofStore(op), start)
	switch {
	case err == nil:
		if op == opDecide {
			s.bypasses.decided(start)
		}
		if !s.storeFound.Load() && s.storeFound.CompareAndSwap(false, true) {
			s.reportHealth()
		}
		return
	case errors.Is(err, errHurried):
	case !errors.Is(err, store.ErrUnavailable):
		// A bug or misuse, say somebody else's value under a key of ours: it is about
		// that key, and says nothing about the store.
		if now := start.Unix(); s.lastStrange.Swap(now) != now {
			s.log.ErrorContext(ctx, "store answered with an error", "op", op, "err", err)
		}
	default:
		s.failures.Add(1)
		if !s.storeAway.Load() { // before anything is counted that was decided without it
			s.bypasses.away(start)
			s.page.Wake()
		}
		if !s.storeAway.Load() && s.storeAway.CompareAndSwap(false, true) {
			s.log.ErrorContext(ctx, "store failed", "op", op, "err", err)
		}
	}
	s.bypasses.failed(op, start, err)
	s.metrics.storeErrors.WithLabelValues(op, reason(err)).Inc()
}

// Run looks after the store until ctx ends, and returns then. It alone says that a
// store has come back, when it answers and no call has failed since the last look,
// so that one that answers now and then does not fill the log.
func (s *Server) Run(ctx context.Context) {
	const usual, away, atFirst = time.Second, stayOpen, 50 * time.Millisecond // between two looks
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		s.look(ctx)
		s.history.sample(time.Now(), s.count)
		switch {
		case !s.storeFound.Load():
			timer.Reset(atFirst)
		case s.breakers.someOpen():
			timer.Reset(away)
		default:
			timer.Reset(usual)
		}
	}
}

// look asks whether the store is there.
func (s *Server) look(ctx context.Context) {
	ping, cancel := context.WithTimeout(ctx, detachedTimeout)
	defer cancel()
	s.standby.Forget()
	first := !s.storeFound.Load()
	quiet := s.failures.Swap(0) == 0 && !s.breakers.someOpen()
	start := time.Now()
	err := s.store.Ping(ping)
	if ctx.Err() != nil {
		return // we stop: it says nothing about the store
	}
	s.observe(ctx, "ping", start, err)
	if err != nil {
		s.bypasses.silent()
	}
	if s.storeLost.Swap(err != nil) != (err != nil) {
		s.page.Wake()
	}
	defer s.reportHealth()
	if err != nil {
		return
	}
	for _, b := range s.breakers.answered() {
		_ = s.callBy(ctx, b, "held", func() error { // counted, and looked at again
			ctx, cancel := context.WithTimeout(ctx, s.storeTimeout)
			defer cancel()
			_, err := s.store.Held(ctx, b.domain)
			return err
		})
	}
	recovered := quiet && s.storeAway.Load()
	if recovered {
		s.bypasses.back(time.Now())
		s.storeAway.Store(false)
		s.page.Wake()
	}
	if recovered || first && !s.storeAway.Load() {
		s.log.InfoContext(ctx, "store answers")
	}
}

// breakerChanged tells that the calls for a domain, as in metrics, are not made any
// more, or again.
func (s *Server) breakerChanged(domain string, open bool) {
	s.metrics.breakerOpen.WithLabelValues(domain).Set(number(open))
	s.page.Wake()
	if open {
		s.bypasses.silent()
		s.log.WarnContext(context.Background(), "store is not asked any more: its limits are decided by their failure modes", "domain", domain)
	} else {
		s.log.InfoContext(context.Background(), "store is asked again", "domain", domain)
	}
}

// The words of metrics and metadata for what a store's error means.
const (
	storeTimeout     = "store_timeout"     // no answer in time
	storeUnavailable = "store_unavailable" // no connection, or one that broke
	storeError       = "store_error"       // an answer that is an error: OOM, LOADING, WRONGTYPE, …
	breakerOpen      = "breaker_open"      // the store was not asked
)

var reasons = []string{storeTimeout, storeUnavailable, storeError, breakerOpen}

// reason is the word for an error.
func reason(err error) string {
	switch {
	case errors.Is(err, errBreakerOpen):
		return breakerOpen
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return storeTimeout
	case errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrNotServing):
		return storeUnavailable
	}
	return storeError
}
