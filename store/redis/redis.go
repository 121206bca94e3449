// Package redis is the store that weir's replicas share: every decision is one
// script call, and so one event in Redis.
package redis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// Release implements [store.Store].
func (s *Store) Release(ctx context.Context, e limit.Ending) (limit.Release, error) {
	return s.release(ctx, s.releaseCall(e))
}

// Undo implements [store.Store].
func (s *Store) Undo(ctx context.Context, r limit.Request) (limit.Release, error) {
	return s.release(ctx, undoCall(s.scripts.release, newGiveBack(r)))
}

func (s *Store) release(ctx context.Context, c *call) (limit.Release, error) {
	reply, err := s.do(ctx, c)
	if err != nil {
		return limit.Release{}, fmt.Errorf("redis: release: %w", err)
	}
	n := reply.array()
	r := limit.Release{Result: limit.ReleaseResult(reply.int())}
	if n > 1 {
		r.HeldFor = limit.Millis(reply.int())
	}
	for i := 2; i < n && reply.err == nil; i += 2 {
		r.Freed = append(r.Freed, limit.Freed{Key: reply.text(), Limit: reply.text()})
	}
	if err := reply.end(); err != nil {
		return limit.Release{}, fmt.Errorf("redis: release: unexpected reply: %w", err)
	}
	return r, nil
}

func (s *Store) releaseCall(e limit.Ending) *call {
	early := ""
	if e.Early {
		early = "e"
	}
	if e.Lease != "" {
		c := leaseCall(s.scripts.release, e.Lease)
		c.args.string("")
		c.args.string(early)
		return c
	}
	tombstone := ""
	if e.Tombstone {
		tombstone = "1"
	}
	c := newCall(s.scripts.release, limit.StreamKey(e.Domain, e.Stream), limit.LeasesKey(e.Domain))
	for _, arg := range []string{"", tombstone, early, limit.LeasePrefix(e.Domain)} {
		c.args.string(arg)
	}
	return c
}

// Renew implements [store.Store].
func (s *Store) Renew(ctx context.Context, e limit.Extension) (limit.Renewal, error) {
	c := leaseCall(s.scripts.renew, e.Lease)
	if e.OfStream {
		c.args.string("1")
	}
	reply, err := s.do(ctx, c)
	if err != nil {
		return limit.Renewal{}, fmt.Errorf("redis: renew: %w", err)
	}
	_, life := reply.array(), reply.int()
	if err := reply.end(); err != nil {
		return limit.Renewal{}, fmt.Errorf("redis: renew: unexpected reply: %w", err)
	}
	return limit.Renewal{Renewed: life > 0, TTL: limit.Millis(life)}, nil
}

// leaseCall returns a call about a lease, with its token for the script.
func leaseCall(script *script, id limit.LeaseID) *call {
	c := newCall(script, limit.LeaseKey(id), limit.LeasesKey(id.Domain()))
	c.args.string(id.Token())
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

// Load is what a store has to do now.
type Load struct {
	Connections, Idle int // to all of its servers, open; and of these without a call
	Waiting           int // calls for which no connection has been free yet
}

// Load tells it, without a call.
func (s *Store) Load() (l Load) {
	for _, n := range s.routes.all() {
		pool := n.client.PoolStats()
		l.Connections += int(pool.TotalConns)
		l.Idle += int(pool.IdleConns)
		l.Waiting += n.pipes.waits()
	}
	return l
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
