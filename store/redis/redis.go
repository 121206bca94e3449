// Package redis is the store that weir's replicas share: every decision is one
// script call, and so one event in Redis.
package redis

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"

	"weir/limit"
	"weir/store"
)

var (
	//go:embed decide.lua
	decideSource string
	//go:embed release.lua
	releaseSource string
	//go:embed renew.lua
	renewSource string
)

// go-redis writes each failed dial to stderr by itself, which in an outage is
// each request: weir counts them, and logs when the store goes and comes.
func init() { logging.Disable() }

// Options configure a store.
type Options struct {
	// URL is redis://[user:password@]host:port[/db], or unix:// and the path of a
	// socket. Required.
	URL string
	// Now returns milliseconds since the epoch, for tests; nil means Redis TIME,
	// which is the clock of production.
	Now func() int64
	// ReplyTimeout is how long a connection waits for an answer before it is given
	// up; at least, and by default, a second. Callers wait as their ctx says.
	ReplyTimeout time.Duration
}

const (
	maxGiveBacks  = 1 << 14     // leases that wait to be given back
	giveBackBatch = 256         // of them in one round trip
	giveBackEvery = time.Second // while Redis is away
)

// Store decides in one Redis. Use [Open].
type Store struct {
	client  *goredis.Client
	now     func() int64
	scripts scripts
	pipes   *pipes

	// giveBacks are leases that may have been granted to nobody. What does not fit
	// ends by its expiry.
	giveBacks chan limit.LeaseID
	stop      context.CancelFunc // ends giving back
	stopped   sync.WaitGroup
	close     func() error // once
}

var _ store.Store = (*Store)(nil)

// Open returns a store on the Redis at o.URL. It does not connect: Redis may come
// later, and until then calls fail. An error means that the URL is wrong, and
// does not contain it, since it may hold a password.
func Open(o Options) (*Store, error) {
	opts, err := parseURL(o.URL)
	if err != nil {
		return nil, fmt.Errorf("redis: %w", err)
	}
	// go-redis resends a command whose reply was lost, and so would charge twice.
	opts.MaxRetries = -1
	opts.DialerRetries = 1
	opts.ContextTimeoutEnabled = true
	timeout := max(o.ReplyTimeout, minReplyTimeout)
	opts.DialTimeout, opts.ReadTimeout, opts.WriteTimeout = minReplyTimeout, timeout, timeout
	opts.PoolSize = connections + 2 // and for what is not batched
	opts.DisableIdentity = true
	opts.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Store{client: goredis.NewClient(opts), now: o.Now, scripts: current, giveBacks: make(chan limit.LeaseID, maxGiveBacks), stop: cancel}
	s.pipes = newPipes(s.client, timeout)
	s.close = sync.OnceValue(s.closeNow)
	s.stopped.Go(func() { s.giveBack(ctx) })
	return s, nil
}

// parseURL reads the address. What a library says of a bad one may quote any part
// of it, and so a password: the errors here have no text of the URL.
func parseURL(text string) (*goredis.Options, error) {
	const form = "redis://[user:password@]host:port[/db] or unix://[user:password@]/path"
	u, err := url.Parse(text)
	if err != nil {
		return nil, errors.New("the URL cannot be read; it is " + form + ", and in user and password : / ? # @ and % are written as %3A %2F %3F %23 %40 and %25")
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			return nil, errors.New("the URL's port is not 1..65535")
		}
	}
	opts, err := goredis.ParseURL(text)
	if err != nil {
		return nil, errors.New("the URL is not " + form)
	}
	return opts, nil
}

// Decide implements [store.Store].
func (s *Store) Decide(ctx context.Context, r limit.Request) (limit.Decision, error) {
	if err := store.CheckRequest(r); err != nil {
		return limit.Decision{}, fmt.Errorf("redis: decide: %w", err)
	}
	c := newCall(s.scripts.decide)
	token := ""
	if r.Lease != "" {
		token = r.Lease.Token()
		c.undo = func(reply any, err error) { s.undo(r.Lease, reply, err) }
	}
	c.args = append(make([]any, 0, 2+7*len(r.Checks)), s.clock(), token)
	c.keys = make([]string, 0, len(r.Checks)+2)
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
			c.args = append(c.args, "c", key, check.Hits, mode, l.Max, l.Lease.Milliseconds(), check.Name)
		}
	}
	if r.Lease != "" {
		c.keys = append(c.keys, limit.LeaseKey(r.Lease), limit.LeasesKey(r.Domain))
	}
	reply, err := s.pipes.do(ctx, c)
	if err != nil {
		return limit.Decision{}, fmt.Errorf("redis: decide: %w", err)
	}
	return decision(r, reply)
}

