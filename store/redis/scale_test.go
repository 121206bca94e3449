package redis_test

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"weir/limit"
	"weir/store/storetest"
)

// perItem are the commands whose work grows with the members that they find, in a set or among
// all keys.
var perItem = []string{
	"zrange", "zrangebyscore", "zrevrange", "zrevrangebyscore", "zremrangebyscore", "zscan", "smembers", "sscan", "hgetall", "hkeys", "hvals", "hscan",
	"lrange", "keys", "scan", "sort",
}

// A decision, and what ends its lease, call the same commands when a pool holds 100,000 leases
// as when it holds 10, and none whose work grows with them; when as many have expired, too.
func TestALargePoolIsDecidedAsASmallOneIs(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock()
		s, client := open(t, server, clock.Now)
		account, slots, pool := check(bucket(t, 1_000_000, time.Second), "a"), check(lane(t, 1000, time.Hour), "a"), check(lane(t, 1_000_000, time.Hour), "pool")
		took := func() map[string]int {
			before := calls(t, client)
			r := withLease(request(account, slots, pool))
			if d := decide(t, s, r); !d.Admitted {
				t.Fatal("refused")
			}
			if _, err := s.Renew(storetest.Context(t), limit.Extension{Lease: r.Lease}); err != nil {
				t.Fatal(err)
			}
			if e, err := s.Release(storetest.Context(t), limit.Ending{Lease: r.Lease}); err != nil || e.Result != limit.Released {
				t.Fatalf("Release = %v, %v", e, err)
			}
			after := calls(t, client)
			maps.DeleteFunc(after, func(name string, n int) bool { return n == before[name] || name == "info" })
			for name := range after {
				after[name] -= before[name]
			}
			// An expiry that is not later, by the clock of Redis, is asked for twice.
			if n := after["pexpire"]; n > 12 {
				t.Errorf("PEXPIRE is called %d times for three sets", n)
			}
			delete(after, "pexpire")
			return after
		}
		took() // the scripts are loaded
		held := 0
		hold := func(n int) {
			var members []goredis.Z
			for ; held < n; held++ {
				members = append(members, goredis.Z{Score: float64(clock.Now() + time.Hour.Milliseconds()), Member: "lease" + strconv.Itoa(held)})
			}
			for part := range slices.Chunk(members, 1000) {
				for _, key := range []string{pool.Key, limit.LeasesKey("d")} {
					if err := client.ZAdd(storetest.Context(t), key, part...).Err(); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		hold(10)
		few := took()
		hold(100_000)
		many := took()
		if got := inspect(t, s, pool)[0].Count; got != 100_000 {
			t.Fatalf("the pool holds %d, want 100,000", got)
		}
		if !maps.Equal(few, many) {
			t.Errorf("with 100,000 leases %v, with 10 %v, want the same", many, few)
		}
		clock.Advance(2 * time.Hour)
		expired := took()
		for _, name := range perItem {
			if many[name]+expired[name] > 0 {
				t.Errorf("it calls %s", strings.ToUpper(name))
			}
		}
		// What has expired is cleaned away bit by bit, so a few commands more.
		total := func(counts map[string]int) (n int) {
			for _, c := range counts {
				n += c
			}
			return n
		}
		if got, most := total(expired), total(few)+4; got > most {
			t.Errorf("with 100,000 expired leases it calls %d commands, %v, want at most %d", got, expired, most)
		}
	})
}

// Nothing that is kept for a subject stays: every key has an expiry, and one that is idle
// goes when it means nothing any more.
func TestNoKeyOfASubjectStays(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, client := open(t, server, nil)
		window, err := limit.NewWindow(1_000_000, limit.Hour, 1)
		if err != nil {
			t.Fatal(err)
		}
		const subjects = 50
		for i := range subjects {
			id := fmt.Sprint(i)
			reserved := check(bucket(t, 10, time.Minute), "reserved"+id)
			reserved.Reserve = time.Minute
			r := withLease(request(
				check(bucket(t, 10, time.Minute), id), check(window, id), check(slides(t, 10), id), check(lane(t, 3, time.Minute), id), check(lane(t, 1000, time.Minute), "pool"), reserved,
			))
			switch i % 3 {
			case 1:
				r.Stream = "stream" + id
			case 2:
				r.Operation.ID = "operation" + id
			}
			if d := decide(t, s, r); !d.Admitted {
				t.Fatalf("refused: %+v", d)
			}
			if i%2 == 0 {
				if _, err := s.Release(storetest.Context(t), limit.Ending{Lease: r.Lease}); err != nil {
					t.Fatal(err)
				}
			}
			// The end of a stream that has asked nothing.
			if _, err := s.Release(storetest.Context(t), limit.Ending{Domain: "d", Stream: "other" + id}); err != nil {
				t.Fatal(err)
			}
		}
		keys, err := client.Keys(storetest.Context(t), "*").Result()
		if err != nil || len(keys) < 5*subjects {
			t.Fatalf("%d keys, %v; want at least %d", len(keys), err, 5*subjects)
		}
		for _, key := range keys {
			left, err := client.PTTL(storetest.Context(t), key).Result()
			if err != nil || left <= 0 || left > limit.StreamSlack+time.Hour {
				t.Errorf("%s goes after %v, %v; want it within %v", key, left, err, limit.StreamSlack+time.Hour)
			}
		}

		// A bucket is one key, which goes when the bucket is full and the slack is over.
		if err := client.FlushDB(storetest.Context(t)).Err(); err != nil {
			t.Fatal(err)
		}
		short := request(check(bucket(t, 1, time.Second), "x"))
		decide(t, s, short)
		left, err := client.PTTL(storetest.Context(t), short.Checks[0].Key).Result()
		if slack := 10 * time.Second; err != nil || left <= 0 || left > time.Second+slack {
			t.Errorf("a bucket that is full after 1 s goes after %v, %v; want %v at most", left, err, time.Second+slack)
		}
		if n, err := client.DBSize(storetest.Context(t)).Result(); err != nil || n != 1 {
			t.Errorf("a bucket has %d keys, %v; want 1", n, err)
		}
	})
}
