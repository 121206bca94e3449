package main

import (
	"testing"
	"time"
)

func TestDecisionsAreDueEvenlyAndWithoutDrift(t *testing.T) {
	s := schedule{rate: 3}
	if got := s.due(3 * 3600 * 24); got != 24*time.Hour {
		t.Errorf("after a day's decisions the next is due at %v", got)
	}
	for n := range 1000 {
		gap := s.due(n+1) - s.due(n)
		if gap < time.Second/3 || gap > time.Second/3+2 {
			t.Fatalf("%v between decisions %d and %d, want a third of a second", gap, n, n+1)
		}
	}
}

func TestWhatIsDueBeforeAMomentIsCountedExactly(t *testing.T) {
	for _, rate := range []float64{.5, 1, 3, 7, 999.9, 2000, 18_342.7, 1_000_000} {
		s := schedule{rate: rate}
		for _, at := range []time.Duration{0, 1, time.Microsecond, 333_333_333, 250 * time.Millisecond, time.Second, 2250 * time.Millisecond} {
			n := s.before(at)
			if n > 0 && s.due(n-1) >= at || s.due(n) < at {
				t.Errorf("before(%v) = %d at %v/s; these are due at %v and %v", at, n, rate, s.due(n-1), s.due(n))
			}
		}
	}
}

func TestTheWindowHasWhatIsDueInIt(t *testing.T) {
	s := schedule{rate: 2000, warm: 250 * time.Millisecond, window: 2 * time.Second}
	if first, end := s.inWindow(); first != 500 || end != 4500 {
		t.Errorf("inWindow() = %d, %d, want 500, 4500", first, end)
	}
}
