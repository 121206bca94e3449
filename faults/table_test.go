package faults

import (
	"strings"
	"syscall"
	"time"

	"weir/limit"
	"weir/store/storetest"
)

// fault is something that breaks, and what may come of it.
type fault struct {
	name   string
	on     func(*world) // starts the Redis; nil: a single one
	strike func(*world)
	mend   func(*world) // nil: it is over when strike returns

	// bypass is a reason for which answers are bypassed meanwhile, in each place 20 that
	// it strikes (nil: all); "": it is enough that there are some. never: none may be.
	bypass  string
	strikes func(*world, place) bool
	never   bool
	// meanwhile looks what works all the same, before it is mended.
	meanwhile func(*world)
	// forgets is what Redis knew and has lost.
	forgets memory
	// lease is the life of leases, if not an hour: what it must heal by expiry.
	lease time.Duration
}

// memory is what can be lost of what Redis knows.
type memory int

const (
	nothing memory = iota
	buckets
	everything
)

func (f fault) life() time.Duration {
	if f.lease == 0 {
		return time.Hour
	}
	return f.lease
}

// lives is the life of leases that must end by themselves: longer than a client holds one.
const lives = 3 * time.Second

var faults = []fault{
	// The network between weir and Redis.
	{
		name:   "the network is slow",
		strike: eachProxy(func(p *proxy) { p.to("downstream", "latency", 500) }),
		mend:   eachProxy((*proxy).heal),
		bypass: "store_timeout",
	},
	{
		name:   "the network is cut",
		strike: eachProxy((*proxy).cut),
		mend:   eachProxy((*proxy).start),
		bypass: "store_unavailable",
	},
	{
		name:   "connections are half open",
		strike: eachProxy(func(p *proxy) { p.to("upstream", "timeout", 0); p.to("downstream", "timeout", 0) }),
		mend:   eachProxy((*proxy).heal),
		bypass: "store_timeout",
	},
	{
		name:   "connections are reset",
		strike: eachProxy(func(p *proxy) { p.to("upstream", "reset_peer", 0) }),
		mend:   eachProxy((*proxy).heal),
		bypass: "store_unavailable",
	},
	{
		name:   "replies are lost",
		strike: eachProxy(func(p *proxy) { p.to("downstream", "limit_data", 3000) }), // of each connection, after some answers
		mend:   eachProxy((*proxy).heal),
		bypass: "store_unavailable",
	},
	{
		name: "connections close slowly",
		strike: func(w *world) {
			eachProxy(func(p *proxy) { p.to("downstream", "slow_close", 500) })(w)
			for range 3 {
				w.load.mark()
				w.redis.MustDo(w.t, "CLIENT", "KILL", "TYPE", "normal")
				w.load.storeAnswers(5)
			}
		},
		mend: eachProxy((*proxy).heal),
	},
	{
		name:    "the network of one replica is cut",
		strike:  func(w *world) { w.replicas[0].proxy.cut() },
		mend:    func(w *world) { w.replicas[0].proxy.start() },
		bypass:  "store_unavailable",
		strikes: func(_ *world, p place) bool { return p.replica == 0 },
	},

	// A single Redis.
	{
		name:   "Redis is stopped",
		strike: signal(syscall.SIGSTOP),
		mend:   signal(syscall.SIGCONT),
		bypass: "store_timeout",
	},
	{
		name:   "Redis is paused", // it answers pings
		strike: do("CLIENT", "PAUSE", "3600000", "WRITE"),
		mend:   do("CLIENT", "UNPAUSE"),
		bypass: "store_timeout",
	},
	{
		name:    "Redis is killed and has kept nothing",
		strike:  kill,
		mend:    restart,
		bypass:  "store_unavailable",
		forgets: everything,
	},
	{
		name:   "Redis is killed and has kept all",
		on:     keepingAll,
		strike: kill,
		mend:   restart,
		bypass: "store_unavailable",
	},
	{
		name: "Redis loses its scripts", // T20
		strike: func(w *world) {
			for range 20 {
				w.load.mark()
				w.redis.MustDo(w.t, "SCRIPT", "FLUSH")
				w.load.storeAnswers(2)
			}
		},
		never: true,
	},
	{
		name:      "Redis has no memory left",
		strike:    func(w *world) { w.keep(); do("CONFIG", "SET", "maxmemory", "1")(w) },
		mend:      do("CONFIG", "SET", "maxmemory", "0"),
		bypass:    "store_error",
		meanwhile: leasesEnd,
	},
	{
		name: "somebody else writes to a key",
		strike: func(w *world) {
			w.keep()
			for _, domain := range domains {
				w.redis.MustDo(w.t, "EVAL", "redis.call('DEL', KEYS[1]) redis.call('LPUSH', KEYS[1], 'x')", "1", bucketKey(domain))
			}
		},
		mend:      eachDomain(func(w *world, domain string) { w.redis.MustDo(w.t, "DEL", bucketKey(domain)) }),
		bypass:    "store_error",
		meanwhile: leasesEnd,
		forgets:   buckets,
	},
	{
		name:   "Redis is read-only",
		strike: do("REPLICAOF", "127.0.0.1", "1"),
		mend:   do("REPLICAOF", "NO", "ONE"),
		bypass: "store_error",
	},
	{
		name: "the clock of Redis is set back", // T22
		on:   onAClock,
		strike: func(w *world) {
			w.drain()
			w.clock.set(w.t, -step)
			w.noGain()
		},
		mend:  func(w *world) { w.clock.set(w.t, 0) },
		never: true,
	},
	{
		name:   "the certificate of Redis is renewed",
		on:     redisWithTLS,
		strike: (*world).renewCertificate,
	},

	// Sentinels.
	{
		name:    "the primary changes", // T24
		on:      sentinels,
		strike:  failover,
		forgets: everything,
		lease:   lives, // a release may not be replicated
	},
	{
		name:    "the primary is killed",
		on:      sentinels,
		strike:  func(w *world) { w.sentinel.Primary.Kill() },
		mend:    (*world).agree,
		bypass:  "store_unavailable",
		forgets: everything,
		lease:   lives,
	},

	// A cluster of three.
	{
		name: "slots of a cluster move",
		on:   cluster,
		strike: eachDomain(func(w *world, domain string) {
			from := w.cluster.Owner(domain)
			for i := range 3 {
				w.cluster.Move(w.t, domain, w.cluster.Nodes[(from+i)%3], w.cluster.Nodes[(from+i+1)%3])
			}
		}),
		lease: lives, // a release may read a key that has moved
	},
	{
		name:    "a node of a cluster is stopped",
		on:      cluster,
		strike:  signal(syscall.SIGSTOP),
		mend:    signal(syscall.SIGCONT),
		bypass:  "store_timeout",
		strikes: ofTheNode,
	},
	{
		name:    "a node of a cluster is killed",
		on:      cluster,
		strike:  kill,
		mend:    restart,
		bypass:  "store_unavailable",
		strikes: ofTheNode,
		forgets: everything,
	},
}

