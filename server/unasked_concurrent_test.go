package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"weir/limit"
	"weir/policy"
	"weir/store"
	"weir/store/memory"
)

// farStore is a store that takes a while to reach and to answer, and whose answers are lost now
// and then, in virtual time. Each caller wakes at instants that no other has, so that one thing
// happens after the other.
type farStore struct{ store.Store }

// callers is how many ask at once.
const callers = 8

// caller is the number of who asks, in a context, and its choices.
type caller struct {
	n int
	*rand.Rand
}

type callerKey struct{}

// sleep sleeps up to d, until an instant of c's own.
func (c caller) sleep(d time.Duration) {
	at := time.Now().Add(time.Duration(c.Int64N(int64(d)))).UnixNano()
	at += callers - at%callers + int64(c.n)
	time.Sleep(time.Until(time.Unix(0, at)))
}

// travel is the way there, f, and back. An error says that the answer was lost.
func (s *farStore) travel(ctx context.Context, f func() error) error {
	c, _ := ctx.Value(callerKey{}).(caller)
	c.sleep(3 * time.Millisecond)
	err := f()
	c.sleep(3 * time.Millisecond)
	if c.IntN(50) == 0 {
		return fmt.Errorf("lost: %w", store.ErrUnavailable)
	}
	return err
}

func (s *farStore) Decide(ctx context.Context, r limit.Request) (d limit.Decision, err error) {
	err = s.travel(ctx, func() (err error) { d, err = s.Store.Decide(ctx, r); return err })
	return d, err
}

func (s *farStore) Settle(ctx context.Context, u limit.Usage) (all []limit.Settlement, err error) {
	err = s.travel(ctx, func() (err error) { all, err = s.Store.Settle(ctx, u); return err })
	return all, err
}

func (s *farStore) Undo(ctx context.Context, r limit.Request) (e limit.Release, err error) {
	err = s.travel(ctx, func() (err error) { e, err = s.Store.Undo(ctx, r); return err })
	return e, err
}

func (s *farStore) Reset(ctx context.Context, checks []limit.Check) error {
	return s.travel(ctx, func() error { return s.Store.Reset(ctx, checks) })
}

// Whenever a request is refused unasked, while others ask, spend and give back at the same
// time through this replica, the store would refuse it at that moment.
func TestWhatIsRefusedUnaskedTheStoreWouldRefuseAtThatMoment(t *testing.T) {
	unasked := int64(0)
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { unasked += askFar(t, seed) })
		})
	}
	t.Logf("%d refusals were unasked", unasked)
	if unasked < 4000 {
		t.Errorf("%d refusals were unasked, want more: nothing is shown", unasked)
	}
}

func askFar(t *testing.T, seed uint64) int64 {
	near := memory.New(memory.Options{Now: func() int64 { return time.Now().UnixMilli() }})
	far := &farStore{Store: near}
	w := replicaOn(t, far, remembered)
	set, err := policy.Parse("far.yaml", []byte(`
domain: d
descriptors:
  - {key: fast, token_bucket: {capacity: 3, refill: 20/s}}
  - {key: slow, token_bucket: {capacity: 2, refill: 1/h, reserve: 10m}}
  - {key: day, rate_limit: {unit: day, requests_per_unit: 3, reserve: 10m}}
  - {key: second, rate_limit: {unit: second, requests_per_unit: 4}}
`), policy.Options{})
	if err != nil {
		t.Fatal(err)
	}
	w.SetPolicy(t.Context(), policy.Reading{Set: set, Changed: true})
	var refusals atomic.Int64
	var all sync.WaitGroup
	for n := range callers {
		all.Go(func() {
			c := caller{n, rand.New(rand.NewPCG(seed, uint64(n)))}
			ctx := context.WithValue(t.Context(), callerKey{}, c)
			var held []limit.Request
			for range 150 {
				c.sleep(10 * time.Millisecond)
				if k := len(held) - 1; k >= 0 && c.IntN(3) == 0 {
					r := held[k]
					held = held[:k]
					switch c.IntN(4) {
					case 0:
						_ = w.undo(ctx, r)
					case 1:
						_ = w.reset(ctx, "d", r.Checks)
					case 2:
						_, _ = w.settle(ctx, limit.Usage{Domain: "d", Lease: r.Lease, Limits: []limit.Used{{Limit: r.Checks[0].Name}}})
					case 3:
						_, _ = w.settle(ctx, limit.Usage{Domain: "d", Lease: r.Lease, Checks: r.Checks[:1]})
					}
					continue
				}
				r := policy.Request{Domain: "d"}
				for range 1 + c.IntN(2) {
					key := []string{"slow", "day", "fast", "second"}[c.IntN(4)]
					r.Descriptors = append(r.Descriptors, policy.Descriptor{Entries: []limit.Entry{{Key: key, Value: "x"}}, Hits: uint64(1 + c.IntN(2)), HasHits: true, Negative: c.IntN(12) == 0})
				}
				m := set.Match(r)
				ask := limit.Request{Domain: "d", Checks: m.Checks}
				at := time.Now()
				d, err := w.ask(ctx, ask)
				switch {
				case err != nil:
					t.Error(err)
				case time.Now().Equal(at) && d.Bypass == limit.DefaultMode: // it was not asked for
					refusals.Add(1)
					c.wouldRefuse(t, near, ask, d)
				case d.Admitted && d.Lease != "":
					ask.Lease = d.Lease
					held = append(held, ask)
				}
			}
		})
	}
	all.Wait()
	return refusals.Load()
}

// wouldRefuse looks at what the store says at this instant, by a question that takes nothing:
// as many hits as were asked for, of each limit that refuses.
func (c caller) wouldRefuse(t *testing.T, near *memory.Store, r limit.Request, told limit.Decision) {
	if told.Admitted {
		t.Errorf("%+v was admitted unasked", r)
	}
	states, err := near.Inspect(t.Context(), r.Checks)
	if err != nil {
		t.Error(err)
	}
	for i, result := range told.Results {
		if !result.Unknown && states[i].RetryAfter == 0 {
			t.Errorf("caller %d: %s for %d is refused unasked: %+v, and the store says %+v", c.n, r.Checks[i].Key, r.Checks[i].Hits, result, states[i])
		}
	}
}
