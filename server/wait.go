package server

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"weir/limit"
)

// waits are requests that wait for a slot: the next request of a client often
// overtakes the release of its last.
type waits struct {
	most  time.Duration // where a policy does not say
	freed atomic.Uint64 // slots that came free so far

	mu      sync.Mutex
	waiting map[string][]chan struct{} // by the key of the full limit, first come, first
	// lately has of each key the slots that came free and woke nobody, the last few, by how
	// many had come free then: each is for one request that was refused just before. It
	// forgets all at once, as of forgotten.
	lately    map[string][]uint64
	forgotten uint64
}

const (
	maxLately = 4096 // keys in lately, at most
	maxFreed  = 8    // slots of each
)

func newWaits(most time.Duration) *waits {
	return &waits{most: most, waiting: make(map[string][]chan struct{}), lately: make(map[string][]uint64)}
}

// full returns the full limits for which a refused request may wait, and how long; none
// if anything but slots refused it.
func (w *waits) full(checks []limit.Check, d limit.Decision) (full []limit.Check, wait time.Duration) {
	if d.Admitted || d.StreamEnded || d.Bypass != limit.DefaultMode {
		return nil, 0
	}
	for i, c := range checks {
		if d.Results[i].Passed || c.Shadow {
			continue
		}
		l, ok := c.Limit.(limit.Concurrency)
		switch {
		case ok:
		case c.Quota != 0 && !limit.QuotaExhausted(checks, d.Results):
			continue // it is over, and another is free
		default:
			return nil, 0
		}
		most := l.MaxWait
		if most == 0 {
			most = w.most
		}
		if most <= 0 {
			return nil, 0
		}
		if full == nil || most < wait {
			wait = most
		}
		full = append(full, c)
	}
	return full, wait
}

// enter lets a request wait for the full limits, or reports false: as many wait for
// one of them as it has slots. Since is what freed was before the request asked: a slot
// that came free after that, and woke nobody, wakes it at once.
func (w *waits) enter(full []limit.Check, since uint64) (woken chan struct{}, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range full {
		if l, _ := c.Limit.(limit.Concurrency); int64(len(w.waiting[c.Key])) >= l.Max {
			return nil, false
		}
	}
	woken = make(chan struct{}, 1)
	for _, c := range full {
		slots := w.lately[c.Key]
		if n := len(slots); n > 0 && slots[n-1] > since {
			w.lately[c.Key] = slots[:n-1]
		} else if w.forgotten <= since {
			continue
		}
		woken <- struct{}{}
		return woken, true
	}
	for _, c := range full {
		w.waiting[c.Key] = append(w.waiting[c.Key], woken)
	}
	return woken, true
}

// leave ends the waiting of one request.
func (w *waits) leave(full []limit.Check, woken chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range full {
		rest := slices.DeleteFunc(w.waiting[c.Key], func(other chan struct{}) bool { return other == woken })
		if len(rest) == 0 {
			delete(w.waiting, c.Key)
		} else {
			w.waiting[c.Key] = rest
		}
	}
}

// count is how many wait, each once for each limit.
func (w *waits) count() (n float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, list := range w.waiting {
		n += float64(len(list))
	}
	return n
}

// wake has the request that waits longest for a slot of key ask again, or the next that
// is refused for want of one.
func (w *waits) wake(key string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	freed := w.freed.Add(1)
	for list := w.waiting[key]; len(list) > 0; list = list[1:] {
		w.waiting[key] = list[1:]
		select {
		case list[0] <- struct{}{}:
			return
		default: // another key has woken it
		}
	}
	if len(w.lately) >= maxLately {
		clear(w.lately)
		w.forgotten = freed
	}
	slots := append(w.lately[key], freed)
	w.lately[key] = slots[max(0, len(slots)-maxFreed):]
}

// wakeAll wakes one request for each of the full limits.
func (w *waits) wakeAll(full []limit.Check) {
	for _, c := range full {
		w.wake(c.Key)
	}
}

// askAndWait asks the store, and if nothing but slots is missing it waits for them: it
// asks again whenever one came free here, and at the end for those that others gave
// back. So a release costs one more ask, and a request that waits another. It waits
// neither longer than the caller does, nor for a caller that has gone, and a slot for
// which it was woken and that it does not take is the next one's. Without an answer of
// the store to a later ask the refusal stays. An error is about the operation.
func (s *Server) askAndWait(ctx context.Context, r limit.Request) (d limit.Decision, err error) {
	freed := s.waits.freed.Load()
	if d, err = s.ask(ctx, r); err != nil {
		return d, err
	}
	full, most := s.waits.full(r.Checks, d)
	if end, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(end)/2) // and there must be time to ask
	}
	if len(full) == 0 || most <= 0 {
		return d, nil
	}
	timer := time.NewTimer(most)
	defer timer.Stop()
	began := time.Now()
	expired, waited := d.Expired, false // Expired by any ask: each is told once
	defer func() {
		d.Expired = expired
		if waited {
			s.passOn(r.Checks, d)
		}
	}()
	for over := false; !over && len(full) > 0; full, _ = s.waits.full(r.Checks, d) {
		woken, ok := s.waits.enter(full, freed)
		if !ok {
			break
		}
		select {
		case <-woken:
		case <-timer.C:
			over = true
		case <-ctx.Done():
			s.waits.leave(full, woken)
			if len(woken) > 0 {
				s.waits.wakeAll(full)
			}
			return d, nil
		}
		s.waits.leave(full, woken)
		freed = s.waits.freed.Load()
		timeout := s.patience(ctx)
		if end, ok := ctx.Deadline(); ok { // the caller must hear of it, too
			timeout = min(timeout, time.Until(end)*3/4)
		}
		waited = true
		given := s.givingBack(refunded(r.Checks))
		again, err := s.askStore(ctx, timeout, r)
		given()
		if err != nil { // the store has refused it, and says nothing else in time
			if !over {
				s.waits.wakeAll(full)
			}
			break
		}
		d = again
		expired += d.Expired
	}
	if waited {
		s.metrics.waited(s.label(r.Domain), d)
		s.metrics.took(ctx, s.metrics.waitSeconds.WithLabelValues(s.label(r.Domain)), began)
	}
	return d, nil
}

// passOn wakes others for the slots that a refused request did not take: another limit
// refused it.
func (s *Server) passOn(checks []limit.Check, d limit.Decision) {
	for i, c := range checks {
		if _, slot := c.Limit.(limit.Concurrency); slot && !d.Admitted && !c.Shadow && d.Results[i].Passed {
			s.waits.wake(c.Key)
		}
	}
}
