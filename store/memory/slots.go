package memory

import (
	"cmp"
	"slices"
)

// slots is a set of tokens in the order of their expiry, so that the live ones
// are counted without removing the others.
type slots []slot

type slot struct {
	expiry int64 // ms
	token  string
}

func (a slot) compare(b slot) int {
	return cmp.Or(cmp.Compare(a.expiry, b.expiry), cmp.Compare(a.token, b.token))
}

func (s *slots) add(m slot) {
	i, found := slices.BinarySearchFunc(*s, m, slot.compare)
	if !found {
		*s = slices.Insert(*s, i, m)
	}
}

func (s slots) has(m slot) bool {
	_, found := slices.BinarySearchFunc(s, m, slot.compare)
	return found
}

func (s *slots) remove(m slot) (found bool) {
	i, found := slices.BinarySearchFunc(*s, m, slot.compare)
	if found {
		*s = slices.Delete(*s, i, i+1)
	}
	return found
}

// behind returns the members that come behind m.
func (s slots) behind(m slot) slots {
	i, found := slices.BinarySearchFunc(s, m, slot.compare)
	if found {
		i++
	}
	return s[i:]
}

// expired is how many members have expired at now; they stand first.
func (s slots) expired(now int64) int {
	n, _ := slices.BinarySearchFunc(s, now, func(m slot, now int64) int {
		if m.expiry <= now {
			return -1
		}
		return 1
	})
	return n
}

func (s slots) live(now int64) int64 { return int64(len(s) - s.expired(now)) }

// reap removes expired members within the budget and says how many.
func (s *slots) reap(now int64, budget *int) int {
	n := min(s.expired(now), *budget)
	*budget -= n
	*s = (*s)[n:]
	return n
}
