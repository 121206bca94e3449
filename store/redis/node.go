package redis

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"weir/limit"
	"weir/store"
)

// node is one Redis server that decides: the only one, the primary that sentinels
// name, or one of a cluster's masters.
type node struct {
	host   string
	client *goredis.Client
	pipes  *pipes
	log    *slog.Logger
	idle   atomic.Bool // nothing has named it since the last look at the topology

	// giveBacks are leases that may have been granted to nobody. What does not fit
	// ends by its expiry.
	giveBacks chan giveBack
	connected chan struct{}                // gets something when there is a new connection
	elsewhere func(id limit.LeaseID) *node // the node of a lease now, maybe this one
	stop      context.CancelFunc           // ends tend
	tended    sync.WaitGroup               // tend
	evicts    string                       // what has been said of evictions
	closing   func() error                 // once
}

const (
	maxGiveBacks  = 1 << 14     // leases that wait to be given back, a node
	giveBackBatch = 256         // of them in one round trip
	giveBackEvery = time.Second // while Redis is away; so often, too, it is asked whether it evicts
)

func newNode(c *connector, host string, sharded bool, log *slog.Logger, now func() string, elsewhere func(limit.LeaseID) *node) *node {
	ctx, cancel := context.WithCancel(context.Background())
	n := &node{
		host: host, log: log, elsewhere: elsewhere, stop: cancel,
		giveBacks: make(chan giveBack, maxGiveBacks),
		connected: make(chan struct{}, 1),
	}
	n.client = c.client(host, n.connected)
	n.pipes = newPipes(n.client, c.timeout, c.patience, sharded, now)
	n.closing = sync.OnceValue(n.closeNow)
	n.tended.Go(func() { n.tend(ctx) })
	return n
}

// undo has a decision undone.
func (n *node) undo(g giveBack) {
	select {
	case n.giveBacks <- g:
	default:
	}
}

// tend gives leases back, again and again while Redis is away, so that a stall leaves
// none, and looks whether a server that was not there before may evict keys, until
// ctx ends.
func (n *node) tend(ctx context.Context) {
	var failed []giveBack
	var again, rested <-chan time.Time
	connected := n.connected
	for {
		select {
		case <-connected:
			n.lookForEviction(ctx)
			// A look may make a connection, and so its own successor: not at once.
			connected, rested = nil, time.After(giveBackEvery)
		case <-rested:
			connected = n.connected
		case g := <-n.giveBacks:
			failed = append(failed, n.giveBackAll(n.waiting(g))...)
		case <-again:
			again = nil
			failed = n.giveBackAgain(failed)
		case <-ctx.Done():
			for _, g := range failed {
				n.undo(g) // for giveBackRest
			}
			return
		}
		failed = failed[:min(len(failed), maxGiveBacks)]
		if again == nil && len(failed) > 0 {
			again = time.After(giveBackEvery)
		}
	}
}

// giveBackAgain gives back what failed before, by the node that has it now. It
// returns what failed again.
func (n *node) giveBackAgain(all []giveBack) (failed []giveBack) {
	for batch := range slices.Chunk(n.passOn(all), giveBackBatch) {
		failed = append(failed, n.giveBackAll(batch)...)
	}
	return failed
}

// passOn leaves leases to the nodes that have them now. It returns those that are here,
// or nowhere.
func (n *node) passOn(all []giveBack) (rest []giveBack) {
	for _, g := range all {
		if other := n.elsewhere(g.lease); other != n && other != nil {
			other.undo(g)
		} else {
			rest = append(rest, g)
		}
	}
	return rest
}

// waiting returns first and others that wait, as many as one round trip takes.
func (n *node) waiting(first ...giveBack) []giveBack {
	all := first
	for len(all) < giveBackBatch {
		select {
		case g := <-n.giveBacks:
			all = append(all, g)
		default:
			return all
		}
	}
	return all
}

// giveBackRest passes on what still waits and is elsewhere, and then, if the server
// answers, gives back the rest, until all of a round trip fail.
func (n *node) giveBackRest(answers bool) {
	var rest []giveBack
	for all := n.waiting(); len(all) > 0; all = n.waiting() {
		rest = append(rest, n.passOn(all)...)
	}
	if !answers {
		return
	}
	for batch := range slices.Chunk(rest, giveBackBatch) {
		if len(n.giveBackAll(batch)) == len(batch) {
			return
		}
	}
}

// giveBackAll undoes decisions. It returns those for which Redis was not there,
// or not here. It does not wait for a worker, since all may be busy with a Redis that
// does not answer, or have ended.
func (n *node) giveBackAll(undone []giveBack) (failed []giveBack) {
	batch := make([]*call, len(undone))
	for i, g := range undone {
		batch[i] = undoCall(current.release, g)
		batch[i].ctx = context.Background()
	}
	n.pipes.send(slices.Clone(batch), minReplyTimeout)
	for i, c := range batch {
		if errors.Is(classify(c.err), store.ErrUnavailable) {
			failed = append(failed, undone[i])
		}
	}
	return failed // an error of the script would come again
}

// lookForEviction warns if Redis may evict keys, once for each server that has
// another policy than it should.
func (n *node) lookForEviction(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, minReplyTimeout)
	defer cancel()
	text, err := n.client.Info(ctx, "memory", "server").Result()
	if err != nil {
		n.log.DebugContext(ctx, "redis may not be asked for its eviction policy", "address", n.host, "err", err)
		return
	}
	info := make(map[string]string)
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		info[name] = value
	}
	policy := info["maxmemory_policy"]
	seen := info["run_id"] + " " + policy
	if policy == "" || seen == n.evicts {
		return
	}
	n.evicts = seen
	if policy != "noeviction" {
		n.log.WarnContext(ctx, "redis may evict keys, and an evicted lease or bucket admits too much: set maxmemory-policy noeviction",
			"address", n.host, "maxmemory_policy", policy, "maxmemory", info["maxmemory"])
	}
}

// close waits a second or two for calls that are under way; those that wait to be
// sent are not. It may be called again.
func (n *node) close() error { return n.closing() }

func (n *node) closeNow() error {
	n.stop()
	n.tended.Wait()
	ended := n.pipes.close(minReplyTimeout)
	n.giveBackRest(ended)   // what was under way may have left some, too
	err := n.client.Close() // and so the calls that Redis has not answered in all this time
	n.pipes.work.Wait()
	return err
}
