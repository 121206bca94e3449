package redis_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"weir/limit"
	"weir/store"
	"weir/store/redis"
	"weir/store/storetest"
)

// each runs a test on a server of every version there is.
func each(t *testing.T, f func(t *testing.T, server *storetest.Redis)) {
	for name, bin := range storetest.RedisBinaries(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, storetest.StartRedis(t, bin))
		})
	}
}

func bucket(t testing.TB, capacity int64, period time.Duration) limit.TokenBucket {
	b, err := limit.NewTokenBucket(capacity, 1, period)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func lane(t testing.TB, maximum int64, lease time.Duration) limit.Concurrency {
	l, err := limit.NewConcurrency(maximum, lease)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func check(l limit.Limit, value string) limit.Check {
	return limit.Check{Name: "k", Limit: l, Hits: 1, Key: limit.Key("d", l, []limit.Entry{{Key: "k", Value: value}})}
}

func request(checks ...limit.Check) limit.Request {
	return limit.Request{Domain: "d", Checks: checks}
}

var leaseNumber atomic.Uint64

func withLease(r limit.Request) limit.Request {
	r.Lease = storetest.TestLease(r.Domain, leaseNumber.Add(1))
	return r
}

func decide(t testing.TB, s store.Store, r limit.Request) limit.Decision {
	t.Helper()
	d, err := s.Decide(storetest.Context(t), r)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// calls counts how often each command was called, by scripts too.
func calls(t testing.TB, client *goredis.Client) map[string]int {
	t.Helper()
	text, err := client.Info(storetest.Context(t), "commandstats").Result()
	if err != nil {
		t.Fatal(err)
	}
	n := make(map[string]int)
	for line := range strings.Lines(text) {
		if name, stats, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls="); ok {
			count := 0
			if _, err := fmt.Sscanf(stats, "%d", &count); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			n[name] = count
		}
	}
	return n
}

func TestScriptsThatRedisForgotAreSentAgain(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, client := open(t, server, nil)
		seven := request(check(bucket(t, 7, 24*time.Hour), "x"))
		var admitted atomic.Int64
		var group sync.WaitGroup
		for i := range 50 {
			group.Go(func() {
				if i%10 == 0 {
					if err := client.ScriptFlush(storetest.Context(t)).Err(); err != nil {
						t.Error(err)
					}
				}
				if d, err := s.Decide(storetest.Context(t), seven); err != nil {
					t.Error(err)
				} else if d.Admitted {
					admitted.Add(1)
				}
			})
		}
		group.Wait()
		if got := admitted.Load(); got != 7 {
			t.Errorf("%d of 50 admitted, want 7", got)
		}
	})
}

// The store's clock is Redis TIME in production.
func TestRedisTimeIsTheClock(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, _ := open(t, server, nil)
		r := request(check(bucket(t, 1, 50*time.Millisecond), "x"))
		if d := decide(t, s, r); !d.Admitted {
			t.Fatalf("first: %+v", d)
		}
		d := decide(t, s, r)
		for end := time.Now().Add(storetest.Deadline); !d.Admitted; d = decide(t, s, r) {
			if wait := d.Results[0].RetryAfter; wait <= 0 || wait > 50*time.Millisecond {
				t.Fatalf("RetryAfter = %v, want at most 50ms", wait)
			}
			if time.Now().After(end) {
				t.Fatal("never admitted again")
			}
		}
	})
}

// T33: a key lives as long as it means something, and not much longer.
func TestKeysExpireWhenTheyMeanNothing(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock()
		s, client := open(t, server, clock.Now)
		const slack = 11 * time.Second
		ttl := func(key string) time.Duration {
			t.Helper()
			d, err := client.PTTL(storetest.Context(t), key).Result()
			if err != nil {
				t.Fatal(err)
			}
			return d
		}
		within := func(key string, least, most time.Duration) {
			t.Helper()
			if got := ttl(key); got < least || got > most {
				t.Errorf("PTTL %s = %v, want %v to %v", key, got, least, most)
			}
		}
		b := check(bucket(t, 10, time.Minute), "x")
		for i := range 10 {
			decide(t, s, request(b))
			full := time.Duration(i+1) * time.Minute
			within(b.Key, full, full+slack)
		}
		w, err := limit.NewWindow(10, limit.Hour, 1)
		if err != nil {
			t.Fatal(err)
		}
		window := check(w, "x")
		decide(t, s, request(window))
		within(window.Key, time.Hour, time.Hour+slack)

		// T12: a set lives as long as the longest of its leases, whatever comes
		// and goes beside it.
		long, short := check(lane(t, 9, time.Hour), "x"), check(lane(t, 9, time.Minute), "x")
		held := withLease(request(long))
		decide(t, s, held)
		for range 3 {
			other := withLease(request(short))
			decide(t, s, other)
			if _, err := s.Release(storetest.Context(t), limit.Ending{Lease: other.Lease}); err != nil {
				t.Fatal(err)
			}
			within(long.Key, time.Hour-slack, time.Hour+slack)
		}
		within(limit.LeaseKey(held.Lease), time.Hour+limit.RecordSlack-slack, time.Hour+limit.RecordSlack)
		if n, err := client.Exists(storetest.Context(t), limit.LeaseKey(storetest.TestLease("d", leaseNumber.Load()))).Result(); err != nil || n != 0 {
			t.Errorf("the record of a released lease exists: %d, %v", n, err)
		}
	})
}

