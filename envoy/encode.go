package envoy

import (
	"cmp"
	"math"
	"slices"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/proto"

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

// refusalSize is room for most refusals, so that b grows once: their problem and metadata are
// far longer than what an admitted request is told.
const refusalSize = 896

// Append appends a decision in Envoy's words, a RateLimitResponse on the wire, to b: m is what
// a.Request meets, d what was decided for m.Checks, and v the verdict on that. If there was
// nothing to ask, m is empty and v admits.
func Append(b []byte, a Ask, m policy.Match, d limit.Decision, v limit.Verdict, o Options) []byte {
	// Never UNKNOWN: Envoy takes that for OK.
	code := rls.RateLimitResponse_OK
	if !v.Admitted {
		code = rls.RateLimitResponse_OVER_LIMIT
		b = slices.Grow(b, refusalSize)
	}
	b = number(b, 1, uint64(code))
	for _, place := range a.places {
		var at int
		b, at = begin(b, 2)
		if place < 0 {
			b = number(b, 1, uint64(rls.RateLimitResponse_OK))
		} else {
			b = appendStatus(b, m, m.Descriptors[place], d, v)
		}
		b = end(b, at)
	}
	b = appendResponseHeaders(b, m, d, v, o)
	if v.Admitted && o.LeaseHeader && d.Lease != "" {
		b = appendHeader(b, 4, "x-weir-lease", string(d.Lease))
	}
	var at int
	if !v.Admitted {
		b, at = begin(b, 5)
		b = end(v.AppendProblem(b), at)
	}
	b, at = begin(b, 6)
	return end(appendMetadata(b, d, v), at)
}

// Encode is Append as a message.
func Encode(a Ask, m policy.Match, d limit.Decision, v limit.Verdict, o Options) *rls.RateLimitResponse {
	r := new(rls.RateLimitResponse)
	if err := proto.Unmarshal(Append(nil, a, m, d, v, o), r); err != nil {
		panic(err) // a bug of Append's
	}
	return r
}

// appendStatus appends the status of a descriptor that met limits: that of its tightest
// enforced one. Shadow limits never touch a status.
func appendStatus(b []byte, m policy.Match, met policy.Matched, d limit.Decision, v limit.Verdict) []byte {
	var tightest standing
	for _, i := range met.Checks {
		if c := &m.Checks[i]; !c.Shadow && !d.Results[i].Unknown {
			if t := stand(c, d.Results[i], v); tightest.check == nil || compare(t, tightest) < 0 {
				tightest = t
			}
		}
	}
	code := rls.RateLimitResponse_OK
	if tightest.check != nil && !tightest.result.Passed {
		code = rls.RateLimitResponse_OVER_LIMIT
	}
	b = number(b, 1, uint64(code))
	switch {
	case tightest.check == nil && met.Unlimited:
		return number(b, 3, math.MaxUint32)
	case tightest.check == nil || d.Bypass != limit.DefaultMode:
		return b // nobody knows how the limit stands
	}
	b, at := begin(b, 2)
	b = end(appendLimit(b, tightest.check), at)
	b = number(b, 3, uint64(saturate(tightest.remaining())))
	if after, ok := tightest.resetAfter(v); ok {
		b, at = begin(b, 4)
		b = end(number(b, 1, uint64(seconds(after))), at)
	}
	return b
}

// appendLimit appends the limit of c in the words of rls.proto.
func appendLimit(b []byte, c *limit.Check) []byte {
	var most, multiplier uint32
	unit, multiplied := rls.RateLimitResponse_RateLimit_UNKNOWN, false
	switch l := c.Limit.(type) {
	case limit.TokenBucket:
		most, unit = saturate(l.Capacity), rls.RateLimitResponse_RateLimit_SECOND
		multiplier, multiplied = saturate(seconds(l.FillTime())), true
	case limit.Window:
		most, unit = saturate(l.Max), units[l.Unit]
		// rls.proto: "If not specified, defaults to 1."
		multiplier, multiplied = saturate(l.Multiplier), l.Multiplier != 1
	case limit.Concurrency:
		most = saturate(l.Max)
	}
	b = number(b, 1, uint64(most))
	b = number(b, 2, uint64(unit))
	b = text(b, 3, c.Name)
	if multiplied {
		var at int
		b, at = begin(b, 4)
		b = end(number(b, 1, uint64(multiplier)), at)
	}
	return b
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
