package memory

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// A set of any size is what a sorted list would be.
func TestSlotsAreASortedSet(t *testing.T) {
	for seed := range uint64(9) {
		r := rand.New(rand.NewPCG(seed, 1))
		var got slots
		var want []slot
		most := []int{5, maxBlock, 10 * maxBlock}[seed%3]
		now := int64(0)
		for range 8_000 {
			// Few values, so that many are there already or expire alike; at a later time most
			// come last.
			m := slot{now/4 + r.Int64N(50), fmt.Sprint(r.IntN(most))}
			at, there := slices.BinarySearchFunc(want, m, slot.compare)
			switch r.IntN(8) {
			case 0, 1, 2, 3:
				if got.add(m); !there && len(want) < most {
					want = slices.Insert(want, at, m)
				} else if !there {
					got.remove(m)
				}
			case 4, 5:
				if len(want) > 0 && r.IntN(2) == 0 {
					m = want[r.IntN(len(want))]
					at, there = slices.BinarySearchFunc(want, m, slot.compare)
				}
				if has := got.has(m); has != there {
					t.Fatalf("has(%v) = %v, want %v", m, has, there)
				}
				if found := got.remove(m); found != there {
					t.Fatalf("remove(%v) = %v, want %v", m, found, there)
				}
				if there {
					want = slices.Delete(want, at, at+1)
				}
			case 6:
				budget := r.IntN(100)
				ended := slices.IndexFunc(want, func(m slot) bool { return m.expiry > now/8 })
				if ended < 0 {
					ended = len(want)
				}
				if n := got.reap(now/8, &budget); n > ended || n < ended && budget != 0 {
					t.Fatalf("reap removed %d of %d and left a budget of %d", n, ended, budget)
				} else {
					want = slices.Delete(want, 0, n)
				}
			default:
				now += r.Int64N(3)
			}
			ended := slices.IndexFunc(want, func(m slot) bool { return m.expiry > now })
			if ended < 0 {
				ended = len(want)
			}
			if n := got.live(now); n != int64(len(want)-ended) {
				t.Fatalf("live(%d) = %d, want %d", now, n, len(want)-ended)
			}
		}
		if all := slices.Collect(got.behind(slot{expiry: -1})); !slices.Equal(all, want) {
			t.Fatalf("has %v, want %v", all, want)
		}
		if alive := slices.Collect(got.alive(now)); int64(len(alive)) != got.live(now) || len(alive) > 0 && alive[0].expiry <= now {
			t.Fatalf("alive(%d) = %v, want %d", now, alive, got.live(now))
		}
		if len(want) > 0 {
			if rest := slices.Collect(got.behind(want[0])); !slices.Equal(rest, want[1:]) {
				t.Fatalf("behind(%v) = %v, want %v", want[0], rest, want[1:])
			}
		}
	}
}

// A change moves the members of one block and the list of blocks: both stay small in a set of
// 100,000, whatever is taken out of it and however its members expire.
func TestAChangeOfManySlotsMovesFew(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, tt := range []struct {
		name   string
		expiry func(i int) int64
	}{
		{"in turn", func(i int) int64 { return int64(i) }},
		{"in any order", func(int) int64 { return r.Int64N(1_000_000_000) }},
	} {
		const n = 100_000
		var s slots
		var held []slot
		most := func() int {
			longest := len(s.blocks)
			for _, b := range s.blocks {
				longest = max(longest, len(b), cap(b)/4)
			}
			return longest
		}
		for i := range n {
			held = append(held, slot{tt.expiry(i), fmt.Sprint(i)})
			s.add(held[i])
		}
		filled := most()
		for i := range n / 2 { // any ends, and another begins
			one := &held[r.IntN(n)]
			if !s.remove(*one) {
				t.Fatalf("%s: %v is not there", tt.name, *one)
			}
			*one = slot{tt.expiry(n + i), fmt.Sprint(n + i)}
			s.add(*one)
		}
		used := most()
		for _, m := range held[:n-10] {
			s.remove(m)
		}
		if left := len(s.blocks); filled > 4*n/maxBlock || used > 4*n/maxBlock || left > 10 || s.n != 10 {
			t.Errorf("%s: %d at most stand together when it is filled, %d when it is used, and 10 of %d are in %d blocks; want %d, %d, 10 and 10",
				tt.name, filled, used, s.n, left, 4*n/maxBlock, 4*n/maxBlock)
		}
	}
}
