package main

import (
	"fmt"
	"time"

	"weir/limit"
	"weir/policy"
)

const domain = "inference"

// limits are the numbers of the demo's policy.
type limits struct {
	tokens int           // of an account, at most
	refill time.Duration // until it has one more
	lane   int           // its jobs at once
	pool   int           // all jobs at once
	lease  time.Duration
}

// readLimits reads them as weir does.
func readLimits(file string) (limits, error) {
	var l limits
	set, err := policy.Load([]string{file}, policy.Options{})
	if err != nil {
		return l, fmt.Errorf("%w; the demo is run from the top of the repository", err)
	}
	match := set.Match(policy.Request{Domain: domain, Descriptors: []policy.Descriptor{
		{Entries: []limit.Entry{{Key: "account", Value: "alice"}}},
		{Entries: []limit.Entry{{Key: "pool", Value: "images"}}},
	}})
	for _, c := range match.Checks {
		switch of := c.Limit.(type) {
		case limit.TokenBucket:
			l.tokens, l.refill = int(of.Capacity), time.Duration(of.Scale/of.Refill)*time.Millisecond
		case limit.Concurrency:
			if c.Class == limit.Pool {
				l.pool = int(of.Max)
			} else {
				l.lane, l.lease = int(of.Max), of.Lease
			}
		case limit.Window:
		}
	}
	if l.refill == 0 || l.lane == 0 || l.pool != 2*l.lane || l.tokens < 2*l.lane {
		return l, fmt.Errorf("%s: the demo needs a bucket of two lanes or more, and a pool of two", file)
	}
	return l, nil
}