// decision reads decide.lua's reply.
func decision(r limit.Request, reply any) (limit.Decision, error) {
	n, err := integers(reply)
	if err != nil || len(n) != 3+4*len(r.Checks) {
		return limit.Decision{}, fmt.Errorf("redis: decide: unexpected reply %v", reply)
	}
	d := limit.Decision{Admitted: n[0] == 1, Expired: n[1], TTL: limit.Millis(n[2]), Results: make([]limit.Result, len(r.Checks))}
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
// known that none was granted.
func (s *Store) undo(id limit.LeaseID, reply any, err error) {
	if n, bad := integers(reply); err == nil && bad == nil && len(n) > 2 && n[2] == 0 {
		return
	}
	select {
	case s.giveBacks <- id:
	default:
	}
}

// giveBack releases leases that may have been granted to nobody, until ctx ends.
// While Redis is away it tries again, so that a stall leaves none.
func (s *Store) giveBack(ctx context.Context) {
	for {
		var ids []limit.LeaseID
		select {
		case id := <-s.giveBacks:
			ids = s.waiting(id)
		case <-ctx.Done():
			return
		}
		for ids = s.giveBackAll(ids); len(ids) > 0; ids = s.giveBackAll(ids) {
			select {
			case <-time.After(giveBackEvery):
			case <-ctx.Done():
				for _, id := range ids {
					s.undo(id, nil, ctx.Err()) // for giveBackRest
				}
				return
			}
		}
	}
}

// waiting returns first and others that wait, as many as one round trip takes.
func (s *Store) waiting(first ...limit.LeaseID) []limit.LeaseID {
	ids := first
	for len(ids) < giveBackBatch {
		select {
		case id := <-s.giveBacks:
			ids = append(ids, id)
		default:
			return ids
		}
	}
	return ids
}

// giveBackRest tries all that still wait, until one fails.
func (s *Store) giveBackRest() {
	for ids := s.waiting(); len(ids) > 0; ids = s.waiting() {
		if len(s.giveBackAll(ids)) > 0 {
			return
		}
	}
}

// giveBackAll releases leases, also those whose decision Redis has not seen yet:
// that one will then take nothing. It returns those for which Redis was not there.
// It uses a connection of its own, since the others may be busy with a Redis that
// does not answer, or closed.
func (s *Store) giveBackAll(ids []limit.LeaseID) (failed []limit.LeaseID) {
	batch := make([]*call, len(ids))
	for i, id := range ids {
		batch[i] = s.leaseCall(s.scripts.release, id)
		batch[i].args = append(batch[i].args, "1")
		batch[i].ctx = context.Background()
	}
	s.pipes.send(slices.Clone(batch), minReplyTimeout)
	for i, c := range batch {
		if errors.Is(classify(c.cmd.Err()), store.ErrUnavailable) {
			failed = append(failed, ids[i])
		}
	}
	return failed // an error of the script would come again
}

// Release implements [store.Store].
func (s *Store) Release(ctx context.Context, id limit.LeaseID) (limit.Release, error) {
	reply, err := s.pipes.do(ctx, s.leaseCall(s.scripts.release, id))
	if err != nil {
		return limit.Release{}, fmt.Errorf("redis: release: %w", err)
	}
	items, _ := reply.([]any)
	if len(items) == 0 {
		return limit.Release{}, fmt.Errorf("redis: release: unexpected reply %v", reply)
	}
	result, _ := items[0].(int64)
	r := limit.Release{Result: limit.ReleaseResult(result)}
	if r.Result == limit.Released && len(items) > 1 {
		held, _ := items[1].(int64)
		r.HeldFor = limit.Millis(held)
		for _, name := range items[2:] {
			text, _ := name.(string)
			r.Limits = append(r.Limits, text)
		}
	}
	return r, nil
}

// Renew implements [store.Store].
func (s *Store) Renew(ctx context.Context, id limit.LeaseID) (limit.Renewal, error) {
	reply, err := s.pipes.do(ctx, s.leaseCall(s.scripts.renew, id))
	if err != nil {
		return limit.Renewal{}, fmt.Errorf("redis: renew: %w", err)
	}
	life, _ := reply.(int64)
	return limit.Renewal{Renewed: life > 0, TTL: limit.Millis(life)}, nil
}

func (s *Store) leaseCall(script *script, id limit.LeaseID) *call {
	c := newCall(script)
	c.keys = []string{limit.LeaseKey(id), limit.LeasesKey(id.Domain())}
	c.args = []any{s.clock(), id.Token()}
	return c
}

// Held implements [store.Store].
func (s *Store) Held(ctx context.Context, domain string) (int64, error) {
	now := s.clock()
	if now == "" {
		t, err := s.client.Time(ctx).Result()
		if err != nil {
			return 0, fmt.Errorf("redis: held: %w", classify(err))
		}
		now = strconv.FormatInt(t.UnixMilli(), 10)
	}
	n, err := s.client.ZCount(ctx, limit.LeasesKey(domain), "("+now, "+inf").Result()
	if err != nil {
		return 0, fmt.Errorf("redis: held: %w", classify(err))
	}
	return n, nil
}

// Ping implements [store.Store].
func (s *Store) Ping(ctx context.Context) error {
	if err := s.client.Ping(ctx).Err(); err != nil {
		return fmt.Errorf("redis: %w", classify(err))
	}
	return nil
}

// Close implements [store.Store]. It waits a second or two for calls that are under
// way; those that wait to be sent fail.
func (s *Store) Close() error { return s.close() }

func (s *Store) closeNow() error {
	s.stop()
	s.stopped.Wait()
	ended := s.pipes.close(minReplyTimeout)
	if ended { // what was under way may have left leases to give back
		s.giveBackRest()
	}
	err := s.client.Close() // and so the calls that Redis has not answered in all this time
	s.pipes.work.Wait()
	return err
}

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
	if err == nil {
		return nil
	}
	var reply goredis.Error
	if errors.As(err, &reply) {
		for _, prefix := range []string{"LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "MISCONF", "OOM", "BUSY ", "NOAUTH", "WRONGPASS"} {
			if goredis.HasErrorPrefix(err, prefix) {
				return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
			}
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
