package main

import (
	"errors"
	"math/rand/v2"
	"runtime"
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

// open has decisions begin when they are due, whatever became of those before.
// Latencies count from then, so that a server that stalls is not asked less
// (coordinated omission), and belong to the window in which the decision was due.
// At most l.callers are under way; the others wait for them, and their wait counts.
func (l *load) open(rate float64, window time.Duration, begin, end func() error) (decided, error) {
	plan := schedule{rate: rate, warm: warmUp, window: window}
	first, total := plan.inWindow()
	all := decided{latencies: make([]time.Duration, total-first)}
	var bypassed, ended atomic.Int64
	var counts atomic.Bool
	due := make(chan int, total) // so that the pacer never waits for callers
	start := time.Now()
	wait, err := l.start(func(i int, c *caller) error {
		random := rand.New(rand.NewPCG(uint64(i), 1))
		for n := range due {
			if err := c.decide(time.Now(), random.IntN(l.subjects)); err != nil {
				return err
			}
			if counts.Load() {
				ended.Add(1)
			}
			if n >= first {
				all.latencies[n-first] = max(1, time.Since(start)-plan.due(n))
				if c.bypassed {
					bypassed.Add(1)
				}
			}
		}
		return nil
	})
	if err != nil {
		return decided{}, err
	}
	paced := make(chan struct{})
	go func() {
		defer close(paced)
		defer close(due)
		pace(start, plan, total, due)
	}()
	time.Sleep(time.Until(start.Add(plan.warm)))
	err = begin()
	counts.Store(true)
	time.Sleep(time.Until(start.Add(plan.warm + plan.window)))
	counts.Store(false)
	err = errors.Join(err, end())
	<-paced
	if e := wait(); !errors.Is(e, errHungUp) { // what was hung up on has not ended, and is counted below
		err = errors.Join(e, err)
	}
	gaveUp := time.Since(start)
	for i, latency := range all.latencies {
		if latency == 0 {
			all.latencies[i] = gaveUp - plan.due(first+i)
			all.unfinished++
		}
	}
	all.bypassed, all.ended = int(bypassed.Load()), int(ended.Load())
	return all, err
}

// pace sends the numbers below total when they are due; those that are late at once.
func pace(start time.Time, plan schedule, total int, due chan<- int) {
	// A thread of its own, which ends with this goroutine, so that nobody else has
	// its timer slack: nanosleep is then finer than Go's timers.
	runtime.LockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // ns; without it a sleep is 50 µs longer
	for n := range total {
		for {
			left := plan.due(n) - time.Since(start)
			if left <= 0 {
				break
			}
			t := unix.NsecToTimespec(int64(left))
			_ = unix.Nanosleep(&t, nil) // a signal may end it early
		}
		due <- n
	}
}
