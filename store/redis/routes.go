package redis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"weir/limit"
)

const (
	clusterSlots = 16384
	// How long until the next look at the topology: at a cluster that is well, since
	// it says when a slot has moved; at sentinels, or when nobody answered; and at
	// least, when a call says that something is wrong. If nobody answered it is at least
	// maxDialPause.
	lookAtCluster   = time.Minute
	lookAtSentinels = time.Second
	lookAgain       = 100 * time.Millisecond
	// sentinelTimeout is how long one sentinel may take to say who the primary is.
	sentinelTimeout = 250 * time.Millisecond
)

// routes says which node serves a key. A node is made when it is first named, and
// closed when it has not been for a while.
type routes struct {
	connector *connector
	log       *slog.Logger
	now       func() string          // the scripts' clock
	slots     []atomic.Pointer[node] // one for all keys, or a cluster's
	health    health                 // of whom is asked for the topology
	found     atomic.Bool            // it has been told once

	suspect chan struct{} // gets something when the topology may be another
	stop    context.CancelFunc
	work    sync.WaitGroup // keep, nodes that are being closed, and pings
	asked   map[string]*goredis.Client
	sentry  map[string]*goredis.SentinelClient

	mu     sync.Mutex
	nodes  map[string]*node // by host
	closed bool
}

// span is a range of slots and the host of its master.
type span struct {
	first, last int
	host        string
}

func newRoutes(c *connector, log *slog.Logger, now func() string) *routes {
	ctx, cancel := context.WithCancel(context.Background())
	r := &routes{
		connector: c, log: log, now: now, stop: cancel,
		suspect: make(chan struct{}, 1), nodes: make(map[string]*node),
		asked: make(map[string]*goredis.Client), sentry: make(map[string]*goredis.SentinelClient),
	}
	r.health.patience = c.patience
	switch c.address.topology {
	case oneServer:
		r.slots = make([]atomic.Pointer[node], 1)
		r.slots[0].Store(r.at(c.address.hosts[0]))
	case sentinels:
		r.slots = make([]atomic.Pointer[node], 1)
		r.work.Go(func() { r.keep(ctx, lookAtSentinels, r.askSentinels) })
	case cluster:
		r.slots = make([]atomic.Pointer[node], clusterSlots)
		r.work.Go(func() { r.keep(ctx, lookAtCluster, r.askCluster) })
	}
	return r
}

// node returns the node that serves key, or nil if none is known.
func (r *routes) node(key string) *node { return r.slots[r.slot(key)].Load() }

func (r *routes) slot(key string) int {
	if !r.sharded() {
		return 0
	}
	return limit.KeySlot(key)
}

func (r *routes) sharded() bool { return len(r.slots) > 1 }

// errNoNode says that it is not known who serves a key.
var errNoNode = errors.New("no node is known for it")

// missing is the error of a call for whose key no node is known.
func (r *routes) missing() error {
	r.health.mu.Lock()
	defer r.health.mu.Unlock()
	if r.health.away == nil {
		return unsentError{errNoNode}
	}
	return unsentError{fmt.Errorf("%w: %w", errNoNode, r.health.away)}
}

// searching reports whether who serves what has not been told yet, and not for
// long.
func (r *routes) searching() bool { return !r.found.Load() && !r.health.lasting() }

// doubt has the topology looked at.
func (r *routes) doubt() {
	select {
	case r.suspect <- struct{}{}:
	default:
	}
}

// moved reports whether err, by which a node answered, says that the slot of key is
// another's. It notes whose, and returns that node, or nil after close. Only a node of
// a cluster is believed.
func (r *routes) moved(key string, by *node, err error) (n *node, moved bool) {
	host, moved := goredis.IsMovedError(err)
	if !moved || !r.sharded() {
		return nil, false
	}
	if n = r.at(told(host, by.host)); n != nil {
		r.slots[r.slot(key)].Store(n)
	}
	r.doubt()
	return n, true
}

