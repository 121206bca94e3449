package faults

import (
	"fmt"
	"strings"
	"testing"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

// operate is an attempt of an operation: the lease that it gets, or "" without one.
func (r *replica) operate(t testing.TB, id string, attempt uint32) (lease string, replayed bool) {
	t.Helper()
	ctx, cancel := call()
	defer cancel()
	m, err := r.leases.Acquire(ctx, &weirv1.AcquireRequest{
		Domain: "d", Descriptors: []*weirv1.Descriptor{of("account", id)}, OperationId: id, Attempt: attempt,
	})
	if err != nil || !m.GetAdmitted() {
		t.Errorf("attempt %d of %s: %v, %v", attempt, id, m, err)
	}
	return m.GetLease().GetId(), m.GetReplayed()
}

// account is what is left of the tokens and the slots of an account.
func (r *replica) account(t testing.TB, id string) string {
	t.Helper()
	ctx, cancel := call()
	defer cancel()
	m, err := r.leases.Inspect(ctx, &weirv1.InspectRequest{Domain: "d", Entries: []*weirv1.Entry{{Key: "account", Value: id}}})
	if err != nil || len(m.GetLimits()) != 2 {
		return ""
	}
	return fmt.Sprint(m.GetLimits()[0].GetRemaining(), " ", m.GetLimits()[1].GetRemaining())
}

// T14: the network eats the replies of Redis. An attempt is then answered by the failure
// mode, and what it took in Redis is given back whole, unless the operation was told of it
// since: afterwards one token and one slot are taken, and asking again takes no more.
func TestALostReplyCostsAnOperationNothing(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	p := newProxy(t, strings.TrimPrefix(redis.URL, "redis://"))
	r := &replica{proxy: p, Process: servertest.Start(t, `
domain: d
descriptors:
  - {key: account, token_bucket: {capacity: 10, refill: 1/d}, concurrency: {max_in_flight: 5, lease: 1h}}
`, "--redis", "redis://"+p.Listen, "--store-timeout", "100ms", "--max-wait", "0s")}
	r.leases = weirv1.NewLeaseServiceClient(r.Dial(t))
	storetest.Eventually(t, "weir is ready", func() bool { code, _ := r.Get(t, "/healthz"); return code == 200 })
	for n := range 5 {
		id := fmt.Sprint("op", n)
		p.to("downstream", "timeout", 0)
		if lease, _ := r.operate(t, id, 1); lease != "" {
			t.Errorf("%s has the lease %s, and no reply came", id, lease)
		}
		p.heal()
		storetest.Eventually(t, "Redis is asked again", func() bool { return r.account(t, id) != "" })
		// The next attempt may come before what the first took is given back, and then has that.
		lease, _ := r.operate(t, id, 2)
		if again, replayed := r.operate(t, id, 3); again != lease || !replayed {
			t.Errorf("%s has the lease %s, and then %s, again: %v", id, lease, again, replayed)
		}
		storetest.Eventually(t, "what nobody was told of is given back", func() bool { return r.account(t, id) == "9 4" })
		if got := r.release(t, lease); got != released {
			t.Errorf("the release of %s finds %v", id, got)
		}
	}
}
