package server

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"weir/envoy"
	"weir/limit"
	"weir/policy"
	weirv1 "weir/proto/weir/v1"
)

// Inspect tells how the limits stand that a descriptor meets. It takes nothing, and
// never fails open.
func (s leases) Inspect(ctx context.Context, m *weirv1.InspectRequest) (*weirv1.InspectResponse, error) {
	set := s.policies()
	if set == nil {
		return nil, toStatus(errNoPolicy)
	}
	if err := envoy.CheckDomain(m.GetDomain()); err != nil {
		return nil, toStatus(badRequest{err})
	}
	subject, err := entries(m.GetEntries())
	if err != nil {
		return nil, toStatus(badRequest{err})
	}
	match := set.Match(policy.Request{Domain: m.GetDomain(), Descriptors: []policy.Descriptor{{Entries: subject}}})
	states, err := s.inspect(ctx, m.GetDomain(), match.Checks, s.storeTimeout)
	if err != nil {
		return nil, toStatus(err)
	}
	r := &weirv1.InspectResponse{Unlimited: match.Descriptors[0].Unlimited}
	for i, c := range match.Checks {
		r.Limits = append(r.Limits, s.limitState(m.GetDomain(), c, states[i]))
	}
	return r, nil
}

// inspect asks the store, which must answer within patience. As a decision, it does not end with
// its caller: one that leaves says nothing about the store.
func (s *Server) inspect(ctx context.Context, domain string, checks []limit.Check, patience time.Duration) (states []limit.State, err error) {
	if len(checks) == 0 {
		return nil, nil
	}
	err = s.call(ctx, "inspect", domain, func() (err error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		states, err = s.store.Inspect(ctx, checks)
		return err
	})
	return states, err
}

// limitState tells a state in LeaseService's words.
func (s *Server) limitState(domain string, c limit.Check, state limit.State) *weirv1.LimitState {
	out := &weirv1.LimitState{
		Name: c.Name, Class: class(c.Class), Shadow: c.Shadow,
		Remaining: uint64(state.Remaining), Level: state.Level, Count: uint64(state.Count),
	}
	out.Kind, out.Capacity = kindOf(c.Limit)
	wait := state.RetryAfter
	switch {
	case out.Kind != weirv1.LimitKind_LIMIT_KIND_CONCURRENCY:
		out.ResetAfter = durationpb.New(state.ResetAfter)
	case state.Remaining == 0:
		wait, out.Estimated = s.holds.estimate(domain, c), true
	}
	if wait > 0 {
		out.RetryAfter = durationpb.New(wait)
	}
	for _, h := range state.Holders {
		out.Holders = append(out.Holders, &weirv1.Holder{Lease: h.Short(), ExpiresAfter: durationpb.New(h.ExpiresAfter)})
	}
	return out
}
