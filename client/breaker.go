package client

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/sony/gobreaker/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// When the client stops waiting for a service that is away, as weir does for its store.
const (
	breakAfter = 3           // calls in a row that nobody answered
	stayOpen   = time.Second // before one call at a time tries it
)

var (
	// errNotSent is in the chain of an error of a call that the breaker kept from the
	// service.
	errNotSent = errors.New("the calls before it were not answered")
	// errAgain is the error of a try behind which another may come: it may have been on a
	// connection that was cut, with all that were on it, and another replica answers the
	// next.
	errAgain = errors.New("the answer was lost")
	// errThere is that of a look that was answered: so the service is there, but nobody
	// has asked it for a decision.
	errThere = errors.New("the service is there")
)

// breaker keeps calls from a service that does not answer.
//
// Callers that leave before Timeout say nothing about the service: they choose their
// deadlines, and who opens the breaker has the limits bypassed. In their place it looks
// by itself whether the service is there.
type breaker struct {
	*gobreaker.TwoStepCircuitBreaker[struct{}]
	c      *Client
	health healthpb.HealthClient

	mu      sync.Mutex
	closed  bool
	looking bool
	looked  time.Time // when a look has begun last
}

func newBreaker(c *Client, conn grpc.ClientConnInterface) *breaker {
	b := &breaker{c: c, health: healthpb.NewHealthClient(conn)}
	b.TwoStepCircuitBreaker = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		MaxRequests: 1,
		Timeout:     stayOpen,
		ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= breakAfter },
		IsExcluded: func(err error) bool {
			return errors.Is(err, errCallerLeft) || errors.Is(err, errAgain) || errors.Is(err, errThere)
		},
		// An answer, even an error, says that the service is there.
		IsSuccessful: func(err error) bool { return !silent(err) },
		OnStateChange: func(_ string, from, to gobreaker.State) {
			switch {
			case to == gobreaker.StateOpen && from == gobreaker.StateClosed:
				c.log.WarnContext(context.Background(), "the rate-limit service does not answer")
			case to == gobreaker.StateClosed:
				c.log.InfoContext(context.Background(), "the rate-limit service answers again")
			}
		},
	})
	return b
}

// look finds out in the background whether the service is there, by gRPC's health
// checks: one at a time, and one in each Timeout at most.
func (b *breaker) look() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || b.looking || time.Since(b.looked) < b.c.options.Timeout {
		return
	}
	b.looking, b.looked = true, time.Now()
	b.c.background.Go(func() {
		for b.checkHealth() && b.State() == gobreaker.StateClosed {
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.looking = false
	})
}

// checkHealth asks once, and reports whether the service was silent. That takes a Timeout.
func (b *breaker) checkHealth() (wasSilent bool) {
	probes := b.State() == gobreaker.StateHalfOpen
	done, err := b.Allow()
	if err != nil {
		return false
	}
	err = errCallerLeft // should the connection panic
	defer func() { done(err) }()
	ctx, cancel := context.WithTimeout(b.c.life, b.c.options.Timeout)
	defer cancel()
	_, err = b.health.Check(ctx, &healthpb.HealthCheckRequest{}, grpc.WaitForReady(true))
	switch wasSilent = silent(err); {
	case wasSilent:
		<-ctx.Done() // a connection that is cut may be there again
		if b.c.life.Err() != nil {
			err = errCallerLeft
		}
	case !probes:
		err = errThere
	}
	return wasSilent && b.c.life.Err() == nil
}

// close ends the looks; none begins afterwards.
func (b *breaker) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
}

// silent reports whether the error of a call means that nobody has answered it.
func silent(err error) bool {
	c := status.Code(err)
	return c == codes.Unavailable || c == codes.DeadlineExceeded
}
