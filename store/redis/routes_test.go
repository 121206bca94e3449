package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"weir/store"
	"weir/store/storetest"
)

// pong answers PING, and nothing else.
func pong(command string, _ []string) string {
	if command == "ping" {
		return "+PONG\r\n"
	}
	return "-ERR not here\r\n"
}

// Who says MOVED and is no cluster is not followed: the address is wrong.
func TestOneServerCannotMoveAKey(t *testing.T) {
	addr := startFake(t, func(command string, args []string) string {
		if command == "ping" {
			return pong(command, args)
		}
		return "-MOVED 1 127.0.0.1:1\r\n"
	})
	s, err := Open(Options{URL: "redis://" + addr, Now: func() int64 { return 1 }})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	ctx := storetest.Context(t)
	_, decided := s.Decide(ctx, oneToken(t))
	_, counted := s.Held(ctx, "d")
	for name, err := range map[string]error{"Decide": decided, "Held": counted} {
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "needs a redis+cluster:// address") {
			t.Errorf("%s: %v, want ErrUnavailable that names the right address", name, err)
		}
	}
	if n := s.routes.node(""); n.host != addr || len(s.routes.all()) != 1 {
		t.Errorf("%s serves all keys, of %d nodes, want %s alone", n.host, len(s.routes.all()), addr)
	}
}

// A slot that nobody serves costs its calls the patience, not their deadlines, also
// while the server serves the other slots.
func TestASlotThatIsNotServedIsGivenUp(t *testing.T) {
	var asked atomic.Int64
	addr := startFake(t, func(command string, args []string) string {
		if command == "evalsha" && strings.Contains(strings.Join(args, " "), "gone") {
			asked.Add(1)
			return "-CLUSTERDOWN Hash slot not served\r\n"
		}
		return pong(command, args) // to a script it is an error, and so an answer
	})
	s := openPatient(t, "redis://"+addr, usualPatience)
	ctx, cancel := context.WithCancel(t.Context())
	var others sync.WaitGroup
	others.Go(func() {
		for r := oneToken(t); ctx.Err() == nil; {
			_, _ = s.Decide(storetest.Context(t), r)
		}
	})
	r := oneToken(t)
	r.Domain = "gone"
	r.Checks[0].Key = strings.Replace(r.Checks[0].Key, "d", "gone", 1)
	call, end := context.WithTimeout(t.Context(), time.Second)
	_, err := s.Decide(call, r)
	end()
	cancel()
	others.Wait()
	if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "CLUSTERDOWN") {
		t.Errorf("Decide: %v, want ErrUnavailable with CLUSTERDOWN", err)
	}
	if n := asked.Load(); n > 5 { // at once, and after 1, 2, 4 and 8 ms
		t.Errorf("it was asked %d times, want at most 5", n)
	}
}

// unkept returns a store whose topology nobody looks at, but as tests do.
func unkept(t *testing.T, url string) *Store {
	t.Helper()
	s, err := Open(Options{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	s.routes.stop()
	s.routes.work.Wait()
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// Of a primary and a former one the primary is asked.
func TestAFormerPrimaryDoesNotAnswerForThePrimary(t *testing.T) {
	former := startFake(t, pong)
	s := unkept(t, "redis+sentinel://127.0.0.1:1/main")
	s.routes.apply([]span{{host: former}})
	if err := s.Ping(storetest.Context(t)); err != nil {
		t.Errorf("Ping: %v", err)
	}
	s.routes.apply([]span{{host: "127.0.0.1:1"}})
	if err := s.Ping(storetest.Context(t)); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Ping, the primary is away: %v, want ErrUnavailable", err)
	}
}

// As long as the sentinels are of two minds the primary is who it was.
func TestATieOfSentinelsChangesNothing(t *testing.T) {
	says := func(port string) string {
		return startFake(t, func(string, []string) string {
			return fmt.Sprintf("*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%s\r\n", len(port), port)
		})
	}
	s := unkept(t, "redis+sentinel://"+says("1")+","+says("2")+"/main")
	for _, want := range []string{"127.0.0.1:1", "127.0.0.1:2"} {
		s.routes.apply([]span{{host: want}})
		for range 20 {
			spans, err := s.routes.askSentinels(t.Context())
			if err != nil || len(spans) != 1 || spans[0].host != want {
				t.Fatalf("askSentinels = %v, %v, want %s, as before", spans, err, want)
			}
		}
	}
}

// Who pings while the store is closed gets an answer or an error.
func TestACloseEndsPings(t *testing.T) {
	for range 50 {
		var slots string
		node := func(command string, args []string) string {
			if command == "cluster" {
				return slots
			}
			return pong(command, args)
		}
		first, second := startFake(t, node), startFake(t, node)
		_, port1, _ := net.SplitHostPort(first)
		_, port2, _ := net.SplitHostPort(second)
		slots = fmt.Sprintf("*2\r\n*3\r\n:0\r\n:8191\r\n*2\r\n$9\r\n127.0.0.1\r\n:%s\r\n*3\r\n:8192\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%s\r\n", port1, port2)
		s, err := Open(Options{URL: "redis+cluster://" + first})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Ping(storetest.Context(t)); err != nil {
			t.Fatal(err)
		}
		var pings sync.WaitGroup
		for range 8 {
			pings.Go(func() {
				for s.Ping(storetest.Context(t)) == nil {
				}
			})
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		pings.Wait()
		if err := s.Ping(storetest.Context(t)); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("Ping after Close: %v, want ErrUnavailable", err)
		}
	}
}
