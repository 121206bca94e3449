package client_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"weir/client"
	"weir/store/storetest"
)

const roomy = `
domain: images
descriptors:
  - key: account
    rate_limit: {unit: year, requests_per_unit: 4000000000, reserve: 10m, name: tokens}
    concurrency: {max_in_flight: 100000, lease: 30s}
`

// Use, End, Release, Context, Reconcile and Close from many goroutines: each lease is ended
// once, nothing is held at the end, and what was used is what stays charged.
func TestLeasesEndOnceWhoeverEndsThem(t *testing.T) {
	s := serve(t, roomy)
	w := newWatcher()
	c := client.New(s.conn, client.Options{Domain: "images", Observer: w, Timeout: storetest.Deadline})
	before := tokens(t, s.conn, "alice")
	var work sync.WaitGroup
	const n = 200
	for range n {
		work.Go(func() {
			l, err := c.Acquire(context.Background(), estimated(10))
			if err != nil {
				t.Error(err)
				return
			}
			ctx := l.Context(context.Background())
			l.Use("tokens", 3)
			var ends sync.WaitGroup
			for i := range 6 {
				ends.Go(func() {
					for range rand.IntN(300) { // in another order each time
						runtime.Gosched()
					}
					switch i {
					case 0, 1:
						l.Release(context.Background())
					case 2:
						_ = l.End(context.Background(), client.Ending{Outcome: "ok", Usage: map[string]uint64{"tokens": 3}})
					case 3:
						_, _ = l.Reconcile(context.Background(), map[string]uint64{"tokens": 3})
					case 4:
						l.Use("tokens", 3)
					case 5:
						<-l.Context(ctx).Done()
					}
				})
			}
			ends.Wait()
		})
	}
	work.Wait()
	var closes sync.WaitGroup
	for range 4 {
		closes.Go(c.Close)
	}
	closes.Wait()
	expect(t, "slots", slots(t, s.conn, "alice"), 0)
	expect(t, "charged", before-tokens(t, s.conn, "alice"), 3*n)
	expect(t, "released", w.count("releases released"), n)
	expect(t, "held", w.level(client.LeasesHeld), 0)
	expect(t, "pending", w.level(client.ReleasesPending), 0)
}

// A queue that is closed while jobs enter, work, panic and are cancelled holds nothing.
func TestAClosedQueueHoldsNothing(t *testing.T) {
	s := serve(t, roomy)
	w := newWatcher()
	c := client.New(s.conn, client.Options{Domain: "images", Observer: w, Timeout: storetest.Deadline})
	q := c.NewQueue(client.QueueOptions{Depth: 5, Total: 40})
	var work sync.WaitGroup
	for i := range 300 {
		work.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.IntN(20))*time.Millisecond)
			defer cancel()
			defer func() { _ = recover() }()
			_ = q.Do(ctx, fmt.Sprint(i%9), estimated(10), func(ctx context.Context, l *client.Lease) error {
				if i%7 == 0 {
					panic("a test")
				}
				<-time.After(time.Duration(rand.IntN(3)) * time.Millisecond)
				return ctx.Err()
			})
		})
		if i == 200 {
			work.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
				defer cancel()
				_ = q.Close(ctx)
			})
		}
	}
	work.Wait()
	_ = q.Close(context.Background())
	c.Close()
	storetest.Eventually(t, "no slot is taken", func() bool { return slots(t, s.conn, "alice") == 0 })
	expect(t, "depth", q.Depth(), 0)
	expect(t, "accounts", q.Accounts(), 0)
	expect(t, "queue depth", w.level(client.QueueDepth), 0)
	expect(t, "working", w.level(client.QueueWorking), 0)
	expect(t, "held", w.level(client.LeasesHeld), 0)
	expect(t, "pending", w.level(client.ReleasesPending), 0)
}

const crowded = `
domain: images
descriptors:
  - key: account
    rate_limit: {unit: year, requests_per_unit: 4000000000, reserve: 10m, name: tokens}
    concurrency: {max_in_flight: 12, lease: 3m}
`

// Requests and replies of all calls are lost, callers leave, panic and come back: in the
// end no slot is taken, and what was used is what is charged.
func TestWhateverIsLostTheMoneyIsRight(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := serve(t, crowded)
				var mu sync.Mutex
				random := rand.New(rand.NewPCG(seed, 7))
				roll := func(n int) int {
					mu.Lock()
					defer mu.Unlock()
					return random.IntN(n)
				}
				var quiet atomic.Bool
				conn := &wire{ClientConnInterface: s.conn, lose: func(ctx context.Context, method string, _ int, _ proto.Message) loss {
					if method == "Inspect" || quiet.Load() {
						return loss{}
					}
					switch roll(10) {
					case 0:
						return loss{request: refused}
					case 1, 2:
						return loss{reply: cut}
					case 3:
						if roll(3) == 0 {
							return loss{request: hang(ctx)}
						}
					}
					time.Sleep(time.Duration(roll(30)) * time.Millisecond)
					return loss{}
				}}
				w := newWatcher()
				c := newClient(t, conn, client.Options{FailureMode: client.FailClosed, Observer: w, Timeout: 250 * time.Millisecond, Retry: client.Retry{Budget: 100}})
				before := tokens(t, s.conn, "alice")
				used := 0
				var work sync.WaitGroup
				for range 20 {
					work.Go(func() {
						for range 15 {
							time.Sleep(time.Duration(roll(5000)) * time.Millisecond)
							ctx, cancel := context.WithTimeout(t.Context(), time.Duration(roll(1500))*time.Millisecond)
							ask := c.Acquire
							if roll(2) == 0 {
								ask = c.Wait
							}
							l, err := ask(ctx, estimated(uint64(roll(100))))
							if err == nil {
								time.Sleep(time.Duration(roll(60)) * time.Second)
								n := roll(200)
								l.Use("tokens", uint64(n))
								_ = l.End(ctx, client.Ending{Outcome: "ok"})
								mu.Lock()
								used += n
								mu.Unlock()
							} else if l != nil || !errors.As(err, new(*client.LimitedError)) && ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) {
								t.Errorf("%v %v", l, err)
							}
							cancel()
						}
					})
				}
				work.Wait()
				quiet.Store(true)
				time.Sleep(3 * time.Minute)
				expect(t, "slots", slots(t, s.conn, "alice"), 0)
				if w.count("settlements late")+w.count("lost_leases expired")+w.count("releases expired")+w.count("releases gave_up") > 0 {
					return // what is late stays charged
				}
				expect(t, "charged beyond what was used", before-tokens(t, s.conn, "alice")-used, 0)
				expect(t, "held", w.level(client.LeasesHeld), 0)
				expect(t, "pending", w.level(client.ReleasesPending), 0)
			})
		})
	}
}
