package redis

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"weir/limit"
	"weir/store/storetest"
)

// BenchmarkScripts is what Redis itself uses for a call, in script calls of 1 and of maxBatch,
// many of them to a pipeline: the script's part of a decision.
func BenchmarkScripts(b *testing.B) {
	server := storetest.StartRedis(b, storetest.AnyRedis(b))
	s, err := Open(Options{URL: server.URL})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	options, err := goredis.ParseURL(server.URL)
	if err != nil {
		b.Fatal(err)
	}
	client := goredis.NewClient(options)
	defer func() { _ = client.Close() }()
	bucket, err := limit.NewTokenBucket(10_000, 1, time.Minute)
	if err != nil {
		b.Fatal(err)
	}
	lane := limit.Concurrency{Max: 1000, Lease: 2 * time.Minute}
	pool := limit.Concurrency{Max: 1_000_000, Lease: 2 * time.Minute}
	check := func(l limit.Limit, name, subject string) limit.Check {
		return limit.Check{Limit: l, Name: name, Key: fmt.Sprintf("weir:{ai}:%s:%s", name, subject), Hits: 1}
	}
	for _, tt := range []struct {
		name  string
		calls func(i int) []*call
	}{
		{"bucket", func(i int) []*call {
			subject := fmt.Sprintf("account=a%09d", i%10_000)
			return []*call{s.decideCall(limit.Request{Domain: "ai", Checks: []limit.Check{check(bucket, "b", subject)}})}
		}},
		{"three buckets", func(i int) []*call {
			subject := fmt.Sprintf("account=a%09d", i%10_000)
			return []*call{s.decideCall(limit.Request{Domain: "ai", Checks: []limit.Check{
				check(bucket, "b", subject), check(bucket, "x", subject), check(bucket, "y", subject),
			}})}
		}},
		{"bucket+lane+pool and release", func(i int) []*call {
			subject := fmt.Sprintf("account=a%09d", i%10_000)
			lease := limit.NewLeaseID("ai", [16]byte{1: byte(i), byte(i >> 8), byte(i >> 16), byte(i >> 24)})
			return []*call{
				s.decideCall(limit.Request{Domain: "ai", Lease: lease, Checks: []limit.Check{
					check(bucket, "b", subject), check(lane, "c", subject), check(pool, "p", "all"),
				}}),
				s.releaseCall(limit.Ending{Lease: lease}),
			}
		}},
	} {
		for _, size := range []int{1, maxBatch} {
			b.Run(fmt.Sprintf("%s/%d", tt.name, size), func(b *testing.B) {
				ctx := b.Context()
				var used [2]time.Duration
				n := 0
				for b.Loop() {
					n = round(ctx, b, client, size, n, tt.calls, server.PID(), &used)
				}
				for i, what := range []string{"redis-ns/decision", "redis-ns/release"} {
					if used[i] > 0 {
						b.ReportMetric(float64(used[i].Nanoseconds())/float64(n), what)
					}
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// round sends 512 decisions in one pipeline.
func round(ctx context.Context, b *testing.B, client *goredis.Client, size, n int, calls func(i int) []*call, pid int, used *[2]time.Duration) int {
	all := make([][]*scriptCall, 2)
	for range 512 / size {
		var these []*scriptCall
		for range size {
			for i, c := range calls(n) {
				c.ctx = ctx
				if i == len(these) {
					these = append(these, &scriptCall{source: n == 0})
				}
				these[i].add(c)
			}
			n++
		}
		for i, s := range these {
			all[i] = append(all[i], s)
		}
	}
	for i, calls := range all {
		if len(calls) == 0 {
			continue
		}
		pipe := client.Pipeline()
		for _, s := range calls {
			_ = pipe.Process(ctx, s.command(ctx, ""))
		}
		before := cpu(b, pid)
		if _, err := pipe.Exec(ctx); err != nil {
			b.Fatal(err)
		}
		used[i] += cpu(b, pid) - before
		for _, s := range calls {
			s.answer()
			for _, c := range s.calls {
				if c.err != nil {
					b.Fatal(c.err)
				}
			}
		}
	}
	return n
}

// cpu is the time that a process has had a CPU for.
func cpu(b *testing.B, pid int) time.Duration {
	b.Helper()
	var all int64
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		b.Fatal(err)
	}
	for _, t := range tasks {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/schedstat", pid, t.Name()))
		if err != nil {
			b.Fatal(err)
		}
		ns, err := strconv.ParseInt(strings.Fields(string(text))[0], 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		all += ns
	}
	return time.Duration(all)
}
