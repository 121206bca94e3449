package envoy

import (
	"cmp"
	"math"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"weir/limit"
	"weir/policy"
)

// Options are what the operator chose to put into responses. The zero value is
// the default.
type Options struct {
	// LeaseHeader sends the lease id to the upstream as x-weir-lease.
	LeaseHeader bool
	// RateLimitHeaders sends ratelimit and ratelimit-policy to the client.
	RateLimitHeaders bool
}

// Encode tells a decision in Envoy's words: m is what a.Request meets, d what
// was decided for m.Checks, and v the verdict on that. If there was nothing to
// ask, m is empty and v admits.
func Encode(a Ask, m policy.Match, d limit.Decision, v limit.Verdict, o Options) *rls.RateLimitResponse {
	r := &rls.RateLimitResponse{
		// Never UNKNOWN: Envoy takes that for OK.
		OverallCode:     rls.RateLimitResponse_OK,
		Statuses:        statuses(a, m, d, v),
		DynamicMetadata: metadata(d, v),
	}
	if v.Admitted {
		if o.LeaseHeader && d.Lease != "" {
			r.RequestHeadersToAdd = []*corev3.HeaderValue{{Key: "x-weir-lease", Value: string(d.Lease)}}
		}
	} else {
		r.OverallCode = rls.RateLimitResponse_OVER_LIMIT
		r.RawBody = v.Problem()
	}
	r.ResponseHeadersToAdd = responseHeaders(m, d, v, o)
	return r
}

// status is a DescriptorStatus and what hangs on it, so that all statuses of a
// response are one allocation.
type status struct {
	status     rls.RateLimitResponse_DescriptorStatus
	limit      rls.RateLimitResponse_RateLimit
	multiplier wrapperspb.UInt32Value
	reset      durationpb.Duration
}

// statuses returns one status for each descriptor of the message, in order.
func statuses(a Ask, m policy.Match, d limit.Decision, v limit.Verdict) []*rls.RateLimitResponse_DescriptorStatus {
	list := make([]*rls.RateLimitResponse_DescriptorStatus, len(a.places))
	all := make([]status, len(a.places))
	for i, place := range a.places {
		s := &all[i]
		s.status.Code = rls.RateLimitResponse_OK
		if place >= 0 {
			s.tell(m, m.Descriptors[place], d, v)
		}
		list[i] = &s.status
	}
	return list
}

// tell fills in the status of a descriptor that met limits: that of its tightest
// enforced one. Shadow limits never touch a status.
func (s *status) tell(m policy.Match, met policy.Matched, d limit.Decision, v limit.Verdict) {
	var tightest standing
	for _, i := range met.Checks {
		if c := &m.Checks[i]; !c.Shadow {
			if t := stand(c, d.Results[i], v); tightest.check == nil || compare(t, tightest) < 0 {
				tightest = t
			}
		}
	}
	if tightest.check == nil {
		if met.Unlimited {
			s.status.LimitRemaining = math.MaxUint32
		}
		return
	}
	if !tightest.result.Passed {
		s.status.Code = rls.RateLimitResponse_OVER_LIMIT
	}
	if d.Bypass != limit.DefaultMode {
		return // nobody knows how the limit stands
	}
	s.status.CurrentLimit = s.current(tightest.check)
	s.status.LimitRemaining = saturate(tightest.remaining())
	if after, ok := tightest.resetAfter(v); ok {
		s.reset.Seconds = seconds(after)
		s.status.DurationUntilReset = &s.reset
	}
}

// current is the limit of c in the words of rls.proto.
func (s *status) current(c *limit.Check) *rls.RateLimitResponse_RateLimit {
	s.limit.Name = c.Name
	switch l := c.Limit.(type) {
	case limit.TokenBucket:
		s.limit.RequestsPerUnit = saturate(l.Capacity)
		s.limit.Unit = rls.RateLimitResponse_RateLimit_SECOND
		s.multiplier.Value = saturate(seconds(l.FillTime()))
		s.limit.UnitMultiplier = &s.multiplier
	case limit.Window:
		s.limit.RequestsPerUnit = saturate(l.Max)
		s.limit.Unit = units[l.Unit]
		// rls.proto: "If not specified, defaults to 1."
		if l.Multiplier != 1 {
			s.multiplier.Value = saturate(l.Multiplier)
			s.limit.UnitMultiplier = &s.multiplier
		}
	case limit.Concurrency:
		s.limit.RequestsPerUnit = saturate(l.Max)
		s.limit.Unit = rls.RateLimitResponse_RateLimit_UNKNOWN
	}
	return &s.limit
}

