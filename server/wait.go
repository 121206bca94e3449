package server

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"weir/limit"
	"weir/policy"
)

// waits are requests that wait for a slot: the next request of a client often
// overtakes the release of its last.
type waits struct {
	most  time.Duration // where a policy does not say
	freed atomic.Uint64 // slots that came free so far

	mu      sync.Mutex
	waiting map[string][]chan struct{} // by the key of the full limit, first come, first
	// lately says how many had come free when one of a key did, for a request that was
	// refused just before. It forgets all at once, as of forgotten.
	lately    map[string]uint64
	forgotten uint64
}

// maxLately is how many keys lately has at most.
const maxLately = 4096

func newWaits(most time.Duration) *waits {
	return &waits{most: most, waiting: make(map[string][]chan struct{}), lately: make(map[string]uint64)}
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
		if w.forgotten > since || w.lately[c.Key] > since {
			delete(w.lately, c.Key) // one release, one more ask
			woken <- struct{}{}
			return woken, true
		}
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
	w.lately[key] = freed
}

// askAndWait asks the store, and if nothing but slots is missing it waits for them: it
// asks again whenever one came free here, and at the end for those that others gave
// back. So a release costs one more ask, and a request that waits another. It waits
// neither longer than the caller does, nor for a caller that has gone, and a slot for
// which it was woken and that it does not take is the next one's.
func (s *Server) askAndWait(ctx context.Context, set *policy.Set, domain, stream string, checks []limit.Check) (d limit.Decision) {
	freed := s.waits.freed.Load()
	d = s.ask(ctx, domain, stream, checks)
	full, most := s.waits.full(checks, d)
	if end, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(end)/2) // and there must be time to ask
	}
	if len(full) == 0 || most <= 0 {
		return d
	}
	timer := time.NewTimer(most)
	defer timer.Stop()
	expired := d.Expired // that any ask found: each is told once
	defer func() { d.Expired = expired }()
	for over := false; !over && len(full) > 0; full, _ = s.waits.full(checks, d) {
		woken, ok := s.waits.enter(full, freed)
		if !ok {
			return d
		}
		select {
		case <-woken:
		case <-timer.C:
			over = true
		case <-ctx.Done():
			s.waits.leave(full, woken)
			if len(woken) > 0 {
				for _, c := range full {
					s.waits.wake(c.Key)
				}
			}
			return d
		}
		s.waits.leave(full, woken)
		freed = s.waits.freed.Load()
		d = s.ask(ctx, domain, stream, checks)
		expired += d.Expired
	}
	for i, c := range checks {
		if _, slot := c.Limit.(limit.Concurrency); slot && !d.Admitted && !c.Shadow && d.Results[i].Passed {
			s.waits.wake(c.Key) // another limit refused
		}
	}
	s.metrics.waited(label(set, domain), d)
	return d
}
