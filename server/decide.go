package server

import (
	"context"
	"crypto/rand"
	"time"

	"weir/limit"
	"weir/policy"
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
// the limits: an error means that the request asks for too much. Stream is the one that
// asks, or "".
func (s *Server) decide(ctx context.Context, set *policy.Set, r policy.Request, stream string) (decided, error) {
	m, err := match(set, r)
	if err != nil {
		return decided{}, err
	}
	d := s.askAndWait(ctx, set, r.Domain, stream, m.Checks)
	v := limit.Judge(m.Checks, d, func(c limit.Check) time.Duration { return s.holds.estimate(r.Domain, c) })
	s.metrics.misused(label(set, r.Domain), r, m)
	s.metrics.decided(label(set, r.Domain), m.Checks, d, v)
	if d.Lease != "" && ctx.Err() != nil {
		s.metrics.givenBack.WithLabelValues(label(set, r.Domain)).Inc()
		s.giveBack(ctx, d.Lease)
	}
	return decided{m, d, v}, nil
}

// match returns the limits that r meets. An error means that they are too many.
func match(set *policy.Set, r policy.Request) (policy.Match, error) {
	m := set.Match(r)
	if n := len(m.Checks); n > maxChecks {
		return policy.Match{}, badRequestf("the descriptors meet %d limits, at most %d may be decided at once; send fewer descriptors", n, maxChecks)
	}
	return m, nil
}

// ask calls the store. The call does not end with the caller: its answer says
// whether there is a lease to give back.
func (s *Server) ask(ctx context.Context, domain, stream string, checks []limit.Check) limit.Decision {
	if len(checks) == 0 {
		return limit.Decision{Admitted: true}
	}
	r := limit.Request{Domain: domain, Checks: checks}
	if limit.NeedsLease(checks) {
		var random [16]byte
		_, _ = rand.Read(random[:]) // it never fails
		r.Lease, r.Stream = limit.NewLeaseID(domain, random), stream
	}
	var d limit.Decision
	err := s.call(ctx, "decide", domain, func() (err error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.storeTimeout)
		defer cancel()
		d, err = s.store.Decide(ctx, r)
		return err
	})
	if err != nil {
		return s.standby.Decide(r, reason(err))
	}
	if d.Admitted {
		s.standby.Follow(domain, checks, d.Lease)
	}
	return d
}

// giveBack releases what was granted to a caller that has gone, since nobody else
// will. If that fails, the lease expires.
func (s *Server) giveBack(ctx context.Context, id limit.LeaseID) {
	s.detached.Go(func() {
		ctx, cancel := detach(ctx)
		defer cancel()
		_, _ = s.release(ctx, limit.Ending{Lease: id})
	})
}
