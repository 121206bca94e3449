package redis_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"weir/limit"
	"weir/store"
	"weir/store/storetest"
)

// TestHistoriesAreLinearizable runs clients at the same time, while connections
// are killed under them, and asks whether what they were told fits one order of
// events.
func TestHistoriesAreLinearizable(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock() // it stands
		s, client := open(t, server, clock.Now)
		unknown, checked := 0, 0
		for round := range 40 {
			asked := linear{t, s, fmt.Sprintf("d%d", round), bucket(t, storetest.LinearTokens, 24*time.Hour), lane(t, storetest.LinearSlots, time.Hour)}
			var h storetest.History
			var clients sync.WaitGroup
			for n := range 4 {
				clients.Go(func() { h.Client(n, 6, asked) })
			}
			if round%2 == 1 {
				for range 3 {
					if err := client.ClientKillByFilter(storetest.Context(t), "TYPE", "normal", "SKIPME", "yes").Err(); err != nil {
						t.Error(err)
					}
				}
			}
			clients.Wait()
			unknown += h.Unknown()
			if h.Check(t) {
				checked++
			}
		}
		t.Logf("%d outcomes were unknown", unknown)
		if checked < 30 {
			t.Errorf("%d of 40 rounds were checked, want at least 30", checked)
		}
	})
}

// linear asks a store.
type linear struct {
	t      *testing.T
	store  store.Store
	domain string
	bucket limit.TokenBucket
	lane   limit.Concurrency
}

func (l linear) lease(n int) limit.LeaseID { return storetest.TestLease(l.domain, uint64(n)) }

// Take implements [storetest.Linear].
func (l linear) Take(lease, hits int) storetest.Outcome {
	subject := []limit.Entry{{Key: "k", Value: "x"}}
	d, err := l.store.Decide(storetest.Context(l.t), limit.Request{
		Domain: l.domain,
		Checks: []limit.Check{
			{Name: "bucket", Limit: l.bucket, Hits: int64(hits), Key: limit.Key(l.domain, l.bucket, subject)},
			{Name: "lane", Limit: l.lane, Hits: int64(hits), Key: limit.Key(l.domain, l.lane, subject)},
		},
		Lease: l.lease(lease),
	})
	if err != nil {
		return storetest.Outcome{Unknown: true}
	}
	return storetest.Outcome{OK: d.Admitted, Remaining: int(d.Results[0].Remaining), Free: int(d.Results[1].Remaining)}
}

// Release implements [storetest.Linear].
func (l linear) Release(lease int) storetest.Outcome {
	r, err := l.store.Release(storetest.Context(l.t), limit.Ending{Lease: l.lease(lease)})
	return storetest.Outcome{Unknown: err != nil, OK: r.Result == limit.Released}
}

// Renew implements [storetest.Linear].
func (l linear) Renew(lease int) storetest.Outcome {
	r, err := l.store.Renew(storetest.Context(l.t), limit.Extension{Lease: l.lease(lease)})
	return storetest.Outcome{Unknown: err != nil, OK: r.Renewed}
}
