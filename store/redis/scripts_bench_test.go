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

// BenchmarkScripts is the CPU time that Redis uses for a decision, or its release, in script calls of 1 and of
// maxBatch, in pipelines of 512 decisions: the scripts, and to read and answer their calls, with warm caches.
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
		return limit.Check{Limit: l, Name: name, Key: "weir:{ai}:" + name + ":" + subject, Hits: 1}
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
				l := scriptLoad{b: b, client: client, pid: server.PID(), size: size, calls: tt.calls}
				for b.Loop() {
					l.round(ctx)
				}
				for i, what := range []string{"redis-ns/decision", "redis-ns/release"} {
					if l.used[i] > 0 {
						b.ReportMetric(float64(l.used[i].Nanoseconds())/float64(l.decisions), what)
					}
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// scriptLoad asks a Redis without a store's workers.
type scriptLoad struct {
	b      *testing.B
	client *goredis.Client
	pid    int                 // of Redis
	size   int                 // calls to a script call
	calls  func(i int) []*call // the i-th decision, and maybe its release

	decisions int
	used      [2]time.Duration // by decisions, by releases
}

// round sends 512 decisions in one pipeline, and then their releases in another.
func (l *scriptLoad) round(ctx context.Context) {
	var all [2][]*scriptCall
	for range 512 / l.size {
		var these []*scriptCall
		for range l.size {
			for i, c := range l.calls(l.decisions) {
				c.ctx = ctx
				if i == len(these) {
					these = append(these, &scriptCall{source: l.decisions == 0})
				}
				these[i].add(c)
			}
			l.decisions++
		}
		for i, s := range these {
			all[i] = append(all[i], s)
		}
	}
	for i, calls := range all {
		if len(calls) == 0 {
			continue
		}
		pipe := l.client.Pipeline()
		for _, s := range calls {
			_ = pipe.Process(ctx, s.command(ctx, "")) // it only queues
		}
		before := cpu(l.b, l.pid)
		if _, err := pipe.Exec(ctx); err != nil {
			l.b.Fatal(err)
		}
		l.used[i] += cpu(l.b, l.pid) - before
		for _, s := range calls {
			s.answer()
			for _, c := range s.calls {
				if c.err != nil {
					l.b.Fatal(c.err)
				}
			}
		}
	}
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
