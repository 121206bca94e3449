package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"weir/envoy"
	"weir/limit"
	"weir/policy"
	weirv1 "weir/proto/weir/v1"
)

const (
	maxLeases = 1000 // of one Release or Renew
	atOnce    = 32   // of them at the store
)

// leases is weir's LeaseService.
type leases struct {
	weirv1.UnimplementedLeaseServiceServer
	*Server
}

// Acquire decides whether work may start, as ShouldRateLimit does, and tells it
// in full.
func (s leases) Acquire(ctx context.Context, m *weirv1.AcquireRequest) (*weirv1.AcquireResponse, error) {
	now := s.loaded.Load()
	if now.set == nil {
		return nil, toStatus(errNoPolicy)
	}
	r, err := request(m)
	if err != nil {
		return nil, toStatus(badRequest{err})
	}
	d, err := s.decide(ctx, now, r, asker{operation: limit.Operation{ID: m.GetOperationId(), Attempt: m.GetAttempt()}})
	if err != nil {
		return nil, toStatus(err)
	}
	return acquired(d), nil
}

// request reads what an Acquire asks for. Its errors are for the caller.
func request(m *weirv1.AcquireRequest) (policy.Request, error) {
	switch n := len(m.GetOperationId()); {
	case n > limit.MaxOperation:
		return policy.Request{}, fmt.Errorf("operation_id has %d bytes; use at most %d", n, limit.MaxOperation)
	case n == 0 && m.GetAttempt() > 0:
		return policy.Request{}, errors.New("attempt counts the tries of an operation, and there is no operation_id; send that too, or no attempt")
	}
	if err := envoy.CheckDomain(m.GetDomain()); err != nil {
		return policy.Request{}, err
	}
	if err := envoy.CheckDescriptors(len(m.GetDescriptors())); err != nil {
		return policy.Request{}, err
	}
	r := policy.Request{Domain: m.GetDomain(), Descriptors: make([]policy.Descriptor, len(m.GetDescriptors()))}
	for i, d := range m.GetDescriptors() {
		out := &r.Descriptors[i]
		out.Negative = d.GetRefund()
		switch {
		case d.Hits != nil:
			out.Hits, out.HasHits = d.GetHits(), true
		case m.Hits != nil: // 0 asks without charging, other than in Envoy's protocol
			out.Hits, out.HasHits = m.GetHits(), true
		}
		var err error
		if out.Entries, err = entries(d.GetEntries()); err != nil {
			return policy.Request{}, fmt.Errorf("descriptors[%d].%w", i, err)
		}
	}
	return r, nil
}

// entries reads those of one descriptor, without the reserved ones.
func entries(list []*weirv1.Entry) ([]limit.Entry, error) {
	if err := envoy.CheckEntries(len(list)); err != nil {
		return nil, err
	}
	var out []limit.Entry
	for i, e := range list {
		if err := envoy.CheckKey(i, e.GetKey()); err != nil {
			return nil, err
		}
		if !strings.HasPrefix(e.GetKey(), limit.ReservedPrefix) {
			out = append(out, limit.Entry{Key: e.GetKey(), Value: e.GetValue()})
		}
	}
	return out, nil
}

// acquired tells a decision in LeaseService's words.
func acquired(a decided) *weirv1.AcquireResponse {
	m, d := a.match, a.decision
	r := &weirv1.AcquireResponse{Admitted: d.Admitted, Replayed: d.Replayed, Verdict: tell(a.verdict)}
	if d.Lease != "" {
		r.Lease = &weirv1.Lease{Id: string(d.Lease), Ttl: durationpb.New(d.TTL), RenewAfter: durationpb.New(renewAfter(d.TTL))}
	}
	r.Bypass, r.BypassReason = bypass(d.Bypass), d.BypassReason
	for _, met := range m.Descriptors {
		s := &weirv1.DescriptorStatus{Unlimited: met.Unlimited}
		for _, i := range met.Checks {
			if d.Results[i].Bypass == limit.DefaultMode && !d.Results[i].Unknown {
				s.Limits = append(s.Limits, limitStatus(m.Checks[i], d.Results[i]))
			}
		}
		r.Statuses = append(r.Statuses, s)
	}
	return r
}

