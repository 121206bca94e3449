package main

import (
	"strings"
	"testing"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
)

func TestBadOptionsAreToldBeforeAnythingIsMeasured(t *testing.T) {
	good := options{callers: "1 8", seconds: 1, rounds: 1, rate: 2000, targets: []string{"floor,127.0.0.1:1,1", "memory,127.0.0.1:2,2"}}
	for _, test := range []struct {
		change func(o *options)
		want   string
	}{
		{func(o *options) { o.callers = "8 many" }, `callers: "many" is no number from 1 to 10000`},
		{func(o *options) { o.callers = "0" }, `"0" is no number`},
		{func(o *options) { o.callers = " " }, "callers: name one"},
		{func(o *options) { o.seconds = 0 }, "rounds are 1 to 1000, seconds above 0"},
		{func(o *options) { o.rounds = 0 }, "rounds are 1 to 1000"},
		{func(o *options) { o.rate = 0 }, "rate: 0 is not"},
		{func(o *options) { o.only = "(" }, "regular expression"},
		{func(o *options) { o.only = "no such" }, "there are:\n  one bucket, 1 callers\n  one bucket, 8 callers\n"},
		{func(o *options) { o.targets = nil }, "the floor first"},
		{func(o *options) { o.targets = o.targets[1:] }, "the floor first"},
		{func(o *options) { o.targets = []string{"floor,x"} }, `"floor,x" is not NAME,ADDRESS,PID`},
		{func(o *options) { o.targets = []string{"floor,x,y"} }, "invalid syntax"},
		{func(o *options) { o.targets = []string{"floor,x,0"} }, "a process id is 1 to 4194304"},
		{func(o *options) { o.targets = append(o.targets, o.targets[1]) }, `two servers are named "memory"`},
		{func(o *options) { o.profile, o.scenario = "/", "none" }, "no scenario is named \"none\"; there are:\n  one bucket\n"},
		{func(o *options) { o.profile, o.scenario = "/", "one bucket" }, "name the one server to profile"},
	} {
		o := good
		test.change(&o)
		if err := run(o); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("run(%+v): %v, want %q", o, err, test.want)
		}
	}
}

func TestATargetIsAStoreOfABuild(t *testing.T) {
	list, err := parseTargets([]string{"floor,127.0.0.1:1,1", "redis@HEAD~20,127.0.0.1:2,22,127.0.0.1:3,33"})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := list[1], (target{"redis@HEAD~20", "127.0.0.1:2", 22, "127.0.0.1:3", 33}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if list[1].store() != "redis" || list[1].build() != "HEAD~20" || list[0].store() != floorName || list[0].build() != "" {
		t.Errorf("%+v: %q of %q", list, list[1].store(), list[1].build())
	}
}

func TestTitlesAreAllDifferent(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range scenarios([]int{1, 8, 64, 256}, 2000) {
		if seen[s.title()] {
			t.Errorf("two scenarios are %q", s.title())
		}
		seen[s.title()] = true
	}
}

func TestAScenarioToProfileHasTheCallersThatWereAskedFor(t *testing.T) {
	list := scenarios([]int{9}, 1234)
	s, err := named(list, "three buckets", 9)
	if err != nil || s.callers != 9 {
		t.Errorf("named(three buckets) has %d callers, %v; want 9", s.callers, err)
	}
	if s, err = named(list, "one bucket, open", 9); err != nil || s.rate != 1234 || s.half {
		t.Errorf("named(one bucket, open) = %+v, %v; want the fixed rate", s, err)
	}
}

func TestAtHalfEachServerHasTheFloorAtItsRateBesideIt(t *testing.T) {
	servers := []target{{name: floorName}, {name: "memory"}, {name: "redis"}}
	most := map[string]float64{floorName: 50_000, "memory": 40_000, "redis": 20_000}
	half := scenario{half: true, want: rls.RateLimitResponse_OK}
	steps, err := half.steps(servers, func(t target) (float64, error) { return most[t.name], nil })
	if err != nil {
		t.Fatal(err)
	}
	want := []step{
		{servers[0], 25_000, 0},
		{servers[0], 20_000, 1},
		{servers[1], 20_000, 1},
		{servers[0], 10_000, 3},
		{servers[2], 10_000, 3},
	}
	if len(steps) != len(want) {
		t.Fatalf("got %+v, want %+v", steps, want)
	}
	for i := range want {
		if steps[i] != want[i] {
			t.Errorf("step %d is %+v, want %+v", i, steps[i], want[i])
		}
	}
}
