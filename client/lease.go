package client

import (
	"context"
	"errors"
	"maps"
	"strings"
	"time"

	weirv1 "weir/proto/weir/v1"
)

// maxText is how long an outcome may be; the rest is left out.
const maxText = 64

// ErrLost is the cause of a context whose lease is lost.
var ErrLost = errors.New("client: the lease is lost: its slots may be somebody else's")

// Lease is what admitted work holds until it is released. Meanwhile the client renews
// it. It may hold nothing; then, and if it is nil, its methods are of no effect. It may
// be used by many goroutines.
type Lease struct {
	client       *Client
	answer       *weirv1.AcquireResponse // nil if the client decided
	bypass       Bypass
	bypassReason string
	id           string        // empty: it holds nothing
	lost         chan struct{} // nil if it holds nothing

	// Below is guarded by client.heartbeat.mu.
	held       bool      // neither released nor lost
	ended      bool      // released
	renewing   bool      // a renewal is on its way
	renewAt    time.Time // when it should be renewed
	renewAfter time.Duration
	expires    time.Time     // when it is lost, unless it is renewed
	gone       time.Time     // when it has expired at the service at the latest
	life       time.Duration // from a renewal on, at most
	usage      map[string]uint64
	contexts   map[context.Context]childContext // that are not over
}

// childContext is a context that ends with a lease.
type childContext struct {
	cancel context.CancelCauseFunc
	keep   func() bool // says that nobody need forget it any more
}

// granted is the lease of an admitted request that was sent at sent.
func (c *Client) granted(m *weirv1.AcquireResponse, sent time.Time) *Lease {
	l := &Lease{client: c, answer: m, bypass: bypassOf(m.GetBypass()), bypassReason: m.GetBypassReason(), id: m.GetLease().GetId()}
	if l.id != "" {
		l.lost = make(chan struct{})
		c.heartbeat.add(l, sent, m.GetLease(), m.GetReplayed())
	}
	return l
}

// ID is all that a release needs, wherever it is sent from; empty if nothing is held. It
// is a capability: don't log it.
func (l *Lease) ID() string {
	if l == nil {
		return ""
	}
	return l.id
}

// Bypass is how the work was admitted if not by the service's store.
func (l *Lease) Bypass() Bypass {
	if l == nil {
		return NoBypass
	}
	return l.bypass
}

// BypassReason is one word for why there was a bypass; empty without one.
func (l *Lease) BypassReason() string {
	if l == nil {
		return ""
	}
	return l.bypassReason
}

// Answer is what the service said: how each limit stands, and what is in shadow. Nil if
// the client decided. It must not be changed.
func (l *Lease) Answer() *weirv1.AcquireResponse {
	if l == nil {
		return nil
	}
	return l.answer
}

// Lost is closed when the lease is gone before it was released: the service says so, or
// its life has passed without a renewal, also after [Client.Close]. The work goes on
// without a right to: stop it, or not. It is never closed after the release.
func (l *Lease) Lost() <-chan struct{} {
	if l == nil {
		return nil
	}
	return l.lost
}

// Context is ctx until the lease is lost, with the cause [ErrLost], or released.
func (l *Lease) Context(ctx context.Context) context.Context {
	if l.ID() == "" {
		return ctx
	}
	ctx, cancel := context.WithCancelCause(ctx)
	h := l.client.heartbeat
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case l.held:
		if l.contexts == nil {
			l.contexts = make(map[context.Context]childContext)
		}
		l.contexts[ctx] = childContext{cancel: cancel, keep: context.AfterFunc(ctx, func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			delete(l.contexts, ctx)
		})}
	case l.ended:
		cancel(nil)
	default:
		cancel(ErrLost)
	}
	return ctx
}

// Use tells what the work has used of a limit that reserves: all of it, not the
// difference to what was reserved; later calls of the same limit replace earlier ones. An
// empty limit means each that this lease reserved and that no other call names. The
// release brings it. A name that reserved nothing changes nothing: it is logged, and a
// Settlement "not_reserved".
func (l *Lease) Use(limit string, hits uint64) {
	if l.ID() == "" {
		return
	}
	l.client.heartbeat.mu.Lock()
	defer l.client.heartbeat.mu.Unlock()
	if l.ended {
		return // it is told already: Reconcile brings more
	}
	if l.usage == nil {
		l.usage = make(map[string]uint64)
	}
	l.usage[limit] = hits
}

// Ending is how the work of a lease ended.
type Ending struct {
	// Outcome is one word such as "ok", "error", "cancelled", of at most 64 bytes; it
	// may be empty.
	Outcome string
	// Usage is as by Use, by the limits' names of at most 128 bytes; at most 64.
	Usage map[string]uint64
}

// Release ends the lease: its slots are free when it returns. It belongs in a defer: it
// may be called any number of times, and if ctx is over it is sent all the same, within
// Options.Timeout. If the service does not hear of it, it is sent again in the
// background until the lease has expired.
func (l *Lease) Release(ctx context.Context) {
	_ = l.End(ctx, Ending{}) // the observer is told
}

// End is Release with more to tell. Only the first End or Release counts; the others
// return nil at once. An error says that the service has not heard of it yet, which the
// client goes on trying, or that it does not take this usage.
func (l *Lease) End(ctx context.Context, e Ending) error {
	if l.ID() == "" {
		return nil
	}
	usage, until, first := l.client.heartbeat.drop(l)
	if !first {
		return nil
	}
	if usage == nil {
		usage = make(map[string]uint64, len(e.Usage))
	}
	maps.Copy(usage, e.Usage)
	parts, err := usageOf(usage)
	if err != nil {
		l.client.observer.Count(Settlements, "refused")
	}
	told := &ending{id: l.id, outcome: text(e.Outcome), usage: parts, until: until}
	return errors.Join(err, l.client.releases.first(ctx, told))
}

// text is s as a text that can be sent: what it says must not keep a slot.
func text(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxText)], "") }

type contextKey struct{}

// NewContext returns a context that carries the lease.
func NewContext(ctx context.Context, l *Lease) context.Context {
	return context.WithValue(ctx, contextKey{}, l)
}

// FromContext is the lease that the middleware or an interceptor acquired for a handler;
// nil, which holds nothing, if there is none.
func FromContext(ctx context.Context) *Lease {
	l, _ := ctx.Value(contextKey{}).(*Lease)
	return l
}
