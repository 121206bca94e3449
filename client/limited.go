package client

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	weirv1 "weir/proto/weir/v1"
)

// missingRetryAfter is how long a caller waits if a refusal does not say.
const missingRetryAfter = time.Second

// longest is the longest Retry-After: sums with it don't overflow.
const longest = 100 * 365 * 24 * time.Hour

// Class says whose allowance refused.
type Class string

const (
	// Lane is the caller's own; over HTTP a 429.
	Lane Class = "lane"
	// Pool is the one that all callers share; over HTTP a 503.
	Pool Class = "pool"
)

// Bypass is how a decision was made if not by the service's store.
type Bypass string

const (
	// NoBypass says that the store decided.
	NoBypass Bypass = ""
	// BypassOpen says that the service admitted unchecked.
	BypassOpen Bypass = "open"
	// BypassClosed says that the service refused unchecked.
	BypassClosed Bypass = "closed"
	// BypassLocal says that one replica of the service decided alone, by its share.
	BypassLocal Bypass = "local"
	// BypassClient says that the service did not answer, and this client's FailureMode
	// decided.
	BypassClient Bypass = "client"
)

// LimitedError is a refusal: the work may not start, and nothing was taken. It is an
// [http.Handler] that answers an HTTP request so, and has the gRPC status for a
// gRPC handler to return.
type LimitedError struct {
	// Class says whose allowance refused: the caller's own if that is one of them.
	Class Class
	// Reason is one word: "bucket_empty", "window_full", "lane_full", "pool_full",
	// "cost_exceeds_capacity", "banned", "store_unavailable", [ReasonServiceAway]. Expect more.
	Reason string
	// Limit is the name of the one that makes the caller wait longest; empty if the
	// service is away.
	Limit string
	// RetryAfter is when to ask again; 1 s if nobody knows, and 0 unless Retryable.
	RetryAfter time.Duration
	// Estimated: RetryAfter is a guess.
	Estimated bool
	// Retryable: asking again can help.
	Retryable bool
	// Limits are all that refused, the one that waits longest first.
	Limits []Violation
	// Bypass is how this was decided without the service's store.
	Bypass Bypass

	bypassReason string
	err          error // why the service is away, in a refusal by the client; or nil
}

// Violation is a limit that refused.
type Violation struct {
	Limit      string
	Class      Class
	Reason     string
	RetryAfter time.Duration // 0 unless Retryable
	Estimated  bool
	Retryable  bool
}

// Error is for logs: it has names of the policy, and nothing of the request.
func (e *LimitedError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "client: refused (%s): %s", e.Class, e.Reason)
	if e.Limit != "" {
		fmt.Fprintf(&b, " of limit %q", e.Limit)
	}
	switch {
	case !e.Retryable:
		b.WriteString("; asking again does not help")
	case e.Estimated:
		fmt.Fprintf(&b, "; retry after about %v", e.RetryAfter)
	default:
		fmt.Fprintf(&b, "; retry after %v", e.RetryAfter)
	}
	return b.String()
}

// Unwrap is why the service is away, if the client refused for that.
func (e *LimitedError) Unwrap() error { return e.err }

// refusal reads one from an answer.
func refusal(m *weirv1.AcquireResponse) *LimitedError {
	v := m.GetVerdict()
	e := &LimitedError{
		Class: classOf(v.GetClass()), Reason: v.GetReason(), Limit: v.GetLimit(),
		Estimated: v.GetEstimated(), Retryable: v.GetRetryable(),
		Bypass: bypassOf(m.GetBypass()), bypassReason: m.GetBypassReason(),
	}
	if e.Retryable {
		e.RetryAfter = missingRetryAfter
		if v.RetryAfter != nil {
			e.RetryAfter = min(longest, max(0, v.GetRetryAfter().AsDuration()))
		}
	}
	for _, w := range v.GetViolations() {
		e.Limits = append(e.Limits, Violation{
			Limit: w.GetLimit(), Class: classOf(w.GetClass()), Reason: w.GetReason(),
			RetryAfter: w.GetRetryAfter().AsDuration(), Estimated: w.GetEstimated(), Retryable: w.GetRetryable(),
		})
	}
	return e
}

func classOf(c weirv1.Class) Class {
	if c == weirv1.Class_CLASS_POOL {
		return Pool
	}
	return Lane
}

func bypassOf(b weirv1.Bypass) Bypass {
	switch b {
	case weirv1.Bypass_BYPASS_OPEN:
		return BypassOpen
	case weirv1.Bypass_BYPASS_CLOSED:
		return BypassClosed
	case weirv1.Bypass_BYPASS_LOCAL:
		return BypassLocal
	case weirv1.Bypass_BYPASS_UNSPECIFIED:
	}
	return NoBypass
}

// code is the refusal's over HTTP.
func (e *LimitedError) code() int {
	if e.Class == Pool {
		return http.StatusServiceUnavailable
	}
	return http.StatusTooManyRequests
}

// violated are the names of the limits that refused, each once, at most 64 as in weir's
// own answers.
func (e *LimitedError) violated() []string {
	names := []string{}
	for _, v := range e.Limits {
		if !slices.Contains(names, v.Limit) && len(names) < 64 {
			names = append(names, v.Limit)
		}
	}
	return names
}
