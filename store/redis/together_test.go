package redis

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	goredis "github.com/redis/go-redis/v9"

	"weir/limit"
	"weir/store/storetest"
)

// Calls that come together are as the same calls one after the other: their replies, and all that
// is in Redis afterwards, with its expiries.
func TestTogetherIsAsOneByOne(t *testing.T) {
	for name, bin := range storetest.RedisBinaries(t) {
		t.Run(name, func(t *testing.T) {
			clock := storetest.NewClock()
			together, single := openSide(t, bin, clock), openSide(t, bin, clock)
			for seed := range uint64(40) {
				together.client.FlushAll(t.Context())
				single.client.FlushAll(t.Context())
				c := &crowd{r: rand.New(rand.NewPCG(seed, 1)), domain: "d"}
				for step := range 8 {
					clock.Advance(one(c, 0, time.Millisecond, 250*time.Millisecond, 3*time.Second, 70*time.Second, -2*time.Millisecond))
					requests, endings := c.requests(one(c, 2, 30, 100)), c.endings(one(c, 0, 3, 20))
					what := fmt.Sprintf("seed %d, step %d", seed, step)
					sameCalls(t, what, together, single, func(s *Store) (all []*call) {
						for _, r := range requests {
							all = append(all, s.decideCall(r))
						}
						return all
					})
					sameCalls(t, what, together, single, func(s *Store) (all []*call) {
						for _, e := range endings {
							all = append(all, s.releaseCall(e))
						}
						return all
					})
					if d := cmp.Diff(single.content(t), together.content(t)); d != "" {
						t.Fatalf("%s: in Redis (-one by one +together):\n%s", what, d)
					}
				}
			}
		})
	}
}

// A set whose members have all expired, and are cleaned away by two requests that come
// together, has an expiry afterwards.
func TestASetThatIsMadeAnewTogetherExpires(t *testing.T) {
	clock := storetest.NewClock()
	s := openSide(t, storetest.AnyRedis(t), clock)
	lane := limit.Concurrency{Max: 1000, Lease: 2 * time.Second}
	n := uint64(0)
	ask := func(subject string) *call {
		n++
		key := limit.Key("d", lane, []limit.Entry{{Key: "k", Value: subject}})
		return s.decideCall(limit.Request{Domain: "d", Lease: storetest.TestLease("d", n), Checks: []limit.Check{{Name: "n", Limit: lane, Hits: 1, Key: key}}})
	}
	for range 70 { // more than one request cleans away
		s.send(t, ask("others"))
	}
	s.send(t, ask("mine"))
	clock.Advance(3 * time.Second)
	s.send(t, ask("mine"), ask("mine"))
	for key, is := range s.content(t) {
		if !is.Expires {
			t.Errorf("%s has no expiry: %v", key, is)
		}
	}
}

// side is a store whose calls are sent as a test says.
type side struct {
	*Store
	client *goredis.Client
}

func openSide(t *testing.T, bin string, clock *storetest.Clock) side {
	t.Helper()
	s, err := Open(Options{URL: storetest.StartRedis(t, bin).URL, Now: clock.Now})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return side{s, s.routes.node("").client}
}

// send sends calls in one round trip, and returns their replies or errors.
func (s side) send(t *testing.T, all ...*call) (told []string) {
	t.Helper()
	for _, c := range all {
		c.ctx, c.undo = t.Context(), nil
	}
	s.routes.node("").pipes.send(slices.Clone(all), storetest.Deadline)
	for _, c := range all {
		told = append(told, fmt.Sprintf("%q %v", c.reply.rest, c.err))
	}
	return told
}

func sameCalls(t *testing.T, what string, together, single side, calls func(s *Store) []*call) {
	t.Helper()
	got := together.send(t, calls(together.Store)...)
	for i, c := range calls(single.Store) {
		if want := single.send(t, c)[0]; got[i] != want {
			t.Fatalf("%s: call %d of %d is told %s together, and %s one by one", what, i, len(got), got[i], want)
		}
	}
}

// kept is what is under a key.
type kept struct {
	Value   string
	Expires bool
}

