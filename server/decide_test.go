package server

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"weir/limit"
	"weir/policy"
	"weir/store"
	"weir/store/memory"
	"weir/store/storetest"
)

// leaving is a store whose caller leaves while it decides.
type leaving struct {
	store.Store
	leave context.CancelFunc
}

func (l *leaving) Decide(ctx context.Context, r limit.Request) (limit.Decision, error) {
	l.leave()
	if err := ctx.Err(); err != nil {
		return limit.Decision{}, fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	return l.Store.Decide(ctx, r)
}

// A decision does not end with its caller, and what it grants then is given back; also by a
// store that answers at once.
func TestWhatIsGrantedToACallerThatHasLeftIsGivenBack(t *testing.T) {
	set, err := policy.Parse("policy.yaml", []byte("domain: d\ndescriptors:\n  - {key: lane, concurrency: {max_in_flight: 1, lease: 1h}}\n"), policy.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, instant := range []bool{false, true} {
		ctx, leave := context.WithCancel(t.Context())
		st := &leaving{memory.New(memory.Options{}), leave}
		s := New(Options{
			Store: st, StoreTimeout: storetest.Deadline, Instant: instant,
			Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), Registerer: prometheus.NewRegistry(),
		})
		s.SetPolicy(t.Context(), policy.Reading{Set: set, Changed: true})
		r := policy.Request{Domain: "d", Descriptors: []policy.Descriptor{{Entries: []limit.Entry{{Key: "lane", Value: "x"}}}}}
		d, err := s.decide(ctx, s.loaded.Load(), r, asker{})
		if err != nil || d.decision.Lease == "" || d.decision.Bypass != limit.DefaultMode {
			t.Errorf("instant %v: decide = %+v, %v, want a lease of the store's", instant, d.decision, err)
		}
		s.Close() // when it has been given back
		if n, err := st.Held(t.Context(), "d"); err != nil || n != 0 {
			t.Errorf("instant %v: %d leases are held, %v, want none", instant, n, err)
		}
	}
}
