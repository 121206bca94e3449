package client

import (
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
)

// heartbeat renews the leases that are held, all that are due soon in one call, and
// notices those that are lost. One goroutine serves all.
type heartbeat struct {
	c *Client

	mu    sync.Mutex
	held  map[*Lease]struct{}
	next  time.Time // when timer fires; zero: it does not
	timer *time.Timer
}

func newHeartbeat(c *Client) *heartbeat {
	h := &heartbeat{c: c, held: make(map[*Lease]struct{}), timer: time.NewTimer(time.Hour)}
	h.timer.Stop()
	return h
}

// add begins to renew a lease. The request was sent at sent, so that the lease lives at
// least until sent + ttl.
func (h *heartbeat) add(l *Lease, sent time.Time, ttl, renewAfter time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l.held = true
	l.extend(sent, ttl, renewAfter)
	h.held[l] = struct{}{}
	h.wakeAt(l.due())
	h.c.observer.Level(LeasesHeld, 1)
}

// extend notes what the service promised to what was sent at sent.
func (l *Lease) extend(sent time.Time, ttl, renewAfter time.Duration) {
	if renewAfter <= 0 || renewAfter > ttl {
		renewAfter = ttl / 3
	}
	l.life, l.renewAfter, l.lastSent = ttl, max(renewAfter, shortestBeat), sent
	l.expires, l.renewAt = sent.Add(ttl), sent.Add(l.renewAfter)
}

// due is when the heartbeat has to look at the lease.
func (l *Lease) due() time.Time {
	if l.renewing || l.expires.Before(l.renewAt) {
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
// the service at the latest. Only the first call for a lease is.
func (h *heartbeat) drop(l *Lease) (usage map[string]uint64, until time.Time, first bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if l.ended {
		return nil, time.Time{}, false
	}
	l.ended = true
	h.forget(l, nil)
	return l.usage, l.lastSent.Add(l.life), true
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
	for _, cancel := range l.contexts {
		cancel(cause)
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
		case !l.renewing && !now.Before(l.renewAt.Add(-l.renewAfter/4)):
			l.renewing, l.lastSent = true, now
			batch = append(batch, l)
		}
		h.wakeAt(l.due())
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
			l.extend(sent, r.GetTtl().AsDuration(), r.GetRenewAfter().AsDuration())
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
			h.wakeAt(l.due())
		}
	}
}
