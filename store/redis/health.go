package redis

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// How calls are tried again, and a server that is away is dialed again. The rule
// is in docs/decisions/0006-retries.md.
const (
	// usualPatience is how long calls are tried again after a server began not to
	// serve. After that they fail at once, until it serves.
	usualPatience = 10 * time.Millisecond
	// A call is tried again after firstPause, then twice that, up to maxPause.
	firstPause = time.Millisecond
	maxPause   = 8 * time.Millisecond
	// maxDialPause is the longest pause between two dials.
	maxDialPause = 200 * time.Millisecond
)

// pauseBefore returns the pause before a call is tried for the nth time again.
func pauseBefore(n int) time.Duration { return min(firstPause<<min(n, 10), maxPause) }

// health is what the calls of a server found of it last. At first it is well.
type health struct {
	patience time.Duration
	ill      atomic.Bool // the rest counts

	mu    sync.Mutex
	since time.Time // when the first call was not served
	away  error     // why the server cannot be reached; nil: it can
	// While it is away one call dials, the others fail: not before next, and one at
	// a time.
	dialing bool
	next    time.Time
	pause   time.Duration
}

// served says that the server did something for a call.
func (h *health) served() {
	if !h.ill.Load() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.since, h.away, h.dialing, h.next, h.pause = time.Time{}, nil, false, time.Time{}, 0
	h.ill.Store(false)
}

// refused says that the server answered that it does not serve now.
func (h *health) refused() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.begin()
	h.away, h.dialing = nil, false
}

// reached says that a call was sent, and got no answer.
func (h *health) reached() {
	if !h.ill.Load() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.away, h.dialing = nil, false
}

// unreachable says that there was no connection for a call, and why.
func (h *health) unreachable(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.begin()
	h.away, h.dialing = err, false
	if now := time.Now(); !now.Before(h.next) { // else it has been counted
		h.pause = min(max(firstPause, 2*h.pause), maxDialPause)
		h.next = now.Add(h.pause)
	}
}

func (h *health) begin() {
	if h.since.IsZero() {
		h.since = time.Now()
	}
	h.ill.Store(true)
}

// mayDial returns nil if a call may be sent although it may have to dial, or why
// the server cannot be reached. Whoever may tells how it ended.
func (h *health) mayDial() error {
	if !h.ill.Load() {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.away == nil {
		return nil
	}
	if h.dialing || time.Now().Before(h.next) {
		return h.away
	}
	h.dialing = true
	return nil
}

// lasting reports whether the server has not served for longer than patience.
func (h *health) lasting() bool {
	if !h.ill.Load() {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.since.IsZero() && time.Since(h.since) > h.patience
}

// unsentError is why a call could not be sent: it has not run.
type unsentError struct{ err error }

func (e unsentError) Error() string { return fmt.Sprintf("not reached: %v", e.err) }
func (e unsentError) Unwrap() error { return e.err }

// unsent reports whether err says that a call was not sent.
func unsent(err error) bool {
	var e unsentError
	return errors.As(err, &e)
}

// notServing reports whether a server answered that it does not serve now, and so
// has not run the call.
func notServing(err error) bool {
	return hasPrefix(err, "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN")
}

func hasPrefix(err error, prefixes ...string) bool {
	if err == nil { // as nearly always, and HasErrorPrefix makes a text of it
		return false
	}
	for _, p := range prefixes {
		if goredis.HasErrorPrefix(err, p) {
			return true
		}
	}
	return false
}

// halfRun reports whether an error stopped a script where it may have written: the
// slot of its keys is being moved, and one that it had not declared is gone; or decide.lua failed
// while it wrote.
func halfRun(err error) bool {
	return err != nil && (strings.Contains(err.Error(), "Script attempted to") || strings.Contains(err.Error(), "weir: half written"))
}
