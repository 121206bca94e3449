package server

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"weir/store"
)

// How a breaker opens and closes.
const (
	breakAfter = 5                      // failures in a row
	stayOpen   = 200 * time.Millisecond // before one call at a time is let through, as a probe
)

// errBreakerOpen is the error of a call that was not made, since those before it failed.
var errBreakerOpen = fmt.Errorf("%w: the calls before it failed", store.ErrUnavailable)

// errHurried is beside the error of a call that a store could not answer in the little
// time that its caller had left. It says nothing about the store: clients choose their
// deadlines, and who opens a breaker has limits bypassed.
var errHurried = errors.New("the caller was in a hurry")

// breakers keep calls from a store that does not answer, so that nobody waits for it:
// each domain has its own, since in a cluster a part of the domains may be away.
type breakers struct {
	changed func(domain string, open bool)

	mu  sync.RWMutex
	all map[string]*breaker // by a domain as in metrics
}

type breaker struct {
	domain string
	*gobreaker.TwoStepCircuitBreaker[struct{}]
	// probing: the store has answered something since the breaker opened, so that a
	// probe is worth its time.
	probing atomic.Bool
	open    atomic.Bool
	since   atomic.Int64 // when it opened last, in nanoseconds since the epoch
}

func newBreakers(changed func(domain string, open bool)) *breakers {
	return &breakers{changed: changed, all: make(map[string]*breaker)}
}

// of is the breaker of a domain, which is one of the configuration's.
func (b *breakers) of(domain string) *breaker {
	b.mu.RLock()
	one := b.all[domain]
	b.mu.RUnlock()
	if one != nil {
		return one
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if one = b.all[domain]; one != nil {
		return one
	}
	one = &breaker{domain: domain}
	one.TwoStepCircuitBreaker = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		MaxRequests: 1,
		Timeout:     stayOpen,
		ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= breakAfter },
		IsExcluded:  func(err error) bool { return errors.Is(err, errHurried) },
		// A store that answers keeps nobody waiting, whatever it says.
		IsSuccessful: func(err error) bool {
			return !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrNotServing)
		},
		OnStateChange: func(_ string, _, to gobreaker.State) {
			switch to {
			case gobreaker.StateOpen:
				one.probing.Store(false)
				if !one.open.Swap(true) {
					one.since.Store(time.Now().UnixNano())
					b.changed(domain, true)
				}
			case gobreaker.StateClosed:
				one.open.Store(false)
				b.changed(domain, false)
			case gobreaker.StateHalfOpen:
			}
		},
	})
	b.all[domain] = one
	return one
}

// call makes a call of the store, if the breaker lets it. Otherwise it fails at once,
// with errBreakerOpen.
func (b *breaker) call(f func() error) (err error) {
	if b.open.Load() && !b.probing.Load() {
		return errBreakerOpen
	}
	done, err := b.Allow()
	if err != nil {
		return errBreakerOpen
	}
	err = store.ErrUnavailable // should f panic
	defer func() { done(err) }()
	err = f()
	return err
}

// answered lets breakers that are open try a call, since the store has answered. It
// returns those that might have tried since the last time, for want of a request that
// does. A domain that is not in the policies any more is among them: nobody asks for it.
func (b *breakers) answered() (untried []*breaker) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	for _, one := range b.all {
		if one.open.Load() && one.probing.Swap(true) { // a try that fails ends it
			untried = append(untried, one)
		}
	}
	return untried
}

// someOpen reports whether a breaker is open.
func (b *breakers) someOpen() bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	for _, one := range b.all {
		if one.open.Load() {
			return true
		}
	}
	return false
}

// opened returns when each breaker opened that is open, by domain, and whether those of
// all domains are that were asked for.
func (b *breakers) opened() (all bool, open map[string]time.Time) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	open = make(map[string]time.Time)
	for domain, one := range b.all {
		if one.open.Load() {
			open[domain] = time.Unix(0, one.since.Load())
		}
	}
	return len(open) > 0 && len(open) == len(b.all), open
}
