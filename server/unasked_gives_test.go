package server

import (
	"testing"
	"testing/synctest"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"weir/limit"
	"weir/policy"
	weirv1 "weir/proto/weir/v1"
)

func parsed(t *testing.T, text string) *policy.Set {
	t.Helper()
	set, err := policy.Parse("policy.yaml", []byte(text), policy.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// says asks for so many hits of the limit of each key, for one subject.
func (w *traceWorld) says(t *testing.T, s *Server, hits uint64, keys ...string) string {
	t.Helper()
	m := &rls.RateLimitRequest{Domain: "d"}
	for _, key := range keys {
		m.Descriptors = append(m.Descriptors, traceDescriptor(key, "x", hits))
	}
	switch a := w.decide(t, s, m, limit.Operation{}); {
	case a.err != "":
		return a.err
	case a.verdict.Admitted:
		return "admitted"
	case a.unasked:
		return "refused unasked"
	}
	return "refused"
}

// expect is says for the replica that remembers, and what it must say.
func (w *traceWorld) expect(t *testing.T, want string, hits uint64, keys ...string) {
	t.Helper()
	if got := w.says(t, w.here, hits, keys...); got != want {
		t.Errorf("%d hits of %v: %s, want %s", hits, keys, got, want)
	}
}

// Usage that is settled by the limit's name gives back at once here.
func TestWhatIsSettledHereByNameIsNotRefusedUnasked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTraceWorld(t, remembered)
		w.setPolicy(parsed(t, "domain: d\ndescriptors:\n  - {key: b, rate_limit: {unit: day, requests_per_unit: 2, reserve: 10m}}\n"))
		w.expect(t, "admitted", 2, "b")
		w.expect(t, "refused", 1, "b")
		w.expect(t, "refused unasked", 1, "b")
		r, err := leases{Server: w.here}.Reconcile(t.Context(), &weirv1.ReconcileRequest{Usage: []*weirv1.LeaseUsage{
			{LeaseId: string(w.granted[0].Lease), Limits: []*weirv1.LimitUsage{{Limit: "b", Hits: 1}}},
		}})
		if err != nil || r.GetResults()[0].GetLimits()[0].GetDifference() != -1 {
			t.Fatalf("Reconcile = %v, %v", r, err)
		}
		w.expect(t, "admitted", 1, "b")
	})
}

// A bucket that stood under another policy for a while may have gained more than the one that
// came back says.
func TestAPolicyThatCameAndWentIsNotRefusedUnasked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTraceWorld(t, remembered)
		slow := parsed(t, "domain: d\ndescriptors:\n  - {key: a, token_bucket: {capacity: 2, refill: 1/h}}\n")
		fast := parsed(t, "domain: d\ndescriptors:\n  - {key: a, token_bucket: {capacity: 2, refill: 10/s}}\n")
		w.setPolicy(slow)
		w.expect(t, "admitted", 2, "a")
		w.expect(t, "refused", 1, "a")
		w.expect(t, "refused unasked", 1, "a")
		w.setPolicy(fast)
		if got := w.says(t, w.there, 1, "a"); got != "refused" { // the store carries the bucket over
			t.Errorf("another replica: %s, want refused", got)
		}
		time.Sleep(150 * time.Millisecond)
		w.setPolicy(slow)
		w.expect(t, "admitted", 1, "a")
	})
}

// A refusal without asking is no decision of the store: a bucket beside it that stands under an
// older policy gains as that says, until the store is asked for it.
func TestWhatIsRefusedUnaskedCarriesNoBucketOver(t *testing.T) {
	for _, tt := range []struct {
		remember   time.Duration
		both, then string
	}{{0, "refused", "refused"}, {remembered, "refused unasked", "admitted"}} {
		synctest.Test(t, func(t *testing.T) {
			w := newTraceWorld(t, tt.remember)
			const other = "domain: d\ndescriptors:\n  - {key: b, token_bucket: {capacity: 1, refill: 1/h}}\n"
			w.setPolicy(parsed(t, other+"  - {key: a, token_bucket: {capacity: 2, refill: 10/s}}\n"))
			w.expect(t, "admitted", 2, "a")
			w.expect(t, "admitted", 1, "b")
			w.setPolicy(parsed(t, other+"  - {key: a, token_bucket: {capacity: 2, refill: 1/h}}\n"))
			w.expect(t, "refused", 1, "b")
			w.expect(t, tt.both, 1, "b", "a")
			time.Sleep(100 * time.Millisecond)
			w.expect(t, tt.then, 1, "a")
		})
	}
}
