// Package main measures rate-limit services beside a gRPC server that does
// nothing: one after the other, round after round, so that what else the machine
// does falls on all of them. scripts/bench.sh starts them and runs it.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
)

func main() {
	// The generator's garbage would be collected on the servers' CPUs.
	debug.SetGCPercent(800)
	flag.Usage = func() { // an error is told already
		fmt.Fprintln(os.Stderr, "bench: scripts/bench.sh runs it, and says what can be set")
	}
	var o options
	flag.StringVar(&o.callers, "callers", "1 8 64 256", "how many callers ask at once")
	flag.Float64Var(&o.seconds, "seconds", 2, "of each measurement")
	flag.IntVar(&o.rounds, "rounds", 3, "measurements of each server")
	flag.Float64Var(&o.rate, "rate", 2000, "decisions a second of the open loop at a fixed rate")
	flag.StringVar(&o.only, "only", "", "regular expression of the scenarios to measure; empty: all")
	flag.StringVar(&o.json, "json", "", "write all results to this file")
	flag.StringVar(&o.kept, "kept", "", "compare with the results in this file, if it is there")
	flag.StringVar(&o.profile, "profile", "", "measure nothing, and write profiles of the one server to this folder")
	flag.StringVar(&o.scenario, "scenario", "", "the scenario to profile, as the table names it")
	flag.StringVar(&o.admin, "admin", "", "the admin address of the server to profile")
	flag.Func("build", "LABEL=VERSION of the servers that are named …@LABEL; may be repeated", func(text string) error {
		label, version, ok := strings.Cut(text, "=")
		if !ok || label == "" {
			return fmt.Errorf("%q is not LABEL=VERSION", text)
		}
		o.builds = append(o.builds, build{label, version})
		return nil
	})
	flag.Parse()
	o.targets = flag.Args()
	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are the command line.
type options struct {
	callers, only, json, kept string
	seconds, rate             float64
	rounds                    int
	profile, scenario, admin  string
	builds                    []build
	targets                   []string
}

func run(o options) error {
	switch {
	case !(o.seconds > 0 && o.seconds <= 600) || o.rounds < 1 || o.rounds > 1000:
		return fmt.Errorf("%d rounds of %v s: rounds are 1 to 1000, seconds above 0 and at most 600", o.rounds, o.seconds)
	case !(o.rate >= 1 && o.rate <= 1_000_000):
		return fmt.Errorf("rate: %v is not from 1 to 1000000 a second", o.rate)
	}
	callers, err := parseCallers(o.callers)
	if err != nil {
		return err
	}
	servers, err := parseTargets(o.targets)
	if err != nil {
		return err
	}
	window := time.Duration(o.seconds * float64(time.Second))
	if o.profile != "" {
		s, err := named(scenarios(callers, o.rate), o.scenario, callers[0])
		if err != nil {
			return err
		}
		return profile(o, servers, s, window)
	}
	list, err := chosen(scenarios(callers, o.rate), o.only)
	if err != nil {
		return err
	}
	if len(servers) < 2 || servers[0].name != floorName {
		return errors.New("name two servers or more, the floor first")
	}
	kept, err := readReport(o.kept)
	if err != nil {
		return err
	}

	r := runner{servers: servers, window: window, rounds: o.rounds, fastest: map[string]float64{}}
	rep, err := newReport(o, servers)
	if err != nil {
		return err
	}
	fmt.Printf("%s\n\n", rep.about())
	fmt.Println(header(servers))
	for _, s := range list {
		measured, err := r.measure(s)
		if err != nil {
			return fmt.Errorf("%s: %w", s.title(), err)
		}
		for _, m := range measured {
			fmt.Println(row(m, servers))
		}
		rep.Measurements = append(rep.Measurements, measured...)
	}
	if o.json != "" {
		if err := rep.write(o.json); err != nil {
			return err
		}
	}
	compareAll(os.Stdout, rep, kept)
	return nil
}

// runner measures servers, the floor first.
type runner struct {
	servers []target
	window  time.Duration
	rounds  int
	fastest map[string]float64 // decisions a second by closed loops of one bucket
}

// measure runs the rounds of a scenario. Every other round goes backwards, so that
// what changes slowly favours nobody.
func (r *runner) measure(s scenario) ([]measurement, error) {
	steps, err := s.steps(r.servers, r.most)
	if err != nil {
		return nil, err
	}
	measured := make([]measurement, len(steps))
	prepared := map[string]float64{}
	for i, step := range steps {
		name := step.target.name
		if _, ok := prepared[name]; !ok {
			if prepared[name], err = s.prepare(step.target); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		}
		measured[i] = measurement{
			Scenario: s.title(), Asked: s.asked(), Server: step.target.store(), Build: step.target.build(),
			Rate: step.rate, SubjectBytes: prepared[name], Rounds: make([]result, r.rounds),
		}
		if step.rate == 0 {
			measured[i].Callers = s.callers
		}
	}
	for round := range r.rounds {
		for i := range steps {
			if round%2 == 1 {
				i = len(steps) - 1 - i
			}
			l, err := s.load(steps[i].target)
			if err != nil {
				return nil, err
			}
			if measured[i].Rounds[round], err = measure(steps[i].target, l, steps[i].rate, r.window); err != nil {
				return nil, fmt.Errorf("%s: %w", steps[i].target.name, err)
			}
		}
		for i := range steps {
			measured[i].Rounds[round].besides(measured[steps[i].floor].Rounds[round])
		}
	}
	for i := range steps {
		measured[i].Median = medians(measured[i].Rounds)
		if s.name == "one bucket" && steps[i].rate == 0 {
			name := steps[i].target.name
			r.fastest[name] = max(r.fastest[name], measured[i].Median.PerSecond)
		}
	}
	return measured, nil
}

// most is how many decisions a second a server has made in this run. If it has not
// been asked yet, it is now.
func (r *runner) most(t target) (float64, error) {
	if n := r.fastest[t.name]; n > 0 {
		return n, nil
	}
	l, err := scenarios([]int{256}, 0)[0].load(t)
	if err != nil {
		return 0, err
	}
	m, err := measure(t, l, 0, r.window)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", t.name, err)
	}
	r.fastest[t.name] = m.PerSecond
	return m.PerSecond, nil
}

