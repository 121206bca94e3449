package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
)

// scenario is what is asked for, and by how many callers at once.
type scenario struct {
	name    string
	keys    string // of the descriptors
	callers int
	want    rls.RateLimitResponse_Code
	release bool // the end of the lease is a part of the decision
}

// scenarios are one bucket for each number of callers, and what else there is at 64.
func scenarios(callers string) ([]scenario, error) {
	var list []scenario
	for text := range strings.FieldsSeq(callers) {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("callers: %q is no number above 0", text)
		}
		list = append(list, scenario{name: "one bucket", keys: "account", callers: n, want: rls.RateLimitResponse_OK})
	}
	return append(list,
		scenario{name: "three buckets", keys: "account path tenant", callers: 64, want: rls.RateLimitResponse_OK},
		scenario{name: "one refused key", keys: "refused", callers: 64, want: rls.RateLimitResponse_OVER_LIMIT},
		scenario{name: "bucket+lane+pool, released", keys: "job pool", callers: 64, want: rls.RateLimitResponse_OK, release: true},
	), nil
}

// compare measures every server in every round, the floor first, and prints the
// medians.
func (s scenario) compare(servers []target, window time.Duration, rounds int) error {
	requests, err := marshal(s.keys, accounts)
	if err != nil {
		return err
	}
	results := make([][]result, len(servers))
	for range rounds {
		var floor float64
		for i, t := range servers {
			l := &load{address: t.address, callers: s.callers, requests: requests, want: s.want, release: s.release}
			if i == 0 { // it admits all, and grants no lease
				l.want, l.lease = rls.RateLimitResponse_OK, "AAAAAAAAAAAAAAAAAAAAAA."+domain
			}
			if l.want == rls.RateLimitResponse_OVER_LIMIT {
				first := load{address: t.address, callers: 1, requests: requests[:1]}
				_ = first.once() // it empties the bucket, if it is the first of all
			}
			r, err := measure(t, l, window)
			if err != nil {
				return fmt.Errorf("%s: %w", t.name, err)
			}
			if i == 0 {
				floor = r.perSecond
			}
			r.ofFloor = r.perSecond / floor
			results[i] = append(results[i], r)
		}
	}
	for i, t := range servers {
		fmt.Println(row(s, t, results[i]))
	}
	return nil
}
