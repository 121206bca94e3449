package faults

import (
	"fmt"
	"sync"
	"time"

	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
)

// bypassed is how an answer was found without the store.
type bypassed struct{ mode, reason string }

// tally is what the clients of one domain at one replica were told.
type tally struct {
	stored   int // answers of the store
	admitted int // of them
	// unsure of those by a bypass may have been charged all the same: their call was
	// made, and nobody knows its end.
	unsure   int
	bypassed map[bypassed]int
	slowest  time.Duration
	// The same since load.mark: answers of the store, and bypassed ones by their reason.
	since   int
	reasons map[string]int
}

func sum[K comparable](counts map[K]int) (n int) {
	for _, count := range counts {
		n += count
	}
	return n
}

// load are clients that ask, renew and release until end. Each violation that a client
// sees is an error of the test.
type load struct {
	w    *world
	f    fault
	stop chan struct{}
	once sync.Once // closes stop
	work sync.WaitGroup

	mu      sync.Mutex // guards the rest
	tallies map[place]*tally
	held    map[place]int // leases: of the store by domain alone, of a replica by both
}

// place is a domain at a replica.
type place struct {
	domain  string
	replica int
}

// Clients of each place, and how often each does something.
const (
	clients = 3
	pace    = 10 * time.Millisecond
)

// everywhere is the replica of leases that the store keeps.
const everywhere = -1

func newLoad(w *world, f fault) *load {
	l := &load{w: w, f: f, stop: make(chan struct{}), tallies: make(map[place]*tally), held: make(map[place]int)}
	for i := range w.replicas {
		for _, domain := range domains {
			p := place{domain, i}
			l.tallies[p] = &tally{bypassed: make(map[bypassed]int), reasons: make(map[string]int)}
			for range clients {
				l.work.Go(func() { l.client(p) })
			}
		}
	}
	w.t.Cleanup(l.end)
	return l
}

// end has the clients release what they hold, and waits for them.
func (l *load) end() {
	l.once.Do(func() { close(l.stop) })
	l.work.Wait()
}

// each calls f with all tallies, and reports whether it was true of each.
func (l *load) each(f func(p place, y *tally) bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := true
	for p, y := range l.tallies {
		all = f(p, y) && all
	}
	return all
}

// mark begins to count anew what has been answered since.
func (l *load) mark() {
	l.each(func(_ place, y *tally) bool {
		y.since = 0
		clear(y.reasons)
		return true
	})
}

// storeAnswers waits until the store has answered so often in each place since mark.
func (l *load) storeAnswers(n int) {
	l.w.t.Helper()
	storetest.Eventually(l.w.t, "the store answers everywhere", func() bool {
		return l.each(func(_ place, y *tally) bool { return y.since >= n })
	})
}

// client asks for a token and a slot, once a tick; if it gets a lease, it holds it for
// a tick, renews it, and gives it back, until end.
func (l *load) client(p place) {
	t := l.w.t
	r := l.w.replicas[p.replica]
	tick := time.NewTicker(pace)
	defer tick.Stop()
	wait := func() (more bool) {
		select {
		case <-tick.C:
			return true
		case <-l.stop:
			return false
		}
	}
	for wait() {
		begin := time.Now()
		m := r.acquire(t, p.domain, of("all", "x"), of("lane", "x"))
		holder := l.told(p, m, time.Since(begin))
		if m.GetLease() == nil {
			continue
		}
		wait()
		if s := r.renew(t, m.GetLease().GetId()); s == lost && !l.mayEnd(begin) {
			t.Errorf("%v: a lease was lost while it was held", p)
		}
		wait()
		l.work.Go(func() { l.giveBack(p, holder, m.GetLease().GetId(), begin) }) // while it cannot, its client asks on
	}
}

// giveBack releases a lease, as often as it takes: at this replica and, if the store
// keeps it, at the others.
func (l *load) giveBack(p, holder place, id string, granted time.Time) {
	t := l.w.t
	l.mu.Lock()
	l.held[holder]--
	l.mu.Unlock()
	tick := time.NewTicker(pace)
	defer tick.Stop()
	at := p.replica
	for begin, tries := time.Now(), 0; time.Since(begin) < storetest.Deadline; tries++ {
		switch s := l.w.replicas[at].release(t, id); {
		case s == released:
			return
		case s == notHeld && tries > 0: // the try before may have released it
			return
		case s == unreleased:
		case l.mayEnd(granted):
			return
		default:
			t.Errorf("%v: release of a lease that is held, try %d: %v", p, tries+1, s)
			return
		}
		<-tick.C
		if holder.replica == everywhere {
			at = (at + 1) % len(l.w.replicas)
		}
	}
	t.Errorf("%v: a lease is not released in %v", p, storetest.Deadline)
}

