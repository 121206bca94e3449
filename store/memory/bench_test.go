package memory_test

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"weir/limit"
	"weir/store/memory"
)

// benchBucket never refuses.
func benchBucket(b *testing.B) limit.TokenBucket {
	l, err := limit.NewTokenBucket(1_000_000_000, 1, time.Second)
	if err != nil {
		b.Fatal(err)
	}
	return l
}

func benchSlots(b *testing.B) limit.Concurrency {
	l, err := limit.NewConcurrency(1_000_000, time.Hour)
	if err != nil {
		b.Fatal(err)
	}
	return l
}

func benchCheck(l limit.Limit, name, value string) limit.Check {
	return limit.Check{Name: name, Limit: l, Hits: 1, Key: limit.Key("d", l, []limit.Entry{{Key: name, Value: value}})}
}

var benchLeases atomic.Uint64

func benchLease() limit.LeaseID {
	var random [16]byte
	n := benchLeases.Add(1)
	binary.BigEndian.PutUint64(random[:], n*0x9e3779b97f4a7c15) // no order, as real ones have none
	binary.BigEndian.PutUint64(random[8:], n)
	return limit.NewLeaseID("d", random)
}

// inTurn is each of n, and no two that follow each other are neighbours.
func inTurn(i, n int) int { return int(uint64(i) * 7919 % uint64(n)) }

// What a decision of one bucket costs by how many subjects the store knows, of which each has
// its turn; and how much memory one takes that is idle.
func BenchmarkSubjects(b *testing.B) {
	l := benchBucket(b)
	for _, n := range []int{1, 1_000, 10_000, 100_000, 1_000_000} {
		asked := make([]limit.Request, n)
		for i := range asked {
			asked[i] = limit.Request{Domain: "d", Checks: []limit.Check{benchCheck(l, "account", "customer-"+strconv.Itoa(i))}}
		}
		before := heap()
		s := memory.New(memory.Options{})
		decide := func(b *testing.B, i int) {
			if d, err := s.Decide(b.Context(), asked[inTurn(i, n)]); err != nil || !d.Admitted {
				b.Errorf("Decide = %+v, %v", d, err)
			}
		}
		for i := range n {
			decide(b, i)
		}
		bytes := float64(heap()-before) / float64(n)
		b.Run(fmt.Sprintf("%d/alone", n), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				decide(b, i)
			}
			b.ReportMetric(bytes, "B/subject")
		})
		b.Run(fmt.Sprintf("%d/parallel", n), func(b *testing.B) {
			b.ReportAllocs()
			var from atomic.Int64
			b.RunParallel(func(pb *testing.PB) {
				i := int(from.Add(1_000_003))
				for ; pb.Next(); i++ {
					decide(b, i)
				}
			})
		})
		runtime.KeepAlive(asked)
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// What a decision of a bucket, a lane and a pool costs with the release of its lease, by how
// many leases the pool holds already. The lease that is released is any of them.
func BenchmarkPool(b *testing.B) {
	bucket, slots := benchBucket(b), benchSlots(b)
	for _, n := range []int{10, 1_000, 100_000} {
		s := memory.New(memory.Options{})
		decide := func(i int) limit.LeaseID {
			account := "customer-" + strconv.Itoa(i%1000)
			r := limit.Request{Domain: "d", Lease: benchLease(), Checks: []limit.Check{
				benchCheck(bucket, "account", account), benchCheck(slots, "account", account), benchCheck(slots, "pool", "images"),
			}}
			if d, err := s.Decide(b.Context(), r); err != nil || !d.Admitted {
				b.Fatalf("Decide = %+v, %v", d, err)
			}
			return r.Lease
		}
		held := make([]limit.LeaseID, n)
		for i := range held {
			held[i] = decide(i)
		}
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				one := &held[inTurn(i, n)]
				if r, err := s.Release(b.Context(), limit.Ending{Lease: *one}); err != nil || r.Result != limit.Released {
					b.Fatalf("Release = %v, %v", r, err)
				}
				*one = decide(i)
			}
		})
	}
}
