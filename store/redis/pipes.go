package redis

import (
	"context"
	"crypto/sha1" // Redis names scripts by it
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"weir/store"
)

const (
	// connections is how many carry script calls, and maxBatch how many calls one
	// round trip takes. A round trip costs Redis more than a script.
	connections = 4
	maxBatch    = 32
	// minReplyTimeout is how long a connection waits for Redis, at least, before it
	// is given up: longer than callers wait, so that a late answer is still seen.
	minReplyTimeout = time.Second
)

// pipes sends script calls in batches that form by themselves: a lone call goes
// at once, and those that come while all connections are out share the next round
// trip. No timer waits for anybody.
type pipes struct {
	client  *goredis.Client
	timeout time.Duration // of a round trip
	calls   chan *call
	done    chan struct{}
	work    sync.WaitGroup // the workers
}

// script is a Lua script and its SHA-1, by which EVALSHA calls it.
type script struct{ source, sha string }

func newScript(source string) *script {
	return &script{source: source, sha: fmt.Sprintf("%x", sha1.Sum([]byte(source)))}
}

// call is one script call.
type call struct {
	script *script
	keys   []string
	args   []any
	ctx    context.Context // of the caller, to pass over calls that nobody waits for

	cmd   *goredis.Cmd
	ready chan struct{} // closed when cmd has its answer

	// settled is swapped once, by the caller that leaves or by the worker
	// that answers, whoever is first.
	settled atomic.Bool
	// undo, if not nil, has what the call may have done taken back: it is called
	// with the answer if the caller has left, or if it is not known whether the
	// call ran. It must not wait.
	undo func(reply any, err error)
}

func newCall(script *script) *call {
	return &call{script: script, ready: make(chan struct{})}
}

// key returns the 1-based index of key in c.keys, where it is added if it is new.
func (c *call) key(key string, seen map[string]int) int {
	if seen != nil {
		if i, ok := seen[key]; ok {
			return i
		}
		seen[key] = len(c.keys) + 1
	} else {
		for i, k := range c.keys {
			if k == key {
				return i + 1
			}
		}
	}
	c.keys = append(c.keys, key)
	return len(c.keys)
}

func newPipes(client *goredis.Client, timeout time.Duration) *pipes {
	p := &pipes{client: client, timeout: timeout, calls: make(chan *call), done: make(chan struct{})}
	for range connections {
		p.work.Go(p.worker)
	}
	return p
}

// do sends c and waits for its answer, or until ctx ends.
func (p *pipes) do(ctx context.Context, c *call) (any, error) {
	c.ctx = ctx
	select {
	case p.calls <- c:
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: no connection was free: %w", store.ErrUnavailable, ctx.Err())
	case <-p.done:
		return nil, fmt.Errorf("%w: closed", store.ErrUnavailable)
	}
	select {
	case <-c.ready:
	case <-ctx.Done():
		if c.settled.CompareAndSwap(false, true) {
			return nil, fmt.Errorf("%w: no answer yet: %w", store.ErrUnavailable, ctx.Err())
		}
		<-c.ready // the answer came at the same moment
	}
	reply, err := c.cmd.Result()
	return reply, classify(err)
}

// worker takes what has gathered, sends it, and answers, until close. Each has a
// connection.
func (p *pipes) worker() {
	batch := make([]*call, 0, maxBatch)
	for {
		select {
		case c := <-p.calls:
			batch = append(batch[:0], c)
		case <-p.done:
			return
		}
	gather:
		for len(batch) < maxBatch {
			select {
			case c := <-p.calls:
				batch = append(batch, c)
			default:
				break gather
			}
		}
		p.send(batch, p.timeout)
	}
}

// send runs a batch in one round trip, and in a second one those whose script
// Redis does not know, within the given time.
func (p *pipes) send(batch []*call, within time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	p.round(ctx, batch, false)
	unknown := batch[:0:0]
	for _, c := range batch {
		if goredis.HasErrorPrefix(c.cmd.Err(), "NOSCRIPT") {
			unknown = append(unknown, c)
		}
	}
	if len(unknown) > 0 {
		p.round(ctx, unknown, true)
	}
	for i, c := range batch {
		batch[i] = nil
		close(c.ready)
		left := !c.settled.CompareAndSwap(false, true)
		if reply, err := c.cmd.Result(); c.undo != nil && (left || mayHaveRun(err)) {
			c.undo(reply, err)
		}
	}
}

// mayHaveRun reports whether a call that failed may have taken effect: it was
// sent, and Redis did not answer.
func mayHaveRun(err error) bool {
	var reply goredis.Error
	if err == nil || errors.As(err, &reply) {
		return false
	}
	var dial *net.OpError
	return !errors.As(err, &dial) || dial.Op != "dial"
}

// round sends calls, by their source or by its digest, and reads the answers.
func (p *pipes) round(ctx context.Context, calls []*call, source bool) {
	pipe := p.client.Pipeline()
	for _, c := range calls {
		if err := c.ctx.Err(); err != nil && !source { // nobody waits: it is never sent
			c.cmd, c.undo = goredis.NewCmd(ctx), nil
			c.cmd.SetErr(err)
			continue
		}
		command, script := "evalsha", c.script.sha
		if source {
			command, script = "eval", c.script.source
		}
		args := make([]any, 0, 3+len(c.keys)+len(c.args))
		args = append(args, command, script, len(c.keys))
		for _, k := range c.keys {
			args = append(args, k)
		}
		c.cmd = goredis.NewCmd(ctx, append(args, c.args...)...)
		_ = pipe.Process(ctx, c.cmd) // it only queues
	}
	// Every command has its own error, also when the connection is lost.
	_, _ = pipe.Exec(ctx)
}

// close lets no call in any more, and waits for those under way, at most for the
// given time; it reports whether all have ended. It is called once.
func (p *pipes) close(within time.Duration) (ended bool) {
	close(p.done)
	all := make(chan struct{})
	go func() {
		p.work.Wait()
		close(all)
	}()
	select {
	case <-all:
		return true
	case <-time.After(within):
		return false
	}
}
