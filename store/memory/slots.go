package memory

import (
	"cmp"
	"iter"
	"slices"
)

// maxBlock is how many members of a set stand together at most: so many are moved when one
// is put between them or taken out.
const maxBlock = 128

// slots is a set of tokens in the order of their expiry, so that the live ones
// are counted without removing the others. They are in blocks of maxBlock at most, one behind
// the other, so that a change of a large set costs little more than one of a small set. The
// zero value is empty; so is nil, to which nothing can be added.
type slots struct {
	blocks [][]slot // none is empty
	n      int      // members in all
}

type slot struct {
	expiry int64 // ms
	token  string
}

func (a slot) compare(b slot) int {
	return cmp.Or(cmp.Compare(a.expiry, b.expiry), cmp.Compare(a.token, b.token))
}

// place returns where m stands, or would: a block, which is the last if all members come
// before m, and the place in it.
func (s *slots) place(m slot) (block, at int, found bool) {
	block, _ = slices.BinarySearchFunc(s.blocks, m, func(b []slot, m slot) int { return b[len(b)-1].compare(m) })
	if block = min(block, len(s.blocks)-1); block < 0 {
		return 0, 0, false
	}
	at, found = slices.BinarySearchFunc(s.blocks[block], m, slot.compare)
	return block, at, found
}

func (s *slots) add(m slot) {
	block, at, found := s.place(m)
	switch {
	case found:
		return
	case len(s.blocks) == 0 && cap(s.blocks) > 0: // the memory of the last block is still there
		s.blocks = s.blocks[:1]
		s.blocks[0] = append(s.blocks[0], m)
	case len(s.blocks) == 0:
		s.blocks = [][]slot{{m}}
	case len(s.blocks[block]) < maxBlock:
		s.blocks[block] = slices.Insert(s.blocks[block], at, m)
	case at == maxBlock: // behind all, as most are: what is before stays full
		s.blocks = append(s.blocks, append(make([]slot, 0, maxBlock), m))
	default:
		full := s.blocks[block]
		second := append(make([]slot, 0, maxBlock), full[maxBlock/2:]...)
		clear(full[maxBlock/2:])
		s.blocks[block] = full[:maxBlock/2]
		s.blocks = slices.Insert(s.blocks, block+1, second)
		if at > maxBlock/2 {
			block, at = block+1, at-maxBlock/2
		}
		s.blocks[block] = slices.Insert(s.blocks[block], at, m)
	}
	s.n++
}

func (s *slots) has(m slot) bool {
	if s == nil {
		return false
	}
	_, _, found := s.place(m)
	return found
}

func (s *slots) remove(m slot) (found bool) {
	if s == nil {
		return false
	}
	block, at, found := s.place(m)
	if !found {
		return false
	}
	s.n--
	s.blocks[block] = slices.Delete(s.blocks[block], at, at+1)
	s.merge(block)
	s.merge(block - 1)
	return true
}

// merge puts a block and the next one together if both are small, and takes an empty one out.
func (s *slots) merge(block int) {
	if block < 0 || block >= len(s.blocks) {
		return
	}
	if len(s.blocks[block]) == 0 {
		s.takeOut(block)
		return
	}
	if next := block + 1; next < len(s.blocks) && len(s.blocks[block])+len(s.blocks[next]) <= maxBlock/2 {
		s.blocks[block] = append(s.blocks[block], s.blocks[next]...)
		s.blocks = slices.Delete(s.blocks, next, next+1)
	}
}

// takeOut takes a block out. The memory of the only one is kept for the next member.
func (s *slots) takeOut(block int) {
	if len(s.blocks) > 1 {
		s.blocks = slices.Delete(s.blocks, block, block+1)
		return
	}
	clear(s.blocks[0])
	s.blocks[0] = s.blocks[0][:0]
	s.blocks = s.blocks[:0]
}

// behind returns the members that come behind m.
func (s *slots) behind(m slot) iter.Seq[slot] {
	return func(yield func(slot) bool) {
		if s == nil {
			return
		}
		block, at, found := s.place(m)
		if found {
			at++
		}
		for ; block < len(s.blocks); block, at = block+1, 0 {
			for _, m := range s.blocks[block][at:] {
				if !yield(m) {
					return
				}
			}
		}
	}
}

// alive returns the members that have not expired at now.
func (s *slots) alive(now int64) iter.Seq[slot] { return s.behind(slot{expiry: now + 1}) } // no token is ""

// expired is how many members have expired at now; they stand first.
func (s *slots) expired(now int64) (n int) {
	if s == nil {
		return 0
	}
	block := 0
	for block < len(s.blocks) && s.last(block).expiry <= now {
		n += len(s.blocks[block])
		block++
	}
	if block == len(s.blocks) {
		return n
	}
	i, _ := slices.BinarySearchFunc(s.blocks[block], now, func(m slot, now int64) int {
		if m.expiry <= now {
			return -1
		}
		return 1
	})
	return n + i
}

func (s *slots) last(block int) slot { return s.blocks[block][len(s.blocks[block])-1] }

func (s *slots) live(now int64) int64 {
	if s == nil {
		return 0
	}
	return int64(s.n - s.expired(now))
}

// reap removes expired members within the budget and says how many.
func (s *slots) reap(now int64, budget *int) int {
	n := min(s.expired(now), *budget)
	if n <= 0 {
		return 0
	}
	*budget -= n
	s.n -= n
	for left := n; left > 0; {
		first := s.blocks[0]
		if len(first) <= left {
			left -= len(first)
			s.takeOut(0)
			continue
		}
		s.blocks[0] = slices.Delete(first, 0, left)
		left = 0
	}
	return n
}
