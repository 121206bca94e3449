package client

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	weirv1 "weir/proto/weir/v1"
)

const (
	maxLeases    = 1000            // of one call
	renewTimeout = 5 * time.Second // of one call, at most
	shortestBeat = 10 * time.Millisecond
	// How long a lease of which nobody was told may be taken to live: as long as the
	// shortest of which this client was told, and 5 s before that.
	firstGuess, longestGuess = 5 * time.Second, time.Minute
	// longLife is what a lease is taken to live after a renewal, if that is not known.
	longLife = time.Hour
)

// heartbeat renews the leases that are held, all that are due soon in one call, and
// notices those that are lost. One goroutine serves all, until Close; then nothing is
// renewed, and a timer notices what is lost.
type heartbeat struct {
	c *Client

	mu       sync.Mutex
	held     map[*Lease]struct{}
	next     time.Time // when timer fires; zero: it does not
	timer    *time.Timer
	ended    bool          // run has
	shortest time.Duration // of the lives of leases; 0: none is known
}

func newHeartbeat(c *Client) *heartbeat {
	h := &heartbeat{c: c, held: make(map[*Lease]struct{}), timer: time.NewTimer(time.Hour)}
	h.timer.Stop()
	return h
}

// add begins to renew a lease. The request was sent at sent, so that the lease lives at
// least until sent + ttl.
func (h *heartbeat) add(l *Lease, sent time.Time, told *weirv1.Lease, replayed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l.held = true
	h.extend(l, sent, told.GetTtl().AsDuration(), told.GetRenewAfter().AsDuration())
	if replayed { // that was what is left of its life
		l.life = max(l.life, longLife)
	} else {
		h.know(l.life)
	}
	h.held[l] = struct{}{}
	h.wakeAt(h.due(l))
	h.c.observer.Level(LeasesHeld, 1)
}

// extend notes what the service promised to what was sent at sent.
func (h *heartbeat) extend(l *Lease, sent time.Time, ttl, renewAfter time.Duration) {
	if renewAfter <= 0 || renewAfter > ttl {
		renewAfter = ttl / 3
	}
	l.life, l.renewAfter = ttl, max(renewAfter, shortestBeat)
	l.expires, l.renewAt, l.gone = sent.Add(ttl), sent.Add(l.renewAfter), time.Now().Add(ttl)
}

// know notes the life of a lease. The lock is held.
func (h *heartbeat) know(life time.Duration) {
	if h.shortest == 0 || life < h.shortest {
		h.shortest = life
	}
}

// shortestLife is how long a lease of which nobody was told lives, for all that is known.
func (h *heartbeat) shortestLife() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return min(longestGuess, cmp.Or(h.shortest, firstGuess))
}

// due is when the heartbeat has to look at the lease. The lock is held.
func (h *heartbeat) due(l *Lease) time.Time {
	if h.ended || l.renewing || l.expires.Before(l.renewAt) {
		return l.expires
	}
	return l.renewAt
}

// wakeAt makes the heartbeat look no later than t. The lock is held.
func (h *heartbeat) wakeAt(t time.Time) {
	if h.next.IsZero() || t.Before(h.next) {
		h.next = t
		h.timer.Reset(time.Until(t))
	}
}

// drop ends the renewal of a lease that is released. until is when it has expired at
// the service at the latest. Only the first call for a lease is first.
func (h *heartbeat) drop(l *Lease) (usage map[string]uint64, until time.Time, first bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if l.ended {
		return nil, time.Time{}, false
	}
	l.ended = true
	h.forget(l, nil)
	return l.usage, l.gone, true
}

// forget takes a lease out of those that are held, and ends its contexts. The lock is
// held.
func (h *heartbeat) forget(l *Lease, cause error) {
	if !l.held {
		return
	}
	l.held = false
	delete(h.held, l)
	h.c.observer.Level(LeasesHeld, -1)
	for _, child := range l.contexts {
		child.keep()
		child.cancel(cause)
	}
	l.contexts = nil
}

// lose tells the holder that its lease is gone. The lock is held.
func (h *heartbeat) lose(l *Lease, how string) {
	h.c.observer.Count(Lost, how) // before anybody sees it
	h.forget(l, ErrLost)
	close(l.lost)
}

func (h *heartbeat) run() {
	defer h.end()
	var calls sync.WaitGroup
	defer calls.Wait()
	defer h.timer.Stop()
	for {
		select {
		case <-h.c.life.Done():
			return
		case <-h.timer.C:
			for batch := range slices.Chunk(h.beat(time.Now()), maxLeases) {
				calls.Go(func() { h.renew(batch) })
			}
		}
	}
}

// end has a timer of its own notice what is lost from now on.
func (h *heartbeat) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ended = true
	h.timer = time.AfterFunc(0, func() { h.beat(time.Now()) })
}

// beat loses what has expired and returns what is to be renewed: with a lease that is
// due come those that are due in the next quarter of their time, so that they are
// renewed together ever after.
func (h *heartbeat) beat(now time.Time) (batch []*Lease) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.next = time.Time{}
	for l := range h.held {
		switch {
		case !now.Before(l.expires):
			h.lose(l, "expired")
			continue
		case !h.ended && !l.renewing && !now.Before(l.renewAt.Add(-l.renewAfter/4)):
			l.renewing, l.gone = true, now.Add(renewTimeout+l.life) // if it arrives, and its answer does not
			batch = append(batch, l)
		}
		h.wakeAt(h.due(l))
	}
	return batch
}

// renew sends one call for all leases of the batch.
func (h *heartbeat) renew(batch []*Lease) {
	ids := make([]string, len(batch))
	timeout := renewTimeout
	for i, l := range batch {
		ids[i] = l.id
		timeout = min(timeout, l.renewAfter)
	}
	sent := time.Now()
	ctx, cancel := context.WithTimeout(h.c.life, timeout)
	defer cancel()
	m, err := h.c.service.Renew(ctx, &weirv1.RenewRequest{LeaseIds: ids})
	if err != nil || len(m.GetResults()) != len(batch) {
		m = &weirv1.RenewResponse{Results: make([]*weirv1.RenewResult, len(batch))} // of no status
	}
	now := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, l := range batch {
		l.renewing = false
		switch r := m.GetResults()[i]; r.GetStatus() {
		case weirv1.RenewStatus_RENEW_STATUS_RENEWED:
			h.extend(l, sent, r.GetTtl().AsDuration(), r.GetRenewAfter().AsDuration())
			h.know(l.life)
			h.c.observer.Count(Renewals, "renewed")
		case weirv1.RenewStatus_RENEW_STATUS_LOST:
			if l.held { // it was not released meanwhile
				h.c.observer.Count(Renewals, "lost")
				h.lose(l, "ended")
			}
		case weirv1.RenewStatus_RENEW_STATUS_UNAVAILABLE, weirv1.RenewStatus_RENEW_STATUS_UNSPECIFIED:
			l.renewAt = now.Add(l.renewAfter / 4)
			h.c.observer.Count(Renewals, "unavailable")
		}
		if l.held {
			h.wakeAt(h.due(l))
		}
	}
}
