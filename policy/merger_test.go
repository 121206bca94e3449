package policy

import (
	"testing"

	"weir/limit"
)

// Of two checks of one state the stricter failure mode stands, in either order; one
// in shadow has no say beside one that is enforced.
func TestTheStricterFailureModeStands(t *testing.T) {
	modes := []limit.FailureMode{limit.DefaultMode, limit.ModeOpen, limit.ModeLocal, limit.ModeClosed} // by strictness
	for i, one := range modes {
		for j, other := range modes {
			a, b := limit.Check{Key: "k", FailureMode: one}, limit.Check{Key: "k", FailureMode: other}
			if got, want := merged(a, b).FailureMode, modes[max(i, j)]; got != want {
				t.Errorf("%q and %q merge to %q, want %q", one, other, got, want)
			}
			b.Shadow = true
			for _, got := range []limit.Check{merged(a, b), merged(b, a)} {
				if got.FailureMode != one || got.Shadow {
					t.Errorf("%q, and %q in shadow, merge to %q, want %q enforced", one, other, got.FailureMode, one)
				}
			}
		}
	}
}
