package storetest_test

import (
	"context"
	"sync"
	"testing"

	"weir/limit"
	"weir/store"
	"weir/store/storetest"
)

// TestTheModelPassesTheScenarios holds the model itself against the scenarios.
func TestTheModelPassesTheScenarios(t *testing.T) {
	storetest.RunScenarios(t, "../testdata", func(_ *testing.T, now func() int64) storetest.Fixture {
		return storetest.Fixture{Store: locked{Store: storetest.NewModel(now), mu: new(sync.Mutex)}}
	})
}

// locked makes the model safe for requests that race.
type locked struct {
	store.Store
	mu *sync.Mutex
}

func (l locked) Decide(ctx context.Context, r limit.Request) (limit.Decision, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Store.Decide(ctx, r)
}
