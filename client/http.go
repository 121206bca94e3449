package client

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"weir/limit"
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
			case errors.Is(err, ErrClosed), errors.Is(err, context.DeadlineExceeded), err != nil && r.Context().Err() != nil: // who left reads nothing
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
	v := e.verdict()
	body := v.Problem()
	h := w.Header()
	if e.Retryable {
		h.Set("Retry-After", strconv.FormatInt(max(1, roundUp(e.RetryAfter, time.Second)), 10)) // 0 would mean at once
	}
	h.Set("Content-Type", "application/problem+json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(v.Class.Code())
	_, _ = w.Write(body) // who does not read it has left
}

// verdict is the refusal in weir's own words.
func (e *LimitedError) verdict() limit.Verdict {
	v := limit.Verdict{Limit: e.Limit, Reason: limit.Reason(e.Reason), RetryAfter: e.RetryAfter, Estimated: e.Estimated, Retryable: e.Retryable}
	if e.Class == Pool {
		v.Class = limit.Pool
	}
	if e.Reason == ReasonServiceAway {
		v.Reason = limit.StoreUnavailable
	}
	for _, w := range e.Limits {
		v.Violations = append(v.Violations, limit.Violation{Limit: w.Limit})
	}
	return v
}
