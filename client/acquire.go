package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v7"
	"github.com/sony/gobreaker/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	weirv1 "weir/proto/weir/v1"
)

// ReasonServiceAway is why the client itself decided: the service did not answer.
const ReasonServiceAway = "service_unavailable"

// errCallerLeft is in the chain of an error of a caller that was over.
var errCallerLeft = errors.New("the caller's context is over")

// awayError is the error of a call that the service did not answer.
type awayError struct{ error }

func (e *awayError) Unwrap() error { return e.error }

// Acquire asks once whether the work of r may start, and returns what it then holds:
// never nil without an error, also if it holds nothing. Release it in any case.
//
// A refusal is a [*LimitedError]. While the service is away the FailureMode decides.
// Other errors are of the caller's making (a status such as INVALID_ARGUMENT), of its
// context, or [ErrClosed]; none of them means that the work may start. What the service
// may have granted then is given back in the background, unless r names its operation:
// whoever does that may ask for it again.
func (c *Client) Acquire(ctx context.Context, r Request) (*Lease, error) {
	a, err := c.newAsk(r)
	if err != nil {
		return nil, err
	}
	c.patience.budget.earn()
	l, err := c.acquire(ctx, a)
	c.abandon(a, err)
	return l, err
}

// abandon is called when an operation is asked for no more, with the error of its last
// ask. If an answer to it was lost, there may be a lease that nobody holds.
func (c *Client) abandon(a *ask, err error) {
	if !a.lost || !a.own {
		return
	}
	e := &ending{ask: a, until: a.lostAt.Add(c.heartbeat.shortestLife())}
	if err != nil { // no work is done: what it reserved is given back
		e.usage = usageParts{{{}}}
	}
	c.releases.later(e)
}

func (c *Client) acquire(ctx context.Context, a *ask) (*Lease, error) {
	if c.closed.Load() {
		return nil, ErrClosed
	}
	start := time.Now()
	l, err := c.decide(ctx, a)
	c.observer.Took(AcquireDuration, time.Since(start))
	limited, refused := errors.AsType[*LimitedError](err)
	bypass, reason := l.Bypass(), ""
	switch {
	case refused:
		c.observer.Count(Acquires, string(limited.Class))
		bypass, reason = limited.Bypass, limited.bypassReason
	case err != nil:
		c.observer.Count(Acquires, "error")
	default:
		c.observer.Count(Acquires, "admitted")
		reason = l.BypassReason()
	}
	if bypass != NoBypass {
		c.observer.Count(Bypasses, reason)
	}
	return l, err
}

// decide gets an answer, and makes of it a lease or an error.
func (c *Client) decide(ctx context.Context, a *ask) (*Lease, error) {
	answer, sent, err := c.send(ctx, a)
	away, isAway := errors.AsType[*awayError](err)
	switch {
	case isAway && c.options.FailureMode == FailClosed:
		return nil, &LimitedError{
			Class: Pool, Reason: ReasonServiceAway, RetryAfter: missingRetryAfter, Estimated: true, Retryable: true,
			Bypass: BypassClient, bypassReason: ReasonServiceAway, err: away,
		}
	case isAway:
		return &Lease{client: c, bypass: BypassClient, bypassReason: ReasonServiceAway}, nil
	case err != nil:
		return nil, fmt.Errorf("client: acquire: %w", err)
	case !answer.GetAdmitted():
		return nil, refusal(answer)
	}
	return c.granted(answer, sent), nil
}