const (
	floorName = "floor"
	maxPID    = 1 << 22 // of Linux; no process has it
)

// target is a server to measure.
type target struct {
	name    string // STORE or STORE@BUILD; floorName is the floor
	address string // of its gRPC port
	pid     int
	// Its Redis; "" and 0 without one.
	redis    string
	redisPID int
}

// store is the target's name without its build.
func (t target) store() string { s, _, _ := strings.Cut(t.name, "@"); return s }

// build is the label of the target's build, "" if it has none.
func (t target) build() string { _, b, _ := strings.Cut(t.name, "@"); return b }

// parseTargets reads NAME,ADDRESS,PID[,REDIS-ADDRESS,REDIS-PID] from the command line.
func parseTargets(args []string) ([]target, error) {
	var list []target
	seen := map[string]bool{}
	for _, arg := range args {
		f := strings.Split(arg, ",")
		if len(f) != 3 && len(f) != 5 {
			return nil, fmt.Errorf("%q is not NAME,ADDRESS,PID[,REDIS-ADDRESS,REDIS-PID]", arg)
		}
		t := target{name: f[0], address: f[1]}
		var err, err2 error
		t.pid, err = strconv.Atoi(f[2])
		if len(f) == 5 {
			t.redis = f[3]
			t.redisPID, err2 = strconv.Atoi(f[4])
		}
		if err := errors.Join(err, err2); err != nil {
			return nil, fmt.Errorf("%q: %w", arg, err)
		}
		if t.pid < 1 || t.pid > maxPID || t.redis != "" && (t.redisPID < 1 || t.redisPID > maxPID) {
			return nil, fmt.Errorf("%q: a process id is 1 to %d", arg, maxPID)
		}
		if seen[t.name] {
			return nil, fmt.Errorf("two servers are named %q", t.name)
		}
		seen[t.name] = true
		list = append(list, t)
	}
	return list, nil
}
