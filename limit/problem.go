package limit

import (
	"encoding/json"
	"fmt"
	"slices"
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

// The codes of HTTP for a refusal, by RFC 6585 and RFC 9110.
const (
	tooManyRequests    = 429
	serviceUnavailable = 503
)

// Code is the code of HTTP for a refusal of this class: 429, or 503.
func (c Class) Code() int {
	if c == Pool {
		return serviceUnavailable
	}
	return tooManyRequests
}

// Problem is the body of HTTP for a refused request, in JSON. It has names from the
// policy, and no values of requests. A StoreUnavailable without a Limit is that of a
// service that does not answer.
func (v Verdict) Problem() []byte {
	p := problemDetails{
		Type:      "https://iana.org/assignments/http-problem-types#quota-exceeded",
		Title:     "Quota Exceeded",
		Status:    v.Class.Code(),
		Detail:    v.detail(),
		Violated:  Names(v.Violations),
		Retryable: v.Retryable,
	}
	if v.Class == Pool {
		p.Type = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
		p.Title = "Temporary Reduced Capacity"
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

// detail says in one sentence what happened and what helps.
func (v Verdict) detail() string {
	wait := fmt.Sprintf("retry after %v", v.RetryAfter)
	if v.Estimated {
		wait = fmt.Sprintf("retry after about %v, which is an estimate", v.RetryAfter)
	}
	if !v.Retryable {
		wait = "retrying does not help"
	}
	var what string
	switch v.Reason {
	case BucketEmpty:
		what = fmt.Sprintf("The token bucket of limit %q has too few tokens left", v.Limit)
	case WindowFull:
		what = fmt.Sprintf("The quota of limit %q has too little left in its window", v.Limit)
	case LaneFull:
		what = fmt.Sprintf("All in-flight slots of limit %q are taken", v.Limit)
	case PoolFull:
		what = fmt.Sprintf("All in-flight slots of limit %q, which callers share, are taken", v.Limit)
	case CostExceedsCapacity:
		what = fmt.Sprintf("The request costs more than limit %q can ever allow", v.Limit)
	case Banned:
		what = fmt.Sprintf("Limit %q allows no requests", v.Limit)
	case StoreUnavailable:
		what = fmt.Sprintf("Limit %q cannot be looked up at present", v.Limit)
		if v.Limit == "" {
			what = "The limits cannot be looked up at present"
		}
	case StreamEnded:
		what = "The end of the stream that asks was told before"
	case NoReason:
		what = "The request was refused"
	default:
		what = fmt.Sprintf("Limit %q refused the request (%s)", v.Limit, v.Reason)
	}
	return what + "; " + wait + "."
}

// MaxNames is how many names of limits a body or a header lists at most: those that matter
// most come first.
const MaxNames = 64

// Names are the different names of the limits, in order, at most MaxNames; never nil.
func Names(vs []Violation) []string {
	list := make([]string, 0, min(len(vs), MaxNames))
	for _, v := range vs {
		if len(list) == MaxNames {
			break
		}
		if !slices.Contains(list, v.Limit) {
			list = append(list, v.Limit)
		}
	}
	return list
}