// T33: whatever is asked, no key is left without an end.
func TestNoKeyIsKeptForEver(t *testing.T) {
	t.Parallel()
	s, client := open(t, storetest.StartRedis(t, storetest.AnyRedis(t)), nil)
	ctx := storetest.Context(t)
	b, w, l := bucket(t, 10, time.Minute), hourly(t, 10), lane(t, 10, time.Minute)
	const accounts = 1000
	lease := func(i int) limit.LeaseID { return storetest.TestLease("d", uint64(i)) }
	together(t, s, accounts, func(i int) limit.Request {
		account := fmt.Sprint(i)
		r := request(check(b, account), check(w, account), check(l, account))
		r.Lease = lease(i)
		return r
	})
	for i := 1; i <= accounts; i += 2 { // half of them end before their time
		if released, err := s.Release(ctx, limit.Ending{Lease: lease(i)}); err != nil || released.Result != limit.Released {
			t.Fatalf("Release = %v, %v", released, err)
		}
	}
	text, err := client.Info(ctx, "keyspace").Result()
	if err != nil {
		t.Fatal(err)
	}
	var keys, expires int
	if _, err := fmt.Sscanf(text[strings.Index(text, "keys="):], "keys=%d,expires=%d", &keys, &expires); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	// Buckets and windows; lanes and records of the leases that are live; the index.
	if want := 3*accounts + 1; keys != want || expires != want {
		t.Errorf("%d of %d keys have an end, want all of %d", expires, keys, want)
	}
}

// together asks n requests, some at once. All must be admitted.
func together(t *testing.T, s store.Store, n int, r func(i int) limit.Request) {
	t.Helper()
	var group sync.WaitGroup
	var next atomic.Int64
	for range 64 {
		group.Go(func() {
			for i := next.Add(1); i <= int64(n) && !t.Failed(); i = next.Add(1) {
				if d, err := s.Decide(storetest.Context(t), r(int(i))); err != nil || !d.Admitted {
					t.Errorf("Decide = %+v, %v, want admission", d, err)
				}
			}
		})
	}
	group.Wait()
}

// T34: leases that expire together are counted exactly at once, and cleaned away
// a few a call. (How long a call then takes is told in docs/promises.md.)
func TestLeasesThatExpireTogetherAreCleanedAFewACall(t *testing.T) {
	t.Parallel()
	clock := storetest.NewClock()
	s, client := open(t, storetest.StartRedis(t, storetest.AnyRedis(t)), clock.Now)
	ctx := storetest.Context(t)
	const leases, most = 2000, 64
	pool := check(lane(t, leases, time.Minute), "pool")
	held := func(when string, want int64) {
		t.Helper()
		if n, err := s.Held(ctx, "d"); err != nil || n != want {
			t.Fatalf("%s: Held = %d, %v, want %d", when, n, err, want)
		}
	}
	// The members of the sets: each lease is one of the pool's and one of the index.
	members := func() int64 {
		t.Helper()
		n := int64(0)
		for _, set := range []string{pool.Key, limit.LeasesKey("d")} {
			size, err := client.ZCard(ctx, set).Result()
			if err != nil {
				t.Fatal(err)
			}
			n += size
		}
		return n
	}
	together(t, s, leases, func(int) limit.Request { return withLease(request(pool)) })
	if d := decide(t, s, withLease(request(pool))); d.Admitted {
		t.Fatal("a full pool admitted")
	}
	held("all are live", leases)
	clock.Advance(time.Minute)
	held("all have expired", 0)

	expired, asks := int64(0), int64(0)
	for left := int64(2 * leases); left > 0; left -= min(left, most) {
		before := members()
		d := decide(t, s, withLease(request(pool)))
		asks++
		if want := leases - asks; !d.Admitted || d.Results[0].Remaining != want {
			t.Fatalf("ask %d: admitted %v, remaining %d, want %d", asks, d.Admitted, d.Results[0].Remaining, want)
		}
		if gone := before + 2 - members(); gone != min(left, most) { // it added two
			t.Fatalf("ask %d removed %d members, want %d", asks, gone, min(left, most))
		}
		expired += d.Expired
	}
	if expired != leases {
		t.Errorf("%d leases were reported as expired, want %d", expired, leases)
	}
	held("all that expired are cleaned away", asks)
}

