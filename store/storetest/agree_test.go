package storetest_test

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"weir/limit"
	"weir/store"
	"weir/store/memory"
	"weir/store/redis"
	"weir/store/storetest"
)

// FuzzAgree runs generated programs against both stores and the model, which
// must tell the same after every step.
func FuzzAgree(f *testing.F) {
	for _, seed := range []string{
		"take and take again until the bucket is empty",
		"\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f",
		"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8\xf7\xf6\xf5\xf4\xf3\xf2\xf1\xf0\xef\xee\xed\xec\xeb\xea\xe9\xe8\xe7\xe6\xe5\xe4\xe3\xe2\xe1\xe0",
		"a lane, a pool, a window, a quota and a shadow meet in one request, and some are over",
	} {
		f.Add([]byte(seed))
	}
	clock := storetest.NewClock()
	shared, err := redis.Open(redis.Options{URL: storetest.StartRedis(f, storetest.AnyRedis(f)).URL, Now: clock.Now})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = shared.Close() })
	programs := 0
	f.Fuzz(func(t *testing.T, data []byte) {
		programs++
		p := program{
			data:   goOn(data),
			domain: fmt.Sprintf("d%d", programs), // so that each starts with an empty Redis
			clock:  clock,
			stores: map[string]store.Store{
				"memory": memory.New(memory.Options{Now: clock.Now}),
				"redis":  shared,
			},
			model: storetest.NewModel(clock.Now),
		}
		for steps := 0; len(p.data) > 0 && steps < 200; steps++ {
			p.step(t)
		}
	})
}

// goOn is data with more behind it, made of it: what a fuzz engine makes is mostly short, and
// what goes wrong mostly takes many steps.
func goOn(data []byte) storetest.Choices {
	sum := fnv.New64a()
	_, _ = sum.Write(data) // it never fails
	r := rand.New(rand.NewPCG(sum.Sum64(), 0))
	all := append(make(storetest.Choices, 0, len(data)+1000), data...)
	for range 1000 {
		all = append(all, byte(r.Uint32()))
	}
	return all
}

// program reads its steps from bytes.
type program struct {
	data   storetest.Choices
	domain string
	clock  *storetest.Clock
	stores map[string]store.Store
	model  *storetest.Model

	policies int // how often the limits have changed
	leases   []limit.LeaseID
	asked    []limit.Request
	granted  []limit.Request
	usage    []limit.Usage // that was told
	latest   int64         // ms that the clock has shown
}

func (p *program) next(n int) int { return p.data.Next(n) }

// some is one of n that came one after the other: as likely the last as any.
func (p *program) some(n int) int {
	if p.next(2) == 0 {
		return n - 1
	}
	return p.next(n)
}

func pick[T any](p *program, from ...T) T { return from[p.next(len(from))] }

