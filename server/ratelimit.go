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
	// Usage before the release: it may be of the lease that ends.
	if err := s.settleAll(ctx, set, ask); err != nil {
		return nil, toStatus(err)
	}
	if err := s.releaseAll(ctx, m.GetDomain(), ask.Endings); err != nil {
		return nil, toStatus(err)
	}
	if len(ask.Request.Descriptors) == 0 { // nothing is asked
		return envoy.Encode(ask, policy.Match{}, limit.Decision{Admitted: true}, limit.Verdict{Admitted: true}, s.encode), nil
	}
	d, err := s.decide(ctx, set, ask.Request, asker{stream: ask.Stream})
	if err != nil {
		return nil, toStatus(err)
	}
	return envoy.Encode(ask, d.match, d.decision, d.verdict, s.encode), nil
}

// settleAll settles what a stream has used by what its lease has reserved of the limits
// that it meets, and charges what was not reserved, whatever is left of it; never to a
// concurrency. As a release it never fails open.
func (s rateLimit) settleAll(ctx context.Context, set *policy.Set, ask envoy.Ask) error {
	if len(ask.Usage.Descriptors) == 0 {
		return nil
	}
	m, err := match(set, ask.Usage)
	if err != nil {
		return err
	}
	u := limit.Usage{Domain: ask.Usage.Domain, Stream: ask.Stream, Lease: ask.UsageLease}
	for _, c := range m.Checks {
		if _, slot := c.Limit.(limit.Concurrency); !slot && (c.Hits != 0 || c.Reserve > 0) {
			u.Checks = append(u.Checks, c)
		}
	}
	if len(u.Checks) == 0 {
		return nil
	}
	ctx, cancel := detach(ctx)
	defer cancel()
	_, err = s.settle(ctx, u)
	return err
}

// releaseAll ends the work that a message ends. A release never fails open: an error
// is UNAVAILABLE, so that Envoy tries again.
func (s rateLimit) releaseAll(ctx context.Context, domain string, endings []limit.Ending) error {
	if len(endings) == 0 {
		return nil
	}
	ctx, cancel := detach(ctx)
	defer cancel()
	errs := make([]error, len(endings))
	each(endings, func(i int, e limit.Ending) {
		if e.Lease != "" && e.Lease.Domain() != domain { // another domain's lease is not held in this one
			s.metrics.released.WithLabelValues(label(s.policies(), domain), limit.NotHeld.String()).Inc()
			return
		}
		_, errs[i] = s.release(ctx, e, byRateLimitService)
	})
	return errors.Join(errs...)
}