func TestErrorsTellTheStoreFromTheCall(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock()
		s, client := open(t, server, clock.Now)
		ctx := storetest.Context(t)

		// Somebody else's value under a key of ours: an error that is no outage,
		// and nothing is charged in part.
		good, bad := check(bucket(t, 5, time.Hour), "good"), check(bucket(t, 5, time.Hour), "bad")
		if err := client.LPush(ctx, bad.Key, "x").Err(); err != nil {
			t.Fatal(err)
		}
		_, err := s.Decide(ctx, request(good, bad))
		if err == nil || errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "WRONGTYPE") {
			t.Errorf("Decide on a list: %v, want WRONGTYPE and no ErrUnavailable", err)
		}
		for _, garbage := range []string{"", "garbage", "\xc1\xff", "\x93\x01", "\x63aaa"} {
			if err := client.Set(ctx, bad.Key, garbage, 0).Err(); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Decide(ctx, request(good, bad)); err == nil || errors.Is(err, store.ErrUnavailable) {
				t.Errorf("Decide on %q: %v, want an error that is no ErrUnavailable", garbage, err)
			}
		}
		if d := decide(t, s, request(good)); d.Results[0].Remaining != 4 {
			t.Errorf("remaining %d after failed requests and one good one, want 4", d.Results[0].Remaining)
		}

		// Without memory nothing is charged in part either, and leases can be
		// given back and renewed.
		slot := withLease(request(check(lane(t, 1, time.Minute), "x")))
		decide(t, s, slot)
		if err := client.ConfigSet(ctx, "maxmemory", "1").Err(); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Decide(ctx, request(good)); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("Decide without memory: %v, want ErrUnavailable", err)
		}
		if r, err := s.Renew(ctx, limit.Extension{Lease: slot.Lease}); err != nil || !r.Renewed {
			t.Errorf("Renew without memory: %v, %v", r, err)
		}
		if r, err := s.Release(ctx, limit.Ending{Lease: slot.Lease}); err != nil || r.Result != limit.Released {
			t.Errorf("Release without memory: %v, %v", r, err)
		}
		if err := client.ConfigSet(ctx, "maxmemory", "0").Err(); err != nil {
			t.Fatal(err)
		}
		if d := decide(t, s, request(good)); d.Results[0].Remaining != 3 {
			t.Errorf("remaining %d, want 3", d.Results[0].Remaining)
		}

		server.Kill()
		if _, err := s.Decide(ctx, request(good)); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("Decide without a server: %v, want ErrUnavailable", err)
		}
		server.Start(t)
		storetest.Eventually(t, "Redis is found again", func() bool {
			_, err := s.Decide(ctx, request(good))
			return err == nil
		})
	})
}

// A lease that was granted to a caller who did not wait is given back, after a
// stall that is shorter than a connection waits, and after a longer one, in which
// what was sent on a lost connection is decided when Redis goes on.
func TestLateGrantsAreGivenBack(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		t.Run("short stall", func(t *testing.T) { stall(t, server, 0) })
		t.Run("long stall", func(t *testing.T) { stall(t, server, 2) })
	})
}

// stall stops the server while 40 callers ask, and for as long as so many pings
// wait in vain.
func stall(t *testing.T, server *storetest.Redis, pings int) {
	t.Helper()
	s, client := open(t, server, nil)
	if err := client.FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	// All connections are there: what they carry when the server stops is the first that
	// it reads when it goes on.
	var warm sync.WaitGroup
	for range 64 {
		warm.Go(func() { decide(t, s, request(check(bucket(t, 1000, time.Hour), "warm"))) })
	}
	warm.Wait()
	r := request(check(lane(t, 100, time.Hour), "x"))
	decide(t, s, withLease(r))
	stopped := false
	resume := func() {
		if stopped {
			_ = syscall.Kill(server.PID(), syscall.SIGCONT)
			stopped = false
		}
	}
	defer resume()
	if err := syscall.Kill(server.PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped = true
	var group sync.WaitGroup
	for range 40 {
		group.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			if _, err := s.Decide(ctx, withLease(r)); !errors.Is(err, store.ErrUnavailable) {
				t.Errorf("Decide on a stopped server: %v, want ErrUnavailable", err)
			}
		})
	}
	group.Wait()
	for range pings {
		if err := s.Ping(storetest.Context(t)); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("Ping of a stopped server: %v, want ErrUnavailable", err)
		}
	}
	resume()
	storetest.Eventually(t, "one lease is held", func() bool {
		n, err := s.Held(storetest.Context(t), "d")
		return err == nil && n == 1
	})
	if d := decide(t, s, withLease(r)); d.Results[0].Remaining != 98 {
		t.Errorf("remaining %d, want 98", d.Results[0].Remaining)
	}
}

