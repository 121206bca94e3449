package redis

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"weir/limit"
	"weir/store"
	"weir/store/storetest"
)

// openPatient opens a store that tries again for so long.
func openPatient(t *testing.T, url string, patience time.Duration) *Store {
	t.Helper()
	c, err := newConnector(Options{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	c.patience = patience
	s := open(c, Options{})
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func oneToken(t *testing.T) limit.Request {
	t.Helper()
	b, err := limit.NewTokenBucket(100, 1, 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return limit.Request{Domain: "d", Checks: []limit.Check{{Name: "k", Limit: b, Hits: 1, Key: limit.Key("d", b, nil)}}}
}

// What a server refused is tried again until it serves, and then charged once: no
// caller sees that it was away for a moment.
func TestRefusedCallsAreTriedAgain(t *testing.T) {
	for version, bin := range storetest.RedisBinaries(t) {
		for _, tt := range []struct {
			name, want  string // of the error meanwhile
			away, again func(server *storetest.Redis)
		}{
			{
				"away", "connection refused",
				func(server *storetest.Redis) { server.MustDo(t, "SAVE"); server.Kill() },
				func(server *storetest.Redis) { server.Start(t) },
			},
			{
				"replica", "READONLY",
				func(server *storetest.Redis) { server.MustDo(t, "REPLICAOF", "127.0.0.1", "1") },
				func(server *storetest.Redis) { server.MustDo(t, "REPLICAOF", "NO", "ONE") },
			},
			{
				"loading", "LOADING",
				func(server *storetest.Redis) {
					server.MustDo(t, "DEBUG", "POPULATE", "1000")
					server.MustDo(t, "SAVE")
					server.Kill()
					server.StartLoading(t, "--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024")
				},
				func(server *storetest.Redis) {}, // it takes a second
			},
		} {
			t.Run(version+" "+tt.name, func(t *testing.T) {
				t.Parallel()
				server := storetest.StartRedis(t, bin, "--enable-debug-command", "local", "--dbfilename", "dump.rdb")
				s := openPatient(t, server.URL, time.Minute)
				ctx := storetest.Context(t)
				r := oneToken(t)
				if _, err := s.Decide(ctx, r); err != nil {
					t.Fatal(err)
				}
				tt.away(server)
				// A deadline ends it. It may be over while the call is under way, which
				// then may run later.
				short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
				defer cancel()
				unknown := int64(0)
				if _, err := s.Decide(short, r); errors.Is(err, context.DeadlineExceeded) {
					unknown = 1
				} else if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("Decide: %v, want ErrUnavailable with %q", err, tt.want)
				}
				const callers = 20
				var asked sync.WaitGroup
				for range callers {
					asked.Go(func() {
						if _, err := s.Decide(ctx, r); err != nil {
							t.Errorf("Decide: %v", err)
						}
					})
				}
				storetest.Eventually(t, "the server is found ill", func() bool { return s.routes.node("").pipes.health.ill.Load() })
				tt.again(server)
				asked.Wait()
				d, err := s.Decide(ctx, r)
				if err != nil {
					t.Fatal(err)
				}
				if more := 100 - callers - 2 - d.Results[0].Remaining; more < 0 || more > unknown {
					t.Errorf("%d left, want %d, or %d less", d.Results[0].Remaining, 100-callers-2, unknown)
				}
			})
		}
	}
}

// openCounted opens a store that counts its dials by host.
func openCounted(t *testing.T, url string) (*Store, *dials) {
	t.Helper()
	c, err := newConnector(Options{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	d := &dials{byHost: make(map[string]int)}
	c.dialed = d.add
	s := open(c, Options{})
	t.Cleanup(func() { _ = s.Close() })
	return s, d
}

type dials struct {
	mu     sync.Mutex
	byHost map[string]int
}

func (d *dials) add(host string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.byHost[host]++
}

// most returns the number of dials of the host that was dialed most.
func (d *dials) most() (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, count := range d.byHost {
		n = max(n, count)
	}
	return n
}

// askFor has many callers ask until some time has passed, each as soon as it has its
// answer, and returns how long it took.
func askFor(d time.Duration, ask func()) (took time.Duration) {
	begin := time.Now()
	var group sync.WaitGroup
	for range 20 {
		group.Go(func() {
			for time.Since(begin) < d {
				ask()
			}
		})
	}
	group.Wait()
	return time.Since(begin)
}

// While a server is plainly away callers fail at once, and it is dialed seldom; also if
// it is there and has no connection to give.
func TestAServerThatIsAwayIsNotHammered(t *testing.T) {
	dir, err := os.MkdirTemp("", "weir") //nolint:usetesting // short: the path of a socket has a bound
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	full := storetest.StartRedis(t, storetest.AnyRedis(t))
	full.MustDo(t, "CONFIG", "SET", "maxclients", "1")
	storetest.Eventually(t, "its only connection is taken", func() bool {
		c, err := net.Dial("unix", strings.TrimPrefix(full.URL, "unix://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_, _ = c.Write([]byte("PING\r\n"))
		answer := make([]byte, 5)
		_, err = io.ReadFull(c, answer)
		return err == nil && string(answer) == "+PONG"
	})
	for _, tt := range []struct{ name, url string }{
		{"nobody", "unix://" + filepath.Join(dir, "s")},
		{"maxclients", full.URL},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, dials := openCounted(t, tt.url)
			r := oneToken(t)
			var calls atomic.Int64
			took := askFor(time.Second/2, func() {
				calls.Add(1)
				if _, err := s.Decide(storetest.Context(t), r); !errors.Is(err, store.ErrUnavailable) || !unsent(err) {
					t.Errorf("Decide: %v, want ErrUnavailable, and that it was not sent", err)
				}
			})
			// The pauses between dials double up to maxDialPause.
			if n, most := dials.most(), 12+int(took/maxDialPause); n > most {
				t.Errorf("%d dials in %v, want at most %d", n, took, most)
			}
			t.Logf("%d calls took %v and %d dials", calls.Load(), took, dials.most())
		})
	}
}

// Of a cluster that is away each node is dialed for its calls, and once more to be asked
// who serves what; not another time because the URL names it.
func TestAClusterThatIsAwayIsNotHammered(t *testing.T) {
	s, dials := openCounted(t, "redis+cluster://127.0.0.1:1,127.0.0.1:2")
	s.routes.apply([]span{{0, clusterSlots/2 - 1, "127.0.0.1:1"}, {clusterSlots / 2, clusterSlots - 1, "127.0.0.1:2"}})
	r := oneToken(t)
	took := askFor(time.Second, func() {
		if _, err := s.Decide(storetest.Context(t), r); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("Decide: %v, want ErrUnavailable", err)
		}
	})
	if n, most := dials.most(), 12+1+2*int(took/maxDialPause); n > most {
		t.Errorf("%d dials of a node in %v, want at most %d", n, took, most)
	}
	t.Logf("%d dials of a node in %v", dials.most(), took)
}

// The look for evictions is not worth more than a dial a second, whatever becomes of it.
func TestALookForEvictionIsNotItsOwnCause(t *testing.T) {
	addr := startFake(t, func(command string, _ []string) string {
		switch command {
		case "ping":
			return "+PONG\r\n"
		case "info":
			return ""
		}
		return "-ERR not here\r\n"
	})
	s, dials := openCounted(t, "redis://"+addr)
	r := oneToken(t)
	took := askFor(time.Second/2, func() { _, _ = s.Decide(storetest.Context(t), r) })
	if n, most := dials.most(), connections+2+2*int(took/giveBackEvery); n > most {
		t.Errorf("%d dials in %v, want at most %d", n, took, most)
	}
}

// What was sent is not sent again, whatever becomes of its answer.
func TestLostRepliesAreNotAskedForAgain(t *testing.T) {
	server := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	p := newThief(t, server.Addr())
	s := openPatient(t, "redis://"+p.addr, time.Minute)
	ctx := storetest.Context(t)
	r := oneToken(t)
	if _, err := s.Decide(ctx, r); err != nil {
		t.Fatal(err)
	}
	const asked = 20
	for range asked {
		p.steal.Store(true)
		if _, err := s.Decide(ctx, r); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("Decide whose reply was lost: %v, want ErrUnavailable", err)
		}
		if p.steal.Load() {
			t.Error("no reply was lost")
		}
	}
	if d, err := s.Decide(ctx, r); err != nil || d.Results[0].Remaining != 100-2-asked {
		t.Errorf("Decide = %+v, %v, want %d left: each was charged once", d, err, 100-2-asked)
	}
}

// thief is a proxy that takes the next answer to a script away, and cuts the
// connection. Answers to anything else, as to an INFO, are not touched.
type thief struct {
	addr  string
	steal atomic.Bool
}

func newThief(t *testing.T, to string) *thief {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &thief{addr: l.Addr().String()}
	var work sync.WaitGroup
	work.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			work.Go(func() { p.serve(client, to) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		work.Wait()
	})
	return p
}

func (p *thief) serve(client net.Conn, to string) {
	defer func() { _ = client.Close() }()
	server, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	var asked atomic.Bool // to run a script, and has not answered
	var copying sync.WaitGroup
	copying.Go(func() {
		defer func() { _ = server.Close() }()
		part := make([]byte, 64<<10)
		for {
			n, err := client.Read(part)
			if err != nil {
				return
			}
			if strings.Contains(string(part[:n]), "evalsha") {
				asked.Store(true)
			}
			if _, err := server.Write(part[:n]); err != nil {
				return
			}
		}
	})
	part := make([]byte, 64<<10)
	for {
		n, err := server.Read(part)
		if err != nil || asked.Swap(false) && p.steal.Swap(false) {
			break
		}
		if _, err := client.Write(part[:n]); err != nil {
			break
		}
	}
	_ = client.Close()
	copying.Wait()
}

// A server that does not let us in is away: its refusal is not taken for an answer.
func TestAServerThatDoesNotLetUsInIsAway(t *testing.T) {
	server := storetest.StartRedis(t, storetest.AnyRedis(t))
	server.MustDo(t, "ACL", "SETUSER", "default", "resetpass", ">right")
	s := openPatient(t, strings.Replace(server.URL, "unix://", "unix://:wrong@", 1), usualPatience)
	_, err := s.Decide(storetest.Context(t), oneToken(t))
	if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "WRONGPASS") {
		t.Errorf("Decide: %v, want ErrUnavailable with WRONGPASS", err)
	}
}

func TestPausesGrowUpToABound(t *testing.T) {
	got := ""
	for n := range 6 {
		got += fmt.Sprint(pauseBefore(n), " ")
	}
	if want := "1ms 2ms 4ms 8ms 8ms 8ms "; got != want {
		t.Errorf("pauses %s, want %s", got, want)
	}
	if got := pauseBefore(1 << 40); got != maxPause {
		t.Errorf("pauseBefore(2^40) = %v, want %v", got, maxPause)
	}
}

func TestAnAddressThatANodeTellsIsCompleted(t *testing.T) {
	for _, tt := range []struct{ address, want string }{
		{"10.0.0.2:7001", "10.0.0.2:7001"},
		{":7001", "10.0.0.1:7001"},
		{"?:7001", "10.0.0.1:7001"},
		{"10.0.0.2:0", "10.0.0.2:7000"},
		{"[::1]:7001", "[::1]:7001"},
		{"node.example:7001", "node.example:7001"},
		{"nonsense", "nonsense"},
	} {
		if got := told(tt.address, "10.0.0.1:7000"); got != tt.want {
			t.Errorf("told(%q) = %q, want %q", tt.address, got, tt.want)
		}
	}
}