// at returns the node of a host; nil after close.
func (r *routes) at(host string) *node {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	n := r.nodes[host]
	if n == nil {
		n = newNode(r.connector, host, r.sharded(), r.log, r.now, func(id limit.LeaseID) *node { return r.node(limit.LeaseKey(id)) })
		r.nodes[host] = n
	}
	n.idle.Store(false)
	return n
}

// all returns the nodes that serve some slot, or did.
func (r *routes) all() []*node {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]*node, 0, len(r.nodes))
	for _, n := range r.nodes {
		all = append(all, n)
	}
	return all
}

// ping asks the node that serves all keys, or all nodes of a cluster, of which one must
// answer.
func (r *routes) ping(ctx context.Context) error {
	if !r.sharded() {
		n := r.slots[0].Load()
		if n == nil {
			return r.missing()
		}
		err := n.client.Ping(ctx).Err()
		if err != nil {
			r.doubt()
		}
		return err
	}
	asked, answers, err := r.startPings(ctx)
	if err != nil {
		return err
	}
	var failed error
	for range asked {
		err := <-answers
		if err == nil {
			return nil
		}
		failed = errors.Join(failed, err)
	}
	r.doubt()
	return failed
}

// startPings asks all nodes. There is at least one.
func (r *routes) startPings(ctx context.Context) (asked int, answers <-chan error, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return 0, nil, unsentError{errClosed}
	case len(r.nodes) == 0:
		return 0, nil, r.missing()
	}
	all := make(chan error, len(r.nodes))
	for _, n := range r.nodes {
		r.work.Go(func() { all <- n.client.Ping(ctx).Err() }) // close waits, as closed is not set yet
	}
	return len(r.nodes), all, nil
}

// keep looks at the topology: at once, from time to time, and when it is in doubt,
// until ctx ends.
func (r *routes) keep(ctx context.Context, every time.Duration, ask func(context.Context) ([]span, error)) {
	for {
		spans, err := ask(ctx)
		least, wait := lookAgain, every
		if err != nil {
			least, wait = maxDialPause, min(every, lookAtSentinels)
			r.health.unreachable(err)
		} else {
			r.health.served()
			r.apply(spans)
			r.found.Store(true)
		}
		pause, next := time.NewTimer(least), time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-pause.C:
			select {
			case <-ctx.Done():
			case <-r.suspect:
			case <-next.C:
			}
		}
		pause.Stop()
		next.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}

