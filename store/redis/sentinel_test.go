package redis_test

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"weir/store"
	"weir/store/redis"
	"weir/store/storetest"
)

// After a failover decisions are taken on the new primary, with what it knows, and
// without anybody's help; also if the primary hangs, and a sentinel with it.
func TestAFailoverIsFollowed(t *testing.T) {
	t.Parallel()
	for name, bin := range storetest.RedisBinaries(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			servers := storetest.StartSentinel(t, bin, "")
			s := openWith(t, redis.Options{URL: servers.URL})
			b := bucket(t, 1000, 24*time.Hour)
			left := decide(t, s, oneOf(t, "d", b)).Results[0].Remaining
			servers.Primary.MustDo(t, "WAIT", "1", "5000")
			storetest.Eventually(t, "a sentinel starts a failover", func() bool {
				_, err := servers.Sentinels[0].Do("SENTINEL", "FAILOVER", storetest.SentinelName)
				return err == nil
			})
			before, begin := evals(t, servers.Replica), time.Now()
			storetest.Eventually(t, "decisions are taken on the new primary", func() bool {
				d, err := s.Decide(storetest.Context(t), oneOf(t, "d", b))
				if err != nil && !errors.Is(err, store.ErrUnavailable) {
					t.Errorf("Decide: %v, want ErrUnavailable", err)
				}
				if err == nil && d.Results[0].Remaining >= left {
					t.Errorf("%d left, want less than %d", d.Results[0].Remaining, left)
				}
				return err == nil && evals(t, servers.Replica) > before
			})
			t.Logf("after %v", time.Since(begin))
			if err := s.Ping(storetest.Context(t)); err != nil {
				t.Errorf("Ping: %v", err)
			}
			host, port, _ := strings.Cut(servers.Replica.Addr(), ":")
			servers.Primary.MustDo(t, "REPLICAOF", host, port) // as the sentinels do, eight seconds later
			storetest.Eventually(t, "the old primary is a replica", func() bool {
				for _, n := range servers.Sentinels {
					replicas, err := n.Do("SENTINEL", "REPLICAS", storetest.SentinelName)
					if err != nil || !strings.Contains(replicas, "master-link-status\nok") {
						return false
					}
				}
				return true
			})

			for _, n := range []*storetest.Redis{servers.Replica, servers.Sentinels[0]} {
				pid := n.PID()
				if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
				defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
			}
			late := openWith(t, redis.Options{URL: servers.URL})
			for _, s := range []*redis.Store{s, late} {
				storetest.Eventually(t, "decisions are taken on the old primary again", func() bool {
					ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
					defer cancel()
					_, err := s.Decide(ctx, oneOf(t, "d", b))
					return err == nil
				})
			}
		})
	}
}

// Wrong sentinels, a name that they do not know and a wrong password are told.
func TestSentinelsThatDoNotHelpAreToldOf(t *testing.T) {
	t.Parallel()
	servers := storetest.StartSentinel(t, storetest.AnyRedis(t), "sentinels")
	for _, tt := range []struct {
		name, want string
		options    redis.Options
	}{
		{"name", "does not know the primary of that name", redis.Options{URL: servers.URL + "x", SentinelPasswordFile: file(t, "sentinels")}},
		{"password", "WRONGPASS", redis.Options{URL: servers.URL, SentinelPasswordFile: file(t, "hunter2")}},
		{"no password", "NOAUTH", redis.Options{URL: servers.URL}},
		{"nobody", "no sentinel says who the primary is", redis.Options{URL: "redis+sentinel://127.0.0.1:1/main"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := openWith(t, tt.options)
			_, err := s.Decide(storetest.Context(t), oneOf(t, "d", bucket(t, 1, time.Hour)))
			if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "hunter2") {
				t.Errorf("Decide: %v, want ErrUnavailable with %q", err, tt.want)
			}
		})
	}
}
