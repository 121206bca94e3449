package redis_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"weir/limit"
	"weir/store"
	"weir/store/redis"
	"weir/store/storetest"
)

// All of it on one cluster of three nodes of every version there is, since one takes
// two seconds to start.
func TestAClusterIsFollowedAsItChanges(t *testing.T) {
	t.Parallel()
	for name, bin := range storetest.RedisBinaries(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := storetest.StartCluster(t, bin, 3)
			t.Run("a slot that moves", func(t *testing.T) { slotMoves(t, c) })
			t.Run("a slot that moves under load", func(t *testing.T) { slotMovesUnderLoad(t, c) })
			t.Run("a node that dies", func(t *testing.T) { nodeDies(t, c) })
			t.Run("a cluster that comes later", func(t *testing.T) { clusterComesLater(t, c) })
		})
	}
}

// domainsOf returns, for each node, some domains whose keys it has.
func domainsOf(t testing.TB, c *storetest.Cluster, each int) [][]string {
	t.Helper()
	domains := make([][]string, len(c.Nodes))
	for n, full := 0, 0; full < len(c.Nodes); n++ {
		domain := fmt.Sprintf("d%d", n)
		var slot int
		if _, err := fmt.Sscan(c.Nodes[0].MustDo(t, "CLUSTER", "KEYSLOT", limit.LeasesKey(domain)), &slot); err != nil {
			t.Fatal(err)
		}
		owner := slot * len(c.Nodes) / 16384
		if len(domains[owner]) < each {
			if domains[owner] = append(domains[owner], domain); len(domains[owner]) == each {
				full++
			}
		}
	}
	return domains
}

func slotOf(t testing.TB, n *storetest.Redis, domain string) string {
	t.Helper()
	return n.MustDo(t, "CLUSTER", "KEYSLOT", limit.LeasesKey(domain))
}

func evals(t testing.TB, n *storetest.Redis) (calls int) {
	t.Helper()
	text := ""
	storetest.Eventually(t, "INFO", func() bool { // a failover cuts connections
		var err error
		text, err = n.Do("INFO", "commandstats")
		return err == nil
	})
	for line := range strings.Lines(text) {
		if _, rest, ok := strings.Cut(line, "cmdstat_evalsha:calls="); ok {
			if _, err := fmt.Sscanf(rest, "%d", &calls); err != nil {
				t.Fatal(err)
			}
		}
	}
	return calls
}

