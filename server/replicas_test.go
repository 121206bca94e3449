package server_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	goredis "github.com/redis/go-redis/v9" //nolint:depguard // looks at the keys themselves, past the store

	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
)

const replicasPolicy = `
domain: d
descriptors:
  - {key: bucket, token_bucket: {capacity: 7, refill: 1/d}}
  - {key: user, concurrency: {max_in_flight: 7, lease: 1h}}
  - {key: g, token_bucket: {capacity: 10, refill: 10/d}}
  - {key: x, token_bucket: {capacity: 3, refill: 3/d}}
`

// replicas are processes on one Redis.
type replicas []*replica

func startReplicas(t testing.TB, redis *storetest.Redis, n int) replicas {
	t.Helper()
	var rs replicas
	for range n {
		// A busy machine must not make them fail open.
		rs = append(rs, newReplica(t, replicasPolicy, "--redis", redis.URL, "--store-timeout", "20s"))
	}
	for _, r := range rs {
		r.ready(t)
	}
	return rs
}

// askers is how many ask at once.
const askers = 200

// together asks as often as there are askers, each time another replica, and
// returns the answers. None may be a bypass.
func (rs replicas) together(t testing.TB, descriptors ...*weirv1.Descriptor) []*weirv1.AcquireResponse {
	t.Helper()
	answers, errs := make([]*weirv1.AcquireResponse, askers), make([]error, askers)
	var work sync.WaitGroup
	start := make(chan struct{})
	for i := range askers {
		work.Go(func() {
			<-start
			answers[i], errs[i] = rs[i%len(rs)].leases.Acquire(storetest.Context(t), &weirv1.AcquireRequest{Domain: "d", Descriptors: descriptors})
		})
	}
	close(start)
	work.Wait()
	for i, err := range errs {
		if err != nil || answers[i].GetBypass() != weirv1.Bypass_BYPASS_UNSPECIFIED {
			t.Fatalf("Acquire: %v, bypass %v", err, answers[i].GetBypass())
		}
	}
	return answers
}

func admitted(answers []*weirv1.AcquireResponse) int {
	n := 0
	for _, a := range answers {
		if a.GetAdmitted() {
			n++
		}
	}
	return n
}

func leaseIDs(answers []*weirv1.AcquireResponse) []string {
	var ids []string
	for _, a := range answers {
		if id := a.GetLease().GetId(); id != "" {
			ids = append(ids, id)
		}
	}
	return ids
}

func redisClient(t testing.TB, redis *storetest.Redis) *goredis.Client {
	t.Helper()
	opts, err := goredis.ParseURL(redis.URL)
	if err != nil {
		t.Fatal(err)
	}
	client := goredis.NewClient(opts)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// C15: 200 askers through 4 processes on one Redis get exactly what there is.
func TestReplicasAdmitExactlyTheLimitTogether(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	rs, client := startReplicas(t, redis, 4), redisClient(t, redis)

	if got := admitted(rs.together(t, typed("bucket", "b"))); got != 7 {
		t.Errorf("200 at a bucket of 7: %d were admitted, want 7", got)
	}

	answers := rs.together(t, typed("user", "u"))
	ids := leaseIDs(answers)
	if got := admitted(answers); got != 7 || len(ids) != 7 || len(slices.Compact(slices.Sorted(slices.Values(ids)))) != 7 {
		t.Errorf("200 at a lane of 7: %d were admitted, with the leases %q; want 7, with as many", got, ids)
	}
	for _, set := range []string{"weir:{d}:c:user=u", "weir:{d}:leases"} {
		if n, err := client.ZCard(t.Context(), set).Result(); n != 7 || err != nil {
			t.Errorf("%s has %d members (%v), want 7", set, n, err)
		}
	}
	for _, r := range rs {
		r.heldReaches(t, 7)
	}

	// Each lease at all replicas at once: one of them ends it.
	for _, id := range ids {
		results := make([]string, len(rs))
		var work sync.WaitGroup
		for i, r := range rs {
			work.Go(func() {
				m, err := r.leases.Release(storetest.Context(t), &weirv1.ReleaseRequest{LeaseIds: []string{id}})
				if err != nil || len(m.GetResults()) != 1 {
					results[i] = fmt.Sprint(m, err)
					return
				}
				results[i] = strings.TrimPrefix(m.GetResults()[0].GetStatus().String(), "RELEASE_STATUS_")
			})
		}
		work.Wait()
		slices.Sort(results)
		if diff := cmp.Diff([]string{"NOT_HELD", "NOT_HELD", "NOT_HELD", "RELEASED"}, results); diff != "" {
			t.Errorf("the same lease at all replicas (-want +got):\n%s", diff)
		}
	}
	for _, r := range rs {
		r.heldReaches(t, 0)
	}
	for _, set := range []string{"weir:{d}:c:user=u", "weir:{d}:leases"} {
		if n, err := client.ZCard(t.Context(), set).Result(); n != 0 || err != nil {
			t.Errorf("%s has %d members (%v) after all releases, want none", set, n, err)
		}
	}
	if got := admitted(rs.together(t, typed("user", "u"))); got != 7 {
		t.Errorf("200 at the lane that is free again: %d were admitted, want 7", got)
	}
}

// T08: what a refused request met keeps its tokens for those that ask for it
// alone. 20 times, each with subjects of its own.
func TestReplicasRefuseWithoutCharging(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	rs := startReplicas(t, redis, 3)
	for i := range 20 {
		subject := fmt.Sprint(i)
		both := admitted(rs.together(t, typed("g", subject), typed("x", subject)))
		alone := admitted(rs.together(t, typed("g", subject)))
		if both != 3 || alone != 7 {
			t.Errorf("round %d: %d then %d were admitted, want 3 then 7", i, both, alone)
		}
	}
}
