package redis

import (
	"cmp"
	"context"
	"crypto/sha1" // Redis names scripts by it
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"weir/store"
)

const (
	// connections is how many carry script calls, and maxBatch how many calls one
	// round trip takes. A round trip costs Redis more than a script: while one is out, others
	// wait to share the next, unless enough wait already, or it is late.
	connections = 4
	maxBatch    = 32
	enough      = maxBatch / 2
	late        = time.Millisecond
	// maxWaiting is how many calls may wait for a connection.
	maxWaiting = 1 << 14
	// minReplyTimeout is how long a connection waits for Redis, at least, before it
	// is given up: longer than callers wait, so that a late answer is still seen.
	minReplyTimeout = time.Second
)

// pipes sends script calls to one server in batches that form by themselves: a lone
// call goes at once, and those that come while a batch is out share the next round trip.
type pipes struct {
	client  *goredis.Client
	health  health
	timeout time.Duration // of a round trip
	start   time.Time
	heard   atomic.Int64   // when the server last answered something, since start
	now     func() string  // the scripts' clock
	sharded bool           // it is a node of a cluster
	work    sync.WaitGroup // the workers

	mu      sync.Mutex
	waiting []*call // no connection has been free for them yet; behind head
	head    int     // how many of them have been taken
	left    int     // callers who left since the last look through those that wait, at most
	out     int     // batches that are out
	overdue bool    // somebody has waited for one for too long
	armed   bool    // alarm will say so
	alarm   *time.Timer
	closed  bool      // no more are let in
	some    sync.Cond // one waits, or closed
}

// script is a Lua script and its SHA-1, by which EVALSHA calls it.
type script struct{ source, sha []byte }

func newScript(source string) *script {
	return &script{source: []byte(source), sha: fmt.Appendf(nil, "%x", sha1.Sum([]byte(source)))}
}

// call is what a script is asked to do once: an item of a script call, as each in
// common.lua says.
type call struct {
	script *script
	keys   []string
	args   packer          // as the script says
	ctx    context.Context // of the caller, to pass over calls that nobody waits for
	// silence, if not 0, is how long the caller waits for a server that answers nobody.
	silence time.Duration
	asking  bool // the server is told that it is asked although it does not own the slot yet
	alone   bool // it shares no script call: others' keys may be elsewhere by now

	reply unpacker
	err   error
	sent  bool          // it may have been sent, and so may have run
	ready chan struct{} // closed when there is a reply or an error

	// settled is swapped once, by the caller that leaves or by the worker
	// that answers, whoever is first.
	settled atomic.Bool
	// undo, if not nil, has what the call may have done taken back: it is called
	// with the answer if the caller has left, or if it is not known whether the
	// call ran. It must not wait.
	undo func(reply unpacker, err error)
}

func newCall(script *script, keys ...string) *call {
	return &call{script: script, keys: keys, ready: make(chan struct{})}
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

// again makes a call ready to be sent once more: it has not run.
func (c *call) again() {
	c.ready = make(chan struct{})
	c.settled.Store(false)
}

func newPipes(client *goredis.Client, timeout, patience time.Duration, sharded bool, now func() string) *pipes {
	p := idlePipes()
	p.client, p.timeout, p.sharded, p.now = client, timeout, sharded, now
	p.health.patience = patience
	for range connections {
		p.work.Go(p.worker)
	}
	return p
}

// idlePipes have no workers.
func idlePipes() *pipes {
	p := &pipes{start: time.Now()}
	p.some.L = &p.mu
	p.alarm = time.AfterFunc(time.Hour, p.isLate)
	p.alarm.Stop()
	return p
}

// errClosed says that a call came too late for these pipes, and was not sent.
var errClosed = errors.New("closed")

// do sends c and waits for its answer, until ctx ends or the server has been silent for
// too long. An error that is not [store.ErrUnavailable] is the server's, or says that c
// was not sent.
func (p *pipes) do(ctx context.Context, c *call) (unpacker, error) {
	c.ctx = ctx
	if err := p.queue(c); err != nil {
		return unpacker{}, err
	}
	quiet := p.listen(c.silence)
	defer quiet.stop()
	for {
		var why error
		select {
		case <-c.ready:
			return c.reply, c.err
		case <-ctx.Done():
			why = ctx.Err()
		case <-quiet.check:
			if !quiet.tooLong() {
				continue
			}
			why = errSilent
		}
		if c.settled.CompareAndSwap(false, true) {
			p.mu.Lock()
			p.left++
			p.mu.Unlock()
			return unpacker{}, fmt.Errorf("%w: no answer yet: %w", store.ErrUnavailable, why)
		}
		<-c.ready // the answer came at the same moment
		return c.reply, c.err
	}
}

// queue has a worker send c, if there is room.
func (p *pipes) queue(c *call) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return unsentError{errClosed}
	}
	if p.wait() >= maxWaiting && p.left >= maxWaiting/2 { // else the looks would take all the time there is
		p.waiting = slices.DeleteFunc(p.waiting[p.head:], func(c *call) bool { return c.settled.Load() })
		p.head, p.left = 0, 0
	}
	if p.wait() >= maxWaiting {
		return fmt.Errorf("%w: %d calls wait already", store.ErrUnavailable, maxWaiting)
	}
	p.waiting = append(p.waiting, c)
	p.next()
	return nil
}