func (p *program) step(t *testing.T) {
	ctx := storetest.Context(t)
	switch p.next(15) {
	case 0:
		by := pick[int64](p, 1, 3, 250, 999, 1000, 7001, 23_456, 60_000, 3_600_000, 3_800_000, 86_400_000, 40*86_400_000, -2, -2, -5000, -5000, -5000)
		// Back to where all is known that was, and buckets and windows are still kept.
		p.latest = max(p.latest, p.clock.Now())
		if to := p.clock.Now() + by; by < 0 && (p.latest-to > 9000 || p.model.Ends(to, p.latest)) {
			by = -by
		}
		p.clock.Advance(time.Duration(by) * time.Millisecond)
	case 1:
		p.policies = p.next(4)
	case 2:
		e := limit.Ending{Early: p.next(3) == 0}
		if p.next(2) == 0 && len(p.leases) > 0 {
			e.Lease = p.leases[p.next(len(p.leases))]
		} else {
			e.Domain, e.Stream, e.Tombstone = p.domain, p.stream(), p.next(3) > 0
		}
		want, _ := p.model.Release(ctx, e)
		for name, s := range p.stores {
			got, err := s.Release(ctx, e)
			if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("%s: Release(%+v) = %v, %v, want %v", name, e, got, err, want)
			}
		}
	case 11:
		if len(p.granted) == 0 {
			return
		}
		r := p.granted[p.some(len(p.granted))]
		want, _ := p.model.Undo(ctx, r)
		for name, s := range p.stores {
			got, err := s.Undo(ctx, r)
			if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("%s: Undo(%+v) = %v, %v, want %v", name, r, got, err, want)
			}
		}
		p.inspect(t, r.Checks)
	case 5, 12:
		u := p.used()
		p.usage = append(p.usage, u)
		want, _ := p.model.Settle(ctx, u)
		for name, s := range p.stores {
			got, err := s.Settle(ctx, u)
			if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("%s: Settle(%+v) = %v, %v, want %v", name, u, got, err, want)
			}
		}
		p.inspect(t, u.Checks)
	case 13:
		after, n := limit.Slot{}, 1+p.next(3)
		for {
			want, _ := p.model.Leases(ctx, p.domain, after, n)
			for name, s := range p.stores {
				got, err := s.Leases(ctx, p.domain, after, n)
				if diff := cmp.Diff(want, got); err != nil || diff != "" {
					t.Fatalf("%s: Leases(%+v, %d): %v (-want +got):\n%s", name, after, n, err, diff)
				}
			}
			if after = want.Next; after == (limit.Slot{}) {
				break
			}
		}
	case 14:
		r := p.request()
		_ = p.model.Reset(ctx, r.Checks)
		for name, s := range p.stores {
			if err := s.Reset(ctx, r.Checks); err != nil {
				t.Fatalf("%s: Reset(%+v): %v", name, r.Checks, err)
			}
		}
	case 3:
		if len(p.leases) == 0 {
			return
		}
		e := limit.Extension{Lease: p.leases[p.next(len(p.leases))], OfStream: p.next(3) == 0}
		want, _ := p.model.Renew(ctx, e)
		for name, s := range p.stores {
			got, err := s.Renew(ctx, e)
			if err != nil || got != want {
				t.Fatalf("%s: Renew(%+v) = %v, %v, want %v", name, e, got, err, want)
			}
		}
	case 4:
		p.inspect(t, p.request().Checks)
	default:
		r := p.request()
		states, err := p.stores["memory"].Inspect(ctx, r.Checks)
		if err != nil {
			t.Fatal(err)
		}
		foreseen := limit.Foresee(r.Checks, states)
		d, wrong := p.model.Decide(ctx, r)
		if wrong == nil && !d.Replayed && !d.StreamEnded {
			if foreseen.Admitted != d.Admitted {
				t.Fatalf("for %+v it was foreseen that admitted is %v", r.Checks, foreseen.Admitted)
			}
			for i, c := range r.Checks {
				if foreseen.Results[i].Passed != d.Results[i].Passed {
					t.Fatalf("for %+v it was foreseen that passed is %v", c, foreseen.Results[i].Passed)
				}
			}
		}
		d.Expired = 0 // a report for metrics, that may be lost when a domain is idle for an hour
		if d.Lease == r.Lease && r.Lease != "" {
			p.granted = append(p.granted, r)
		}
		want := ""
		if wrong == nil {
			want = storetest.Sentence(r.Checks, d, "L")
		}
		for name, s := range p.stores {
			d, err := s.Decide(ctx, r)
			if wrong != nil && errors.Is(err, wrong) {
				continue
			}
			if err != nil || wrong != nil {
				t.Fatalf("%s: Decide(%+v): %v, want %v", name, r, err, wrong)
			}
			if d.Replayed != (d.Lease != r.Lease && d.Lease != "") {
				t.Fatalf("%s: Decide = %+v for the lease %s", name, d, r.Lease)
			}
			d.Expired = 0
			if got := storetest.Sentence(r.Checks, d, "L"); got != want {
				t.Fatalf("%s: step for %+v:\n got %s\nwant %s", name, r.Checks, got, want)
			}
		}
		want2, _ := p.model.Held(ctx, p.domain)
		for name, s := range p.stores {
			if got, err := s.Held(ctx, p.domain); err != nil || got != want2 {
				t.Fatalf("%s: Held = %d, %v, want %d", name, got, err, want2)
			}
		}
	}
}

func (p *program) inspect(t *testing.T, checks []limit.Check) {
	t.Helper()
	ctx := storetest.Context(t)
	want, _ := p.model.Inspect(ctx, checks)
	for name, s := range p.stores {
		got, err := s.Inspect(ctx, checks)
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); err != nil || diff != "" {
			t.Fatalf("%s: Inspect %+v: %v (-want +got):\n%s", name, checks, err, diff)
		}
	}
}

