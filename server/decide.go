package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"weir/limit"
	"weir/policy"
	"weir/store"
)

// maxChecks is how many limits one request may meet: a script that decides as many
// takes Redis most of the usual store timeout.
const maxChecks = 1024

// decided is a request with its decision.
type decided struct {
	match    policy.Match
	decision limit.Decision
	verdict  limit.Verdict
}

// decide finds the limits that r meets, asks the store for all of them at once,
// judges and counts. Without an answer the standby decides, by the failure modes of
// the limits: an error means that the request asks for too much, or that its operation
// may not ask so. Who is the stream or the operation that asks, if one is known.
func (s *Server) decide(ctx context.Context, now *loaded, r policy.Request, who asker) (decided, error) {
	start := time.Now()
	ctx, span := s.tracer.start(ctx, "decide")
	defer span.End()
	m, err := match(now.set, r)
	if err != nil {
		return decided{}, err
	}
	ask := limit.Request{Domain: r.Domain, Checks: m.Checks, Stream: who.stream, Operation: who.operation}
	if ask.Operation.ID != "" {
		ask.Operation.Body = limit.BodyOf(m.Checks)
	}
	domain := now.of(r.Domain)
	d, err := s.askAndWait(ctx, ask)
	if err != nil {
		s.metrics.conflicts.WithLabelValues(domain.label, conflict(err)).Inc()
		return decided{}, badOperation{err}
	}
	v := limit.Judge(m.Checks, d, func(c limit.Check) time.Duration { return s.holds.estimate(r.Domain, c) })
	s.metrics.misused(domain.label, r, m)
	s.metrics.decided(domain, m.Checks, d, v)
	s.noteForPage(domain.label, m.Checks, d, v)
	tellSpan(span, domain.label, m.Checks, d, v)
	s.metrics.took(ctx, domain.took(s.metrics), start)
	if d.Lease != "" && !d.Replayed && ctx.Err() != nil {
		s.metrics.givenBack.WithLabelValues(domain.label).Inc()
		ask.Lease = d.Lease
		s.giveBack(ctx, ask)
	}
	return decided{m, d, v}, nil
}

// asker is who asks for a decision.
type asker struct {
	stream    string
	operation limit.Operation // without its Body
}

// conflict is the word for an error of an operation's.
func conflict(err error) string {
	if errors.Is(err, store.ErrLateAttempt) {
		return "late_attempt"
	}
	return "other_request"
}

// match returns the limits that r meets. An error means that they are too many.
func match(set *policy.Set, r policy.Request) (policy.Match, error) {
	m := set.Match(r)
	if n := len(m.Checks); n > maxChecks {
		return policy.Match{}, badRequestf("the descriptors meet %d limits, at most %d may be decided at once; send fewer descriptors", n, maxChecks)
	}
	if n := (limit.Request{Checks: m.Checks}).Reserving(); n > limit.MaxReserved {
		return policy.Match{}, badRequestf("the descriptors meet %d limits that reserve, at most %d may be reserved at once; send fewer descriptors", n, limit.MaxReserved)
	}
	return m, nil
}

// ask asks the store, and if that does not answer decides without it. An error is about
// the operation.
func (s *Server) ask(ctx context.Context, r limit.Request) (limit.Decision, error) {
	if len(r.Checks) == 0 {
		return limit.Decision{Admitted: true}, nil
	}
	if s.unasked == nil {
		return s.askOrBypass(ctx, r)
	}
	now := time.Now()
	if d, known := s.unasked.Refuse(r, now); known {
		s.metrics.unasked.WithLabelValues(s.label(r.Domain)).Inc()
		return d, nil
	}
	defer s.givingBack(refunded(r.Checks))()
	asked := s.unasked.Ask(now)
	d, err := s.askOrBypass(ctx, r)
	if err == nil && d.Bypass == limit.DefaultMode {
		s.unasked.Learn(asked, r, d, time.Now())
	}
	return d, err
}

// refunded are the keys of what checks give back to.
func refunded(checks []limit.Check) (keys []string) {
	for _, c := range checks {
		if c.Hits < 0 {
			keys = append(keys, c.Key)
		}
	}
	return keys
}

// givingBack is called before hits may be given back to the states with these keys, and what
// it returns afterwards.
func (s *Server) givingBack(keys []string) (after func()) {
	if s.unasked == nil || len(keys) == 0 {
		return func() {}
	}
	return s.unasked.Give(keys)
}

func (s *Server) askOrBypass(ctx context.Context, r limit.Request) (limit.Decision, error) {
	d, err := s.askStore(ctx, s.patience(ctx), r)
	if err != nil && !ofOperation(err) {
		return s.standby.Decide(r, reason(err))
	}
	return d, err
}

// ofOperation reports whether err is about an operation, and not about its store.
func ofOperation(err error) bool {
	return errors.Is(err, store.ErrOtherRequest) || errors.Is(err, store.ErrLateAttempt)
}

// maxPatience bounds the patience of whoever says no deadline, or a late one.
const maxPatience = time.Second

// patience is how long a caller's decision may wait for its turn at a store that
// answers others: half of the caller's time, so that the answer comes within it.
func (s *Server) patience(ctx context.Context) time.Duration {
	patience := maxPatience
	if end, ok := ctx.Deadline(); ok {
		patience = min(patience, time.Until(end)/2)
	}
	return max(patience, s.storeTimeout)
}

// askStore asks the store, under a lease id of its own. The call does not end with the
// caller: its answer says whether there is a lease to give back.
func (s *Server) askStore(ctx context.Context, timeout time.Duration, r limit.Request) (limit.Decision, error) {
	if r.NeedsLease() {
		var random [16]byte
		_, _ = rand.Read(random[:]) // it never fails
		r.Lease = limit.NewLeaseID(r.Domain, random)
	} else {
		r.Stream = ""
	}
	var a storeAnswer
	var err error
	if s.instant {
		err = s.observed(ctx, opDecide, func() (err error) {
			a, err = s.answerOf(context.WithoutCancel(ctx), r)
			return err
		})
	} else {
		err = s.callBy(ctx, s.loaded.Load().of(r.Domain).breaker(), opDecide, func() (err error) {
			a, err = s.answerOf(store.Until(ctx, time.Now().Add(timeout)), r)
			if timeout < s.storeTimeout && errors.Is(err, context.DeadlineExceeded) {
				err = fmt.Errorf("%w: %w", errHurried, err)
			}
			return err
		})
	}
	if err != nil || a.wrong != nil {
		return limit.Decision{}, cmp.Or(err, a.wrong)
	}
	if a.decision.Admitted && !a.decision.Replayed {
		r.Lease = a.decision.Lease
		s.standby.FollowRequest(r)
	}
	return a.decision, nil
}

// storeAnswer is what a store said of a request: a decision, or what is wrong with its operation.
type storeAnswer struct {
	decision limit.Decision
	wrong    error
}

// answerOf returns the store's answer to r. An error is that there is none: what is wrong
// with an operation is no failure of the store's.
func (s *Server) answerOf(ctx context.Context, r limit.Request) (storeAnswer, error) {
	d, err := s.store.Decide(ctx, r)
	if ofOperation(err) {
		return storeAnswer{wrong: err}, nil
	}
	return storeAnswer{decision: d}, err
}

// giveBack undoes what was granted to a caller that has gone, since nobody else
// will. If that fails, the lease expires.
func (s *Server) giveBack(ctx context.Context, r limit.Request) {
	s.detached.Go(func() {
		ctx, cancel := detach(ctx)
		defer cancel()
		_ = s.undo(ctx, r) // counted
	})
}