// send sends the request until it is answered, within Tries and the budget. sent is the
// moment before the try that was answered. The error is ctx's if that ended.
func (c *Client) send(ctx context.Context, a *ask) (answer *weirv1.AcquireResponse, sent time.Time, err error) {
	pauses := &backoff.ExponentialBackOff{
		InitialInterval: 10 * time.Millisecond, RandomizationFactor: 0.5, Multiplier: 2, MaxInterval: time.Second,
	}
	pauses.Reset()
	tries, began := 0, time.Now()
	answer, err = backoff.Retry(ctx, func() (*weirv1.AcquireResponse, error) {
		tries++
		sent = time.Now()
		more := a.repeatable() && tries < c.options.Tries
		answer, err := c.try(ctx, a, c.giveUpAt(ctx, began, sent), more)
		if err == nil || !more || !errors.As(err, new(*awayError)) || errors.Is(err, errNotSent) || c.breaker.State() == gobreaker.StateOpen {
			return answer, permanent(err)
		}
		pause, now := pauses.NextBackOff(), time.Now()
		if end, waited := c.early(ctx, began, now); waited && !now.Add(pause).Before(end) || !c.patience.budget.spend() {
			return nil, permanent(err)
		}
		return nil, backoff.RetryAfter(pause, err)
	},
		backoff.WithBackOff(&backoff.ZeroBackOff{}), // pause says when
		backoff.WithMaxElapsedTime(0),               // Tries bounds it
		backoff.WithNotify(func(error, time.Duration) { c.observer.Count(Retries, "lost") }),
	)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return nil, sent, context.Cause(ctx)
	case errors.Is(err, errCallerLeft): // the service saw it first
		return nil, sent, context.DeadlineExceeded
	}
	if gaveUp := backoff.AsRetryError(err); gaveUp != nil {
		err = gaveUp.LastErr
	}
	return answer, sent, err
}

// early is when a caller with a deadline has to be told, so that it can still do
// something. waited: at t it has waited for Timeout, since began, so that the service is
// what keeps it.
func (c *Client) early(ctx context.Context, began, t time.Time) (end time.Time, waited bool) {
	callers, ok := ctx.Deadline()
	return callers.Add(-c.options.Timeout / 10), ok && t.Sub(began) >= c.options.Timeout
}

// giveUpAt is when to give up a try that begins now: after Timeout, or early enough for a
// caller that will have waited as long by then.
func (c *Client) giveUpAt(ctx context.Context, began, now time.Time) time.Time {
	late := now.Add(c.options.Timeout)
	if end, _ := c.early(ctx, began, now); end.After(now) && end.Before(late) && end.Sub(began) >= c.options.Timeout {
		return end
	}
	return late
}

// try sends the request once, and waits until end at most. Its error is an awayError if
// the service did not answer. With more to come it says nothing about the service.
func (c *Client) try(ctx context.Context, a *ask, end time.Time, more bool) (_ *weirv1.AcquireResponse, err error) {
	try, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	if hurried(ctx, try) && c.breaker.State() == gobreaker.StateHalfOpen {
		c.breaker.look() // it would leave before it knew
		return nil, &awayError{errNotSent}
	}
	done, err := c.breaker.Allow()
	if err != nil {
		return nil, &awayError{errNotSent}
	}
	err = errCallerLeft // should conn panic
	defer func() {
		if more && silent(err) {
			done(errAgain)
			return
		}
		done(err)
	}()
	var to peer.Peer // remains empty if nothing was sent
	sent := time.Now()
	answer, err := c.service.Acquire(try, a.next(), grpc.Peer(&to))
	a.heard(err, to.Addr != nil, sent)
	switch code := status.Code(err); {
	case err == nil:
	case ctx.Err() != nil, code == codes.DeadlineExceeded && hurried(ctx, try):
		err = fmt.Errorf("%w: %w", errCallerLeft, err)
		c.breaker.look()
	case away(code):
		err = &awayError{err}
	}
	return answer, err
}

// permanent is err as one after which nothing is tried; nil if it is nil.
func permanent(err error) error {
	if err == nil {
		return nil
	}
	return backoff.Permanent(err)
}

// hurried reports whether the deadline of a try is its caller's. Then the service may
// have seen it pass before the caller does.
func hurried(ctx, try context.Context) bool {
	callers, ok := ctx.Deadline()
	own, _ := try.Deadline()
	return ok && !own.Before(callers)
}

// away reports whether a call that ended so was lost on the way, or met a service that
// can't decide now. RESOURCE_EXHAUSTED is neither: it is what a request gets that is too
// large, and whoever asks may choose its size; it must not be a way around the limits.
func away(c codes.Code) bool {
	switch c {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Unknown, codes.Internal, codes.Aborted, codes.DataLoss:
		return true
	case codes.OK, codes.Canceled, codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied,
		codes.ResourceExhausted, codes.FailedPrecondition, codes.OutOfRange, codes.Unimplemented, codes.Unauthenticated:
	}
	return false
}