func (s side) content(t *testing.T) map[string]kept {
	t.Helper()
	ctx := context.Background()
	keys, err := s.client.Keys(ctx, "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]kept, len(keys))
	for _, k := range keys {
		value := fmt.Sprint(s.client.ZRangeWithScores(ctx, k, 0, -1).Val())
		if text, err := s.client.Get(ctx, k).Result(); err == nil {
			value = fmt.Sprintf("%q", text)
		}
		all[k] = kept{value, s.client.PTTL(ctx, k).Val() > 0}
	}
	return all
}

// crowd makes requests at random, of few subjects.
type crowd struct {
	r      *rand.Rand
	domain string
	asked  []limit.Request
	leases []limit.LeaseID
}

func one[T any](c *crowd, from ...T) T { return from[c.r.IntN(len(from))] }

func (c *crowd) requests(n int) (all []limit.Request) {
	for range n {
		r := limit.Request{Domain: c.domain, Checks: c.checks()}
		if len(c.asked) > 0 && c.r.IntN(3) > 0 {
			r = c.asked[c.r.IntN(len(c.asked))]
			if c.r.IntN(8) == 0 {
				all = append(all, r) // the very same, lease and all
				continue
			}
			r.Stream, r.Operation = "", limit.Operation{}
		}
		if c.r.IntN(4) == 0 {
			r.Operation = limit.Operation{ID: one(c, "o1", "o2"), Attempt: one[uint32](c, 0, 1, 2)}
		}
		r.Lease = ""
		if r.NeedsLease() {
			r.Lease = storetest.TestLease(c.domain, uint64(len(c.leases)))
			c.leases = append(c.leases, r.Lease)
			if c.r.IntN(3) == 0 && r.Operation.ID == "" {
				r.Stream = one(c, "s1", "s2")
			}
		}
		c.asked = append(c.asked, r)
		all = append(all, r)
	}
	return all
}

func (c *crowd) checks() []limit.Check {
	all := make(map[string]limit.Check)
	for i := range 1 + c.r.IntN(4) {
		check := limit.Check{Name: one(c, "n", "m"), Hits: one[int64](c, 1, 1, 1, 0, 2, 7, -1, limit.MaxExact, -limit.MaxExact)}
		switch c.r.IntN(4) {
		case 0:
			check.Limit = one(c, limit.TokenBucket{Capacity: 10, Scale: 1000, Refill: 1}, limit.TokenBucket{Capacity: 3, Scale: 500, Refill: 1})
		case 1:
			check.Limit = limit.Window{Max: one[int64](c, 3, 10, 0), Unit: one(c, limit.Second, limit.Minute), Multiplier: 1, Sliding: c.r.IntN(2) == 0, ChargeOver: c.r.IntN(3) == 0}
		default:
			check.Limit = limit.Concurrency{Max: one[int64](c, 1, 3, 100, 100), Lease: one(c, 2*time.Second, time.Minute), Linger: one(c, 0, 0, time.Second)}
		}
		if _, slot := check.Limit.(limit.Concurrency); !slot {
			check.Reserve = one(c, 0, 0, 3*time.Second)
			check.Quota = one(c, 0, 0, 0, i+1)
		}
		check.Shadow = check.Quota == 0 && c.r.IntN(6) == 0
		check.Key = limit.Key(c.domain, check.Limit, []limit.Entry{{Key: "k", Value: one(c, "a", "b")}})
		all[check.Key] = check
	}
	var list []limit.Check
	for _, key := range slices.Sorted(maps.Keys(all)) {
		list = append(list, all[key])
	}
	return list
}

func (c *crowd) endings(n int) (all []limit.Ending) {
	for range n {
		e := limit.Ending{Early: c.r.IntN(3) == 0, Domain: c.domain, Stream: one(c, "s1", "s2"), Tombstone: c.r.IntN(3) > 0}
		if len(c.leases) > 0 && c.r.IntN(3) > 0 {
			e = limit.Ending{Early: e.Early, Lease: c.leases[c.r.IntN(len(c.leases))]}
		}
		all = append(all, e)
	}
	return all
}