// apply notes who serves what, and closes the nodes that nothing has named since the
// time before.
func (r *routes) apply(spans []span) {
	named := make(map[string]bool)
	for _, s := range spans {
		n := r.at(s.host)
		if n == nil {
			return
		}
		named[s.host] = true
		for i := s.first; i <= s.last; i++ {
			r.slots[i].Store(n)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for host, n := range r.nodes {
		if named[host] || !n.idle.Swap(true) || r.closed {
			continue
		}
		for i := range r.slots { // what nobody serves now
			r.slots[i].CompareAndSwap(n, nil)
		}
		delete(r.nodes, host)
		r.work.Go(func() { _ = n.close() }) // nobody waits for what it has to say
	}
}

// close ends all nodes.
func (r *routes) close() error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.stop()
	nodes := r.all()
	errs := make([]error, len(nodes))
	var ending sync.WaitGroup
	for i, n := range nodes {
		ending.Go(func() { errs[i] = n.close() })
	}
	ending.Wait()
	r.work.Wait()
	for _, c := range r.asked {
		errs = append(errs, c.Close())
	}
	for _, c := range r.sentry {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// askCluster asks one node after the other which slots are whose.
func (r *routes) askCluster(ctx context.Context) ([]span, error) {
	var failed error
	ask := func(host string, c *goredis.Client) []span {
		ctx, cancel := context.WithTimeout(ctx, minReplyTimeout)
		defer cancel()
		slots, err := c.ClusterSlots(ctx).Result() //nolint:staticcheck // every cluster answers it, also before 7.0 and after; go-redis itself asks it
		if err != nil {
			failed = errors.Join(failed, err)
			return nil
		}
		return spansOf(slots, host)
	}
	nodes := r.all()
	rand.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	var well, ill []*node
	asked := make(map[string]bool)
	for _, n := range nodes {
		asked[n.host] = true
		if n.pipes.health.ill.Load() {
			ill = append(ill, n)
		} else {
			well = append(well, n)
		}
	}
	for _, n := range slices.Concat(well, ill) {
		if spans := ask(n.host, n.client); len(spans) > 0 {
			return spans, nil
		}
	}
	for _, i := range rand.Perm(len(r.connector.address.hosts)) {
		host := r.connector.address.hosts[i]
		if asked[host] {
			continue
		}
		if r.asked[host] == nil {
			r.asked[host] = r.connector.client(host, nil)
		}
		if spans := ask(host, r.asked[host]); len(spans) > 0 {
			return spans, nil
		}
	}
	if failed == nil {
		failed = errors.New("the cluster has no slots")
	}
	return nil, failed
}

// spansOf reads what host says of the slots.
func spansOf(slots []goredis.ClusterSlot, host string) []span {
	var spans []span
	for _, s := range slots {
		if len(s.Nodes) == 0 || s.Start < 0 || s.End >= clusterSlots {
			continue
		}
		spans = append(spans, span{first: s.Start, last: s.End, host: told(s.Nodes[0].Addr, host)})
	}
	return spans
}

// told completes the address of a node as another node tells it: without a host, or
// with ? for one, it is on the same host; port 0 is the same port.
func told(address, by string) string {
	host, port, err := net.SplitHostPort(address)
	byHost, byPort, err2 := net.SplitHostPort(by)
	if err != nil || err2 != nil {
		return address
	}
	if host == "" || host == "?" {
		host = byHost
	}
	if port == "0" {
		port = byPort
	}
	return net.JoinHostPort(host, port)
}

// askSentinels asks all sentinels at once who is the primary. More than half of them
// decide, or most of those that answer in time: one that is cut off with an old
// primary does not, nor does one that hangs hold it up. At a tie nothing changes.
func (r *routes) askSentinels(ctx context.Context) ([]span, error) {
	hosts := r.connector.address.hosts
	type vote struct {
		host string
		err  error
	}
	votes := make(chan vote, len(hosts))
	for _, host := range hosts {
		if r.sentry[host] == nil {
			r.sentry[host] = r.connector.sentinelClient(host)
		}
		c := r.sentry[host]
		r.work.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, sentinelTimeout)
			defer cancel()
			primary, err := c.GetMasterAddrByName(ctx, r.connector.address.primary).Result()
			switch {
			case errors.Is(err, goredis.Nil):
				votes <- vote{err: errors.New("a sentinel does not know the primary of that name")}
			case err != nil:
				votes <- vote{err: err}
			case len(primary) != 2:
				votes <- vote{err: errors.New("a sentinel's answer is not a host and a port")}
			default:
				votes <- vote{host: net.JoinHostPort(primary[0], primary[1])}
			}
		})
	}
	var failed error
	before := ""
	if n := r.slots[0].Load(); n != nil {
		before = n.host
	}
	count, best := make(map[string]int), ""
	for range hosts {
		v := <-votes
		if v.host == "" {
			failed = errors.Join(failed, v.err)
			continue
		}
		count[v.host]++
		if count[v.host] > count[best] || v.host == before && count[v.host] == count[best] {
			best = v.host
		}
		if count[best] > len(hosts)/2 {
			break
		}
	}
	if best == "" {
		return nil, fmt.Errorf("no sentinel says who the primary is: %w", failed)
	}
	return []span{{host: best}}, nil
}