// A slot is moved with its keys while its domain is asked: each answer is right, and
// nothing is charged twice.
func slotMoves(t *testing.T, c *storetest.Cluster) {
	t.Helper()
	s := openWith(t, redis.Options{URL: c.URL})
	domain := domainsOf(t, c, 1)[0][0]
	from, to := c.Nodes[0], c.Nodes[1]
	slot := slotOf(t, from, domain)
	const capacity = 1000
	b, l := bucket(t, capacity, 24*time.Hour), lane(t, 100, time.Hour)
	left := int64(capacity)
	ask := func(value string) limit.Decision {
		t.Helper()
		r := limit.Request{Domain: domain, Checks: []limit.Check{{Name: "k", Limit: b, Hits: 1, Key: limit.Key(domain, b, []limit.Entry{{Key: "k", Value: value}})}}}
		return decide(t, s, r)
	}
	askOld := func(when string) {
		t.Helper()
		left--
		if d := ask("old"); !d.Admitted || d.Results[0].Remaining != left {
			t.Errorf("%s: %+v, want %d left", when, d, left)
		}
	}
	two := oneOf(t, domain, b, l)
	decide(t, s, two)
	askOld("before")

	to.MustDo(t, "CLUSTER", "SETSLOT", slot, "IMPORTING", from.ID(t))
	from.MustDo(t, "CLUSTER", "SETSLOT", slot, "MIGRATING", to.ID(t))
	askOld("its key is not moved yet")
	for i := range 2 { // ASK: on the node that the slot moves to
		if d := ask("new"); d.Results[0].Remaining != capacity-1-int64(i) {
			t.Errorf("a new key: %+v, want %d left", d, capacity-1-i)
		}
	}
	// Of several keys all must be there: else nothing runs, and nothing is charged.
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	fresh := oneOf(t, domain, bucket(t, 7, time.Hour), lane(t, 7, time.Hour))
	if _, err := s.Decide(ctx, fresh); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("new keys in a slot that moves: %v, want ErrUnavailable", err)
	}
	cancel()

	// A release does not declare the sets that its record names: if one is there
	// already, it says so.
	host, port, _ := strings.Cut(to.Addr(), ":")
	from.MustDo(t, "MIGRATE", host, port, two.Checks[1].Key, "0", "5000")
	if _, err := s.Release(storetest.Context(t), limit.Ending{Lease: two.Lease}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Release of a lease that is half moved: %v, want ErrUnavailable", err)
	}
	for keys := from.MustDo(t, "CLUSTER", "GETKEYSINSLOT", slot, "100"); keys != ""; keys = from.MustDo(t, "CLUSTER", "GETKEYSINSLOT", slot, "100") {
		from.MustDo(t, append([]string{"MIGRATE", host, port, "", "0", "5000", "KEYS"}, strings.Split(keys, "\n")...)...)
	}
	askOld("its key is moved")
	if released, err := s.Release(storetest.Context(t), limit.Ending{Lease: two.Lease}); err != nil || released.Result != limit.Released {
		t.Errorf("Release of a lease that has moved = %v, %v", released, err)
	}

	for _, n := range []*storetest.Redis{to, from, c.Nodes[2]} {
		n.MustDo(t, "CLUSTER", "SETSLOT", slot, "NODE", to.ID(t))
	}
	askOld("the slot is moved") // MOVED
	before := evals(t, from)
	for range 20 {
		askOld("afterwards")
	}
	if got := evals(t, from) - before; got != 0 {
		t.Errorf("%d calls were sent to the old node, want none", got)
	}
	if d := decide(t, s, oneOf(t, domain, b, l)); d.Results[0].Remaining != capacity-2 || d.Results[1].Remaining != 99 {
		t.Errorf("after all: %+v, want %d tokens and 99 slots", d.Results, capacity-2)
	}
}

// A slot moves to and fro while many ask: of a bucket as many are admitted as it
// holds, less those whose answer was lost.
func slotMovesUnderLoad(t *testing.T, c *storetest.Cluster) {
	t.Helper()
	s := openWith(t, redis.Options{URL: c.URL})
	domain := domainsOf(t, c, 2)[0][1]
	const capacity = 3000
	b := bucket(t, capacity, 24*time.Hour)
	var mu sync.Mutex
	admitted, unknown := int64(0), int64(0)
	ctx, cancel := context.WithCancel(storetest.Context(t))
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(func() {
			for ctx.Err() == nil {
				d, err := s.Decide(storetest.Context(t), oneOf(t, domain, b))
				mu.Lock()
				switch {
				case err != nil && errors.Is(err, store.ErrUnavailable):
					unknown++
				case err != nil:
					t.Error(err)
				case d.Admitted:
					admitted++
				}
				mu.Unlock()
			}
		})
	}
	for i := range 6 {
		from, to := c.Nodes[i%2], c.Nodes[(i+1)%2]
		c.Move(t, domain, from, to)
		mu.Lock()
		sofar := admitted
		mu.Unlock()
		storetest.Eventually(t, "some are admitted", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return admitted >= min(sofar+20, capacity)
		})
	}
	cancel()
	clients.Wait()
	d := decide(t, s, oneOf(t, domain, b))
	if d.Admitted {
		admitted++
	}
	if lost := capacity - d.Results[0].Remaining - admitted; lost < 0 || lost > unknown {
		t.Errorf("%d admitted, %d unknown, %d left of %d: %d lost", admitted, unknown, d.Results[0].Remaining, capacity, lost)
	}
	if unknown > 10 { // whatever the old node says is followed, and no connection is lost
		t.Errorf("%d calls failed, of %d, want hardly any", unknown, admitted+unknown)
	}
	t.Logf("%d admitted, %d unknown", admitted, unknown)
}