// mayEnd reports whether a lease may be gone that nobody has released: its life may be
// over, or Redis has forgotten it.
func (l *load) mayEnd(granted time.Time) bool {
	return l.f.forgets == everything || time.Since(granted) >= l.f.life()
}

// told counts an answer and looks whether it is one that its mode may give. It returns
// who holds the lease that it grants, if it does.
func (l *load) told(p place, m *weirv1.AcquireResponse, took time.Duration) (holder place) {
	t := l.w.t
	l.mu.Lock()
	defer l.mu.Unlock()
	y := l.tallies[p]
	y.slowest = max(y.slowest, took)
	by := bypassed{mode(m.GetBypass()), m.GetBypassReason()}
	most := slots
	if by.mode == "" {
		y.stored++
		y.since++
		if m.GetAdmitted() {
			y.admitted++
		}
		if m.GetAdmitted() != (m.GetLease() != nil) {
			t.Errorf("%v: an answer of the store: %v", p, m)
		}
		holder = place{p.domain, everywhere}
	} else {
		y.bypassed[by]++
		y.reasons[by.reason]++
		if by.reason != "breaker_open" { // an error may have ended a script halfway
			y.unsure++
		}
		verdict := "refused"
		switch {
		case m.GetAdmitted() && m.GetLease() != nil:
			verdict = "leased"
		case m.GetAdmitted():
			verdict = "admitted"
		case m.GetVerdict().GetReason() == "store_unavailable" && m.GetVerdict().GetClass() == weirv1.Class_CLASS_POOL:
			verdict = "unavailable"
		}
		switch p.domain + " " + by.mode + " " + verdict {
		case "open open admitted", "closed closed unavailable", "local local leased", "local local refused":
		default:
			t.Errorf("%v: an answer without the store: %v", p, m)
		}
		if l.f.never {
			t.Errorf("%v: bypassed: %v", p, by)
		}
		holder, most = p, slots/replicas
	}
	if m.GetLease() == nil {
		return holder
	}
	// What is held for sure: from the answer until the release is asked for.
	l.held[holder]++
	if n := l.held[holder]; n > most && (l.f.forgets != everything || holder.replica != everywhere) {
		t.Errorf("%v: %d leases of a lane of %d", holder, n, most)
	}
	return holder
}

func mode(b weirv1.Bypass) string {
	switch b {
	case weirv1.Bypass_BYPASS_UNSPECIFIED:
		return ""
	case weirv1.Bypass_BYPASS_OPEN:
		return "open"
	case weirv1.Bypass_BYPASS_CLOSED:
		return "closed"
	case weirv1.Bypass_BYPASS_LOCAL:
		return "local"
	}
	return fmt.Sprint(b)
}

// together has many ask for the same at once, at all replicas, and wants as many admitted
// as there are. If some answer was none of the store's, another subject is asked for.
func (w *world) together(domain, key string, want int) {
	t := w.t
	t.Helper()
	const askers = 40
	subject := 0
	storetest.Eventually(t, "the store answers all of "+domain, func() bool {
		subject++
		answers := make([]*weirv1.AcquireResponse, askers)
		var work sync.WaitGroup
		start := make(chan struct{})
		for i := range askers {
			work.Go(func() {
				<-start
				answers[i] = w.replicas[i%len(w.replicas)].acquire(t, domain, of(key, fmt.Sprint("together", subject)))
			})
		}
		close(start)
		work.Wait()
		admitted, stored := 0, 0
		for i, m := range answers {
			if mode(m.GetBypass()) == "" {
				stored++
				if m.GetAdmitted() {
					admitted++
				}
			}
			if id := m.GetLease().GetId(); id != "" {
				w.replicas[i%len(w.replicas)].release(t, id)
			}
		}
		if stored == askers && admitted != want {
			t.Errorf("%s: of %d at once %d were admitted at %s, want %d", domain, askers, admitted, key, want)
		}
		return stored == askers
	})
}