// A decision of which a part was written is not tried again, and what it took is given back.
func TestWhatIsHalfWrittenIsUndone(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		server.MustDo(t, strings.Fields("ACL SETUSER weir on >secret "+storetest.Rights+" -zadd")...)
		s, err := redis.Open(redis.Options{URL: strings.Replace(server.URL, "unix://", "unix://weir:secret@", 1)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		r := request(check(bucket(t, 5, time.Hour), "x"))
		decide(t, s, r) // the script is loaded
		d, err := s.Decide(storetest.Context(t), withLease(request(r.Checks[0], check(lane(t, 5, time.Hour), "x"))))
		if err == nil || !strings.Contains(err.Error(), "half written") {
			t.Errorf("Decide = %+v, %v, want an error", d, err)
		}
		storetest.Eventually(t, "what was taken is given back", func() bool {
			states, err := s.Inspect(storetest.Context(t), r.Checks)
			return err == nil && states[0].Remaining == 4
		})
	})
}

// The commands and keys that README.md says an ACL user needs are all it needs.
func TestAUserNeedsNoMoreRightsThanAreTold(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		ctx := storetest.Context(t)
		server.MustDo(t, strings.Fields("ACL SETUSER weir on >secret "+storetest.Rights)...)
		s, err := redis.Open(redis.Options{URL: strings.Replace(server.URL, "unix://", "unix://weir:secret@", 1)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		if err := s.Ping(ctx); err != nil {
			t.Errorf("Ping: %v", err)
		}
		w, err := limit.NewWindow(10, limit.Hour, 1)
		if err != nil {
			t.Fatal(err)
		}
		for _, life := range []time.Duration{20 * time.Millisecond, time.Minute} {
			r := withLease(request(check(bucket(t, 10, time.Second), "x"), check(w, "x"), check(lane(t, 1, life), "x")))
			storetest.Eventually(t, "admitted", func() bool { // the second waits for the first to expire, and cleans it away
				r.Lease = storetest.TestLease("d", leaseNumber.Add(1))
				return decide(t, s, r).Admitted
			})
			if life < time.Minute {
				continue
			}
			if renewed, err := s.Renew(ctx, limit.Extension{Lease: r.Lease}); err != nil || !renewed.Renewed {
				t.Errorf("Renew = %v, %v", renewed, err)
			}
			if n, err := s.Held(ctx, "d"); err != nil || n != 1 {
				t.Errorf("Held = %d, %v", n, err)
			}
			if got := inspect(t, s, r.Checks...)[2].Count; got != 1 {
				t.Errorf("Inspect tells of %d leases, want 1", got)
			}
			if released, err := s.Release(ctx, limit.Ending{Lease: r.Lease}); err != nil || released.Result != limit.Released {
				t.Errorf("Release = %v, %v", released, err)
			}
		}
	})
}

// Redis has lost what a window counted, and not who reserved of it: what is given back
// would be somebody else's.
func TestAReservationOfALostCountIsLate(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, client := open(t, server, storetest.NewClock().Now)
		r := withLease(request(check(hourly(t, 10), "x"), check(bucket(t, 10, time.Second), "x")))
		for i := range r.Checks {
			r.Checks[i].Hits, r.Checks[i].Reserve = 4, time.Minute
		}
		decide(t, s, r)
		if err := client.Del(storetest.Context(t), r.Checks[0].Key, r.Checks[1].Key).Err(); err != nil {
			t.Fatal(err)
		}
		decide(t, s, request(check(bucket(t, 10, time.Second), "y"))) // others go on
		settled, err := s.Settle(storetest.Context(t), limit.Usage{Domain: r.Domain, Lease: r.Lease, Checks: []limit.Check{r.Checks[0], r.Checks[1]}})
		want := []limit.Settlement{{Result: limit.Late}, {Result: limit.Settled}}
		if err != nil || fmt.Sprint(settled) != fmt.Sprint(want) {
			t.Errorf("Settle = %v, %v, want %v", settled, err, want)
		}
		if n, err := client.Exists(storetest.Context(t), r.Checks[1].Key).Result(); err != nil || n != 0 {
			t.Errorf("a bucket that is full has a state: %d, %v", n, err)
		}
	})
}
