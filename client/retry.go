package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v7"
	"golang.org/x/time/rate"
)

// What stands in for zero in Retry.
const (
	defaultAttempts = 5
	queueAttempts   = 20
	defaultPatience = 2 * time.Minute
	maxJitter       = 250 * time.Millisecond
	defaultBudget   = 0.2 // retries for each request
	queueBudget     = 2   // where a queue's workers wait for each other's tokens
	freeRetries     = 10  // a second, which no budget forbids: a quiet caller may retry too
	maxSaved        = 100 // retries
)

// Retry is the contract of a caller that asks again after a refusal: only what is
// retryable, not before Retry-After, and within these bounds and the context's deadline.
type Retry struct {
	// Attempts is how often to ask at most, the first time too; 0 means 5 for Wait, and 20
	// for a Queue.
	Attempts int
	// Patience is how long to ask altogether, beside the context's deadline; 0 means
	// 2 min. A Retry-After that ends later is not waited for.
	Patience time.Duration
	// Jitter is how much longer than Retry-After to wait at most, at random, so that not
	// all come at once; 0 means 250 ms, which is the most.
	Jitter time.Duration
	// Budget is how many retries there may be for each request, over all callers of the
	// Client or Queue; 10 a second are always allowed. 0 means 0.2 for Wait, and 2 for a
	// Queue.
	Budget float64
}

// GaveUpError is the error of a Wait that asks no more, though it might help. Its chain
// has the last [*LimitedError].
type GaveUpError struct {
	// Why is one of "attempts", "deadline" (the context's, or the Patience, is nearer
	// than Retry-After), "budget".
	Why string
	// Asks is how often was asked.
	Asks int
	// Err is the last refusal.
	Err error
}

func (e *GaveUpError) Error() string {
	return fmt.Sprintf("client: gave up after %d asks (%s): %v", e.Asks, e.Why, e.Err)
}

// Unwrap is the last refusal.
func (e *GaveUpError) Unwrap() error { return e.Err }

// Wait acquires as Acquire does, and while it is refused waits and asks again, by
// Options.Retry. The error is a [*LimitedError] if asking again does not help, a
// [*GaveUpError] if a bound ended it, ctx's if that ended, or one of Acquire.
func (c *Client) Wait(ctx context.Context, r Request) (*Lease, error) {
	return c.wait(ctx, r, c.patience)
}

func (c *Client) wait(ctx context.Context, r Request, p *patience) (_ *Lease, err error) {
	a, err := c.newAsk(r)
	if err != nil {
		return nil, err
	}
	defer func() { c.abandon(a, err) }()
	p.budget.earn()
	deadline := time.Now().Add(p.Patience)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	asks := 0
	l, err := backoff.Retry(ctx, func() (*Lease, error) {
		asks++
		l, err := c.acquire(ctx, a)
		limited, refused := errors.AsType[*LimitedError](err)
		if err == nil || !refused || !limited.Retryable {
			return l, backoff.Permanent(err)
		}
		wait := limited.RetryAfter + rand.N(p.Jitter) + 1
		var why string
		switch {
		case asks >= p.Attempts:
			why = "attempts"
		case !time.Now().Add(wait).Before(deadline):
			why = "deadline"
		case !p.budget.spend():
			why = "budget"
		default:
			return nil, backoff.RetryAfter(wait, err)
		}
		c.observer.Count(GaveUp, why)
		return nil, backoff.Permanent(&GaveUpError{Why: why, Asks: asks, Err: err})
	},
		backoff.WithBackOff(&backoff.ZeroBackOff{}), // Retry-After says when
		backoff.WithMaxElapsedTime(0),               // deadline does
		backoff.WithNotify(func(error, time.Duration) { c.observer.Count(Retries, "refused") }),
	)
	switch gaveUp := backoff.AsRetryError(err); {
	case err == nil:
		return l, nil
	case gaveUp != nil && !errors.Is(err, backoff.ErrPermanent): // ctx ended
		return nil, gaveUp.Cause
	case gaveUp != nil:
		return nil, gaveUp.LastErr
	}
	return nil, err
}

// patience is a Retry with its defaults and its budget.
type patience struct {
	Retry
	budget *budget
}

func newPatience(r Retry, attempts int, share float64) *patience {
	r.Attempts = cmp.Or(max(0, r.Attempts), attempts)
	r.Patience = cmp.Or(max(0, r.Patience), defaultPatience)
	r.Jitter = min(maxJitter, cmp.Or(max(0, r.Jitter), maxJitter))
	return &patience{Retry: r, budget: &budget{
		share: cmp.Or(max(0, r.Budget), share),
		free:  rate.NewLimiter(freeRetries, freeRetries),
	}}
}

// budget bounds retries by a share of the requests.
type budget struct {
	share float64
	free  *rate.Limiter

	mu    sync.Mutex
	saved float64 // retries, up to maxSaved
}

// earn is called for each request.
func (b *budget) earn() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.saved = min(maxSaved, b.saved+b.share)
}

// spend reports whether there may be a retry.
func (b *budget) spend() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.saved >= 1 {
		b.saved--
		return true
	}
	return b.free.Allow()
}
