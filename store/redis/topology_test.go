package redis_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"weir/limit"
	"weir/store"
	"weir/store/redis"
	"weir/store/storetest"
)

// secret has every character that a URL must escape.
const (
	secret        = "s:/?#@%t"
	escapedSecret = "s%3A%2F%3F%23%40%25t"
)

func allow(t testing.TB, server *storetest.Redis, more ...string) {
	t.Helper()
	server.MustDo(t, append(strings.Fields("ACL SETUSER weir on "+storetest.Rights), append(more, ">"+secret)...)...)
}

func file(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Every form of address passes the store's suite, by users with few rights.
func TestEveryAddressPassesTheScenarios(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		start func(t *testing.T, bin string) (redis.Options, []*storetest.Redis)
	}{
		{"unix", func(t *testing.T, bin string) (redis.Options, []*storetest.Redis) {
			s := storetest.StartRedis(t, bin)
			allow(t, s, "+select")
			url := strings.Replace(s.URL, "unix://", "unix://weir:"+escapedSecret+"@", 1)
			return redis.Options{URL: url + "?db=3"}, []*storetest.Redis{s}
		}},
		{"redis", func(t *testing.T, bin string) (redis.Options, []*storetest.Redis) {
			s := storetest.StartRedisTCP(t, bin)
			allow(t, s, "+select")
			return redis.Options{URL: "redis://weir:" + escapedSecret + "@" + s.Addr() + "/3"}, []*storetest.Redis{s}
		}},
		{"rediss", func(t *testing.T, bin string) (redis.Options, []*storetest.Redis) {
			certificate := storetest.NewCertificate(t)
			s := storetest.StartRedisTLS(t, bin, certificate)
			allow(t, s)
			url := strings.Replace(s.URL, "rediss://", "rediss://weir@", 1)
			return redis.Options{URL: url, PasswordFile: file(t, secret+"\n"), CAFile: certificate.CA}, []*storetest.Redis{s}
		}},
		{"sentinel", func(t *testing.T, bin string) (redis.Options, []*storetest.Redis) {
			s := storetest.StartSentinel(t, bin, "sentinels")
			allow(t, s.Primary, "+select")
			url := strings.Replace(s.URL, "://", "://weir@", 1) + "/3"
			return redis.Options{URL: url, PasswordFile: file(t, secret), SentinelPasswordFile: file(t, "sentinels\r\n")}, []*storetest.Redis{s.Primary}
		}},
		{"cluster", func(t *testing.T, bin string) (redis.Options, []*storetest.Redis) {
			c := storetest.StartCluster(t, bin, 3)
			for _, n := range c.Nodes {
				allow(t, n, strings.Fields(storetest.ClusterRights)...)
			}
			return redis.Options{URL: strings.Replace(c.URL, "://", "://weir:"+escapedSecret+"@", 1)}, c.Nodes
		}},
		{"cluster with TLS", func(t *testing.T, bin string) (redis.Options, []*storetest.Redis) {
			certificate := storetest.NewCertificate(t)
			c := storetest.StartClusterTLS(t, bin, 3, certificate)
			return redis.Options{URL: c.URL, CAFile: certificate.CA}, c.Nodes
		}},
	} {
		for version, bin := range storetest.RedisBinaries(t) {
			t.Run(tt.name+" "+version, func(t *testing.T) {
				t.Parallel()
				options, servers := tt.start(t, bin)
				storetest.RunScenarios(t, "../testdata", func(t *testing.T, now func() int64) storetest.Fixture {
					for _, s := range servers {
						s.MustDo(t, "FLUSHALL")
					}
					options.Now = now
					return storetest.Fixture{Store: openWith(t, options)}
				})
				options.Now = nil
				s := openWith(t, options)
				for n := range 9 { // on all nodes
					lifeOfALease(t, s, fmt.Sprintf("domain %d", n))
				}
				for _, server := range servers {
					if size := server.MustDo(t, "INFO", "keyspace"); !strings.Contains(size, "keys=") {
						t.Errorf("%s has no keys: %q", server.Addr(), size)
					}
				}
			})
		}
	}
}

func openWith(t testing.TB, o redis.Options) *redis.Store {
	t.Helper()
	s, err := redis.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// oneOf asks for a token and a slot of a domain.
func oneOf(t testing.TB, domain string, l ...limit.Limit) limit.Request {
	t.Helper()
	r := limit.Request{Domain: domain}
	for i, l := range l {
		r.Checks = append(r.Checks, limit.Check{Name: "k", Limit: l, Hits: 1, Key: limit.Key(domain, l, []limit.Entry{{Key: "k", Value: fmt.Sprint(i)}})})
	}
	if r.NeedsLease() {
		r = withLease(r)
	}
	return r
}

func lifeOfALease(t testing.TB, s store.Store, domain string) {
	t.Helper()
	ctx := storetest.Context(t)
	if err := s.Ping(ctx); err != nil {
		t.Errorf("Ping: %v", err)
	}
	b, l := bucket(t, 10, time.Hour), lane(t, 2, time.Minute)
	r := oneOf(t, domain, b, l)
	if d := decide(t, s, r); !d.Admitted || d.Results[0].Remaining != 9 || d.Results[1].Remaining != 1 {
		t.Errorf("Decide = %+v, want the first of 10 and of 2", d)
	}
	if renewed, err := s.Renew(ctx, limit.Extension{Lease: r.Lease}); err != nil || !renewed.Renewed {
		t.Errorf("Renew = %v, %v", renewed, err)
	}
	if n, err := s.Held(ctx, domain); err != nil || n != 1 {
		t.Errorf("Held = %d, %v, want 1", n, err)
	}
	if released, err := s.Release(ctx, limit.Ending{Lease: r.Lease}); err != nil || released.Result != limit.Released {
		t.Errorf("Release = %v, %v", released, err)
	}
	if d := decide(t, s, oneOf(t, domain, b, l)); d.Results[0].Remaining != 8 || d.Results[1].Remaining != 1 {
		t.Errorf("after a release: %+v, want 8 tokens and 1 slot", d)
	}
}
