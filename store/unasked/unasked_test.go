package unasked

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"weir/limit"
	"weir/store"
	"weir/store/memory"
	"weir/store/storetest"
)

const life = 250 * time.Millisecond

// world is a store that others use too, and what this process remembers of it. Its clock has
// parts of a millisecond, as ours has; the store cuts them.
type world struct {
	t      *testing.T
	now    time.Time
	store  store.Store
	memory *Memory
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, now: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC), memory: New(life)}
	w.store = memory.New(memory.Options{Now: func() int64 { return w.now.UnixMilli() }})
	t.Cleanup(func() { _ = w.store.Close() })
	return w
}

// decide asks the store.
func (w *world) decide(checks ...limit.Check) limit.Decision {
	w.t.Helper()
	r := limit.Request{Domain: "d", Checks: checks}
	if r.NeedsLease() {
		r.Lease = storetest.TestLease("d", rand.Uint64()) //nolint:gosec // it need only be new
	}
	d, err := w.store.Decide(storetest.Context(w.t), r)
	if err != nil {
		w.t.Fatal(err)
	}
	return d
}

// ask asks the memory, and if that does not know the store, which takes some time before and
// after.
func (w *world) ask(checks ...limit.Check) (d limit.Decision, known bool) {
	w.t.Helper()
	r := limit.Request{Domain: "d", Checks: checks}
	if d, known := w.memory.Refuse(r, w.now); known {
		return d, true
	}
	asked := w.memory.Ask(w.now)
	d = w.decide(checks...)
	w.memory.Learn(asked, r, d, w.now)
	return d, false
}

func check(l limit.Limit, subject string, hits int64) limit.Check {
	return limit.Check{Key: limit.Key("d", l, []limit.Entry{{Key: "a", Value: subject}}), Limit: l, Hits: hits, Name: "a"}
}

