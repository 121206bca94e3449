package envoy

import (
	"encoding/json"
	"fmt"
	"net/http"

	"weir/limit"
)

// A problemDetails is the body of a refusal, by RFC 9457. The types are those of
// draft-ietf-httpapi-ratelimit-headers-11, section 5, and the titles those that
// it registers.
type problemDetails struct {
	Type       string   `json:"type"`
	Title      string   `json:"title"`
	Status     int      `json:"status"`
	Detail     string   `json:"detail"`
	RetryAfter *int64   `json:"retry_after_ms,omitempty"`
	Violated   []string `json:"violated-policies"`
	Retryable  bool     `json:"retryable"`
}

// problem is the body for a refused request. Envoy sends it as it is.
func problem(v limit.Verdict) []byte {
	p := problemDetails{
		Type:      "https://iana.org/assignments/http-problem-types#quota-exceeded",
		Title:     "Quota Exceeded",
		Status:    http.StatusTooManyRequests,
		Detail:    detail(v),
		Violated:  names(v.Violations),
		Retryable: v.Retryable,
	}
	if v.Class == limit.Pool {
		p.Type = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
		p.Title = "Temporary Reduced Capacity"
		p.Status = http.StatusServiceUnavailable
	}
	if v.Retryable {
		millis := v.RetryAfter.Milliseconds()
		p.RetryAfter = &millis
	}
	body, err := json.Marshal(p)
	if err != nil {
		return nil // texts, numbers and booleans always marshal
	}
	return body
}

// detail says in one sentence what happened and what helps. It has names from the
// policy, and no request values.
func detail(v limit.Verdict) string {
	wait := fmt.Sprintf("retry after %v", v.RetryAfter)
	if v.Estimated {
		wait = fmt.Sprintf("retry after about %v, which is an estimate", v.RetryAfter)
	}
	if !v.Retryable {
		wait = "retrying does not help"
	}
	var what string
	switch v.Reason {
	case limit.BucketEmpty:
		what = fmt.Sprintf("The token bucket of limit %q has too few tokens left", v.Limit)
	case limit.WindowFull:
		what = fmt.Sprintf("The quota of limit %q has too little left in its window", v.Limit)
	case limit.LaneFull:
		what = fmt.Sprintf("All in-flight slots of limit %q are taken", v.Limit)
	case limit.PoolFull:
		what = fmt.Sprintf("All in-flight slots of limit %q, which callers share, are taken", v.Limit)
	case limit.CostExceedsCapacity:
		what = fmt.Sprintf("The request costs more than limit %q can ever allow", v.Limit)
	case limit.Banned:
		what = fmt.Sprintf("Limit %q allows no requests", v.Limit)
	case limit.StoreUnavailable:
		what = fmt.Sprintf("Limit %q cannot be looked up at present", v.Limit)
	case limit.StreamEnded:
		what = "The end of the stream that asks was told before"
	case limit.NoReason:
		what = "The request was refused"
	default:
		what = fmt.Sprintf("Limit %q refused the request (%s)", v.Limit, v.Reason)
	}
	return what + "; " + wait + "."
}
