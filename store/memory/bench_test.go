package memory_test

import (
	"fmt"
	"runtime"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"weir/limit"
	"weir/store/memory"
	"weir/store/storetest"
)

// benchBucket never refuses, nor do benchSlots.
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

var benchLeases atomic.Uint64

// benchLease is a new id. They come in no order, as real ones do.
func benchLease() limit.LeaseID {
	return storetest.TestLease("d", benchLeases.Add(1)*0x9e3779b97f4a7c15)
}

// inTurn is each of n, and no two that follow each other are neighbours.
func inTurn(i, n int) int { return int(uint64(i) * 7919 % uint64(n)) }

// admits decides r, and reports whether it is admitted, as it must be.
func admits(b *testing.B, s *memory.Store, r limit.Request) bool {
	d, err := s.Decide(b.Context(), r)
	if err != nil || !d.Admitted {
		b.Errorf("Decide = %+v, %v", d, err)
		return false
	}
	return true
}

// releases ends a lease, and reports whether it was held, as it must be.
func releases(b *testing.B, s *memory.Store, id limit.LeaseID) bool {
	r, err := s.Release(b.Context(), limit.Ending{Lease: id})
	if err != nil || r.Result != limit.Released {
		b.Errorf("Release = %+v, %v", r, err)
		return false
	}
	return true
}

// alone and parallel measure f, which is told a number that is another each time, until it
// reports false. Then alone calls each of last.
func alone(b *testing.B, f func(b *testing.B, i int) bool, last ...func(b *testing.B)) {
	b.Run("alone", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			if !f(b, i) {
				return
			}
		}
		for _, g := range last {
			g(b)
		}
	})
}

func parallel(b *testing.B, f func(b *testing.B, i int) bool) {
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		var from atomic.Int64
		b.RunParallel(func(pb *testing.PB) {
			for i := int(from.Add(1) << 40); pb.Next() && f(b, i); i++ {
			}
		})
	})
}

// BenchmarkSubjects is what a decision of one bucket costs by how many subjects the store knows,
// of which each has its turn; and how much memory one takes that is idle, its key included. It is
// for the one mutex too: run it with -cpu 1,2,4. With one processor a decision holds it nearly
// all the time, so that no number of processors decides more often; with more, it tells what
// contention adds.
func BenchmarkSubjects(b *testing.B) {
	l := benchBucket(b)
	ask := func(i int) limit.Request {
		return limit.Request{Domain: "d", Checks: []limit.Check{check(b, l, "customer-"+strconv.Itoa(i))}}
	}
	for _, n := range []int{1, 1_000, 10_000, 100_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			before := heap()
			s := memory.New(memory.Options{})
			for i := range n {
				if !admits(b, s, ask(i)) {
					return
				}
			}
			bytes := float64(heap()-before) / float64(n)
			asked := make([]limit.Request, n)
			for i := range asked {
				asked[i] = ask(i)
			}
			again := func(b *testing.B, i int) bool { return admits(b, s, asked[inTurn(i, n)]) }
			alone(b, again, func(b *testing.B) { b.ReportMetric(bytes, "B/subject") })
			parallel(b, again)
		})
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// BenchmarkPool is what a decision of a bucket, a lane and a pool costs with the release of a
// lease, by how many leases the pool holds already. Alone any of these is released; in parallel
// the one that was granted.
func BenchmarkPool(b *testing.B) {
	bucket, slots := benchBucket(b), benchSlots(b)
	var accounts [1000][]limit.Check
	for i := range accounts {
		account := "customer-" + strconv.Itoa(i)
		accounts[i] = []limit.Check{check(b, bucket, account), check(b, slots, account), check(b, slots, "images")}
	}
	for _, n := range []int{10, 1_000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s := memory.New(memory.Options{})
			ask := func(i int) limit.Request {
				return limit.Request{Domain: "d", Lease: benchLease(), Checks: accounts[i%len(accounts)]}
			}
			held := make([]limit.LeaseID, n)
			for i := range held {
				r := ask(i)
				if held[i] = r.Lease; !admits(b, s, r) {
					return
				}
			}
			alone(b, func(b *testing.B, i int) bool {
				one := &held[inTurn(i, n)]
				released := releases(b, s, *one)
				r := ask(i)
				*one = r.Lease
				return released && admits(b, s, r)
			})
			parallel(b, func(b *testing.B, i int) bool {
				r := ask(i)
				return admits(b, s, r) && releases(b, s, r.Lease)
			})
		})
	}
}
