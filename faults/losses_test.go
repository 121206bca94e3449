package faults

import (
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

// What a failover or a restart loses cannot be helped by weir, but it must be what is
// said of it: measured here, and nothing more than that. docs/faults.md tells the numbers.

// room is more than all leases of a test of losses.
const room = 100_000

const lossesPolicy = `
domain: open
descriptors:
  - {key: all, token_bucket: {capacity: 1000000, refill: 1/d}}
  - {key: lane, concurrency: {max_in_flight: 100000, lease: 1h}}
  - {key: brief, concurrency: {max_in_flight: 100000, lease: 2s}}
`

func newLossy(t *testing.T, addr string) *replica {
	t.Helper()
	r := &replica{proxy: newProxy(t, addr)}
	r.Process = servertest.Start(t, lossesPolicy, "--redis", "redis://"+r.proxy.Listen, "--store-timeout", "1s")
	r.leases = weirv1.NewLeaseServiceClient(r.Dial(t))
	storetest.Eventually(t, "the store decides", func() bool {
		return mode(r.acquire(t, "open", of("all", "warm")).GetBypass()) == ""
	})
	return r
}

// told is what clients of one replica were told, by the store.
type told struct {
	mu             sync.Mutex // guards the rest
	held, released map[string]bool
	unsure         int // asks or releases whose end nobody knows
	bypassed       int
}

// ask takes slots, and gives back every other, until stop.
func (d *told) ask(t *testing.T, r *replica, stop <-chan struct{}) {
	for n := 0; ; n++ {
		select {
		case <-stop:
			return
		default:
		}
		m := r.acquire(t, "open", of("all", "x"), of("lane", "x"))
		d.mu.Lock()
		id := m.GetLease().GetId()
		switch {
		case id != "":
			d.held[id] = true
		case m.GetBypassReason() == "breaker_open":
			d.bypassed++
		default:
			d.bypassed++
			d.unsure++
		}
		d.mu.Unlock()
		if id == "" || n%2 == 0 {
			continue
		}
		s := r.release(t, id)
		d.mu.Lock()
		delete(d.held, id)
		if s == released {
			d.released[id] = true
		} else {
			d.unsure++ // the store may have it or not
		}
		d.mu.Unlock()
	}
}

func (d *told) count() (granted, bypassed int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.held) + len(d.released), d.bypassed
}

// A primary dies under load, and its replica takes its place: what had not reached it is
// lost, and no more. Who renews a lease that is lost is told so; a release that is lost
// costs its slot until the lease ends.
func TestWhatAFailoverLoses(t *testing.T) {
	for _, tt := range []struct {
		name  string
		flags []string
		lag   int // milliseconds that the replica is behind
		cut   bool
	}{
		{name: "the replica follows"},
		{name: "the replica is 50 ms behind", lag: 50},
		{name: "the replica is cut off", flags: []string{"--min-replicas-to-write", "1", "--min-replicas-max-lag", "1"}, cut: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			flags := append([]string{"--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"}, tt.flags...)
			primary := storetest.StartRedisTCP(t, storetest.AnyRedis(t), flags...)
			link := newProxy(t, primary.Addr())
			host, port, _ := strings.Cut(link.Listen, ":")
			follower := storetest.StartRedisTCP(t, storetest.AnyRedis(t), "--replicaof", host+" "+port)
			// A primary calls a replica online some time before it feeds it.
			for _, n := range []string{"1", "2"} {
				storetest.Eventually(t, "the replica follows", func() bool {
					_, _ = primary.Do("SET", "probe", n) // it may want a replica
					probe, err := follower.Do("GET", "probe")
					return err == nil && probe == n
				})
			}
			r := newLossy(t, primary.Addr())
			if tt.lag > 0 {
				link.to("downstream", "latency", tt.lag)
			}
			d := told{held: make(map[string]bool), released: make(map[string]bool)}
			stop := make(chan struct{})
			var clients sync.WaitGroup
			begin := time.Now()
			for range 8 {
				clients.Go(func() { d.ask(t, r, stop) })
			}
			end := sync.OnceFunc(func() { close(stop); clients.Wait() })
			defer end()
			storetest.Eventually(t, "many leases are granted", func() bool { n, _ := d.count(); return n >= 1000 })
			before, _ := d.count()
			rate := float64(before) / time.Since(begin).Seconds()
			if tt.cut {
				link.to("downstream", "timeout", 0) // and nobody closes the connection
				link.to("upstream", "timeout", 0)
				begin = time.Now()
				storetest.Eventually(t, "the primary takes no more", func() bool { _, n := d.count(); return n > 0 })
				after, _ := d.count()
				t.Logf("cut off, the primary granted for %v and %d leases more", time.Since(begin).Round(time.Millisecond), after-before)
			}
			link.cut() // what is on its way is lost too
			primary.Kill()
			r.proxy.cut()
			end()
			follower.MustDo(t, "REPLICAOF", "NO", "ONE")
			follower.MustDo(t, "CONFIG", "SET", "min-replicas-to-write", "0")
			r.proxy.Upstream = follower.Addr()
			r.proxy.start()
			storetest.Eventually(t, "the new primary decides", func() bool {
				return mode(r.acquire(t, "open", of("all", "warm")).GetBypass()) == ""
			})
			storetest.Eventually(t, "what nobody knows of is given back", func() bool {
				m := r.metrics(t)
				return m["weir_store_up"] == 1
			})

			gone, ghosts := 0, 0
			for id := range d.held {
				switch s := r.renew(t, id); s {
				case lost:
					gone++
				case renewed:
				default:
					t.Errorf("renewal of a lease: %v", s)
				}
			}
			for id := range d.released {
				switch s := r.release(t, id); s {
				case released:
					ghosts++ // the new primary had not heard of its release
				case notHeld:
				default:
					t.Errorf("a second release: %v", s)
				}
			}
			free, _ := r.left("open", "lane", "x")
			left, _ := r.left("open", "all", "x")
			admitted := len(d.held) + len(d.released)
			t.Logf("%.0f grants a second: of %d leases held %d were lost, of %d releases %d; %d of %d tokens were not charged; %d ends unknown",
				rate, len(d.held), gone, len(d.released), ghosts, max(0, admitted-(tokens-left)), admitted, d.unsure)
			if !tt.cut && gone > len(d.held)/2 {
				t.Errorf("%d of %d leases were lost, want what a moment grants", gone, len(d.held))
			}
			if taken := room - free; taken < len(d.held)-gone || taken > len(d.held)-gone+d.unsure {
				t.Errorf("%d slots are taken, want %d that are held, and %d at most whose end nobody knows", taken, len(d.held)-gone, d.unsure)
			}
			if charged := tokens - left; charged > admitted+d.unsure {
				t.Errorf("%d tokens were charged for %d leases", charged, admitted)
			}
		})
	}
}