// take returns calls that wait, in the place of others, as many as one round trip takes. It
// waits for one, or if others are out for enough, and returns none when the pipes are closed.
func (p *pipes) take(batch []*call) []*call {
	p.mu.Lock()
	defer p.mu.Unlock()
	for ready := false; !ready && !p.closed; ready = p.may() {
		for !p.closed && !p.may() {
			p.some.Wait()
		}
		p.mu.Unlock()
		runtime.Gosched() // who is ready to ask does so first, and shares the round trip
		p.mu.Lock()
	}
	if p.closed {
		return nil
	}
	p.out++
	p.overdue, p.armed = false, false
	taken := p.waiting[p.head:min(p.head+maxBatch, len(p.waiting))]
	batch = append(batch[:0], taken...)
	clear(taken)
	if p.head += len(taken); p.head == len(p.waiting) || p.head >= maxWaiting { // seldom, since it moves the rest
		p.waiting = slices.Delete(p.waiting, 0, p.head)
		p.head = 0
	}
	p.next()
	return batch
}

// may reports whether a batch may be sent now. Its lock must be held.
func (p *pipes) may() bool {
	return p.wait() > 0 && (p.out == 0 || p.wait() >= enough || p.overdue)
}

// back says that a batch is not out any more.
func (p *pipes) back() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out--
	p.next()
}

// next has a batch sent, if it is time, or sees to it that it will be. Its lock must be held.
func (p *pipes) next() {
	switch {
	case p.may():
		p.some.Signal()
	case p.wait() > 0 && !p.armed:
		p.armed = true
		p.alarm.Reset(late)
	}
}

// isLate has those sent that have waited for a batch to come back.
func (p *pipes) isLate() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.overdue, p.armed = p.wait() > 0, false
	p.next()
}

// wait is how many calls wait. Its lock must be held.
func (p *pipes) wait() int { return len(p.waiting) - p.head }

// waits is wait for who does not hold the lock.
func (p *pipes) waits() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.wait()
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
		if batch = p.take(batch); len(batch) == 0 {
			return
		}
		p.send(batch, p.timeout)
		p.back()
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
		if c.err != nil && goredis.HasErrorPrefix(c.err, "NOSCRIPT") {
			unknown = append(unknown, c)
		}
	}
	if len(unknown) > 0 {
		p.round(ctx, unknown, true)
	}
	for i, c := range batch {
		batch[i] = nil
		reply, err := c.reply, c.err
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
	var all []*scriptCall
	for _, c := range calls {
		c.sent = false
		if err := c.ctx.Err(); (err != nil || c.settled.Load()) && !source { // nobody waits: it is never sent
			c.fail(cmp.Or(err, errSilent))
			continue
		}
		if len(all) == 0 {
			if err := p.reachable(); err != nil {
				for _, c := range calls {
					c.sent = false
					c.fail(err)
				}
				return
			}
		}
		i := slices.IndexFunc(all, func(s *scriptCall) bool { return s.takes(c, p.sharded) })
		if i < 0 {
			i, all = len(all), append(all, &scriptCall{source: source})
		}
		all[i].add(c)
	}
	if len(all) == 0 {
		return
	}
	now := p.now()
	pipe := p.client.Pipeline()
	for _, s := range all {
		if s.calls[0].asking {
			_ = pipe.Process(ctx, goredis.NewCmd(ctx, "asking")) // it only queues, as the next does
		}
		_ = pipe.Process(ctx, s.command(ctx, now))
	}
	// Every command has its own error, also when the connection is lost; but not if
	// the server has not let us in: then go-redis leaves them without any.
	_, failed := pipe.Exec(ctx)
	served, refused, sent := false, false, false
	for _, s := range all {
		if !s.calls[0].sent {
			for _, c := range s.calls {
				c.fail(cmp.Or(s.cmd.Err(), failed))
			}
			continue
		}
		s.answer()
		for _, c := range s.calls {
			sent = true
			refused = refused || notServing(c.err)
			served = served || !c.mayHaveRun(c.err) && !notServing(c.err)
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
func (c *call) fail(err error) { c.reply, c.err = unpacker{}, unsentError{err} }

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
	p.mu.Lock()
	p.closed = true
	for _, c := range p.waiting[p.head:] {
		if c.settled.CompareAndSwap(false, true) {
			c.fail(errClosed)
			close(c.ready)
		}
	}
	p.waiting, p.head = nil, 0
	p.alarm.Stop()
	p.some.Broadcast()
	p.mu.Unlock()
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
