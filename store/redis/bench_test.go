package redis_test

import (
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"weir/limit"
	"weir/store/redis"
	"weir/store/storetest"
)

// BenchmarkDecide is what one decision of a bucket costs, alone and beside 63
// others, of which batches form.
func BenchmarkDecide(b *testing.B) {
	server := storetest.StartRedis(b, storetest.AnyRedis(b))
	s, err := redis.Open(redis.Options{URL: server.URL})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	r := request(check(bucket(b, 1000, time.Second), "x"))
	decide(b, s, r)
	aloneAndTogether(b, s, r)
}

// BenchmarkDurability is what the same costs on a Redis that keeps it: docs/faults.md tells
// what it buys.
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
			server := storetest.StartRedis(b, storetest.AnyRedis(b), tt.flags...)
			s, err := redis.Open(redis.Options{URL: server.URL})
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = s.Close() }()
			// Admitted each time: what is refused writes nothing.
			r := request(check(bucket(b, 1_000_000_000, time.Second), "x"))
			decide(b, s, r)
			aloneAndTogether(b, s, r)
		})
	}
}

func aloneAndTogether(b *testing.B, s *redis.Store, r limit.Request) {
	b.Helper()
	b.Run("alone", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := s.Decide(b.Context(), r); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("beside 63", func(b *testing.B) {
		b.ReportAllocs()
		b.SetParallelism(32) // times GOMAXPROCS
		var failed atomic.Int64
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if _, err := s.Decide(b.Context(), r); err != nil {
					failed.Add(1)
				}
			}
		})
		if n := failed.Load(); n > 0 {
			b.Errorf("%d failed", n)
		}
	})
}

// BenchmarkLeases is what a page of leases costs, each with three slots: for so long Redis
// does nothing else.
func BenchmarkLeases(b *testing.B) {
	server := storetest.StartRedis(b, storetest.AnyRedis(b))
	s, err := redis.Open(redis.Options{URL: server.URL})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = s.Close() }()
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