// Redis is killed while leases are held, and comes back with what it has kept: a lease
// that is forgotten is LOST to its holder, and its slot is free.
func TestWhatARestartForgets(t *testing.T) {
	const (
		all      = 100
		slowDisk = "appendfsync everysec on a slow disk"
	)
	for version, bin := range storetest.RedisBinaries(t) {
		for _, tt := range []struct {
			name        string
			flags       []string
			least, most int // that are lost
		}{
			{"nothing is kept", nil, all, all},
			{"appendfsync everysec", []string{"--appendonly", "yes", "--appendfsync", "everysec"}, 0, all}, // none, if the disk is not slow
			{slowDisk, []string{"--appendonly", "yes", "--appendfsync", "everysec"}, 1, all},
			{"appendfsync always", []string{"--appendonly", "yes", "--appendfsync", "always"}, 0, 0},
		} {
			t.Run(tt.name+"/"+version, func(t *testing.T) {
				t.Parallel()
				server := bin
				if tt.name == slowDisk {
					server = preloaded(t, bin, "disk", "WEIR_SYNC=3")
				}
				redis := storetest.StartRedisTCP(t, server, tt.flags...)
				r := newLossy(t, redis.Addr())
				if tt.name == slowDisk {
					storetest.Eventually(t, "Redis waits for its disk", func() bool {
						r.acquire(t, "open", of("all", "warm"))
						return strings.Contains(redis.MustDo(t, "INFO", "persistence"), "aof_pending_bio_fsync:1")
					})
				}
				var ids []string
				storetest.Eventually(t, "leases are granted", func() bool { // the disk may be slow
					for len(ids) < all {
						id := r.acquire(t, "open", of("all", "x"), of("lane", "x")).GetLease().GetId()
						if id == "" {
							return false
						}
						ids = append(ids, id)
					}
					return true
				})
				redis.Kill()
				redis.Start(t)
				storetest.Eventually(t, "the store decides", func() bool {
					return mode(r.acquire(t, "open", of("all", "warm")).GetBypass()) == ""
				})
				gone := 0
				for _, id := range ids {
					s := unrenewed
					storetest.Eventually(t, "a renewal is answered", func() bool { s = r.renew(t, id); return s != unrenewed })
					if s == lost {
						gone++
						if s := r.release(t, id); s != notHeld {
							t.Errorf("release of a lease that is LOST: %v", s)
						}
					}
				}
				t.Logf("%d of %d leases are LOST", gone, all)
				if gone < tt.least || gone > tt.most {
					t.Errorf("%d of %d leases are LOST, want %d to %d", gone, all, tt.least, tt.most)
				}
				storetest.Eventually(t, "the slots of lost leases are free, and the others are not", func() bool {
					free, ok := r.left("open", "lane", "x")
					return ok && free == room-all+gone
				})
			})
		}
	}
}

// A replica dies while Redis has what it was asked for and nobody was told: nobody gives
// those leases back, and they end by themselves.
func TestADeadReplicasSlotsAreFreeWhenTheirLeasesEnd(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	doomed, other := newLossy(t, redis.Addr()), newLossy(t, redis.Addr())
	doomed.proxy.to("downstream", "latency", int(storetest.Deadline.Milliseconds()))
	const asked = 3 // slots of one request, on a connection that is there
	var one sync.WaitGroup
	one.Go(func() {
		ctx, cancel := call()
		defer cancel()
		var all []*weirv1.Descriptor
		for i := range asked {
			all = append(all, of("brief", fmt.Sprint("x", i)))
		}
		_, _ = doomed.leases.Acquire(ctx, &weirv1.AcquireRequest{Domain: "open", Descriptors: all})
	})
	taken := func() (n int) {
		for i := range asked {
			if free, ok := other.left("open", "brief", fmt.Sprint("x", i)); ok {
				n += room - free
			}
		}
		return n
	}
	storetest.Eventually(t, "the slots are taken", func() bool { return taken() == asked })
	doomed.Signal(t, syscall.SIGKILL)
	doomed.Wait(t)
	one.Wait()
	begin := time.Now()
	storetest.Eventually(t, "they are free", func() bool { return taken() == 0 })
	if took := time.Since(begin); took > 4*time.Second {
		t.Errorf("they were free after %v, and their leases live 2s", took)
	}
}
