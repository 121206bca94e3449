package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// Middleware acquires for each request, and releases when its handler returns or panics.
// A refused request does not reach the handler: it is answered by
// [LimitedError.ServeHTTP]. The handler has the ResponseWriter as it came, and finds the
// lease by [FromContext]. A Request without descriptors is not asked: it is free.
func (c *Client) Middleware(ask func(*http.Request) Request) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			request := ask(r)
			if len(request.Descriptors) == 0 {
				next.ServeHTTP(w, r)
				return
			}
			l, err := c.Acquire(r.Context(), request)
			limited, refused := errors.AsType[*LimitedError](err)
			switch {
			case refused:
				limited.ServeHTTP(w, r)
				return
			case errors.Is(err, ErrClosed), err != nil && r.Context().Err() != nil: // who left reads nothing
				http.Error(w, http.StatusText(http.StatusServiceUnavailable), http.StatusServiceUnavailable)
				return
			case err != nil:
				http.Error(w, http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError)
				return
			}
			_ = c.hold(r.Context(), l, func(ctx context.Context) error {
				next.ServeHTTP(w, r.WithContext(ctx))
				return ctx.Err()
			})
		})
	}
}

// ServeHTTP answers a request that was refused as weir does through Envoy: 429 for a lane
// and 503 for a pool, Retry-After in whole seconds if asking again can help, and a problem
// of RFC 9457 with the exact wait. It names limits of the policy.
func (e *LimitedError) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	body, err := json.Marshal(e.problem())
	if err != nil {
		body = nil // texts, numbers and booleans always marshal
	}
	h := w.Header()
	if e.Retryable {
		h.Set("Retry-After", strconv.FormatInt(max(1, roundUp(e.RetryAfter, time.Second)), 10)) // 0 would mean at once
	}
	h.Set("Content-Type", "application/problem+json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(e.code())
	_, _ = w.Write(body) // who does not read it has left
}

// A problem is the body of a refusal. It is the same as package envoy's.
type problem struct {
	Type       string   `json:"type"`
	Title      string   `json:"title"`
	Status     int      `json:"status"`
	Detail     string   `json:"detail"`
	RetryAfter *int64   `json:"retry_after_ms,omitempty"`
	Violated   []string `json:"violated-policies"`
	Retryable  bool     `json:"retryable"`
}

func (e *LimitedError) problem() problem {
	p := problem{
		Type:      "https://iana.org/assignments/http-problem-types#quota-exceeded",
		Title:     "Quota Exceeded",
		Status:    e.code(),
		Detail:    e.detail(),
		Violated:  e.violated(),
		Retryable: e.Retryable,
	}
	if e.Class == Pool {
		p.Type = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
		p.Title = "Temporary Reduced Capacity"
	}
	if e.Retryable {
		millis := e.RetryAfter.Milliseconds()
		p.RetryAfter = &millis
	}
	return p
}

// detail says in one sentence what happened and what helps.
func (e *LimitedError) detail() string {
	wait := fmt.Sprintf("retry after %v", e.RetryAfter)
	if e.Estimated {
		wait = fmt.Sprintf("retry after about %v, which is an estimate", e.RetryAfter)
	}
	if !e.Retryable {
		wait = "retrying does not help"
	}
	var what string
	switch e.Reason {
	case "bucket_empty":
		what = fmt.Sprintf("The token bucket of limit %q has too few tokens left", e.Limit)
	case "window_full":
		what = fmt.Sprintf("The quota of limit %q has too little left until its window ends", e.Limit)
	case "lane_full":
		what = fmt.Sprintf("All in-flight slots of limit %q are taken", e.Limit)
	case "pool_full":
		what = fmt.Sprintf("All in-flight slots of limit %q, which callers share, are taken", e.Limit)
	case "cost_exceeds_capacity":
		what = fmt.Sprintf("The request costs more than limit %q can ever allow", e.Limit)
	case "banned":
		what = fmt.Sprintf("Limit %q allows no requests", e.Limit)
	case "store_unavailable":
		what = fmt.Sprintf("Limit %q cannot be looked up at present", e.Limit)
	case "stream_ended":
		what = "The end of the stream that asks was told before"
	case ReasonServiceAway:
		what = "The limits cannot be looked up at present"
	case "":
		what = "The request was refused"
	default:
		what = fmt.Sprintf("Limit %q refused the request (%s)", e.Limit, e.Reason)
	}
	return what + "; " + wait + "."
}