// A node that hangs holds up its own domains, and no others; nothing is left of it.
func TestANodeThatHangsHoldsUpNoOther(t *testing.T) {
	c := storetest.StartCluster(t, storetest.AnyRedis(t), 3)
	before := goleak.IgnoreCurrent()
	s, err := redis.Open(redis.Options{URL: c.URL})
	if err != nil {
		t.Fatal(err)
	}
	domains := domainsOf(t, c, 5)
	l := lane(t, 1000, time.Hour)
	ask := func(domain string, within time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		_, err := s.Decide(ctx, oneOf(t, domain, l))
		return err
	}
	for _, list := range domains {
		for _, d := range list {
			if err := ask(d, storetest.Deadline); err != nil {
				t.Fatal(err)
			}
		}
	}
	stopped := c.Nodes[0].PID()
	if err := syscall.Kill(stopped, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(stopped, syscall.SIGCONT) }()
	var group sync.WaitGroup
	var slowest time.Duration
	var mu sync.Mutex
	for i := range 200 {
		group.Go(func() { _ = ask(domains[0][i%5], 20*time.Millisecond) }) // in vain
		group.Go(func() {
			begin := time.Now()
			if err := ask(domains[1+i%2][i%5], storetest.Deadline); err != nil {
				t.Errorf("a domain of another node: %v", err)
			}
			mu.Lock()
			slowest = max(slowest, time.Since(begin))
			mu.Unlock()
		})
	}
	group.Wait()
	if slowest >= redis.MinReplyTimeout { // so long a connection waits for the node that hangs
		t.Errorf("the slowest of 200 took %v, want less than %v", slowest, redis.MinReplyTimeout)
	}
	t.Logf("the slowest of 200 took %v", slowest)
	if err := s.Ping(storetest.Context(t)); err != nil {
		t.Errorf("Ping: %v, want an answer of the others", err)
	}
	if err := syscall.Kill(stopped, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for _, d := range domains[0] {
		storetest.Eventually(t, "what was granted to nobody is given back", func() bool {
			n, err := s.Held(storetest.Context(t), d)
			return err == nil && n == 1
		})
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := goleak.Find(before); err != nil {
		t.Error(err)
	}
}

// A node that dies takes its own domains with it, at once, until it is back.
func nodeDies(t *testing.T, c *storetest.Cluster) {
	t.Helper()
	s := openWith(t, redis.Options{URL: c.URL})
	domains := domainsOf(t, c, 1)
	b := bucket(t, 1000, time.Second)
	for _, list := range domains {
		decide(t, s, oneOf(t, list[0], b))
	}
	c.Nodes[2].Kill()
	for range 200 {
		for _, list := range domains[:2] {
			decide(t, s, oneOf(t, list[0], b))
		}
		if _, err := s.Decide(storetest.Context(t), oneOf(t, domains[2][0], b)); !errors.Is(err, store.ErrUnavailable) {
			t.Fatalf("a domain of the dead node: %v, want ErrUnavailable", err)
		}
	}
	c.Nodes[2].Start(t)
	storetest.Eventually(t, "the node is found again", func() bool {
		_, err := s.Decide(storetest.Context(t), oneOf(t, domains[2][0], b))
		return err == nil
	})
	for _, n := range c.Nodes {
		n.Kill()
	}
	if err := s.Ping(storetest.Context(t)); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Ping without any node: %v, want ErrUnavailable", err)
	}
}

// A cluster may come later than weir.
func clusterComesLater(t *testing.T, c *storetest.Cluster) {
	t.Helper()
	for _, n := range c.Nodes {
		n.Kill()
	}
	s := openWith(t, redis.Options{URL: c.URL})
	r := oneOf(t, "d", bucket(t, 1000, time.Second))
	for range 100 { // each fails at once, not at its deadline
		if _, err := s.Decide(storetest.Context(t), r); !errors.Is(err, store.ErrUnavailable) {
			t.Fatalf("Decide without a cluster: %v, want ErrUnavailable", err)
		}
	}
	for _, n := range c.Nodes {
		n.Start(t)
	}
	storetest.Eventually(t, "the cluster is found", func() bool {
		_, err := s.Decide(storetest.Context(t), r)
		return err == nil
	})
}
