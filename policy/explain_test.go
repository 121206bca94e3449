package policy

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// It runs the files of testdata/explain, whose commands are those of testdata/match.
func TestAnExplanationSaysWhyEachLimitIsMet(t *testing.T) {
	datadriven.Walk(t, "testdata/explain", func(t *testing.T, path string) {
		set := &Set{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "policy":
				s, err := Parse("d.yaml", []byte(d.Input), Options{HashKey: []byte("a key of tests")})
				if err != nil {
					return err.Error()
				}
				set = s
				return "ok"
			case "explain":
				r := parseRequest(t, d.Input)
				if d.HasArg("domain") {
					d.ScanArgs(t, "domain", &r.Domain)
				}
				want := set.Match(r)
				e := set.Explain(r)
				if !reflect.DeepEqual(e.Match, want) {
					t.Errorf("an explanation of %+v, and Match returns %+v", e.Match, want)
				}
				return formatExplanation(t, e)
			}
			t.Fatalf("unknown command %s", d.Cmd)
			return ""
		})
	})
}

// What is explained of the scenarios of Match is what Match does in them.
func TestAnExplanationIsOfWhatMatchDoes(t *testing.T) {
	asked := 0
	datadriven.Walk(t, "testdata/match", func(t *testing.T, path string) {
		set := &Set{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "policy" {
				if s, err := Parse("d.yaml", []byte(d.Input), Options{Lenient: d.HasArg("lenient"), HashKey: []byte("a key of tests")}); err == nil {
					set = s
				}
				return d.Expected
			}
			r, again := parseRequest(t, d.Input), parseRequest(t, d.Input)
			e := set.Explain(r)
			if !reflect.DeepEqual(e.Match, set.Match(r)) || !reflect.DeepEqual(r, again) {
				t.Errorf("%s: an explanation of %+v, and Match returns %+v", d.Pos, e.Match, set.Match(r))
			}
			formatExplanation(t, e) // it looks at each limit
			asked += len(e.Match.Checks)
			return d.Expected
		})
	})
	if asked < 50 {
		t.Errorf("%d checks were explained, want 50 or more", asked)
	}
}

func formatExplanation(t *testing.T, e Explanation) string {
	var b strings.Builder
	if e.File != "" {
		fmt.Fprintf(&b, "%s:%d\n", e.File, e.Line)
	}
	for i, d := range e.Descriptors {
		fmt.Fprintf(&b, "descriptor %d\n", i+1)
		for _, s := range d.Steps {
			fmt.Fprintf(&b, "  %s: %s", s.Entry, s.How)
			if s.Policy != "" {
				fmt.Fprintf(&b, ", %s in line %d", s.Policy, s.Line)
			}
			if s.Shared {
				b.WriteString(", shared")
			}
			b.WriteByte('\n')
		}
		if d.Why != "" {
			b.WriteString("  " + d.Why + "\n")
		}
		asked := 0
		for _, r := range d.Rules {
			fmt.Fprintf(&b, "  %s in line %d, %s: ", r.Name, r.Line, r.Words)
			if r.Check < 0 {
				b.WriteString(r.LeftOut + "\n")
				continue
			}
			if got := e.Match.Descriptors[i].Checks[asked]; got != r.Check {
				t.Errorf("limit %s is check %d, and Match says %d", r.Name, r.Check, got)
			}
			asked++
			fmt.Fprintf(&b, "check %d, %s\n", r.Check, e.Match.Checks[r.Check].Key)
		}
		if asked != len(e.Match.Descriptors[i].Checks) {
			t.Errorf("descriptor %d: %d limits are asked, and Match says %d", i, asked, len(e.Match.Descriptors[i].Checks))
		}
	}
	return b.String()
}
