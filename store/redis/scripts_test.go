package redis

import (
	"regexp"
	"strings"
	"testing"
)

func TestConstantsAreNumbersInScripts(t *testing.T) {
	const source = "#!lua\nlocal ONE, TWO = 1, 2 -- with a remark\nlocal TEN = 10\n-- TEN is gone\nlocal a = TEN + TWO .. 'TEN' .. TENS\n"
	if got, want := fold(source), "#!lua\n\n\nlocal a = 10 + 2 .. 'TEN' .. TENS\n"; got != want {
		t.Errorf("fold = %q, want %q", got, want)
	}
	left := regexp.MustCompile(`(?m)^ *local [A-Z_, ]+ = [0-9, ]+$`)
	for name, s := range map[string]*script{
		"decide": current.decide, "release": current.release, "renew": current.renew, "settle": current.settle,
		"inspect": current.inspect, "leases": current.leases, "reset": current.reset,
	} {
		if found := left.FindString(string(s.source)); found != "" || strings.Contains(string(s.source), "include") {
			t.Errorf("%s has %q, or includes", name, found)
		}
	}
}

func TestTwoConstantsOfOneNameAreABug(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("two constants of one name are taken")
		}
	}()
	fold("#!lua\nlocal SAME = 1\nlocal SAME = 2\n")
}
