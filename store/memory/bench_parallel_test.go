package memory_test

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"weir/limit"
	"weir/store/memory"
	"weir/store/storetest"
)

// BenchmarkDecideParallel is for the one mutex of the store: run it with -cpu 1,2,4. With one
// processor it tells how long a decision takes, nearly all of it with the mutex held, so that
// no number of processors decides more often than that; with more, what contention adds.
func BenchmarkDecideParallel(b *testing.B) {
	tokens, err := limit.NewTokenBucket(1_000_000_000, 1_000_000_000, time.Second)
	if err != nil {
		b.Fatal(err)
	}
	lane, err := limit.NewConcurrency(1000, time.Minute)
	if err != nil {
		b.Fatal(err)
	}
	pool, err := limit.NewConcurrency(100_000, time.Minute)
	if err != nil {
		b.Fatal(err)
	}
	check := func(l limit.Limit, key, value string) limit.Check {
		return limit.Check{Name: key, Limit: l, Hits: 1, Key: limit.Key("d", l, []limit.Entry{{Key: key, Value: value}})}
	}
	for _, subjects := range []int{1, 10_000, 100_000} {
		asks := make([][]limit.Check, subjects)
		leased := make([][]limit.Check, min(subjects, 10_000))
		for i := range asks {
			asks[i] = []limit.Check{check(tokens, "account", fmt.Sprint(i))}
			if i < len(leased) {
				leased[i] = append(asks[i][:1:1], check(lane, "account", fmt.Sprint(i)), check(pool, "pool", ""))
			}
		}
		run := func(name string, asks [][]limit.Check, release bool) {
			b.Run(fmt.Sprintf("%s/subjects=%d", name, subjects), func(b *testing.B) {
				s := memory.New(memory.Options{})
				for _, checks := range asks { // so that the map does not grow meanwhile
					decideOrFail(b, s, limit.Request{Domain: "d", Checks: checks[:1]}, false)
				}
				var askers atomic.Uint64
				b.ReportAllocs()
				b.ResetTimer()
				b.RunParallel(func(pb *testing.PB) {
					asker := askers.Add(1) << 40
					r := rand.New(rand.NewPCG(asker, 0))
					for n := asker; pb.Next(); n++ {
						request := limit.Request{Domain: "d", Checks: asks[r.IntN(len(asks))]}
						if release {
							request.Lease = storetest.TestLease("d", n)
						}
						decideOrFail(b, s, request, release)
					}
				})
			})
		}
		run("bucket", asks, false)
		if subjects <= 10_000 {
			run("bucket+lane+pool+release", leased, true)
		}
	}
}

func decideOrFail(b *testing.B, s *memory.Store, r limit.Request, release bool) {
	d, err := s.Decide(b.Context(), r)
	if err != nil || !d.Admitted {
		b.Fatalf("Decide = %+v, %v", d, err)
	}
	if release {
		if got, err := s.Release(b.Context(), limit.Ending{Lease: d.Lease}); err != nil || got.Result != limit.Released {
			b.Fatalf("Release = %+v, %v", got, err)
		}
	}
}