func bucket(t testing.TB, capacity, count int64, period time.Duration) limit.TokenBucket {
	t.Helper()
	b, err := limit.NewTokenBucket(capacity, count, period)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func window(t testing.TB, most int64, unit limit.Unit) limit.Window {
	t.Helper()
	w, err := limit.NewWindow(most, unit, 1)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestARefusalIsRememberedUntilItCanPass(t *testing.T) {
	w := newWorld(t)
	c := check(bucket(t, 1, 10, time.Second), "x", 1) // a token each 100 ms
	for i, step := range []struct {
		after           time.Duration
		admitted, known bool
		wait            time.Duration
	}{
		{0, true, false, 0},
		{0, false, false, 100 * time.Millisecond},
		{40 * time.Millisecond, false, true, 60 * time.Millisecond},
		{58 * time.Millisecond, false, true, 2 * time.Millisecond},
		{time.Millisecond, false, false, time.Millisecond}, // it may pass within the store's next millisecond
		{time.Millisecond, true, false, 0},
	} {
		w.now = w.now.Add(step.after)
		d, known := w.ask(c)
		if got := d.Results[0].RetryAfter; d.Admitted != step.admitted || known != step.known || got != step.wait {
			t.Errorf("step %d: admitted %v, known %v, retry after %v; want %v, %v, %v", i, d.Admitted, known, got, step.admitted, step.known, step.wait)
		}
	}
}

func TestWhatMayNotBeRefusedUnasked(t *testing.T) {
	b := bucket(t, 5, 1, time.Hour)
	lane, err := limit.NewConcurrency(1, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	full := check(b, "x", 3)
	charging := check(window(t, 1, limit.Hour), "w", 1)
	over := charging.Limit.(limit.Window) //nolint:errcheck // it is one
	over.ChargeOver = true
	charging.Limit = over
	shadow, quota, refund := full, full, full
	shadow.Shadow, quota.Quota, refund.Hits = true, 1, -1
	w.ask(full)
	if d, known := w.ask(full); d.Admitted || known {
		t.Fatal("the bucket is not empty, or that is known without asking")
	}
	for name, tt := range map[string]struct {
		request limit.Request
		want    bool
	}{
		"the same":                        {limit.Request{Checks: []limit.Check{full}}, true},
		"less":                            {limit.Request{Checks: []limit.Check{check(b, "x", 2)}}, false},
		"more: its wait is longer":        {limit.Request{Checks: []limit.Check{check(b, "x", 4)}}, false},
		"another subject":                 {limit.Request{Checks: []limit.Check{check(b, "y", 3)}}, false},
		"another policy":                  {limit.Request{Checks: []limit.Check{check(bucket(t, 6, 1, time.Hour), "x", 3)}}, false},
		"in shadow":                       {limit.Request{Checks: []limit.Check{shadow}}, false},
		"of a quota":                      {limit.Request{Checks: []limit.Check{quota}}, false},
		"a refund":                        {limit.Request{Checks: []limit.Check{refund}}, false},
		"beside a refund":                 {limit.Request{Checks: []limit.Check{full, {Key: "k", Limit: b, Hits: -1}}}, false},
		"beside what is to be charged":    {limit.Request{Checks: []limit.Check{full, charging}}, false},
		"beside a lane":                   {limit.Request{Checks: []limit.Check{full, check(lane, "x", 1)}}, true},
		"of a stream, beside a lane":      {limit.Request{Stream: "s", Checks: []limit.Check{full, check(lane, "x", 1)}}, false},
		"of a stream that takes no lease": {limit.Request{Stream: "s", Checks: []limit.Check{full}}, true},
		"of an operation":                 {limit.Request{Operation: limit.Operation{ID: "o"}, Checks: []limit.Check{full}}, false},
	} {
		if d, known := w.memory.Refuse(tt.request, w.now); known != tt.want || d.Admitted {
			t.Errorf("%s: known %v, admitted %v; want %v", name, known, d.Admitted, tt.want)
		}
	}
	d, _ := w.memory.Refuse(limit.Request{Checks: []limit.Check{check(lane, "x", 1), full}}, w.now)
	if !d.Results[0].Passed || !d.Results[0].Unknown || d.Results[1].Passed || d.Results[1].Unknown {
		t.Errorf("beside a lane: %+v, want the lane unasked, and the bucket refused", d.Results)
	}
}

// Full lanes are known by the store alone: a slot may come free at any time.
func TestAFullLaneIsAskedForEachTime(t *testing.T) {
	w := newWorld(t)
	lane, err := limit.NewConcurrency(1, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, known := w.ask(check(lane, "x", 1)); known {
			t.Error("a lane is known to be full")
		}
	}
}

// No refusal that is known would have been an admission: neither by the passing of time, in
// parts of the store's milliseconds, nor by what others spend, nor by what is given back, but
// for what another process gave back within life. The wait that is told may be too short, if
// others have spent since, and is too long by as much as the answer took to come.
func TestTheStoreWouldHaveRefusedToo(t *testing.T) {
	known := 0
	for seed := range uint64(400) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { known += trace(t, rand.New(rand.NewPCG(seed, 1))) })
	}
	if known < 1000 {
		t.Errorf("in all traces %d refusals were known, want more: nothing is shown", known)
	}
}

// trace returns how many refusals were known.
func trace(t *testing.T, r *rand.Rand) (known int) {
	w := newWorld(t)
	limits := []limit.Limit{
		bucket(t, 1+r.Int64N(5), 1+r.Int64N(20), time.Second), bucket(t, 3, 7, time.Minute),
		window(t, 3, limit.Second), window(t, 2, limit.Minute),
	}
	subjects := []string{"x", "y"}
	some := func() limit.Check {
		i := r.IntN(len(limits)) // each has subjects of its own: a bucket has one limit
		return check(limits[i], fmt.Sprint(i, subjects[r.IntN(len(subjects))]), 1+r.Int64N(3))
	}
	given := make(map[string]time.Time) // what others gave back, and when
	type pending struct {
		asked Asked
		r     limit.Request
		d     limit.Decision
	}
	var answers []pending // that are on their way
	for range 300 {
		switch r.IntN(12) {
		case 0, 1, 2:
			w.now = w.now.Add(time.Duration(r.Int64N(int64(60 * time.Millisecond))))
		case 3:
			w.now = w.now.Add(time.Duration(r.Int64N(int64(2 * time.Second))))
		case 4: // others spend
			w.decide(some())
		case 5: // others give back
			c := some()
			c.Hits = -c.Hits
			w.decide(c)
			given[c.Key] = w.now
		case 6: // we give back, while others' answers are on their way
			c := some()
			c.Hits = -c.Hits
			after := w.memory.Give([]string{c.Key})
			w.decide(c)
			after()
		case 7: // an answer comes
			if len(answers) > 0 {
				a := answers[0]
				answers = answers[1:]
				w.memory.Learn(a.asked, a.r, a.d, w.now)
			}
		case 8: // one is asked for, and comes later
			request := limit.Request{Domain: "d", Checks: []limit.Check{some()}}
			asked := w.memory.Ask(w.now)
			w.now = w.now.Add(time.Duration(r.Int64N(int64(3 * time.Millisecond))))
			answers = append(answers, pending{asked, request, w.decide(request.Checks...)})
		default:
			checks := []limit.Check{some()}
			if other := some(); other.Key != checks[0].Key {
				checks = append(checks, other)
			}
			d, unasked := w.memory.Refuse(limit.Request{Domain: "d", Checks: checks}, w.now)
			if !unasked {
				w.ask(checks...)
				continue
			}
			known++
			recent := false
			for i, c := range checks {
				if !d.Results[i].Passed && w.now.Sub(given[c.Key]) <= life {
					recent = true
				}
			}
			if recent {
				continue
			}
			real := w.decide(checks...)
			if real.Admitted {
				t.Fatalf("refused unasked, and the store admits: %+v", d.Results)
			}
			for i, result := range d.Results {
				if !result.Passed && real.Results[i].Passed {
					t.Fatalf("check %d is told %+v, and the store says %+v", i, result, real.Results[i])
				}
			}
		}
	}
	return known
}

func TestARefundOfAnotherProcessIsHonouredInTime(t *testing.T) {
	w := newWorld(t)
	c := check(bucket(t, 1, 1, time.Hour), "x", 1)
	w.ask(c)
	w.ask(c)
	back := c
	back.Hits = -1
	w.decide(back)
	w.now = w.now.Add(life)
	if d, known := w.ask(c); known || !d.Admitted {
		t.Errorf("after %v: admitted %v, known %v; want what was given back", life, d.Admitted, known)
	}
}

func TestALifeIsCutToTheLongest(t *testing.T) {
	for _, tt := range []struct {
		life, after time.Duration
		known       bool
	}{
		{0, 0, false},
		{time.Hour, MaxLife - time.Millisecond, true},
		{time.Hour, MaxLife, false},
	} {
		w := newWorld(t)
		w.memory = New(tt.life)
		c := check(bucket(t, 1, 1, time.Hour), "x", 1)
		w.ask(c)
		w.ask(c) // refused
		w.now = w.now.Add(tt.after)
		if d, known := w.ask(c); d.Admitted || known != tt.known {
			t.Errorf("a life of %v, after %v: admitted %v, known %v, want %v", tt.life, tt.after, d.Admitted, known, tt.known)
		}
	}
}

// What is remembered is bounded, however many are refused.
func TestTheMemoryIsBounded(t *testing.T) {
	m := New(life)
	now := time.Now()
	b := bucket(t, 1, 1, time.Hour)
	for i := range 3 * maxKept {
		r := limit.Request{Checks: []limit.Check{check(b, fmt.Sprint(i), 1)}}
		m.Learn(m.Ask(now), r, limit.Decision{Results: []limit.Result{{RetryAfter: time.Hour}}}, now)
	}
	if n := len(m.now) + len(m.old); n > 2*maxKept {
		t.Errorf("%d are remembered, want at most %d", n, 2*maxKept)
	}
	now = now.Add(3 * life)
	for i := range 3 {
		r := limit.Request{Checks: []limit.Check{check(b, fmt.Sprint(i), 1)}}
		m.Learn(m.Ask(now.Add(time.Duration(i)*2*life)), r, limit.Decision{Results: []limit.Result{{RetryAfter: time.Hour}}}, now)
	}
	if n := len(m.now) + len(m.old); n > 3 {
		t.Errorf("%d are remembered long after, want 3 at most", n)
	}
}

func TestItMayBeUsedAtOnce(t *testing.T) {
	m := New(life)
	b := bucket(t, 1, 1, time.Hour)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			r := limit.Request{Checks: []limit.Check{check(b, fmt.Sprint(i%3), 1)}}
			for range 1000 {
				now := time.Now()
				if _, known := m.Refuse(r, now); !known {
					m.Learn(m.Ask(now), r, limit.Decision{Results: []limit.Result{{RetryAfter: time.Hour}}}, now)
				}
				if i == 0 {
					m.Give([]string{r.Checks[0].Key})()
				}
			}
		})
	}
	all.Wait()
	r := limit.Request{Checks: []limit.Check{check(b, "1", 1)}} // given back to by nobody
	if _, known := m.Refuse(r, time.Now()); !known {
		t.Error("the last refusal is not known")
	}
}
