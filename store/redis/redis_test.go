package redis_test

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"weir/store/redis"
	"weir/store/storetest"
)

// TestMain lets 8 tests run at once, unless -parallel says otherwise: most wait for
// servers that look for each other, and not for a CPU.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err) // there is no such flag
	}
	m.Run()
}

// open opens a store on the server, and a client that looks at its keys.
func open(t *testing.T, server *storetest.Redis, now func() int64) (*redis.Store, *goredis.Client) {
	t.Helper()
	s, err := redis.Open(redis.Options{URL: server.URL, Now: now, ReplyTimeout: storetest.Deadline})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	opts, err := goredis.ParseURL(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	client := goredis.NewClient(opts)
	t.Cleanup(func() { _ = client.Close() })
	return s, client
}

func TestRedisPassesTheScenarios(t *testing.T) {
	for name, bin := range storetest.RedisBinaries(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := storetest.StartRedis(t, bin)
			storetest.RunScenarios(t, "../testdata", func(t *testing.T, now func() int64) storetest.Fixture {
				s, client := open(t, server, now)
				if err := client.FlushAll(t.Context()).Err(); err != nil {
					t.Fatal(err)
				}
				return storetest.Fixture{Store: s, Dump: func() string { return dump(t, client, now()) }}
			})
		})
	}
}

// dump prints all keys but for expired members of sets: cleaning them away is
// not a change of state.
func dump(t *testing.T, client *goredis.Client, now int64) string {
	ctx := storetest.Context(t)
	var b strings.Builder
	keys, err := client.Keys(ctx, "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(keys)
	for _, key := range keys {
		kind, err := client.Type(ctx, key).Result()
		if err != nil {
			t.Fatal(err)
		}
		switch kind {
		case "string":
			value, err := client.Get(ctx, key).Result()
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, "%s %x\n", key, value)
		case "zset":
			members, err := client.ZRangeByScoreWithScores(ctx, key, &goredis.ZRangeBy{Min: fmt.Sprintf("(%d", now), Max: "+inf"}).Result()
			if err != nil {
				t.Fatal(err)
			}
			if len(members) > 0 {
				fmt.Fprintf(&b, "%s %v\n", key, members)
			}
		default:
			t.Fatalf("%s is a %s", key, kind)
		}
	}
	return b.String()
}
