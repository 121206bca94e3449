package server

import (
	"sync"
	"time"

	"weir/limit"
)

// holds is how long leases are held on average, by domain and limit, as the
// releases of this replica tell. Retry-After of a full lane or pool is guessed
// from it, since nobody can know when somebody's work will end.
type holds struct {
	mu   sync.Mutex
	mean map[holdKey]time.Duration // exponentially weighted, 1/8 a release
}

type holdKey struct{ domain, limit string }

func newHolds() *holds { return &holds{mean: make(map[holdKey]time.Duration)} }

// add counts a lease that was held under a limit. Names come from policies, so
// the map stays as small as they are.
func (h *holds) add(domain, name string, held time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	k := holdKey{domain, name}
	if mean, ok := h.mean[k]; ok {
		held = mean + (held-mean)/8
	}
	h.mean[k] = held
}

// estimate is the time after which one of the slots of c is free if they are
// given back evenly: mean hold / max_in_flight (1 s before the first release), at
// least 1 s, at most retry_after.
func (h *holds) estimate(domain string, c limit.Check) time.Duration {
	l, ok := c.Limit.(limit.Concurrency)
	if !ok {
		return 0
	}
	h.mu.Lock()
	mean := h.mean[holdKey{domain, c.Name}]
	h.mu.Unlock()
	wait := max(time.Second, (mean / time.Duration(l.Max)).Round(time.Millisecond))
	if l.RetryAfterMax > 0 {
		wait = min(wait, max(time.Second, l.RetryAfterMax))
	}
	return wait
}
