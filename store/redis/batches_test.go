package redis_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"weir/store"
	"weir/store/redis"
	"weir/store/storetest"
)

// A decision that is alone is one command. Those that come together share commands, and the
// time that Redis tells is asked for once a command.
func TestDecisionsThatComeTogetherShareCommands(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, client := open(t, server, nil)
		three := request(check(bucket(t, 1000, time.Second), "x"), check(lane(t, 1000, time.Minute), "x"), check(lane(t, 1000, time.Minute), "pool"))
		decide(t, s, withLease(three)) // the script is loaded
		for _, tt := range []struct {
			together    int
			least, most int
		}{{1, 1, 1}, {200, 4, 199}} {
			before := calls(t, client)
			allWait(t, server, s, tt.together, func(int) { decide(t, s, withLease(three)) })
			after := calls(t, client)
			got := func(command string) int { return after[command] - before[command] }
			if n := got("evalsha"); n < tt.least || n > tt.most || got("eval") != 0 || got("time") != n {
				t.Errorf("%d decisions: %d EVALSHA, %d EVAL and %d TIME; want %d to %d, 0, and as many", tt.together, n, got("eval"), got("time"), tt.least, tt.most)
			}
		}
	})
}

// allWait makes n calls of a server that stands still until all of them wait, but for those
// that the connections have taken.
func allWait(t *testing.T, server *storetest.Redis, s *redis.Store, n int, call func(i int)) {
	t.Helper()
	whileAllWait(t, server, s, n, call, func() {})
}

// whileAllWait is allWait that calls look before Redis goes on.
func whileAllWait(t *testing.T, server *storetest.Redis, s *redis.Store, n int, call func(i int), look func()) {
	t.Helper()
	if err := syscall.Kill(server.PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() { call(i) })
	}
	storetest.Eventually(t, "all wait", func() bool { return s.Waiting() >= n-redis.MaxOut })
	look()
	if err := syscall.Kill(server.PID(), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	group.Wait()
}

// Load tells what waits, and on how many connections.
func TestLoadTellsConnectionsAndWhatWaits(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, _ := open(t, server, nil)
		r := request(check(bucket(t, 1000, time.Second), "x"))
		decide(t, s, r)
		storetest.Eventually(t, "with nothing to do all connections are idle", func() bool {
			l := s.Load()
			return l.Connections > 0 && l.Idle == l.Connections && l.Waiting == 0
		})
		whileAllWait(t, server, s, 2*redis.MaxOut, func(int) { decide(t, s, r) }, func() {
			storetest.Eventually(t, "some wait for connections that are out", func() bool {
				l := s.Load()
				return l.Waiting > 0 && l.Idle < l.Connections
			})
		})
	})
}

// What is wrong with one subject is nothing to those that it shares a command with.
func TestAFailureIsNoneOfTheOthers(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, client := open(t, server, nil)
		b := bucket(t, 5, time.Hour)
		bad := check(b, "bad")
		if err := client.RPush(storetest.Context(t), bad.Key, "a list").Err(); err != nil {
			t.Fatal(err)
		}
		const n = 200
		var failed, admitted atomic.Int64
		allWait(t, server, s, n, func(i int) {
			r := request(check(b, fmt.Sprint(i)), check(b, "bad"))
			if i%10 > 0 {
				r = request(check(b, fmt.Sprint(i)))
			}
			switch d, err := s.Decide(storetest.Context(t), r); {
			case err == nil && d.Admitted:
				admitted.Add(1)
			case err != nil && i%10 == 0 && strings.Contains(err.Error(), "WRONGTYPE") && !errors.Is(err, store.ErrUnavailable):
				failed.Add(1)
			default:
				t.Errorf("%d: %+v, %v", i, d, err)
			}
		})
		if failed.Load() != n/10 || admitted.Load() != n-n/10 {
			t.Errorf("%d failed and %d were admitted, want %d and %d", failed.Load(), admitted.Load(), n/10, n-n/10)
		}
		for i := range n {
			want := int64(4)
			if i%10 == 0 {
				want = 5 // it was not decided
			}
			if got := inspect(t, s, check(b, fmt.Sprint(i)))[0].Level; got != want {
				t.Errorf("%d has %d left, want %d", i, got, want)
			}
		}
	})
}
