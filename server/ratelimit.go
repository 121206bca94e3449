package server

import (
	"context"
	"errors"
	"path"
	"slices"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"

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
	a, err := s.answer(ctx, m)
	if err != nil {
		return nil, err
	}
	return envoy.Encode(a.ask, a.match, a.decision, a.verdict, s.encode), nil
}

// answered is an Ask with what was decided. If nothing was asked it admits.
type answered struct {
	ask envoy.Ask
	decided
}

// answer is ShouldRateLimit, before it is put into Envoy's words. Its error is a gRPC status.
func (s rateLimit) answer(ctx context.Context, m *rls.RateLimitRequest) (answered, error) {
	now := s.loaded.Load()
	if now.set == nil {
		return answered{}, toStatus(errNoPolicy)
	}
	ask, err := envoy.Decode(m)
	if err != nil {
		return answered{}, toStatus(badRequest{err})
	}
	// Usage before the release: it may be of the lease that ends.
	if err := s.settleAll(ctx, now.set, ask); err != nil {
		return answered{}, toStatus(err)
	}
	if err := s.releaseAll(ctx, m.GetDomain(), ask.Endings); err != nil {
		return answered{}, toStatus(err)
	}
	if len(ask.Request.Descriptors) == 0 { // nothing is asked
		return answered{ask, decided{decision: limit.Decision{Admitted: true}, verdict: limit.Verdict{Admitted: true}}}, nil
	}
	d, err := s.decide(ctx, now, ask.Request, asker{stream: ask.Stream})
	if err != nil {
		return answered{}, toStatus(err)
	}
	return answered{ask, d}, nil
}

// register registers the service: as generated code does, but for the answers of
// ShouldRateLimit, which are bytes for [wire] and never a message.
func (s rateLimit) register(services grpc.ServiceRegistrar) {
	desc := rls.RateLimitService_ServiceDesc
	desc.Methods = slices.Clone(desc.Methods)
	for i, m := range desc.Methods {
		if m.MethodName != path.Base(rls.RateLimitService_ShouldRateLimit_FullMethodName) {
			continue
		}
		info := &grpc.UnaryServerInfo{Server: s, FullMethod: rls.RateLimitService_ShouldRateLimit_FullMethodName}
		desc.Methods[i].Handler = func(_ any, ctx context.Context, next func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			m := new(rls.RateLimitRequest)
			if err := next(m); err != nil {
				return nil, err
			}
			if interceptor == nil {
				return s.encoded(ctx, m)
			}
			return interceptor(ctx, m, info, s.encoded)
		}
	}
	services.RegisterService(&desc, s)
}

// encoded is ShouldRateLimit of m, a RateLimitRequest, on the wire.
func (s rateLimit) encoded(ctx context.Context, m any) (any, error) {
	a, err := s.answer(ctx, m.(*rls.RateLimitRequest)) //nolint:errcheck // it is what the handler made
	if err != nil {
		return nil, err
	}
	return encoded(envoy.Append(make([]byte, 0, answerSize), a.ask, a.match, a.decision, a.verdict, s.encode)), nil
}

// answerSize is room for the answer about a limit or two.
const answerSize = 192

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
