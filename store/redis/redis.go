// Package redis is the store that weir's replicas share: every decision is one
// script call, and so one event in Redis.
package redis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"weir/limit"
	"weir/store"
)

// go-redis writes each failed dial to stderr by itself, which in an outage is
// each request: weir counts them, and logs when the store goes and comes.
func init() { logging.Disable() }

// Options configure a store.
type Options struct {
	// URL is one of redis://[user:password@]host:port[/db], rediss:// for TLS,
	// unix://[user:password@]/path[?db=N], redis+sentinel://host:port,host:port/primary[/db]
	// and redis+cluster://host:port,host:port (and rediss+…). User, password and
	// database are those of the Redis servers. Required.
	URL string
	// PasswordFile and SentinelPasswordFile, if not empty, hold the password of the
	// Redis servers, and that of the sentinels. They are read for each new
	// connection.
	PasswordFile, SentinelPasswordFile string
	// CAFile, if not empty, has in PEM the authorities whose servers are trusted by
	// rediss://, instead of the system's. It is read for each new connection.
	CAFile string
	// Logger gets what operators should know of the servers. Nil: nobody.
	Logger *slog.Logger
	// Now returns milliseconds since the epoch, for tests; nil means Redis TIME,
	// which is the clock of production.
	Now func() int64
	// ReplyTimeout is how long a connection waits for an answer before it is given
	// up; at least, and by default, a second. Callers wait as their ctx says.
	ReplyTimeout time.Duration
	// Silence is how long a decision waits for a server that answers nobody; 0: as its
	// ctx says. While others are answered it waits for its turn.
	Silence time.Duration
}

// Store decides in Redis: in one server, in the primary that sentinels name, or in a
// cluster, where each domain is on one of the nodes. Use [Open].
type Store struct {
	now     func() int64
	silence time.Duration
	scripts scripts
	routes  *routes
	close   func() error // once
}

var _ store.Store = (*Store)(nil)

// Open returns a store on the Redis at o.URL. It does not connect: Redis may come
// later, and until then calls fail. An error means that the options are wrong; it
// has nothing of the URL or a password in it.
func Open(o Options) (*Store, error) {
	c, err := newConnector(o)
	if err != nil {
		return nil, fmt.Errorf("redis: %w", err)
	}
	return open(c, o), nil
}

func open(c *connector, o Options) *Store {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Store{now: o.Now, silence: o.Silence, scripts: current}
	s.routes = newRoutes(c, o.Logger, s.clock)
	s.close = sync.OnceValue(s.routes.close)
	return s
}

// Decide implements [store.Store].
func (s *Store) Decide(ctx context.Context, r limit.Request) (limit.Decision, error) {
	if err := store.CheckRequest(r); err != nil {
		return limit.Decision{}, fmt.Errorf("redis: decide: %w", err)
	}
	c := newCall(s.scripts.decide)
	c.silence = s.silence
	token := ""
	if r.Lease != "" {
		token = r.Lease.Token()
		c.undo = func(reply any, err error) { s.undo(r.Lease, reply, err) }
	}
	stream := ""
	if r.Stream != "" {
		stream = "1"
	}
	c.args = append(make([]any, 0, 3+7*len(r.Checks)), s.clock(), token, stream)
	c.keys = make([]string, 0, len(r.Checks)+3)
	var seen map[string]int // only for requests that are not small
	if len(r.Checks) > 8 {
		seen = make(map[string]int, len(r.Checks))
	}
	for _, check := range r.Checks {
		key := c.key(check.Key, seen)
		mode := ""
		switch {
		case check.Shadow:
			mode = "s"
		case check.Quota != 0:
			mode = strconv.Itoa(check.Quota)
		}
		switch l := check.Limit.(type) {
		case limit.TokenBucket:
			hits := min(check.Hits, l.Capacity+1) // more is no different, and stays exact
			c.args = append(c.args, "b", key, hits, mode, l.Capacity, l.Scale, l.Refill)
		case limit.Window:
			over := "0"
			if l.ChargeOver {
				over = "1"
			}
			c.args = append(c.args, "w", key, check.Hits, mode, l.Max, l.Length().Milliseconds(), over)
		case limit.Concurrency:
			c.args = append(c.args, "c", key, check.Hits, mode, l.Max, l.Lease.Milliseconds(), strconv.FormatInt(l.Linger.Milliseconds(), 10)+" "+check.Name)
		}
	}
	if r.Lease != "" {
		c.keys = append(c.keys, limit.LeaseKey(r.Lease), limit.LeasesKey(r.Domain))
	}
	if r.Stream != "" {
		c.keys = append(c.keys, limit.StreamKey(r.Domain, r.Stream))
	}
	reply, err := s.do(ctx, c)
	if err != nil {
		return limit.Decision{}, fmt.Errorf("redis: decide: %w", err)
	}
	return decision(r, reply)
}

