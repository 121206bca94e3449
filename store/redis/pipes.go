package redis

import (
	"cmp"
	"context"
	"crypto/sha1" // Redis names scripts by it
	"errors"
	"fmt"
	"os"
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

// pipes sends script calls to one server in batches that form by themselves: a lone
// call goes at once, and those that come while all connections are out share the
// next round trip. No timer waits for anybody.
type pipes struct {
	client  *goredis.Client
	health  health
	timeout time.Duration // of a round trip
	start   time.Time
	heard   atomic.Int64 // when the server last answered something, since start
	calls   chan *call
	done    chan struct{}
	work    sync.WaitGroup // the workers
}

// script is a Lua script and its SHA-1, by which EVALSHA calls it.
type script struct{ source, sha []byte }

func newScript(source string) *script {
	return &script{source: []byte(source), sha: fmt.Appendf(nil, "%x", sha1.Sum([]byte(source)))}
}

// call is one script call.
type call struct {
	script *script
	keys   []string
	args   []any
	ctx    context.Context // of the caller, to pass over calls that nobody waits for
	// silence, if not 0, is how long the caller waits for a server that answers nobody.
	silence time.Duration
	asking  bool // the server is told that it is asked although it does not own the slot yet

	cmd    *goredis.Cmd
	source bool          // it is called by its source, not by its digest
	sent   bool          // it may have been sent, and so may have run
	ready  chan struct{} // closed when cmd has its answer

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

// again makes a call ready to be sent once more: it has not run.
func (c *call) again() {
	c.ready = make(chan struct{})
	c.settled.Store(false)
}

// MarshalBinary returns what names the script. go-redis asks for it when it has a
// connection and writes the call: before that nothing was sent, whatever failed.
func (c *call) MarshalBinary() ([]byte, error) {
	c.sent = true
	if c.source {
		return c.script.source, nil
	}
	return c.script.sha, nil
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

func newPipes(client *goredis.Client, timeout, patience time.Duration) *pipes {
	p := &pipes{client: client, timeout: timeout, start: time.Now(), calls: make(chan *call), done: make(chan struct{})}
	p.health.patience = patience
	for range connections {
		p.work.Go(p.worker)
	}
	return p
}

// errClosed says that a call came too late for these pipes, and was not sent.
var errClosed = errors.New("closed")

// do sends c and waits for its answer, until ctx ends or the server has been silent for
// too long. An error that is not [store.ErrUnavailable] is the server's, or says that c
// was not sent.
func (p *pipes) do(ctx context.Context, c *call) (any, error) {
	c.ctx = ctx
	quiet := p.listen(c.silence)
	defer quiet.stop()
	for sent := false; !sent; {
		select {
		case p.calls <- c:
			sent = true
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: no connection was free: %w", store.ErrUnavailable, ctx.Err())
		case <-p.done:
			return nil, unsentError{errClosed}
		case <-quiet.check:
			if quiet.tooLong() {
				return nil, fmt.Errorf("%w: no connection was free: %w", store.ErrUnavailable, errSilent)
			}
		}
	}
	for {
		var why error
		select {
		case <-c.ready:
			return c.cmd.Result()
		case <-ctx.Done():
			why = ctx.Err()
		case <-quiet.check:
			if !quiet.tooLong() {
				continue
			}
			why = errSilent
		}
		if c.settled.CompareAndSwap(false, true) {
			return nil, fmt.Errorf("%w: no answer yet: %w", store.ErrUnavailable, why)
		}
		<-c.ready // the answer came at the same moment
		return c.cmd.Result()
	}
}

// errSilent says that the server has answered nobody for as long as a call waits.
var errSilent = fmt.Errorf("the server is silent: %w", os.ErrDeadlineExceeded)

// listener tells whether a server has been silent since somebody began to wait for it.
type listener struct {
	pipes   *pipes
	silence time.Duration
	from    time.Duration
	timer   *time.Timer
	check   <-chan time.Time // it is time to look whether it was tooLong
}

// listen returns a listener that is stopped by stop; with no silence it never says a
// thing.
func (p *pipes) listen(silence time.Duration) listener {
	if silence <= 0 {
		return listener{}
	}
	timer := time.NewTimer(silence)
	return listener{p, silence, time.Since(p.start), timer, timer.C}
}

// tooLong reports whether the server has answered nobody for as long as the silence.
func (l listener) tooLong() bool {
	left := max(l.from, time.Duration(l.pipes.heard.Load())) + l.silence - time.Since(l.pipes.start)
	if left > 0 {
		l.timer.Reset(left)
	}
	return left <= 0
}

func (l listener) stop() {
	if l.timer != nil {
		l.timer.Stop()
	}
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
		reply, err := c.cmd.Result()
		undo, unknown := c.undo, c.mayHaveRun(err)
		left := !c.settled.CompareAndSwap(false, true)
		close(c.ready) // from here on it is the caller's, who may send it again
		if undo != nil && (left && err == nil || unknown) {
			undo(reply, err)
		}
	}
}

// mayHaveRun reports whether c, which failed, may have taken effect: it was sent,
// and Redis did not answer, or stopped it in the middle.
func (c *call) mayHaveRun(err error) bool {
	if err == nil || !c.sent {
		return false
	}
	var reply goredis.Error
	return !errors.As(err, &reply) || halfRun(err)
}

// round sends calls, by their source or by its digest, and reads the answers.
func (p *pipes) round(ctx context.Context, calls []*call, source bool) {
	pipe := p.client.Pipeline()
	first := true
	for _, c := range calls {
		c.sent, c.source = false, source
		if err := c.ctx.Err(); (err != nil || c.settled.Load()) && !source { // nobody waits: it is never sent
			c.fail(ctx, cmp.Or(err, errSilent))
			continue
		}
		if first {
			first = false
			if err := p.reachable(); err != nil {
				for _, c := range calls {
					c.sent = false
					c.fail(ctx, err)
				}
				return
			}
		}
		command := "evalsha"
		if source {
			command = "eval"
		}
		args := make([]any, 0, 3+len(c.keys)+len(c.args))
		args = append(args, command, c, len(c.keys))
		for _, k := range c.keys {
			args = append(args, k)
		}
		c.cmd = goredis.NewCmd(ctx, append(args, c.args...)...)
		if c.asking {
			_ = pipe.Process(ctx, goredis.NewCmd(ctx, "asking")) // it only queues, as the next does
		}
		_ = pipe.Process(ctx, c.cmd)
	}
	if first {
		return
	}
	// Every command has its own error, also when the connection is lost; but not if
	// the server has not let us in: then go-redis leaves them without any.
	_, failed := pipe.Exec(ctx)
	served, refused, sent := false, false, false
	for _, c := range calls {
		err := c.cmd.Err()
		switch {
		case c.sent && err == nil:
			sent, served = true, true
		case c.sent:
			sent = true
			refused = refused || notServing(err)
			served = served || !c.mayHaveRun(err) && !notServing(err)
		case unsent(err): // nobody waited
		default:
			c.fail(ctx, cmp.Or(err, failed))
		}
	}
	if served || refused {
		p.heard.Store(int64(time.Since(p.start)))
	}
	switch {
	case served:
		p.health.served()
	case refused:
		p.health.refused()
	case sent:
		p.health.reached()
	default:
		p.health.unreachable(failed)
	}
}

// fail answers a call that was not sent.
func (c *call) fail(ctx context.Context, err error) {
	c.cmd = goredis.NewCmd(ctx)
	c.cmd.SetErr(unsentError{err})
}

// reachable returns nil if a batch may be sent: there is a connection, or it is time
// to dial.
func (p *pipes) reachable() error {
	if !p.health.ill.Load() || p.client.PoolStats().IdleConns > 0 {
		return nil
	}
	return p.health.mayDial()
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
