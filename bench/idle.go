package main

import (
	"fmt"
	"strconv"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
)

// idle prints how much memory Redis needs for an account that asked once. It
// leaves Redis empty.
func idle(t target) error {
	requests, err := marshal("account", idleAccounts)
	if err != nil {
		return err
	}
	touch := func(requests [][]byte) error {
		l := load{address: t.address, callers: 64, requests: requests, want: rls.RateLimitResponse_OK}
		return l.once()
	}
	// What connections and scripts take is there before.
	if err := touch(requests[:accounts]); err != nil {
		return err
	}
	if _, err := redis(t.redis, "FLUSHALL"); err != nil {
		return err
	}
	before, err := usedMemory(t.redis)
	if err != nil {
		return err
	}
	if err := touch(requests); err != nil {
		return err
	}
	after, err := usedMemory(t.redis)
	if err != nil {
		return err
	}
	n, err := redis(t.redis, "DBSIZE")
	if err != nil {
		return err
	}
	if n != strconv.Itoa(idleAccounts) {
		return fmt.Errorf("redis has %s keys instead of %d: its memory says nothing", n, idleAccounts)
	}
	key, err := redis(t.redis, "RANDOMKEY")
	if err != nil {
		return err
	}
	fmt.Printf("%s: %.0f bytes of Redis memory an idle account (%d of them, each touched once by a token bucket; a key is %s)\n\n",
		t.name, float64(after-before)/idleAccounts, idleAccounts, key)
	_, err = redis(t.redis, "FLUSHALL")
	return err
}
