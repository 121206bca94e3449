package server

import (
	"context"
	"errors"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"weir/envoy"
	"weir/limit"
	"weir/policy"
)

// rateLimit is Envoy's RateLimitService.
type rateLimit struct {
	rls.UnimplementedRateLimitServiceServer
	*Server
}

// ShouldRateLimit decides whether work may start, and ends leases whose
// descriptors say so.
func (s rateLimit) ShouldRateLimit(ctx context.Context, m *rls.RateLimitRequest) (*rls.RateLimitResponse, error) {
	set := s.policies()
	if set == nil {
		return nil, toStatus(errNoPolicy)
	}
	ask, err := envoy.Decode(m)
	if err != nil {
		return nil, toStatus(badRequest{err})
	}
	if err := s.releaseAll(ctx, m.GetDomain(), ask.Releases); err != nil {
		return nil, toStatus(err)
	}
	if len(ask.Request.Descriptors) == 0 { // nothing is asked
		return envoy.Encode(ask, policy.Match{}, limit.Decision{Admitted: true}, limit.Verdict{Admitted: true}, s.encode), nil
	}
	d, err := s.decide(ctx, set, ask.Request)
	if err != nil {
		return nil, toStatus(err)
	}
	return envoy.Encode(ask, d.match, d.decision, d.verdict, s.encode), nil
}

// releaseAll ends the leases of a message. A release never fails open: an error is
// UNAVAILABLE, so that Envoy tries again.
func (s rateLimit) releaseAll(ctx context.Context, domain string, ids []limit.LeaseID) error {
	if len(ids) == 0 {
		return nil
	}
	ctx, cancel := detach(ctx)
	defer cancel()
	errs := make([]error, len(ids))
	each(ids, func(i int, id limit.LeaseID) {
		if id.Domain() != domain { // another domain's lease is not held in this one
			s.metrics.released.WithLabelValues(label(s.policies(), domain), limit.NotHeld.String()).Inc()
			return
		}
		_, errs[i] = s.release(ctx, id)
	})
	return errors.Join(errs...)
}