func bypass(m limit.FailureMode) weirv1.Bypass {
	switch m {
	case limit.DefaultMode:
	case limit.ModeOpen:
		return weirv1.Bypass_BYPASS_OPEN
	case limit.ModeLocal:
		return weirv1.Bypass_BYPASS_LOCAL
	case limit.ModeClosed:
		return weirv1.Bypass_BYPASS_CLOSED
	}
	return weirv1.Bypass_BYPASS_UNSPECIFIED
}

func limitStatus(c limit.Check, r limit.Result) *weirv1.LimitStatus {
	s := &weirv1.LimitStatus{Name: c.Name, Remaining: uint64(r.Remaining), Passed: r.Passed, Shadow: c.Shadow}
	s.Kind, s.Capacity = kindOf(c.Limit)
	if s.Kind != weirv1.LimitKind_LIMIT_KIND_CONCURRENCY {
		s.ResetAfter = durationpb.New(r.ResetAfter)
	}
	return s
}

// kindOf is what a limit counts, and how much it allows.
func kindOf(l limit.Limit) (kind weirv1.LimitKind, capacity uint64) {
	switch l := l.(type) {
	case limit.TokenBucket:
		return weirv1.LimitKind_LIMIT_KIND_TOKEN_BUCKET, uint64(l.Capacity)
	case limit.Window:
		return weirv1.LimitKind_LIMIT_KIND_WINDOW, uint64(l.Max)
	case limit.Concurrency:
		return weirv1.LimitKind_LIMIT_KIND_CONCURRENCY, uint64(l.Max)
	}
	return weirv1.LimitKind_LIMIT_KIND_UNSPECIFIED, 0
}

func tell(v limit.Verdict) *weirv1.Verdict {
	out := &weirv1.Verdict{Violations: violations(v.Violations), Shadowed: violations(v.Shadowed)}
	if v.Admitted {
		return out
	}
	out.Class, out.Reason, out.Limit = class(v.Class), string(v.Reason), v.Limit
	out.Estimated, out.Retryable = v.Estimated, v.Retryable
	if v.Retryable {
		out.RetryAfter = durationpb.New(v.RetryAfter)
	}
	return out
}

func violations(vs []limit.Violation) []*weirv1.Violation {
	var out []*weirv1.Violation
	for _, v := range vs {
		w := &weirv1.Violation{Limit: v.Limit, Class: class(v.Class), Reason: string(v.Reason), Estimated: v.Estimated, Retryable: v.Retryable}
		if v.Retryable {
			w.RetryAfter = durationpb.New(v.RetryAfter)
		}
		out = append(out, w)
	}
	return out
}

func class(c limit.Class) weirv1.Class {
	if c == limit.Pool {
		return weirv1.Class_CLASS_POOL
	}
	return weirv1.Class_CLASS_LANE
}

// Release ends leases. It finishes even if the caller has gone.
func (s leases) Release(ctx context.Context, m *weirv1.ReleaseRequest) (*weirv1.ReleaseResponse, error) {
	if err := leaseCount(len(m.GetLeaseIds())); err != nil {
		return nil, toStatus(err)
	}
	if err := checkUsage(m.GetUsage()); err != nil {
		return nil, toStatus(err)
	}
	r := &weirv1.ReleaseResponse{Results: make([]*weirv1.ReleaseResult, len(m.GetLeaseIds()))}
	ctx, cancel := detach(ctx)
	defer cancel()
	r.Usage = s.reconcile(ctx, m.GetUsage()) // which may come later too, so that it stops no release
	ids, first := distinct(m.GetLeaseIds())
	each(ids, func(i int, id string) {
		r.Results[first[id]] = &weirv1.ReleaseResult{Status: s.releaseOne(ctx, id)}
	})
	for i, id := range m.GetLeaseIds() {
		if j := first[id]; j != i {
			again := r.Results[j].GetStatus()
			if again == weirv1.ReleaseStatus_RELEASE_STATUS_RELEASED {
				again = weirv1.ReleaseStatus_RELEASE_STATUS_NOT_HELD // the first ended it
			}
			r.Results[i] = &weirv1.ReleaseResult{Status: again}
		}
	}
	return r, nil
}

