package envoy

import (
	"fmt"
	"strings"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"weir/limit"
	"weir/policy"
)

// decided is a check and its result.
type decided struct {
	limit.Check
	limit.Result
}

// decision is everything that Encode is given, made of what the descriptors met.
type decision struct {
	a Ask
	m policy.Match
	d limit.Decision
	v limit.Verdict
}

// estimate is what the tests tell for a full lane or pool.
const estimate = 4 * time.Second

// decide makes a decision of the checks of each descriptor. Checks of one name
// and key are one check, as policy.Match has it.
func decide(descriptors ...[]decided) decision {
	var t decision
	index := make(map[string]int)
	for i, met := range descriptors {
		t.a.places = append(t.a.places, i)
		var m policy.Matched
		for _, c := range met {
			if c.Limit == nil {
				m.Unlimited = true
				continue
			}
			id := c.Name + c.Key
			if _, ok := index[id]; !ok {
				index[id] = len(t.m.Checks)
				t.m.Checks = append(t.m.Checks, c.Check)
				t.d.Results = append(t.d.Results, c.Result)
			}
			m.Checks = append(m.Checks, index[id])
		}
		t.m.Descriptors = append(t.m.Descriptors, m)
	}
	t.d.Admitted = !limit.Refused(t.m.Checks, t.d.Results)
	t.judge()
	return t
}

func (t *decision) judge() {
	t.v = limit.Judge(t.m.Checks, t.d, func(limit.Check) time.Duration { return estimate })
}

func (t decision) encode(o Options) *rls.RateLimitResponse {
	return Encode(t.a, t.m, t.d, t.v, o)
}

func passed(remaining int64, reset time.Duration) limit.Result {
	return limit.Result{Passed: true, Remaining: remaining, ResetAfter: reset}
}

func failed(remaining int64, retry, reset time.Duration) limit.Result {
	return limit.Result{Remaining: remaining, RetryAfter: retry, ResetAfter: reset}
}

func check(name string, l limit.Limit) limit.Check {
	key := name
	switch l.(type) {
	case limit.TokenBucket:
		key += " b"
	case limit.Window:
		key += " w"
	case limit.Concurrency:
		key += " c"
	}
	return limit.Check{Key: key, Name: name, Limit: l, Hits: 1}
}

func hourly(name string, maximum int64) limit.Check {
	return check(name, limit.Window{Max: maximum, Unit: limit.Hour, Multiplier: 1})
}

func daily(name string, maximum int64) limit.Check {
	return check(name, limit.Window{Max: maximum, Unit: limit.Day, Multiplier: 1})
}

// aBucket gains a token every 10 s.
func aBucket(name string, capacity int64) limit.Check {
	return check(name, limit.TokenBucket{Capacity: capacity, Scale: 10_000, Refill: 1})
}

func lane(name string, maximum int64) limit.Check {
	return check(name, limit.Concurrency{Max: maximum, Lease: time.Minute})
}

func pool(name string, maximum int64) limit.Check {
	c := lane(name, maximum)
	c.Class = limit.Pool
	return c
}

func shadow(c limit.Check) limit.Check {
	c.Shadow = true
	return c
}

func quota(c limit.Check, group int) limit.Check {
	c.Quota = group
	return c
}

func costing(c limit.Check, hits int64) limit.Check {
	c.Hits = hits
	return c
}

var unlimited = decided{}

// notation writes the codes, and what remains, in short: OVER [OK 7][OVER 0]; nil for
// a status without current_limit.
func notation(r *rls.RateLimitResponse) string {
	var b strings.Builder
	b.WriteString(strings.TrimSuffix(r.GetOverallCode().String(), "_LIMIT") + " ")
	for _, s := range r.GetStatuses() {
		code := strings.TrimSuffix(s.GetCode().String(), "_LIMIT")
		switch {
		case s.GetCurrentLimit() != nil || s.GetLimitRemaining() != 0:
			fmt.Fprintf(&b, "[%s %d]", code, s.GetLimitRemaining())
		default:
			fmt.Fprintf(&b, "[%s nil]", code)
		}
	}
	return b.String()
}
