package limit

import (
	"fmt"
	"time"
)

// MaxSliding is the longest sliding window. Below 2^35 ms its weights are exact in
// Lua, however much was counted.
const MaxSliding = 365 * 24 * time.Hour

// NewSlidingWindow returns the window of maximum hits in the last multiplier units.
// It fails if a number is out of range, or the window is longer than [MaxSliding].
func NewSlidingWindow(maximum int64, unit Unit, multiplier int64) (Window, error) {
	w, err := NewWindow(maximum, unit, multiplier)
	if err != nil {
		return Window{}, err
	}
	if w.Length() > MaxSliding {
		const day = 24 * time.Hour
		return Window{}, fmt.Errorf("window: sliding has at most %d days, got %d", MaxSliding/day, w.Length()/day)
	}
	w.Sliding = true
	return w, nil
}

// WindowState is what a store keeps of one window: two counters. What counts is Count
// and, of a Window that is Sliding, the part of Previous that is less than Length ago, as
// if its hits had come evenly, rounded up:
//
//	Count + ceil(Previous * left / length)
//
// where left is what is left of the current window. It falls by itself, without a jump
// where a window ends. A fixed window is one that forgets Previous. The zero value means no
// state: nothing counted.
//
// Hits did not come evenly: docs/decisions/0016-sliding-windows.md says how far from
// the truth that is, and TestSlidingAgainstALog shows it.
type WindowState struct {
	Start    int64 // ms, of the current window
	Count    int64 // hits in the current window, 0..MaxExact
	Previous int64 // hits in the window before, 0..MaxExact; 0 of a fixed one
}

// At returns the state at time now, for windows as long as w. It rolls forward only.
func (s WindowState) At(w Window, now int64) WindowState {
	length := w.Length().Milliseconds()
	start := now - now%length
	if start <= s.Start {
		return s
	}
	next := WindowState{Start: start}
	if w.Sliding && start == s.Start+length {
		next.Previous = s.Count
	}
	return next
}

// Counted is what counts at now, 0..MaxExact; s is the state at now, here as in all
// that follows. Before Start, if time was set back, it is what it was at Start.
func (s WindowState) Counted(w Window, now int64) int64 {
	length := w.Length().Milliseconds()
	// The part that is left, rounded up, is all but the part that has passed.
	passed := ratio{uint64(max(0, now-s.Start)), uint64(length)}
	return min(MaxExact, s.Count+s.Previous-passed.floor(s.Previous))
}

// Passes reports whether hits more stay within w. 0 passes unless the window is
// over; a refund always passes; a ban refuses everything else.
func (s WindowState) Passes(w Window, hits, now int64) bool {
	return hits < 0 || w.Max > 0 && hits <= w.Max && s.Counted(w, now)+hits <= w.Max
}

// Charge adds hits to the current window, or refunds them if negative: what it has not
// counted, the one before gives back. Counts saturate at 0 and MaxExact.
func (s WindowState) Charge(hits int64) WindowState {
	count := s.Count + hits
	s.Count = min(MaxExact, max(0, count))
	s.Previous = max(0, s.Previous+min(0, count))
	return s
}

// Settle adds difference, of any sign, to the window that began at start, in which
// something was reserved. ok is false, and nothing changed, if that one has passed: it is
// neither the current one nor, of a sliding window, the one before.
func (s WindowState) Settle(w Window, start, difference int64) (_ WindowState, ok bool) {
	switch {
	case start == s.Start:
		s.Count = min(MaxExact, max(0, s.Count+difference))
	case w.Sliding && start == s.Start-w.Length().Milliseconds():
		s.Previous = min(MaxExact, max(0, s.Previous+difference))
	default:
		return s, false
	}
	return s, true
}

// Reset is the state at now with nothing counted. It is not the zero value: what was
// reserved in its windows can still be settled.
func (s WindowState) Reset(w Window, now int64) WindowState {
	return WindowState{Start: s.At(w, now).Start}
}

// Remaining is how many hits of w are left, >= 0.
func (s WindowState) Remaining(w Window, now int64) int64 {
	return max(0, w.Max-s.Counted(w, now))
}

// RetryAfterMillis is the first millisecond, from now on, at which hits that do not pass
// now would, for 0 <= hits <= w.Max and w.Max > 0: two windows at most.
func (s WindowState) RetryAfterMillis(w Window, hits, now int64) int64 {
	length := w.Length().Milliseconds()
	end, room := s.Start+length, w.Max-hits
	switch {
	case s.Count <= room: // when enough of the window before has gone
		return end - leftFor(s.Previous, room-s.Count, length) - now
	case !w.Sliding:
		return end - now
	default: // in the next window, whose window before is this one
		return end + length - leftFor(s.Count, room, length) - now
	}
}

// leftFor is how much of a window (ms) may be left for the previous count to weigh
// room at most, for 0 <= room < previous.
func leftFor(previous, room, length int64) int64 {
	return ratio{uint64(length), uint64(previous)}.floor(room)
}

// ResetAfterMillis is when all that is counted now is forgotten, from now on: the end of
// the next window if the current one has counted anything, else its own.
func (s WindowState) ResetAfterMillis(w Window, now int64) int64 {
	length := w.Length().Milliseconds()
	end := s.Start + length
	if w.Sliding && s.Count > 0 {
		end += length
	}
	return end - now
}

// Inspect is how the window stands at now under w, for hits that may pass.
func (s WindowState) Inspect(w Window, hits, now int64) State {
	at := s.At(w, now)
	state := State{Count: at.Counted(w, now), Remaining: at.Remaining(w, now), ResetAfter: Millis(at.ResetAfterMillis(w, now))}
	if w.Max > 0 && hits <= w.Max && !at.Passes(w, hits, now) {
		state.RetryAfter = Millis(at.RetryAfterMillis(w, hits, now))
	}
	return state
}