// eachProxy does something to the network of all replicas.
func eachProxy(do func(p *proxy)) func(*world) {
	return func(w *world) {
		for _, r := range w.replicas {
			do(r.proxy)
		}
	}
}

func eachDomain(do func(w *world, domain string)) func(*world) {
	return func(w *world) {
		for _, domain := range domains {
			do(w, domain)
		}
	}
}

func do(command ...string) func(*world) {
	return func(w *world) { w.redis.MustDo(w.t, command...) }
}

func signal(s syscall.Signal) func(*world) {
	return func(w *world) {
		if err := syscall.Kill(w.redis.PID(), s); err != nil {
			w.t.Error(err)
		}
	}
}

func keepingAll(w *world) { oneRedis("--appendonly", "yes", "--appendfsync", "always")(w) }

func kill(w *world) { w.redis.Kill() }

func restart(w *world) { w.redis.Start(w.t) }

// failover asks the sentinels to change the primary, and makes the old one a replica, as
// they do some seconds later, without a connection being closed.
func failover(w *world) {
	first := w.sentinel.Sentinels[0]
	storetest.Eventually(w.t, "a sentinel changes the primary", func() bool {
		if isPrimary(first, w.sentinel.Replica) {
			return true
		}
		_, _ = first.Do("SENTINEL", "FAILOVER", storetest.SentinelName) // it gives up on a busy machine
		return false
	})
	w.agree()
	host, port, _ := strings.Cut(w.sentinel.Replica.Addr(), ":")
	w.sentinel.Primary.MustDo(w.t, "REPLICAOF", host, port)
}

// agree waits until all sentinels take the replica for the primary.
func (w *world) agree() {
	storetest.Eventually(w.t, "the sentinels agree", func() bool {
		for _, s := range w.sentinel.Sentinels {
			if !isPrimary(s, w.sentinel.Replica) {
				return false
			}
		}
		return true
	})
}

// keep takes a lease in each domain.
func (w *world) keep() {
	w.kept = make(map[string]string)
	for _, domain := range domains {
		storetest.Eventually(w.t, "the store grants a lease", func() bool {
			m := w.replicas[0].acquire(w.t, domain, of("kept", "x"))
			if mode(m.GetBypass()) == "" {
				w.kept[domain] = m.GetLease().GetId()
			}
			return w.kept[domain] != ""
		})
	}
}

// leasesEnd: what keep took is renewed and released, and the clients' leases end, though
// nothing is granted.
func leasesEnd(w *world) {
	for _, domain := range domains {
		r, id := w.replicas[0], w.kept[domain]
		storetest.Eventually(w.t, "a lease is renewed", func() bool { return r.renew(w.t, id) == renewed })
		storetest.Eventually(w.t, "it is released", func() bool { return r.release(w.t, id) != unreleased })
		storetest.Eventually(w.t, "the leases of "+domain+" end", func() bool {
			held, ok := w.replicas[0].metrics(w.t)[`weir_leases_held{domain="`+domain+`"}`]
			return ok && held == 0
		})
	}
}

// ofTheNode: the domain of the place was on the node that is struck.
func ofTheNode(w *world, p place) bool { return w.cluster.Nodes[w.cluster.Owner(p.domain)] == w.redis }

// bucketKey is where the tokens of the clients are.
func bucketKey(domain string) string {
	return limit.Key(domain, limit.TokenBucket{}, []limit.Entry{{Key: "all", Value: "x"}})
}

// step is how far a clock is set back.
const step = 30 * time.Second

// drain empties a bucket.
func (w *world) drain() {
	for _, domain := range domains {
		storetest.Eventually(w.t, "the bucket of a second is empty", func() bool {
			return !w.replicas[0].acquire(w.t, domain, of("second", "x")).GetAdmitted()
		})
	}
}

// noGain: after the clock was set back, an empty bucket has gained nothing, and says how
// long that may last.
func (w *world) noGain() {
	for _, domain := range domains {
		for i := range 5 * second {
			m := w.replicas[i%len(w.replicas)].acquire(w.t, domain, of("second", "x"))
			if m.GetAdmitted() {
				w.t.Errorf("%s: an empty bucket admits after the clock was set back", domain)
			}
			if wait := m.GetVerdict().GetRetryAfter().AsDuration(); wait <= 0 || wait > step+time.Second {
				w.t.Errorf("%s: it says to wait for %v, want %v at most", domain, wait, step+time.Second)
			}
		}
	}
}
