package client

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v7"
	"github.com/sony/gobreaker/v2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	weirv1 "weir/proto/weir/v1"
)

const (
	maxPending  = 10_000          // releases that the service has not heard of
	sendTimeout = 5 * time.Second // of one call that sends them again
	// usageLife is how long usage is worth sending after the release: the service keeps
	// what was reserved for an hour.
	usageLife = time.Hour
	// maxSize is how large one call is: well below the 4 MiB that the service takes. The
	// usage of one lease has less than 10 KB.
	maxSize = 1 << 20
)

// ending is the release of one lease, as it is told. If ask is set it is that of the
// lease, if there is any, that the operation holds; it is to be found before until, since
// to ask later would only take it anew.
type ending struct {
	ask     *ask
	id      string
	outcome string
	usage   usageParts // what is left to be settled
	until   time.Time  // when it is not worth telling any more
	ended   bool       // the lease is, but not its usage
}

// releases sends endings: each once while its holder waits, and those that the service
// did not hear of again, in batches, from one goroutine.
type releases struct {
	c    *Client
	wake chan struct{} // has one token if run should look
	done chan struct{} // closed when run has ended

	mu      sync.Mutex
	pending []*ending
	closing chan struct{} // closed when nothing is to come but what is pending
}

func newReleases(c *Client) *releases {
	return &releases{c: c, wake: make(chan struct{}, 1), done: make(chan struct{}), closing: make(chan struct{})}
}

// first tells an ending while its holder waits, whether or not ctx is over. What the
// service does not hear of is sent again later.
func (r *releases) first(ctx context.Context, e *ending) error {
	if r.c.breaker.State() == gobreaker.StateOpen {
		r.later(e)
		return fmt.Errorf("client: release: %w", errNotSent)
	}
	// The slots must be freed though the holder's context is over, as it often is in a
	// defer.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.c.options.Timeout)
	defer cancel()
	left, err := r.send(ctx, []*ending{e})
	if len(left) > 0 {
		r.later(e)
	}
	if err != nil {
		return fmt.Errorf("client: release: %w", err)
	}
	return nil
}

// later has an ending sent again, if there is room.
func (r *releases) later(e *ending) {
	r.mu.Lock()
	full := len(r.pending) >= maxPending || r.c.life.Err() != nil
	if !full {
		r.pending = append(r.pending, e)
		r.c.observer.Level(ReleasesPending, 1)
	}
	r.mu.Unlock()
	if full {
		r.giveUp(e)
		return
	}
	r.wakeUp()
}

// giveUp counts what is told no more.
func (r *releases) giveUp(e *ending) {
	if !e.ended {
		r.c.observer.Count(Releases, "gave_up")
	}
	if e.ask != nil { // nobody knows whether there is a lease
		return
	}
	for _, part := range e.usage {
		for range part {
			r.c.observer.Count(Settlements, "unavailable")
		}
	}
}

func (r *releases) wakeUp() {
	select {
	case r.wake <- struct{}{}:
	default: // it will look anyway
	}
}

// send sends endings of one outcome, at most 1000, and returns those that should be sent
// again. It is one call, if the service takes each usage, and none is in parts.
func (r *releases) send(ctx context.Context, batch []*ending) (left []*ending, err error) {
	request := &weirv1.ReleaseRequest{Outcome: batch[0].outcome}
	var used []*ending
	for _, e := range batch {
		request.LeaseIds = append(request.LeaseIds, e.id)
		if len(e.usage) > 0 {
			used = append(used, e)
			request.Usage = append(request.Usage, e.leaseUsage())
		}
	}
	m, err := r.c.service.Release(ctx, request)
	switch code := status.Code(err); {
	case err == nil:
	case len(used) > 0 && code == codes.InvalidArgument && len(batch) > 1: // one of them, and which is not told
		half := len(batch) / 2
		left, err = r.send(ctx, batch[:half])
		others, errOfOthers := r.send(ctx, batch[half:])
		return append(left, others...), errors.Join(err, errOfOthers)
	case len(used) > 0 && (code == codes.InvalidArgument || code == codes.Unimplemented):
		// A usage that the service does not take must not keep the slots.
		for _, e := range used {
			e.usage = nil
			r.c.observer.Count(Settlements, "refused")
		}
		left, again := r.send(ctx, batch)
		return left, errors.Join(err, again)
	default:
		return batch, err
	}
	var more []*ending // of whose usage a part is left
	for i, e := range batch {
		var s weirv1.ReleaseStatus
		if i < len(m.GetResults()) {
			s = m.GetResults()[i].GetStatus()
		}
		again := s == weirv1.ReleaseStatus_RELEASE_STATUS_UNAVAILABLE
		if len(used) > 0 && used[0] == e {
			var settled *weirv1.ReconcileResult
			if n := len(request.GetUsage()) - len(used); n < len(m.GetUsage()) {
				settled = m.GetUsage()[n]
			}
			again = !r.settle(ctx, e, settled) || again
			used = used[1:]
		}
		if s != weirv1.ReleaseStatus_RELEASE_STATUS_UNAVAILABLE && !e.ended {
			e.ended, e.until = true, e.until.Add(usageLife)
			r.c.observer.Count(Releases, releaseWord(s))
		}
		switch {
		case again:
			left, err = append(left, e), errNoStore
		case len(e.usage) > 0:
			more = append(more, e)
		}
	}
	if len(more) > 0 {
		others, errOfOthers := r.send(ctx, more)
		return append(left, others...), errors.Join(err, errOfOthers)
	}
	return left, err
}

