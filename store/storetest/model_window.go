package storetest

import (
	"math/big"

	"weir/limit"
)

// latest is the start of the window that is the current one of key at now: time that is
// set back begins none anew.
func (m *Model) latest(key string, w limit.Window, now int64) int64 {
	length := w.Length().Milliseconds()
	start := now / length * length
	if old := m.windows[key]; old != nil {
		start = max(start, old.latest)
	}
	return start
}

// counted is what counts of key at now: what was hit in the current window and, if w
// slides, of the one before it the part that is not yet a window ago.
func (m *Model) counted(key string, w limit.Window, now int64) *big.Int {
	all := m.windows[key]
	if all == nil {
		return new(big.Int)
	}
	current, length := m.latest(key, w, now), w.Length().Milliseconds()
	sum := integer(all.hits[current])
	if w.Sliding {
		gone := big.NewRat(max(0, now-current), length)
		part := gone.Sub(integer(1), gone)
		sum.Add(sum, part.Mul(part, integer(all.hits[current-length])))
	}
	up := floor(sum.Neg(sum)) // ceil(x) = -floor(-x)
	return up.Neg(up)
}

// fits reports whether hits more would stay within w.
func (m *Model) fits(key string, w limit.Window, hits, now int64) bool {
	sum := new(big.Int).Add(m.counted(key, w, now), big.NewInt(hits))
	return w.Max != 0 && sum.Cmp(big.NewInt(w.Max)) <= 0
}

// count adds hits to the current window. What is refunded beyond them is given back by the
// window before, of one that slides.
func (m *Model) count(key string, w limit.Window, hits, now int64) {
	current := m.latest(key, w, now)
	beyond := min(0, m.countIn(key, current, current, hits))
	if w.Sliding && beyond < 0 {
		m.countIn(key, current, current-w.Length().Milliseconds(), beyond)
	}
}

// countIn adds hits to the window that began at start, while current is the current one. It
// returns the sum, which the count is cut from.
func (m *Model) countIn(key string, current, start, hits int64) int64 {
	all := m.windows[key]
	if all == nil {
		all = &modelWindow{hits: make(map[int64]int64)}
		m.windows[key] = all
	}
	sum := all.hits[start] + hits
	all.latest, all.hits[start] = current, min(limit.MaxExact, max(0, sum))
	return sum
}

// counts reports whether what was hit in the window that began at start counts at now.
func (m *Model) counts(key string, w limit.Window, start, now int64) bool {
	current := m.latest(key, w, now)
	return start == current || w.Sliding && start == current-w.Length().Milliseconds()
}

// windowState is how w stands for key at now; its wait is that of so many hits. Waits are
// not computed, but looked for.
func (m *Model) windowState(key string, w limit.Window, hits, now int64) limit.State {
	var s limit.State
	s.Count = limit.MaxExact
	if n := m.counted(key, w, now); n.IsInt64() {
		s.Count = min(s.Count, n.Int64())
	}
	s.Remaining = max(0, w.Max-s.Count)
	if w.Max > 0 && hits <= w.Max {
		s.RetryAfter = limit.Millis(first(func(after int64) bool { return m.fits(key, w, hits, now+after) }))
	}
	current := m.latest(key, w, now)
	hit := m.windows[key] != nil && m.windows[key].hits[current] > 0
	s.ResetAfter = limit.Millis(first(func(after int64) bool {
		if hit {
			return !m.counts(key, w, current, now+after)
		}
		return m.latest(key, w, now+after) != current
	}))
	return s
}