// used is usage: told before, or of what a request was granted, or of anything.
func (p *program) used() limit.Usage {
	if n := len(p.usage); n > 0 && p.next(4) == 0 {
		return p.usage[p.some(n)]
	}
	u := limit.Usage{Domain: p.domain, Stream: p.stream(), Reserved: p.next(4) == 0}
	if p.next(2) == 0 && len(p.leases) > 0 {
		u.Lease = p.leases[p.next(len(p.leases))]
		if p.next(2) == 0 {
			u.Stream = ""
		}
		for range p.next(3) {
			u.Limits = append(u.Limits, limit.Used{Limit: pick(p, "", "n", "m"), Hits: pick[int64](p, 0, 1, 3, 5, 50, limit.MaxExact)})
		}
	}
	var checks []limit.Check
	if n := len(p.granted); n > 0 && p.next(2) == 0 {
		r := p.granted[p.some(n)]
		checks = r.Checks
		if r.Stream != "" {
			u.Stream = r.Stream
		}
	} else {
		checks = p.request().Checks
	}
	for _, c := range checks {
		if _, slot := c.Limit.(limit.Concurrency); !slot {
			u.Checks = append(u.Checks, c)
		}
	}
	return u
}

// request returns a request with up to four checks, of any kind; or with those of an earlier
// one, under the policy that was then.
func (p *program) request() limit.Request {
	r := limit.Request{Domain: p.domain}
	if n := len(p.asked); n > 0 && p.next(2) == 0 {
		r.Checks = p.asked[p.some(n)].Checks
	} else {
		r.Checks = p.checks()
	}
	if p.next(4) == 0 {
		r.Operation = limit.Operation{ID: pick(p, "o1", "o2"), Attempt: uint32(p.next(3))}
		r.Operation.Body[0] = byte(p.next(5) / 4)
	}
	if r.NeedsLease() {
		r.Lease = storetest.TestLease(p.domain, uint64(len(p.leases)+1))
		p.leases = append(p.leases, r.Lease)
		if p.next(2) == 0 && r.Operation.ID == "" {
			r.Stream = p.stream()
		}
	}
	p.asked = append(p.asked, r)
	return r
}

func (p *program) checks() (all []limit.Check) {
	for i := range 1 + p.next(4) {
		subject := []limit.Entry{{Key: "k", Value: pick(p, "a", "b", "c")}}
		c := limit.Check{Name: pick(p, "n", "m"), Hits: pick[int64](p, 1, 1, 1, 0, 2, 3, 7, 11, -1, -4, limit.MaxExact, -limit.MaxExact)}
		c.Class = pick(p, limit.Lane, limit.Lane, limit.Pool)
		switch p.next(6) {
		case 0:
			c.Shadow = true
		case 1:
			c.Quota = i + 1
		}
		switch p.next(3) {
		case 0:
			c.Limit = p.bucket()
		case 1:
			newWindow := limit.NewWindow
			if p.next(2) == 0 {
				newWindow = limit.NewSlidingWindow
			}
			w, err := newWindow(pick[int64](p, 3, 10, 1, 0), pick(p, limit.Second, limit.Minute, limit.Hour, limit.Day, limit.Month), pick[int64](p, 1, 1, 7))
			if err != nil {
				panic(err)
			}
			w.ChargeOver = p.next(3) == 0
			c.Limit = w
		case 2:
			l, err := limit.NewConcurrency(pick[int64](p, 3, 1, 2), pick(p, 2*time.Second, time.Minute, 1500*time.Millisecond))
			if err != nil {
				panic(err)
			}
			l.Linger = pick(p, 0, 0, time.Second, 3*time.Second, 2*time.Minute)
			c.Limit = l
			if c.Quota != 0 {
				c.Quota = 0
			}
		}
		if _, slot := c.Limit.(limit.Concurrency); !slot {
			c.Reserve = pick(p, 0, 0, 3*time.Second, 2*time.Minute)
		}
		c.Key = limit.Key(p.domain, c.Limit, subject)
		if !sameState(all, c) {
			all = append(all, c)
		}
	}
	return all
}

func (p *program) stream() string { return pick(p, "s1", "s2", "s3") }

// bucket returns one of four, which stand for changes of one policy.
func (p *program) bucket() limit.TokenBucket {
	configs := []struct {
		capacity, count int64
		period          time.Duration
	}{
		{10, 1, time.Second},
		{3, 2, time.Second},
		{7, 7, time.Minute},
		{1_000_000_000, 99_991, 100_003 * time.Millisecond},
	}
	c := configs[p.policies]
	b, err := limit.NewTokenBucket(c.capacity, c.count, c.period)
	if err != nil {
		panic(err)
	}
	return b
}

// sameState reports whether c would share its state with one of checks, as
// policies never let two buckets or two lanes do; windows may if each carries
// the same hits.
func sameState(checks []limit.Check, c limit.Check) bool {
	for _, o := range checks {
		if o.Key == c.Key {
			if _, ok := c.Limit.(limit.Window); !ok || o.Hits != c.Hits {
				return true
			}
		}
	}
	return false
}
