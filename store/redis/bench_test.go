package redis_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"weir/limit"
	"weir/store/redis"
	"weir/store/storetest"
)

// openBench opens a store on a server of its own, with flags, and a client of that.
func openBench(b *testing.B, flags ...string) (*redis.Store, *goredis.Client) {
	b.Helper()
	server := storetest.StartRedis(b, storetest.AnyRedis(b), flags...)
	s, err := redis.Open(redis.Options{URL: server.URL, ReplyTimeout: storetest.Deadline})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = s.Close() })
	opts, err := goredis.ParseURL(server.URL)
	if err != nil {
		b.Fatal(err)
	}
	client := goredis.NewClient(opts)
	b.Cleanup(func() { _ = client.Close() })
	return s, client
}

// usage returns the processor time of Redis in seconds, and its bytes for data.
func usage(b *testing.B, client *goredis.Client) (cpu float64, memory int64) {
	b.Helper()
	text, err := client.Info(storetest.Context(b), "cpu", "memory").Result()
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch name {
		case "used_cpu_sys", "used_cpu_user":
			seconds, _ := strconv.ParseFloat(value, 64)
			cpu += seconds
		case "used_memory":
			memory, _ = strconv.ParseInt(value, 10, 64)
		}
	}
	return cpu, memory
}

// callers calls f for 0 to n-1, of 64 callers.
func callers(n int, f func(i int)) {
	var next atomic.Int64
	var all sync.WaitGroup
	for range 64 {
		all.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				f(int(i))
			}
		})
	}
	all.Wait()
}

// perDecision has 64 callers decide, and tells the processor time of Redis for each.
func perDecision(b *testing.B, client *goredis.Client, f func(i int)) {
	b.Helper()
	before, _ := usage(b, client)
	b.ReportAllocs()
	b.ResetTimer()
	callers(b.N, f)
	b.StopTimer()
	after, _ := usage(b, client)
	b.ReportMetric((after-before)*1e9/float64(b.N), "redis-ns/op")
}

// aloneAndTogether measures f alone, and beside 63 others, of which batches form.
func aloneAndTogether(b *testing.B, client *goredis.Client, f func() error) {
	b.Helper()
	b.Run("alone", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := f(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("beside 63", func(b *testing.B) {
		var failed atomic.Int64
		perDecision(b, client, func(int) {
			if f() != nil {
				failed.Add(1)
			}
		})
		if n := failed.Load(); n > 0 {
			b.Errorf("%d failed", n)
		}
	})
}

// BenchmarkDecide is what one decision costs by what it asks, refusals too.
func BenchmarkDecide(b *testing.B) {
	s, client := openBench(b)
	tokens, slots := bucket(b, 1_000_000_000, time.Second), lane(b, 1_000_000, time.Hour)
	empty := request(check(bucket(b, 1, 24*time.Hour), "empty"))
	decide(b, s, empty)
	for _, tt := range []struct {
		name     string
		r        limit.Request
		admitted bool
		released bool
	}{
		{"one bucket", request(check(tokens, "a")), true, false},
		{"one bucket refuses", empty, false, false},
		{"three buckets", request(check(tokens, "a"), check(tokens, "b"), check(tokens, "c")), true, false},
		{"bucket, lane and pool, released", request(check(tokens, "a"), check(slots, "a"), check(slots, "pool")), true, true},
	} {
		b.Run(tt.name, func(b *testing.B) {
			aloneAndTogether(b, client, func() error {
				r := tt.r
				if tt.released {
					r = withLease(r)
				}
				if d, err := s.Decide(b.Context(), r); err != nil {
					return err
				} else if d.Admitted != tt.admitted {
					return fmt.Errorf("Decide = %+v", d)
				}
				if !tt.released {
					return nil
				}
				if e, err := s.Release(b.Context(), limit.Ending{Lease: r.Lease}); err != nil {
					return err
				} else if e.Result != limit.Released {
					return fmt.Errorf("Release = %+v", e)
				}
				return nil
			})
		})
	}
}

// BenchmarkDurability is what a decision of one bucket costs on a Redis that keeps it:
// docs/faults.md tells what it buys.
func BenchmarkDurability(b *testing.B) {
	for _, tt := range []struct {
		name  string
		flags []string
	}{
		{"nothing", nil},
		{"everysec", []string{"--appendonly", "yes", "--appendfsync", "everysec"}},
		{"always", []string{"--appendonly", "yes", "--appendfsync", "always"}},
	} {
		b.Run(tt.name, func(b *testing.B) {
			s, client := openBench(b, tt.flags...)
			// Admitted each time: what is refused writes nothing.
			r := request(check(bucket(b, 1_000_000_000, time.Second), "x"))
			decide(b, s, r)
			aloneAndTogether(b, client, func() error {
				_, err := s.Decide(b.Context(), r)
				return err
			})
		})
	}
}

// BenchmarkSubjects is what a decision of one bucket costs by how many subjects there are, of
// which each has its turn; and how much memory of Redis one takes that is idle.
func BenchmarkSubjects(b *testing.B) {
	l := bucket(b, 1_000_000_000, time.Second)
	for _, n := range []int{1_000, 10_000, 100_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s, client := openBench(b)
			ask := func(i int) {
				if d, err := s.Decide(context.Background(), request(check(l, "customer-"+strconv.Itoa(i)))); err != nil || !d.Admitted {
					b.Errorf("Decide = %+v, %v", d, err)
				}
			}
			ask(0)
			_, before := usage(b, client)
			callers(n, ask)
			_, after := usage(b, client)
			perDecision(b, client, func(i int) { ask(int(uint64(i) * 7919 % uint64(n))) })
			b.ReportMetric(float64(after-before)/float64(n), "redis-B/subject")
		})
	}
}

// BenchmarkPool is what a decision of a bucket, a lane and a pool costs with the release of its
// lease, by how many leases the pool holds already.
func BenchmarkPool(b *testing.B) {
	tokens, slots := bucket(b, 1_000_000_000, time.Second), lane(b, 1_000_000, time.Hour)
	for _, n := range []int{10, 1_000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s, client := openBench(b)
			ask := func(i int) limit.LeaseID {
				account := "customer-" + strconv.Itoa(i%1000)
				r := request(check(tokens, account), check(slots, account), check(slots, "pool"))
				r.Lease = storetest.TestLease("d", leaseNumber.Add(1)*0x9e3779b97f4a7c15) // in no order, as real ones
				if d, err := s.Decide(context.Background(), r); err != nil || !d.Admitted {
					b.Errorf("Decide = %+v, %v", d, err)
				}
				return r.Lease
			}
			callers(n, func(i int) { ask(i) })
			perDecision(b, client, func(i int) {
				if e, err := s.Release(context.Background(), limit.Ending{Lease: ask(i)}); err != nil || e.Result != limit.Released {
					b.Errorf("Release = %+v, %v", e, err)
				}
			})
		})
	}
}

// BenchmarkLeases is what a page of leases costs, each with three slots: for so long Redis
// does nothing else.
func BenchmarkLeases(b *testing.B) {
	s, _ := openBench(b)
	l := lane(b, 1_000_000, 24*time.Hour)
	for range 20_000 {
		decide(b, s, withLease(request(check(l, "x"), check(l, "y"), check(l, "z"))))
	}
	after := leases(b, s, limit.Slot{}, limit.MaxListed).Next
	for _, n := range []int{1, 100, limit.MaxListed} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			for b.Loop() {
				leases(b, s, after, n)
			}
		})
	}
}