var units = [...]rls.RateLimitResponse_RateLimit_Unit{
	limit.NoUnit: rls.RateLimitResponse_RateLimit_UNKNOWN,
	limit.Second: rls.RateLimitResponse_RateLimit_SECOND,
	limit.Minute: rls.RateLimitResponse_RateLimit_MINUTE,
	limit.Hour:   rls.RateLimitResponse_RateLimit_HOUR,
	limit.Day:    rls.RateLimitResponse_RateLimit_DAY,
	limit.Week:   rls.RateLimitResponse_RateLimit_WEEK,
	limit.Month:  rls.RateLimitResponse_RateLimit_MONTH,
	limit.Year:   rls.RateLimitResponse_RateLimit_YEAR,
}

// standing is how an enforced check stands after the decision.
type standing struct {
	check  *limit.Check
	result limit.Result
	never  bool          // it did not pass, and never can
	wait   time.Duration // until it may pass; 0 if it did, or never can
}

func stand(c *limit.Check, r limit.Result, v limit.Verdict) standing {
	s := standing{check: c, result: r}
	if r.Passed {
		return s
	}
	if s.never = c.Impossible() != limit.NoReason; s.never {
		return s
	}
	s.wait = r.RetryAfter
	if _, ok := c.Limit.(limit.Concurrency); ok {
		// No store knows this wait: the verdict has the estimate.
		for _, w := range v.Violations {
			if w.Estimated && w.Limit == c.Name {
				s.wait = w.RetryAfter
				break // the longest comes first
			}
		}
	}
	return s
}

// compare orders the tightest first: what did not pass, by the longest wait; then
// the smallest remaining. Ties are broken by what they are, never by position.
func compare(a, b standing) int {
	switch {
	case a.result.Passed != b.result.Passed:
		return first(!a.result.Passed)
	case a.never != b.never:
		return first(a.never)
	}
	return cmp.Or(
		cmp.Compare(b.wait, a.wait),
		cmp.Compare(a.result.Remaining, b.result.Remaining),
		cmp.Compare(b.result.ResetAfter, a.result.ResetAfter),
		cmp.Compare(a.check.Name, b.check.Name),
	)
}

func first(a bool) int {
	if a {
		return -1
	}
	return 1
}

// remaining is what the wire tells: 0 if the check did not pass, whatever is
// left, since Envoy takes the smallest of a response for its headers.
func (s standing) remaining() int64 {
	if !s.result.Passed {
		return 0
	}
	return s.result.Remaining
}

// resetAfter is when it is worth while to come back, if that is known.
//
// In a refused request every check that did not pass tells the wait of the whole
// request: before it the same request is refused again. Envoy makes its
// x-ratelimit-reset of the first status with nothing remaining, so that a shorter
// wait would depend on the order of the descriptors (TestOfTwoRefusalsTheLongerWaitIsTold).
func (s standing) resetAfter(v limit.Verdict) (after time.Duration, ok bool) {
	switch {
	case !s.result.Passed && !v.Admitted:
		return v.RetryAfter, v.Retryable
	case !s.result.Passed:
		return s.wait, !s.never
	}
	_, concurrency := s.check.Limit.(limit.Concurrency)
	return s.result.ResetAfter, !concurrency
}

// seconds is d in whole seconds, rounded up: Envoy cuts, and a client must not
// come back too early. Never negative.
func seconds(d time.Duration) int64 {
	s := int64(d / time.Second)
	if d%time.Second > 0 {
		s++
	}
	return max(0, s)
}

// saturate is n within a uint32.
func saturate(n int64) uint32 { return uint32(min(max(0, n), math.MaxUint32)) }
