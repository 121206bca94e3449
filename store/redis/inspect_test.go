package redis_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	goredis "github.com/redis/go-redis/v9"

	"weir/limit"
	"weir/store"
	"weir/store/redis"
	"weir/store/storetest"
)

func inspect(t testing.TB, s store.Store, checks ...limit.Check) []limit.State {
	t.Helper()
	states, err := s.Inspect(storetest.Context(t), checks)
	if err != nil {
		t.Fatal(err)
	}
	return states
}

// slides is a window of so many hits in 20 s, which slides.
func slides(t testing.TB, maximum int64) limit.Window {
	t.Helper()
	w, err := limit.NewSlidingWindow(maximum, limit.Second, 20)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func hourly(t testing.TB, maximum int64) limit.Window {
	t.Helper()
	w, err := limit.NewWindow(maximum, limit.Hour, 1)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// raw is all that Redis keeps, byte for byte: each key with its value and the time
// at which it expires.
func raw(t testing.TB, client *goredis.Client) map[string]string {
	t.Helper()
	ctx := storetest.Context(t)
	keys, err := client.Keys(ctx, "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]string)
	for _, key := range keys {
		value, err := client.Dump(ctx, key).Result()
		if err != nil {
			t.Fatal(err)
		}
		expires, err := client.PExpireTime(ctx, key).Result()
		if err != nil {
			t.Fatal(err)
		}
		all[key] = fmt.Sprintf("%x until %v", value, expires)
	}
	return all
}

func TestInspectWritesNothing(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock()
		s, client := open(t, server, clock.Now)
		l := lane(t, 200, time.Minute)
		checks := []limit.Check{check(bucket(t, 10, time.Minute), "x"), check(hourly(t, 500), "x"), check(l, "x")}
		for range 150 {
			decide(t, s, withLease(request(checks[1:]...)))
		}
		decide(t, s, withLease(request(checks...)))
		clock.Advance(30 * time.Second)
		decide(t, s, withLease(request(checks...)))
		before := raw(t, client)

		other := bucket(t, 5, time.Second) // the limit has changed
		fresh := []limit.Check{check(other, "new"), check(hourly(t, 1), "new"), check(l, "new")}
		for range 3 { // most expire meanwhile, and are left where they are
			inspect(t, s, append(fresh, checks...)...)
			inspect(t, s, limit.Check{Key: checks[0].Key, Limit: other})
			clock.Advance(15 * time.Second)
		}
		if got := inspect(t, s, checks[2])[0]; got.Count != 1 || len(got.Holders) != 1 {
			t.Errorf("the lane holds %d, %v, want the one that is live", got.Count, got.Holders)
		}
		if diff := cmp.Diff(before, raw(t, client)); diff != "" {
			t.Errorf("what Redis keeps, before and after (-want +got):\n%s", diff)
		}
	})
}

// An inspection needs no right to write, and works when Redis cannot: without
// memory, and on a replica.
func TestInspectNeedsNoWrites(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock()
		s, client := open(t, server, clock.Now)
		ctx := storetest.Context(t)
		r := withLease(request(check(bucket(t, 10, time.Minute), "x"), check(hourly(t, 5), "x"), check(lane(t, 2, time.Minute), "x")))
		decide(t, s, r)
		want := inspect(t, s, r.Checks...)

		rule := []any{"ACL", "SETUSER", "looker", "on", ">secret", "~weir:*", "-@all"}
		for _, command := range strings.Fields("PING EVAL EVALSHA TIME GET ZCOUNT ZRANGE") {
			rule = append(rule, "+"+strings.ToLower(command))
		}
		if err := client.Do(ctx, rule...).Err(); err != nil {
			t.Fatal(err)
		}
		looker, err := redis.Open(redis.Options{URL: strings.Replace(server.URL, "unix://", "unix://looker:secret@", 1), Now: clock.Now})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = looker.Close() })
		expect := func(when string) {
			t.Helper()
			if diff := cmp.Diff(want, inspect(t, looker, r.Checks...)); diff != "" {
				t.Errorf("%s (-want +got):\n%s", when, diff)
			}
		}
		expect("without rights to write")
		if _, err := looker.Decide(ctx, withLease(r)); err == nil {
			t.Error("a user without rights to write decided")
		}

		for _, set := range [][]string{{"maxmemory", "1"}, {"replicaof", "127.0.0.1 1"}} {
			if err := client.ConfigSet(ctx, "maxmemory", "0").Err(); err != nil {
				t.Fatal(err)
			}
			if set[0] == "replicaof" {
				err = client.Do(ctx, "REPLICAOF", "127.0.0.1", "1").Err()
			} else {
				err = client.ConfigSet(ctx, set[0], set[1]).Err()
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.Decide(ctx, withLease(r)); !errors.Is(err, store.ErrUnavailable) {
				t.Errorf("Decide with %s: %v, want ErrUnavailable", set, err)
			}
			expect(fmt.Sprint("with ", set))
		}
	})
}

// The clock of an inspection is Redis TIME, as that of a decision.
func TestInspectByTheClockOfRedis(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, _ := open(t, server, nil)
		r := withLease(request(check(bucket(t, 10, time.Hour), "x"), check(lane(t, 2, time.Hour), "x")))
		decide(t, s, r)
		states := inspect(t, s, r.Checks...)
		if got := states[0]; got.Level != 9 || got.ResetAfter <= 59*time.Minute || got.ResetAfter > time.Hour {
			t.Errorf("the bucket is at %+v, want 9 tokens, full in an hour", got)
		}
		holders := states[1].Holders
		if len(holders) != 1 || holders[0].Token != r.Lease.Token() || holders[0].ExpiresAfter <= 59*time.Minute || holders[0].ExpiresAfter > time.Hour {
			t.Errorf("the lane is held by %+v, want %s for an hour", holders, r.Lease)
		}
	})
}

func TestInspectOfStrangeStatesIsAnError(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, client := open(t, server, nil)
		ctx := storetest.Context(t)
		checks := []limit.Check{check(bucket(t, 5, time.Hour), "x"), check(hourly(t, 5), "x"), check(lane(t, 5, time.Hour), "x")}
		for _, c := range checks {
			for _, garbage := range []string{"", "garbage", "\xc1\xff", "\x93\x01", "\x63aaa", "\x01", "\x01\xc0\xc0\xc0\xc0\xc0\xc0", "\x01\x02", "\x01\x02\xff\x00\x00\x00"} {
				if err := client.Set(ctx, c.Key, garbage, 0).Err(); err != nil {
					t.Fatal(err)
				}
				if got, err := s.Inspect(ctx, []limit.Check{c}); err == nil || errors.Is(err, store.ErrUnavailable) {
					t.Errorf("Inspect of %q: %v, %v, want an error that is no ErrUnavailable", garbage, got, err)
				}
			}
			if err := client.Del(ctx, c.Key).Err(); err != nil {
				t.Fatal(err)
			}
		}
		if got := inspect(t, s, checks...); !slices.Equal([]int64{got[0].Remaining, got[1].Remaining, got[2].Remaining}, []int64{5, 5, 5}) {
			t.Errorf("afterwards %+v, want all as new", got)
		}
		server.Kill()
		if _, err := s.Inspect(ctx, checks); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("Inspect without a server: %v, want ErrUnavailable", err)
		}
	})
}
