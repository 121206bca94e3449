package main

import (
	"fmt"
	"strconv"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
)

const (
	subjectsAtOnce = 100 // of a request that fills
	// With hits for ten minutes of refill, no bucket is full again, and forgotten,
	// before all are measured.
	fillHits = 10
)

// fill has every subject of the scenario ask once, and returns how many bytes each
// takes: of Redis's memory, which is empty before; else of the process's, with the
// garbage collector's headroom.
func fill(t target, s scenario) (bytes float64, err error) {
	memory := func() (int64, error) { return residentMemory(t.pid) }
	if t.redis != "" {
		memory = func() (int64, error) { return usedMemory(t.redis) }
		if _, err := redis(t.redis, "FLUSHALL"); err != nil {
			return 0, err
		}
	}
	request, err := newTemplate(s.keys, subjectsAtOnce, fillHits)
	if err != nil {
		return 0, err
	}
	before, err := memory()
	if err != nil {
		return 0, err
	}
	l := load{
		address: t.address, callers: 8, request: request, first: s.first, subjects: s.subjects,
		want: rls.RateLimitResponse_OK, drain: fillTime,
	}
	if err := l.once(); err != nil {
		return 0, fmt.Errorf("fill it with %d subjects: %w", s.subjects, err)
	}
	after, err := memory()
	if err != nil {
		return 0, err
	}
	if t.redis != "" {
		n, err := redis(t.redis, "DBSIZE")
		if err != nil {
			return 0, err
		}
		if n != strconv.Itoa(s.subjects) {
			return 0, fmt.Errorf("redis has %s keys instead of %d: its memory says nothing", n, s.subjects)
		}
	}
	return float64(after-before) / float64(s.subjects), nil
}
