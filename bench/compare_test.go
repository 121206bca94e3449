package main

import (
	"strings"
	"testing"
)

// measured is a measurement of rounds with these ratios of decisions, each with the
// same CPU.
func measured(scenario, server string, cpu float64, ofFloor ...float64) measurement {
	m := measurement{Scenario: scenario, Server: server, Callers: 64}
	for _, v := range ofFloor {
		m.Rounds = append(m.Rounds, result{OfFloor: v, CPUOfFloor: cpu, P99OfFloor: 1})
	}
	m.Median = medians(m.Rounds)
	return m
}

func TestWorseIsByMoreThanTheRoundsDiffer(t *testing.T) {
	for _, test := range []struct {
		about         string
		before, now   []float64
		cpu, cpuNow   float64
		worse, better [2]bool // decisions, CPU
	}{
		{"the same", []float64{.5, .6, .7}, []float64{.5, .6, .7}, 1, 1, [2]bool{}, [2]bool{}},
		{"within the spread before", []float64{.5, .6, .7}, []float64{.45, .45, .45}, 1, 1, [2]bool{}, [2]bool{}},
		{"within the spread now", []float64{.6, .6, .6}, []float64{.3, .45, .6}, 1, 1, [2]bool{}, [2]bool{}},
		{"fewer decisions", []float64{.6, .61, .62}, []float64{.4, .41, .42}, 1, 1, [2]bool{true, false}, [2]bool{}},
		{"more decisions", []float64{.6, .61, .62}, []float64{.8, .81, .82}, 1, 1, [2]bool{}, [2]bool{true, false}},
		{"more CPU", []float64{.5, .6, .7}, []float64{.5, .6, .7}, 1, 1.5, [2]bool{false, true}, [2]bool{}},
		{"less CPU", []float64{.5, .6, .7}, []float64{.5, .6, .7}, 1.5, 1, [2]bool{}, [2]bool{false, true}},
		{"one round tells nothing", []float64{.6}, []float64{.1}, 1, 9, [2]bool{}, [2]bool{}},
	} {
		list := compare([]measurement{measured("s", "redis", test.cpu, test.before...)}, []measurement{measured("s", "redis", test.cpuNow, test.now...)})
		if len(list) != 2 || list[0].metric != "decisions" || list[1].metric != "CPU" {
			t.Fatalf("%s: compared by %+v, want decisions and CPU", test.about, list)
		}
		for i, c := range list {
			if c.worse != test.worse[i] || c.better != test.better[i] {
				t.Errorf("%s: %s is worse: %t, better: %t; want %t, %t", test.about, c.metric, c.worse, c.better, test.worse[i], test.better[i])
			}
		}
	}
}

func TestOnlyWhatWasMeasuredBothTimesIsCompared(t *testing.T) {
	before := []measurement{measured("s", floorName, 1, 1), measured("s", "memory", 1, 1), measured("gone", "memory", 1, 1)}
	now := []measurement{measured("s", floorName, 1, 1), measured("s", "memory", 1, 1), measured("s", "redis", 1, 1), measured("new", "memory", 1, 1)}
	for _, c := range compare(before, now) {
		if c.scenario != "s" || c.server != "memory" {
			t.Errorf("%s on %s is compared", c.scenario, c.server)
		}
	}
}

func TestAnOpenLoopIsComparedByCPUAndP99(t *testing.T) {
	m := measured("s", "memory", 1, 1)
	m.Rate = 2000
	list := compare([]measurement{m}, []measurement{m})
	if len(list) != 2 || list[0].metric != "CPU" || list[1].metric != "p99" || list[1].ratio() != 1 {
		t.Errorf("compared by %+v, want CPU and p99, unchanged", list)
	}
}

func TestBuildsAreComparedWithTheFirstAndTheLastWithWhatWasKept(t *testing.T) {
	with := func(build string, m measurement) measurement { m.Build = build; return m }
	r := report{
		Builds: []build{{"HEAD~1", "aaa"}, {"HEAD", "bbb"}},
		Measurements: []measurement{
			measured("s", floorName, 1, 1, 1),
			with("HEAD~1", measured("s", "redis", 2, .5, .5)),
			with("HEAD", measured("s", "redis", 1, .25, .25)),
		},
	}
	kept := report{Builds: []build{{"weir", "kkk"}}, Measurements: []measurement{measured("s", "redis", 1, .2, .2)}}
	var out strings.Builder
	compareAll(&out, r, &kept)
	for _, want := range []string{
		"@HEAD (bbb) beside @HEAD~1 (aaa)",
		"| decisions            |   0.50 |   0.25 |       0.50 | ! |",
		"| CPU                  |   2.00 |   1.00 |       0.50 | + |",
		"beside the kept result",
		"| decisions            |   0.20 |   0.25 |       1.25 | + |",
		"1 of 2 are worse",
		"0 of 2 are worse",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the comparison does not say %q:\n%s", want, out.String())
		}
	}
}
