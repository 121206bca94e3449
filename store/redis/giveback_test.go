package redis

import (
	"errors"
	"testing"
	"time"

	"weir/limit"
	"weir/store"
	"weir/store/storetest"
)

// A decision that Redis sees only after its lease was given back takes nothing.
func TestADecisionThatWasGivenUpTakesNothing(t *testing.T) {
	server := storetest.StartRedis(t, storetest.AnyRedis(t))
	s, err := Open(Options{URL: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	ctx := storetest.Context(t)
	l, err := limit.NewConcurrency(2, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	r := limit.Request{
		Domain: "d",
		Checks: []limit.Check{{Name: "k", Limit: l, Hits: 1, Key: limit.Key("d", l, nil)}},
		Lease:  storetest.TestLease("d", 1),
	}
	if err := s.release(ctx, r.Lease); err != nil {
		t.Fatal(err)
	}
	if d, err := s.Decide(ctx, r); err == nil || errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Decide of a lease that was given back = %+v, %v, want an error of its own", d, err)
	}
	// The mark is nobody's lease.
	if got, err := s.Release(ctx, r.Lease); err != nil || got.Result != limit.NotHeld {
		t.Errorf("Release = %v, %v, want NOT_HELD", got, err)
	}
	if got, err := s.Renew(ctx, r.Lease); err != nil || got.Renewed {
		t.Errorf("Renew = %v, %v, want LOST", got, err)
	}
	r.Lease = storetest.TestLease("d", 2)
	if d, err := s.Decide(ctx, r); err != nil || d.Results[0].Remaining != 1 {
		t.Errorf("Decide = %+v, %v, want one slot left of two", d, err)
	}
}

func TestCloseTwice(t *testing.T) {
	s, err := Open(Options{URL: "redis://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	if _, err := s.Decide(storetest.Context(t), limit.Request{}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Decide after Close: %v, want ErrUnavailable", err)
	}
}