// decision reads decide.lua's reply.
func decision(r limit.Request, reply any) (limit.Decision, error) {
	n, err := integers(reply)
	if err != nil {
		return limit.Decision{}, fmt.Errorf("redis: decide: unexpected reply: %w", err)
	}
	if want := 3 + 4*len(r.Checks); len(n) != want {
		return limit.Decision{}, fmt.Errorf("redis: decide: a reply of %d items, want %d", len(n), want)
	}
	d := limit.Decision{Admitted: n[0] == 1, StreamEnded: n[0] == 2, Expired: n[1], TTL: limit.Millis(n[2]), Results: make([]limit.Result, len(r.Checks))}
	if d.TTL > 0 {
		d.Lease = r.Lease
	}
	for i := range d.Results {
		p := n[3+4*i:]
		d.Results[i] = limit.Result{Passed: p[0] == 1, Remaining: p[1], RetryAfter: limit.Millis(p[2]), ResetAfter: limit.Millis(p[3])}
	}
	return d, nil
}

// undo has the lease of a decision that was not told given back, unless it is
// known that none was granted. If no node is known for it by now it ends by its expiry.
func (s *Store) undo(id limit.LeaseID, reply any, err error) {
	if n, bad := integers(reply); err == nil && bad == nil && len(n) > 2 && n[2] == 0 {
		return
	}
	if n := s.routes.node(limit.LeaseKey(id)); n != nil {
		n.undo(id)
	}
}

// Release implements [store.Store].
func (s *Store) Release(ctx context.Context, e limit.Ending) (limit.Release, error) {
	reply, err := s.do(ctx, s.releaseCall(e))
	if err != nil {
		return limit.Release{}, fmt.Errorf("redis: release: %w", err)
	}
	items, _ := reply.([]any)
	if len(items) == 0 {
		return limit.Release{}, fmt.Errorf("redis: release: the reply is a %T, and not an array with a result", reply)
	}
	result, _ := items[0].(int64)
	r := limit.Release{Result: limit.ReleaseResult(result)}
	if len(items) > 1 {
		held, _ := items[1].(int64)
		r.HeldFor = limit.Millis(held)
		for pair := range slices.Chunk(items[2:], 2) {
			key, _ := pair[0].(string)
			name, _ := pair[len(pair)-1].(string)
			r.Freed = append(r.Freed, limit.Freed{Key: key, Limit: name})
		}
	}
	return r, nil
}

func (s *Store) releaseCall(e limit.Ending) *call {
	early := ""
	if e.Early {
		early = "1"
	}
	if e.Lease != "" {
		c := leaseCall(s.scripts.release, e.Lease, s.clock())
		c.args = append(c.args, "", early)
		return c
	}
	tombstone := ""
	if e.Tombstone {
		tombstone = "1"
	}
	c := newCall(s.scripts.release)
	c.keys = []string{limit.StreamKey(e.Domain, e.Stream), limit.LeasesKey(e.Domain)}
	c.args = []any{s.clock(), "", tombstone, early, limit.LeasePrefix(e.Domain)}
	return c
}

// Charge implements [store.Store].
func (s *Store) Charge(ctx context.Context, u limit.Usage) ([]bool, error) {
	if err := store.CheckUsage(u); err != nil {
		return nil, fmt.Errorf("redis: charge: %w", err)
	}
	c := newCall(s.scripts.charge)
	c.args = []any{s.clock()}
	seen := make(map[string]int, len(u.Checks))
	for _, check := range u.Checks {
		key := c.key(check.Key, seen)
		switch l := check.Limit.(type) {
		case limit.TokenBucket:
			c.args = append(c.args, "b", key, check.Hits, l.Capacity, l.Scale, l.Refill)
		case limit.Window:
			c.args = append(c.args, "w", key, check.Hits, l.Length().Milliseconds(), "0", "0")
		case limit.Concurrency: // CheckUsage refuses it
		}
	}
	c.keys = append(c.keys, limit.UsageKey(u.Domain, u.Stream))
	reply, err := s.do(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("redis: charge: %w", err)
	}
	n, err := integers(reply)
	if err != nil || len(n) != len(u.Checks) {
		return nil, fmt.Errorf("redis: charge: unexpected reply %v", reply)
	}
	charged := make([]bool, len(n))
	for i := range n {
		charged[i] = n[i] == 1
	}
	return charged, nil
}

