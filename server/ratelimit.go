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
	set := s.policies.Load()
	if set == nil {
		return nil, toStatus(errNoPolicy)
	}
	ask, err := envoy.Decode(m)
	if errors.Is(err, envoy.ErrNotSupported) {
		return nil, toStatus(err)
	}
	if err != nil {
		return nil, toStatus(badRequest(err.Error()))
	}
	for _, r := range ask.Releases {
		if r.Lease.Domain() != m.GetDomain() {
			s.metrics.released.WithLabelValues(label(set, m.GetDomain()), limit.NotHeld.String()).Inc()
			continue // another domain's lease is not held in this one
		}
		// A release never fails open: UNAVAILABLE, so that Envoy tries again.
		if _, err := s.release(ctx, r.Lease); err != nil {
			return nil, toStatus(err)
		}
	}
	if len(ask.Request.Descriptors) == 0 { // nothing is asked
		return envoy.Encode(ask, policy.Match{}, limit.Decision{Admitted: true}, limit.Verdict{Admitted: true}, s.encode), nil
	}
	match := set.Match(ask.Request)
	s.countMisuse(set, ask.Request, match)
	d, v := s.decide(ctx, set, ask.Request.Domain, match.Checks)
	return envoy.Encode(ask, match, d, v, s.encode), nil
}
