package limit_test

import (
	"testing"

	"weir/limit"
)

func TestFailureModesAreNamedAndOrdered(t *testing.T) {
	ordered := []limit.FailureMode{limit.DefaultMode, limit.ModeOpen, limit.ModeLocal, limit.ModeClosed}
	for i, name := range []string{"", "open", "local", "closed"} {
		if got := ordered[i].String(); got != name {
			t.Errorf("%d.String() = %q, want %q", ordered[i], got, name)
		}
		if got := limit.ParseFailureMode(name); got != ordered[i] {
			t.Errorf("ParseFailureMode(%q) = %v, want %v", name, got, ordered[i])
		}
		if i > 0 && ordered[i] <= ordered[i-1] {
			t.Errorf("%v is not stricter than %v", ordered[i], ordered[i-1])
		}
	}
	for _, name := range []string{"Open", "shut", " "} {
		if got := limit.ParseFailureMode(name); got != limit.DefaultMode {
			t.Errorf("ParseFailureMode(%q) = %v, want none", name, got)
		}
	}
	if got := limit.FailureMode(99).String(); got != "" {
		t.Errorf("99 is the mode %q, want none", got)
	}
}
