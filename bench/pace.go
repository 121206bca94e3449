package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// schedule says when each decision of an open loop is due: so many a second, evenly.
type schedule struct {
	rate         float64 // > 0
	warm, window time.Duration
}

// due is when decision n, from 0 on, is due, from the start of the loop.
func (s schedule) due(n int) time.Duration {
	return time.Duration(float64(n) / s.rate * float64(time.Second))
}

// before is how many decisions are due before a moment.
func (s schedule) before(t time.Duration) int {
	n := int(s.rate * t.Seconds())
	for n > 0 && s.due(n-1) >= t { // rounding may be one off
		n--
	}
	for s.due(n) < t {
		n++
	}
	return n
}

// inWindow is the decisions that are measured: from first to before end.
func (s schedule) inWindow() (first, end int) {
	return s.before(s.warm), s.before(s.warm + s.window)
}

// openLoop is a run of decisions that begin when they are due.
type openLoop struct {
	*load
	plan        schedule
	from, total int // decisions: the first that is measured, and all
	start       time.Time
	decided     []time.Duration // how long each took, from the first that is measured on; 0: it has not ended
	counts      atomic.Bool     // resources are counted
	ended       atomic.Int64    // while they were
	bypassed    atomic.Int64
	underWay    atomic.Int64

	once   sync.Once
	failed chan struct{} // closed after err is set
	err    error
}

// open has decisions begin when they are due, whatever became of those before.
// Latencies count from then, so that a server that stalls is not asked less
// (coordinated omission), and belong to the window in which the decision was due.
// At most wireCalls are under way on each of the connections; the others wait for
// them, and their wait counts. It releases nothing.
func (l *load) open(rate float64, window time.Duration, begin, end func() error) (decided, error) {
	if l.release || len(l.request.message) > maxRequest {
		return decided{}, fmt.Errorf("an open loop releases nothing, and has requests of at most %d bytes", maxRequest)
	}
	plan := schedule{rate: rate, warm: warmUp, window: window}
	o := &openLoop{load: l, plan: plan, failed: make(chan struct{})}
	o.from, o.total = plan.inWindow()
	o.decided = make([]time.Duration, o.total-o.from)

	var wires []*wire
	var work sync.WaitGroup
	hangUp := func() {
		for _, w := range wires {
			_ = w.conn.Close()
		}
		work.Wait()
	}
	until := time.Now().Add(plan.warm + plan.window + l.patience() + drainTime) // never, unless something hangs
	for range connections {
		w, err := dialWire(l.address, until, o.end)
		if err != nil {
			hangUp()
			return decided{}, err
		}
		wires = append(wires, w)
		work.Go(func() { o.fail(w.read()) })
		select {
		case <-w.ready:
		case <-o.failed:
			hangUp()
			return decided{}, o.err
		}
	}

	o.start = time.Now()
	paced := make(chan struct{})
	go func() {
		defer close(paced)
		if err := o.pace(wires); err != nil {
			o.fail(err)
		}
	}()
	time.Sleep(time.Until(o.start.Add(plan.warm)))
	err := begin()
	o.counts.Store(true)
	time.Sleep(time.Until(o.start.Add(plan.warm + plan.window)))
	o.counts.Store(false)
	err = errors.Join(err, end())
	<-paced
	for o.underWay.Load() > 0 && !o.over() {
		time.Sleep(time.Millisecond)
	}
	gaveUp := time.Since(o.start)
	o.fail(nil) // from here on the ends of connections are no errors
	hangUp()

	d := decided{latencies: o.decided, bypassed: int(o.bypassed.Load()), ended: int(o.ended.Load())}
	for i, latency := range d.latencies {
		if latency == 0 {
			d.latencies[i] = gaveUp - plan.due(o.from+i)
			d.unfinished++
		}
	}
	return d, errors.Join(o.err, err)
}

// fail ends the loop for a reason, if nothing has ended it before.
func (o *openLoop) fail(err error) {
	o.once.Do(func() {
		o.err = err
		close(o.failed)
	})
}

// over is whether the loop has failed, or has waited long enough for answers.
func (o *openLoop) over() bool {
	select {
	case <-o.failed:
		return true
	default:
		return time.Since(o.start) > o.plan.warm+o.plan.window+o.patience()
	}
}

// end is the end of decision n.
func (o *openLoop) end(n int, answer []byte) error {
	o.underWay.Add(-1)
	bypassed, err := o.check(answer)
	if err != nil {
		return err
	}
	if o.counts.Load() {
		o.ended.Add(1)
	}
	if n >= o.from {
		o.decided[n-o.from] = max(1, time.Since(o.start)-o.plan.due(n))
		if bypassed {
			o.bypassed.Add(1)
		}
	}
	return nil
}

// pace asks for all decisions when they are due; those that are late at once.
func (o *openLoop) pace(wires []*wire) error {
	// A thread of its own, which ends with this goroutine, so that nobody else has
	// its timer slack: nanosleep is then finer than Go's timers.
	runtime.LockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // ns; without it a sleep is 50 µs longer
	random := rand.New(rand.NewPCG(1, 1))
	request := bytes.Clone(o.request.message)
	for n := 0; n < o.total; {
		left := o.plan.due(n) - time.Since(o.start)
		for left <= 0 {
			o.request.write(request, o.load.first+random.IntN(o.subjects))
			asked, err := askOne(wires, n, request)
			if err != nil {
				return err
			}
			if !asked { // until one ends
				left = 50 * time.Microsecond
				break
			}
			o.underWay.Add(1)
			if n++; n == o.total {
				break
			}
			left = o.plan.due(n) - time.Since(o.start)
		}
		for _, w := range wires {
			if err := w.flush(); err != nil {
				return err
			}
		}
		if o.over() {
			return nil
		}
		t := unix.NsecToTimespec(max(0, int64(left)))
		_ = unix.Nanosleep(&t, nil) // a signal may end it early
	}
	return nil
}

// askOne asks on one of the connections, in turn, and returns false if too many calls
// are under way on all of them.
func askOne(wires []*wire, n int, request []byte) (bool, error) {
	for i := range wires {
		if ok, err := wires[(n+i)%len(wires)].ask(n, request); ok || err != nil {
			return ok, err
		}
	}
	return false, nil
}
