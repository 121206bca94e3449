package limit

import (
	"cmp"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"
)

// plainJudge is Judge as it is told: all that refused, sorted, and of those that a request
// waits for the first.
func plainJudge(checks []Check, d Decision, estimate func(Check) time.Duration) Verdict {
	v := Verdict{Admitted: d.Admitted}
	if d.StreamEnded && !d.Admitted {
		v.Reason = StreamEnded
		return v
	}
	if !d.Admitted {
		v.QuotaExhausted, v.Class = QuotaExhausted(checks, d.Results), Pool
	}
	var waits []Violation
	groups := make(map[int][]Violation)
	for i, c := range checks {
		if d.Results[i].Passed {
			continue
		}
		w := violation(c, d.Results[i], estimate)
		switch {
		case d.Admitted && c.Shadow:
			v.Shadowed = append(v.Shadowed, w)
		case !v.Refuses(c):
		default:
			v.Violations = append(v.Violations, w)
			v.Class = min(v.Class, w.Class)
			if c.Quota == 0 {
				waits = append(waits, w)
			} else {
				groups[c.Quota] = append(groups[c.Quota], w)
			}
		}
	}
	var firsts []Violation
	for _, g := range groups {
		sortViolations(g)
		firsts = append(firsts, g[0])
	}
	slices.SortFunc(firsts, func(a, b Violation) int {
		return cmp.Or(compareBool(b.Retryable, a.Retryable), cmp.Compare(a.RetryAfter, b.RetryAfter), cmp.Compare(a.Limit, b.Limit), cmp.Compare(a.Reason, b.Reason))
	})
	waits = append(waits, firsts[:min(1, len(firsts))]...)
	sortViolations(v.Violations)
	sortViolations(v.Shadowed)
	sortViolations(waits)
	if len(waits) > 0 {
		w := waits[0]
		v.Limit, v.Reason, v.Retryable, v.RetryAfter, v.Estimated = w.Limit, w.Reason, w.Retryable, w.RetryAfter, w.Estimated
	}
	return v
}

func TestAVerdictIsTheFirstOfAllThatAreSorted(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	limits := []Limit{
		TokenBucket{Capacity: 5, Scale: 1000, Refill: 1},
		Window{Max: 3, Unit: Minute, Multiplier: 1},
		Window{Unit: Minute, Multiplier: 1},
		Concurrency{Max: 2, Lease: time.Minute},
	}
	estimate := func(c Check) time.Duration { return time.Duration(len(c.Name)) * time.Second }
	refused, admitted := 0, 0
	for range 20_000 {
		var checks []Check
		var d Decision
		for range r.IntN(6) {
			c := Check{Limit: limits[r.IntN(len(limits))], Hits: int64(r.IntN(8)), Name: []string{"a", "bb", "ccc"}[r.IntN(3)]}
			c.Class, c.Shadow = Class(r.IntN(2)), r.IntN(4) == 0
			if r.IntN(2) == 0 {
				c.Quota = 1 + r.IntN(3)
			}
			checks = append(checks, c)
			d.Results = append(d.Results, Result{Passed: r.IntN(3) == 0, RetryAfter: time.Duration(r.IntN(4)) * time.Second, Bypass: FailureMode(r.IntN(4))})
		}
		// Two groups of a quota that are alike but for what nobody compares are told in any order.
		for i := range checks {
			if checks[i].Quota != 0 {
				checks[i].Class, d.Results[i].Bypass = Lane, DefaultMode
			}
		}
		d.Admitted = !Refused(checks, d.Results)
		d.StreamEnded = !d.Admitted && r.IntN(10) == 0
		got, want := Judge(checks, d, estimate), plainJudge(checks, d, estimate)
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("Judge(%+v, %+v) =\n%+v, want\n%+v", checks, d, got, want)
		}
		if got.Admitted {
			admitted++
		} else {
			refused++
		}
	}
	if refused < 1000 || admitted < 1000 {
		t.Errorf("%d were refused and %d admitted, want many of both", refused, admitted)
	}
}

// Most verdicts take no memory, or only that of what they tell.
func TestAVerdictTakesMemoryForItsViolationsOnly(t *testing.T) {
	checks := []Check{
		{Limit: TokenBucket{Capacity: 5, Scale: 1000, Refill: 1}, Hits: 1, Name: "a"},
		{Limit: Concurrency{Max: 2, Lease: time.Minute}, Hits: 1, Name: "b"},
	}
	estimate := func(Check) time.Duration { return time.Second }
	for _, tt := range []struct {
		d    Decision
		want float64
	}{
		{Decision{Admitted: true, Results: []Result{{Passed: true}, {Passed: true}}}, 0},
		{Decision{Results: []Result{{}, {}}}, 1},
	} {
		if got := testing.AllocsPerRun(100, func() { Judge(checks, tt.d, estimate) }); got > tt.want {
			t.Errorf("a verdict on %+v takes %v pieces of memory, want %v", tt.d, got, tt.want)
		}
	}
}