// Renew implements [store.Store].
func (s *Store) Renew(ctx context.Context, e limit.Extension) (limit.Renewal, error) {
	c := leaseCall(s.scripts.renew, e.Lease, s.clock())
	if e.OfStream {
		c.args = append(c.args, "1")
	}
	reply, err := s.do(ctx, c)
	if err != nil {
		return limit.Renewal{}, fmt.Errorf("redis: renew: %w", err)
	}
	life, _ := reply.(int64)
	return limit.Renewal{Renewed: life > 0, TTL: limit.Millis(life)}, nil
}

func leaseCall(script *script, id limit.LeaseID, now string) *call {
	c := newCall(script)
	c.keys = []string{limit.LeaseKey(id), limit.LeasesKey(id.Domain())}
	c.args = []any{now, id.Token()}
	return c
}

// Held implements [store.Store].
func (s *Store) Held(ctx context.Context, domain string) (int64, error) {
	key := limit.LeasesKey(domain)
	for try := 0; ; try++ {
		count, err := s.count(ctx, key)
		if err == nil {
			return count, nil
		}
		if !s.again(ctx, err, try) {
			return 0, fmt.Errorf("redis: held: %w", classify(err))
		}
	}
}

// count counts the leases in the index at key.
func (s *Store) count(ctx context.Context, key string) (int64, error) {
	n := s.routes.node(key)
	if n == nil {
		return 0, s.routes.missing()
	}
	now := s.clock()
	if now == "" {
		t, err := n.client.Time(ctx).Result()
		if err != nil {
			return 0, err
		}
		now = strconv.FormatInt(t.UnixMilli(), 10)
	}
	count, err := n.client.ZCount(ctx, key, "("+now, "+inf").Result()
	s.routes.moved(key, n, err)
	return count, err
}

// Ping implements [store.Store]. A cluster can be reached if any of its nodes can:
// the others' domains are decided, and each call that fails says so.
func (s *Store) Ping(ctx context.Context) error {
	for try := 0; ; try++ {
		err := s.routes.ping(ctx)
		if err == nil {
			return nil
		}
		if !s.again(ctx, err, try) {
			return fmt.Errorf("redis: %w", classify(err))
		}
	}
}

// Close implements [store.Store]. It waits a second or two for calls that are under
// way; those that wait to be sent fail.
func (s *Store) Close() error { return s.close() }

// clock is the scripts' now: "" makes them ask Redis.
func (s *Store) clock() string {
	if s.now == nil {
		return ""
	}
	return strconv.FormatInt(s.now(), 10)
}

// classify wraps what is wrong with the store, and not with the call, in
// [store.ErrUnavailable].
func classify(err error) error {
	if err == nil || errors.Is(err, store.ErrUnavailable) {
		return err
	}
	var reply goredis.Error
	if errors.As(err, &reply) {
		switch {
		case unsent(err), halfRun(err), notServing(err), hasPrefix(err, "TRYAGAIN", "ASK ", "NOREPLICAS", "MISCONF", "OOM", "BUSY ", "NOAUTH", "WRONGPASS"):
			return fmt.Errorf("%w: %w: %w", store.ErrUnavailable, store.ErrNotServing, err)
		case hasPrefix(err, "MOVED "):
			return fmt.Errorf("%w: %w: a node of a cluster needs a redis+cluster:// address: %w", store.ErrUnavailable, store.ErrNotServing, err)
		}
		// A bug or misuse: WRONGTYPE, CROSSSLOT, a script's error. Some quote the
		// command's arguments, which are values of requests.
		text, _, _ := strings.Cut(err.Error(), ", with args beginning")
		return errors.New(text)
	}
	return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
}

func integers(reply any) ([]int64, error) {
	items, ok := reply.([]any)
	if !ok {
		return nil, errors.New("not an array")
	}
	n := make([]int64, len(items))
	for i, item := range items {
		if n[i], ok = item.(int64); !ok {
			return nil, errors.New("not integers")
		}
	}
	return n, nil
}
