package server

import (
	"testing"
	"time"

	"weir/limit"
)

// A release wakes one request: one that waits, or the next that is refused for a slot
// that it had not seen come free. So few ask more than once, however many are refused.
func TestAReleaseWakesOne(t *testing.T) {
	l, err := limit.NewConcurrency(10, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	lane := []limit.Check{{Key: "lane", Limit: l}}
	w := newWaits(time.Second)
	enter := func(since uint64) chan struct{} {
		t.Helper()
		woken, ok := w.enter(lane, since)
		if !ok {
			t.Fatal("it may not wait")
		}
		return woken
	}
	expect := func(when string, c chan struct{}, want int) {
		t.Helper()
		if got := len(c); got != want {
			t.Errorf("%s: woken %d times, want %d", when, got, want)
		}
	}
	w.wake("lane")
	w.wake("another")
	first, second := enter(0), enter(0)
	expect("the first that had not seen it", first, 1)
	expect("the second", second, 0)
	third := enter(0)
	w.wake("lane")
	expect("who waits longest", second, 1)
	expect("who waits behind", third, 0)
	w.wake("lane")
	expect("who waits behind, then", third, 1)
	late := w.freed.Load()
	w.wake("lane")
	expect("who had seen all", enter(w.freed.Load()), 0)
	expect("who had not", enter(late), 1)

	// Who was woken by one key leaves the wake of another to the next.
	both := []limit.Check{{Key: "a", Limit: l}, {Key: "b", Limit: l}}
	one, _ := w.enter(both, w.freed.Load())
	other, _ := w.enter(both[1:], w.freed.Load())
	w.wake("a")
	w.wake("b")
	expect("by a", one, 1)
	expect("by b", other, 1)
}