// distinct returns the different ids, in order, and where each stands first.
func distinct(ids []string) (different []string, first map[string]int) {
	first = make(map[string]int, len(ids))
	for i, id := range ids {
		if _, again := first[id]; !again {
			first[id] = i
			different = append(different, id)
		}
	}
	return different, first
}

func (s leases) releaseOne(ctx context.Context, text string) weirv1.ReleaseStatus {
	id, err := limit.ParseLeaseID(text)
	if err != nil {
		return weirv1.ReleaseStatus_RELEASE_STATUS_NOT_HELD // no lease has such an id
	}
	result, err := s.release(ctx, limit.Ending{Lease: id}, byLeaseService)
	if err != nil {
		return weirv1.ReleaseStatus_RELEASE_STATUS_UNAVAILABLE
	}
	switch result {
	case limit.Released:
		return weirv1.ReleaseStatus_RELEASE_STATUS_RELEASED
	case limit.Expired:
		return weirv1.ReleaseStatus_RELEASE_STATUS_EXPIRED
	case limit.NotHeld, limit.Lingering: // only what ended early lingers, and that is Envoy's to tell
	}
	return weirv1.ReleaseStatus_RELEASE_STATUS_NOT_HELD
}

// renewAfter is when a holder should renew: after a third of its lease's life, so
// that it can try again.
func renewAfter(ttl time.Duration) time.Duration {
	return max(time.Millisecond, (ttl / 3).Truncate(time.Millisecond))
}

// Renew extends leases that are held.
func (s leases) Renew(ctx context.Context, m *weirv1.RenewRequest) (*weirv1.RenewResponse, error) {
	if err := leaseCount(len(m.GetLeaseIds())); err != nil {
		return nil, toStatus(err)
	}
	ctx, cancel := detach(ctx)
	defer cancel()
	r := &weirv1.RenewResponse{Results: make([]*weirv1.RenewResult, len(m.GetLeaseIds()))}
	each(m.GetLeaseIds(), func(i int, id string) { r.Results[i] = s.renewOne(ctx, id) })
	return r, nil
}

func (s leases) renewOne(ctx context.Context, text string) *weirv1.RenewResult {
	id, err := limit.ParseLeaseID(text)
	if err != nil { // no lease has such an id
		return &weirv1.RenewResult{Status: weirv1.RenewStatus_RENEW_STATUS_LOST}
	}
	n, err := s.renew(ctx, limit.Extension{Lease: id})
	switch {
	case err != nil:
		return &weirv1.RenewResult{Status: weirv1.RenewStatus_RENEW_STATUS_UNAVAILABLE}
	case !n.Renewed:
		return &weirv1.RenewResult{Status: weirv1.RenewStatus_RENEW_STATUS_LOST}
	}
	return &weirv1.RenewResult{
		Status: weirv1.RenewStatus_RENEW_STATUS_RENEWED, Ttl: durationpb.New(n.TTL), RenewAfter: durationpb.New(renewAfter(n.TTL)),
	}
}

// leaseCount bounds a batch of leases.
func leaseCount(n int) error {
	switch {
	case n == 0:
		return badRequestf("no lease ids; send at least one")
	case n > maxLeases:
		return badRequestf("%d lease ids, at most %d may come in one call; send several calls", n, maxLeases)
	}
	return nil
}

// each calls f for every id, a bounded number at once, and waits for all.
func each[T any](ids []T, f func(i int, id T)) {
	if len(ids) == 1 {
		f(0, ids[0])
		return
	}
	var work sync.WaitGroup
	next := make(chan int)
	for range min(atOnce, len(ids)) {
		work.Go(func() {
			for i := range next {
				f(i, ids[i])
			}
		})
	}
	for i := range ids {
		next <- i
	}
	close(next)
	work.Wait()
}
