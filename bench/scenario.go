package main

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
)

const (
	domain   = "ai" // of policy.yaml
	accounts = 10_000
	// A million subjects have numbers of their own, so that none is there before.
	million      = 1_000_000
	firstOfMany  = 1_000_000
	usualCallers = 64
	fillTime     = 2 * time.Minute
)

// scenario is what is asked for, and how.
type scenario struct {
	name    string
	keys    string // of the descriptors
	callers int
	// An open loop at this many decisions a second; 0 is a closed loop.
	rate            float64
	half            bool // an open loop at half of what each server can do in this run
	first, subjects int  // whom requests are for
	filled          bool // every subject has asked before
	want            rls.RateLimitResponse_Code
	release         bool // the end of the lease is a part of the decision
}

// title is what BENCH_ONLY is matched with, and what a kept result is compared by.
func (s scenario) title() string {
	switch {
	case s.half:
		return s.name + ", open at half"
	case s.rate > 0:
		return fmt.Sprintf("%s, open at %.0f/s", s.name, s.rate)
	}
	return fmt.Sprintf("%s, %d callers", s.name, s.callers)
}

// scenarios are one bucket for each number of callers, and what else there is at 64.
func scenarios(callers []int, rate float64) []scenario {
	bucket := scenario{name: "one bucket", keys: "account", subjects: accounts, want: rls.RateLimitResponse_OK}
	with := func(change func(s *scenario)) scenario {
		s := bucket
		s.callers = usualCallers
		change(&s)
		return s
	}
	var list []scenario
	for _, n := range callers {
		list = append(list, with(func(s *scenario) { s.callers = n }))
	}
	return append(list,
		with(func(s *scenario) { s.half = true }),
		with(func(s *scenario) { s.rate = rate }),
		with(func(s *scenario) { s.name, s.keys = "three buckets", "account path tenant" }),
		with(func(s *scenario) {
			s.name, s.keys, s.want = "one refused key", "refused", rls.RateLimitResponse_OVER_LIMIT
		}),
		with(func(s *scenario) { s.name, s.keys, s.release = "bucket+lane+pool, released", "job pool", true }),
		// The last one: what it leaves in the servers stays.
		with(func(s *scenario) {
			s.name, s.first, s.subjects, s.filled = "10^6 subjects", firstOfMany, million, true
		}),
	)
}

// chosen returns the scenarios whose titles match the regular expression.
func chosen(list []scenario, only string) ([]scenario, error) {
	match, err := regexp.Compile(only)
	if err != nil {
		return nil, fmt.Errorf("the scenarios' regular expression: %w", err)
	}
	var some []scenario
	var titles strings.Builder
	for _, s := range list {
		if match.MatchString(s.title()) {
			some = append(some, s)
		}
		fmt.Fprintf(&titles, "\n  %s", s.title())
	}
	if len(some) == 0 {
		return nil, fmt.Errorf("no scenario matches %q; there are:%s", only, titles.String())
	}
	return some, nil
}

// asked is the scenario's name in the table.
func (s scenario) asked() string {
	if s.half || s.rate > 0 {
		return s.name + ", open"
	}
	return s.name
}

// named returns the first scenario that the table names so, with so many callers if
// it is a closed loop. That at half of what a server can do is none of them.
func named(list []scenario, asked string, callers int) (scenario, error) {
	var names []string
	for _, s := range list {
		switch {
		case s.half:
			continue
		case s.asked() == asked:
			if s.rate == 0 {
				s.callers = callers
			}
			return s, nil
		}
		if !slices.Contains(names, s.asked()) {
			names = append(names, s.asked())
		}
	}
	return scenario{}, fmt.Errorf("no scenario is named %q; there are:\n  %s", asked, strings.Join(names, "\n  "))
}

// parseCallers reads numbers that are separated by spaces.
func parseCallers(text string) ([]int, error) {
	var list []int
	for field := range strings.FieldsSeq(text) {
		n, err := strconv.Atoi(field)
		if err != nil || n < 1 || n > 10_000 {
			return nil, fmt.Errorf("callers: %q is no number from 1 to 10000", field)
		}
		list = append(list, n)
	}
	if len(list) == 0 {
		return nil, errors.New("callers: name one number or more")
	}
	return list, nil
}

// load is the scenario's for a server.
func (s scenario) load(t target) (*load, error) {
	request, err := newTemplate(s.keys, 1, 0)
	if err != nil {
		return nil, err
	}
	l := &load{
		address: t.address, callers: s.callers, request: request, first: s.first, subjects: s.subjects,
		want: s.want, release: s.release,
	}
	if t.name == floorName { // it admits all, and grants no lease
		l.want, l.lease = rls.RateLimitResponse_OK, "AAAAAAAAAAAAAAAAAAAAAA."+domain
	}
	return l, nil
}

// prepare brings a server into the state that the scenario is about, and returns the
// bytes that each subject takes, 0 if that is not known.
func (s scenario) prepare(t target) (subjectBytes float64, err error) {
	switch {
	case t.name == floorName:
		return 0, nil
	case s.filled:
		return fill(t, s)
	case s.want == rls.RateLimitResponse_OVER_LIMIT:
		l, err := s.load(t)
		if err != nil {
			return 0, err
		}
		l.callers, l.subjects = 1, 1
		var other otherAnswer
		// It empties the bucket; OVER_LIMIT is wanted, so an OK is an error.
		if err := l.once(); err != nil && (!errors.As(err, &other) || other.got != rls.RateLimitResponse_OK) {
			return 0, fmt.Errorf("empty the bucket: %w", err)
		}
	}
	return 0, nil
}

// step is one measurement of a round.
type step struct {
	target target
	rate   float64
	floor  int // the step of the same round that its ratios are to
}

// steps are what a round of the scenario measures. fastest is how many decisions a
// second each server has made.
func (s scenario) steps(servers []target, fastest func(t target) (float64, error)) ([]step, error) {
	var list []step
	for _, t := range servers {
		if !s.half {
			list = append(list, step{target: t, rate: s.rate})
			continue
		}
		most, err := fastest(t)
		if err != nil {
			return nil, err
		}
		// Beside each server the floor at the same rate.
		floor := len(list)
		list = append(list, step{target: servers[0], rate: most / 2, floor: floor})
		if t.name != floorName {
			list = append(list, step{target: t, rate: most / 2, floor: floor})
		}
	}
	return list, nil
}