// settle notes what became of the first part of a usage, and reports whether that is
// over.
func (r *releases) settle(ctx context.Context, e *ending, found *weirv1.ReconcileResult) bool {
	r.c.countSettlements(ctx, e.usage[0], found)
	if again := unsettled(e.usage[0], found); len(again) > 0 {
		e.usage[0] = again
		return false
	}
	e.usage = e.usage[1:]
	return true
}

// leaseUsage is the first part of the usage as a message.
func (e *ending) leaseUsage() *weirv1.LeaseUsage {
	return &weirv1.LeaseUsage{LeaseId: e.id, Limits: e.usage[0]}
}

// size is how many bytes it has in a call, about.
func (e *ending) size() int {
	n := len(e.id)
	if len(e.usage) > 0 {
		n += proto.Size(e.leaseUsage())
	}
	return n + 16
}

func releaseWord(s weirv1.ReleaseStatus) string {
	switch s {
	case weirv1.ReleaseStatus_RELEASE_STATUS_RELEASED:
		return "released"
	case weirv1.ReleaseStatus_RELEASE_STATUS_EXPIRED:
		return "expired"
	case weirv1.ReleaseStatus_RELEASE_STATUS_NOT_HELD, weirv1.ReleaseStatus_RELEASE_STATUS_UNSPECIFIED, weirv1.ReleaseStatus_RELEASE_STATUS_UNAVAILABLE:
	}
	return "not_held"
}

// run sends again what is pending, until Close.
func (r *releases) run() {
	defer close(r.done)
	pause := &backoff.ExponentialBackOff{
		InitialInterval: 100 * time.Millisecond, RandomizationFactor: 0.5, Multiplier: 2, MaxInterval: 5 * time.Second,
	}
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	closing, armed := r.closing, false
	for {
		select {
		case <-r.c.life.Done():
			return
		case <-r.wake:
			if armed { // it comes with the next call
				continue
			}
		case <-closing: // now at once, and then with short pauses
			closing, pause.MaxInterval = nil, pause.InitialInterval
			pause.Reset()
			r.flush(time.Now())
		case <-timer.C:
			r.flush(time.Now())
		}
		r.mu.Lock()
		n := len(r.pending)
		r.mu.Unlock()
		switch armed = n > 0; {
		case armed:
			timer.Reset(pause.NextBackOff())
		case closing == nil:
			return
		default:
			pause.Reset()
		}
	}
}

// flush sends all that is pending, once.
func (r *releases) flush(now time.Time) {
	r.mu.Lock()
	all := r.pending
	r.pending = nil
	r.mu.Unlock()
	byOutcome := make(map[string][]*ending)
	before := len(all)
	var left []*ending
	silent := false // the service does not say what an operation holds
	for _, e := range all {
		if !now.Before(e.until) {
			r.giveUp(e)
			continue
		}
		if e.ask != nil && !silent {
			silent = !r.find(e)
		}
		switch {
		case e.id != "":
			byOutcome[e.outcome] = append(byOutcome[e.outcome], e)
		case e.ask != nil:
			left = append(left, e)
		}
	}
	for _, list := range byOutcome {
		for batch := range batches(list) {
			ctx, cancel := context.WithTimeout(r.c.life, sendTimeout)
			r.c.observer.Count(Retries, "release")
			again, _ := r.send(ctx, batch) // what is left says it
			left = append(left, again...)
			cancel()
		}
	}
	r.c.observer.Level(ReleasesPending, len(left)-before)
	r.mu.Lock()
	r.pending = append(left, r.pending...)
	r.mu.Unlock()
}

// batches are parts of a list that fit into one call each.
func batches(list []*ending) iter.Seq[[]*ending] {
	return func(yield func([]*ending) bool) {
		begin, size := 0, 0
		for i, e := range list {
			n := e.size()
			if i > begin && (i-begin == maxLeases || size+n > maxSize) {
				if !yield(list[begin:i]) {
					return
				}
				begin, size = i, 0
			}
			size += n
		}
		if begin < len(list) {
			yield(list[begin:])
		}
	}
}

// find asks for what an abandoned operation holds, which then is to be released: it takes
// nothing anew if there is a lease. It reports whether the service has answered.
func (r *releases) find(e *ending) bool {
	ctx, cancel := context.WithTimeout(r.c.life, sendTimeout)
	defer cancel()
	ctx, cancelAtEnd := context.WithDeadline(ctx, e.until)
	defer cancelAtEnd()
	r.c.observer.Count(Retries, "abandoned")
	m, err := r.c.service.Acquire(ctx, e.ask.next())
	if err != nil && away(status.Code(err)) || ctx.Err() != nil {
		return false
	}
	e.ask, e.id, e.outcome = nil, m.GetLease().GetId(), "abandoned"
	e.until = time.Now().Add(m.GetLease().GetTtl().AsDuration())
	return true
}

// close sends what is pending until nothing is, or the time is over.
func (r *releases) close(timeout time.Duration) {
	close(r.closing)
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-r.done:
	case <-timer.C:
	}
}

// giveUpAll forgets what is pending and returns of how many leases that is the release.
func (r *releases) giveUpAll() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.pending {
		if !e.ended {
			n++
		}
		r.giveUp(e)
	}
	r.c.observer.Level(ReleasesPending, -len(r.pending))
	r.pending = nil
	return n
}
