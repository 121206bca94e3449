package server

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"weir/limit"
	"weir/policy"
	weirv1 "weir/proto/weir/v1"
	"weir/store"
	"weir/store/memory"
	"weir/store/storetest"
)

// A trace asks two worlds the same, at the same times: one remembers refusals, and one asks
// its store each time. Both must tell the same, but for what a refusal without asking cannot
// know: the other limits of its request.

// remembered is how long the first world remembers.
const remembered = 250 * time.Millisecond

// tracePolicy is one of several, which allow other numbers, or name and enforce other limits.
func tracePolicy(n int) string {
	mode := []string{"false", "true"}[n/2%2]
	return fmt.Sprintf(`
domain: d
descriptors:
  - {key: fast, token_bucket: {capacity: %[1]d, refill: %[2]d/s}}
  - {key: slow, token_bucket: {capacity: %[1]d, refill: %[1]d/h, reserve: 10m, name: slow%[1]d}}
  - {key: second, rate_limit: {unit: second, requests_per_unit: %[1]d}}
  - {key: day, rate_limit: {unit: day, requests_per_unit: %[1]d, reserve: 10m}}
  - {key: slide, rate_limit: {unit: second, requests_per_unit: %[1]d, window: sliding}}
  - {key: over, rate_limit: {unit: second, requests_per_unit: 2, on_over: charge}}
  - {key: lane, concurrency: {max_in_flight: 2, lease: 1s}}
  - {key: pool, token_bucket: {capacity: %[1]d, refill: 10/s}, reject_as: pool}
  - {key: full, concurrency: {max_in_flight: 1, lease: 1s}, reject_as: pool}
  - {key: both, token_bucket: {capacity: 2, refill: 5/s}, concurrency: {max_in_flight: 2, lease: 1s}}
  - {key: one, rate_limit: {unit: second, requests_per_unit: 1}, quota_mode: true}
  - {key: two, token_bucket: {capacity: 2, refill: 3/s}, quota_mode: true}
  - {key: shade, token_bucket: {capacity: 2, refill: 3/s}, shadow_mode: true}
  - {key: maybe, token_bucket: {capacity: 2, refill: 4/s}, shadow_mode: %[3]s}
  - {key: banned, rate_limit: {unit: day, requests_per_unit: 0}}
`, 2+n%3, 7*(n%3+1), mode)
}

// traceKeys are its limits; those that come first, and more than once, are most asked for.
var traceKeys = strings.Fields("fast slow second day pool both fast slow second day pool fast slow day over over lane full slide over one two shade maybe banned")

// traceWorld is a store and two replicas: one that is asked, and another.
type traceWorld struct {
	store       *countingStore
	here, there *Server
	granted     []limit.Request // with their leases
}

func newTraceWorld(t *testing.T, remember time.Duration) *traceWorld {
	st := &countingStore{Store: memory.New(memory.Options{Now: func() int64 { return time.Now().UnixMilli() }})}
	return &traceWorld{store: st, here: replicaOn(t, st, remember), there: replicaOn(t, st, 0)}
}

// replicaOn is a server that remembers refusals for so long.
func replicaOn(t *testing.T, st store.Store, remember time.Duration) *Server {
	s := New(Options{
		Store: st, StoreTimeout: storetest.Deadline, RememberRefusals: remember,
		Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry(),
	})
	t.Cleanup(s.Close)
	return s
}

func (w *traceWorld) setPolicy(set *policy.Set) {
	for _, s := range []*Server{w.here, w.there} {
		s.SetPolicy(context.Background(), policy.Reading{Set: set, Changed: true})
	}
}

// countingStore counts how often it is asked.
type countingStore struct {
	store.Store
	asked int
}

func (s *countingStore) Decide(ctx context.Context, r limit.Request) (limit.Decision, error) {
	s.asked++
	return s.Store.Decide(ctx, r)
}

// traceAnswer is what a world said.
type traceAnswer struct {
	decision limit.Decision
	verdict  limit.Verdict
	unasked  bool
	err      string
}

// questionOf reads a message.
func questionOf(t *testing.T, m *rls.RateLimitRequest) *question {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	q := new(question)
	if err := q.read(b); err != nil {
		t.Fatal(err)
	}
	return q
}

func (w *traceWorld) decide(t *testing.T, s *Server, m *rls.RateLimitRequest, operation limit.Operation) traceAnswer {
	t.Helper()
	var d decided
	var err error
	before := w.store.asked
	if operation.ID != "" {
		r := policy.Request{Domain: m.GetDomain()}
		for _, one := range m.GetDescriptors() {
			e := one.GetEntries()[0]
			r.Descriptors = append(r.Descriptors, policy.Descriptor{Entries: []limit.Entry{{Key: e.GetKey(), Value: e.GetValue()}}, Hits: one.GetHitsAddend().GetValue(), HasHits: true})
		}
		d, err = s.decide(t.Context(), s.loaded.Load(), r, asker{operation: operation})
	} else {
		var a answered
		a, err = rateLimit{Server: s}.answer(t.Context(), questionOf(t, m))
		d = a.decided
	}
	if err != nil {
		return traceAnswer{err: err.Error()}
	}
	if d.decision.Lease != "" {
		w.granted = append(w.granted, limit.Request{Domain: "d", Checks: d.match.Checks, Lease: d.decision.Lease})
	}
	return traceAnswer{decision: d.decision, verdict: d.verdict, unasked: w.store.asked == before && len(d.match.Checks) > 0}
}

// agreement is a trace that is read from bytes.
type agreement struct {
	t       *testing.T
	choices storetest.Choices
	set     []*policy.Set
	worlds  [2]*traceWorld        // that remembers, and that asks
	now     int                   // of set
	fine    bool                  // time passes in parts of a millisecond
	given   time.Time             // when the other replica last gave something back
	spent   time.Time             // and when it last spent
	unasked int                   // refusals
	last    *rls.RateLimitRequest // without a stream
}

func (p *agreement) next(n int) int { return p.choices.Next(n) }

func runTrace(t *testing.T, data []byte) (unasked int) {
	synctest.Test(t, func(t *testing.T) {
		p := &agreement{t: t, choices: data, worlds: [2]*traceWorld{newTraceWorld(t, remembered), newTraceWorld(t, 0)}}
		for n := range 6 {
			set, err := policy.Parse("trace.yaml", []byte(tracePolicy(n)), policy.Options{})
			if err != nil {
				t.Fatal(err)
			}
			p.set = append(p.set, set)
		}
		p.fine = p.next(4) == 0
		p.policy(p.next(len(p.set)))
		for steps := 0; len(p.choices) > 0 && steps < 400 && !t.Failed(); steps++ {
			p.step()
		}
		unasked = p.unasked
	})
	return unasked
}

// policy changes it. All buckets are asked for then, without a cost: a bucket that stands
// under an old limit gains as that says until the store is asked for it, and a refusal
// without asking asks for none.
func (p *agreement) policy(n int) {
	p.now = n
	for _, w := range p.worlds {
		w.setPolicy(p.set[n])
	}
	ask := &rls.RateLimitRequest{Domain: "d"}
	for _, key := range traceKeys {
		for _, value := range []string{"x", "y"} {
			ask.Descriptors = append(ask.Descriptors, traceDescriptor(key, value, 0))
		}
	}
	for _, w := range p.worlds {
		w.decide(p.t, w.there, ask, limit.Operation{})
	}
}

func traceDescriptor(key, value string, hits uint64) *ratelimit.RateLimitDescriptor {
	return &ratelimit.RateLimitDescriptor{Entries: []*ratelimit.RateLimitDescriptor_Entry{{Key: key, Value: value}}, HitsAddend: wrapperspb.UInt64(hits)}
}

// request is what to ask, up to three limits at once.
func (p *agreement) request() *rls.RateLimitRequest {
	m := &rls.RateLimitRequest{Domain: "d"}
	for range 1 + p.next(6)/2%3 {
		d := traceDescriptor(traceKeys[p.next(len(traceKeys))], []string{"x", "x", "x", "x", "y"}[p.next(5)], uint64(p.next(7)/2))
		switch p.next(16) {
		case 0:
			d.IsNegativeHits = true
		case 1, 2:
			d.Limit = &ratelimit.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: uint32(1 + p.next(4)), Unit: []typev3.RateLimitUnit{typev3.RateLimitUnit_SECOND, typev3.RateLimitUnit_DAY}[p.next(2)]}
		}
		m.Descriptors = append(m.Descriptors, d)
	}
	return m
}

func (p *agreement) stream() string { return fmt.Sprint("s", p.next(5)) }

func (p *agreement) step() {
	switch p.next(20) {
	case 0, 1, 2:
		by := time.Duration([]int{1, 1, 2, 20, 49, 50, 51, 100, 249, 250, 251, 600, 999}[p.next(13)]) * time.Millisecond
		if p.fine {
			by += time.Duration(p.next(250)) * 4 * time.Microsecond
		}
		time.Sleep(by)
	case 3, 12:
		p.lease()
		p.again()
	case 4:
		switch p.next(8) {
		case 0:
			p.policy(p.next(len(p.set)))
		case 1: // it comes and goes
			before := p.now
			p.policy(p.next(len(p.set)))
			time.Sleep(time.Duration(p.next(5)*50) * time.Millisecond)
			p.policy(before)
			p.again()
		}
	case 5: // the other replica
		m := p.request()
		for _, d := range m.GetDescriptors() {
			if d.GetIsNegativeHits() {
				p.given = time.Now()
			}
		}
		p.spent = time.Now()
		p.same(m, p.worlds[0].decide(p.t, p.worlds[0].there, m, limit.Operation{}), p.worlds[1].decide(p.t, p.worlds[1].there, m, limit.Operation{}))
	case 6:
		m := p.request()
		for _, d := range m.GetDescriptors() {
			d.IsNegativeHits, d.Limit = false, nil
		}
		o := limit.Operation{ID: p.stream(), Attempt: uint32(p.next(3))}
		p.ask(m, o)
	case 7:
		m := p.request()
		m.Descriptors = append(m.Descriptors, traceDescriptor("weir.stream_id", p.stream(), 1))
		p.ask(m, limit.Operation{})
	case 8, 9, 10, 11:
		p.again()
	default:
		p.last = p.request()
		p.ask(p.last, limit.Operation{})
	}
}

// again asks as the last time, as clients do.
func (p *agreement) again() {
	if p.last != nil {
		p.ask(p.last, limit.Operation{})
	}
}

// lease does something with a lease or a stream, mostly in the replica that remembers.
func (p *agreement) lease() {
	kind, n, hits, remote := p.next(6), p.next(256), uint64(p.next(4)), p.next(5) == 0
	stream := p.stream()
	if remote {
		p.given, p.spent = time.Now(), time.Now()
	}
	var told [2]string
	for i, w := range p.worlds {
		s := w.here
		if remote {
			s = w.there
		}
		var held limit.Request
		if len(w.granted) > 0 {
			held = w.granted[len(w.granted)-1-n%min(len(w.granted), 6)]
		}
		message := &rls.RateLimitRequest{Domain: "d"}
		switch {
		case kind == 0: // usage of a stream
			d := traceDescriptor("weir.event", "usage", hits)
			d.Entries = append(d.Entries, traceDescriptor("weir.stream_id", stream, 0).Entries[0], traceDescriptor([]string{"slow", "day", "fast"}[n%3], "x", 0).Entries[0])
			message.Descriptors = append(message.Descriptors, d)
		case kind == 1: // its end
			d := traceDescriptor("weir.event", "release", 1)
			d.Entries = append(d.Entries, traceDescriptor("weir.stream_id", stream, 0).Entries[0])
			message.Descriptors = append(message.Descriptors, d)
		case held.Lease == "":
			continue
		case kind == 2:
			name := []string{"", "day", "slow2", "slow3", "slow4", "limit"}[n%6]
			r, err := leases{Server: s}.Reconcile(p.t.Context(), &weirv1.ReconcileRequest{Usage: []*weirv1.LeaseUsage{{LeaseId: string(held.Lease), Limits: []*weirv1.LimitUsage{{Limit: name, Hits: hits}}}}})
			told[i] = fmt.Sprint(r.GetResults(), err)
		case kind == 3:
			r, err := leases{Server: s}.Release(p.t.Context(), &weirv1.ReleaseRequest{LeaseIds: []string{string(held.Lease)}})
			told[i] = fmt.Sprint(r.GetResults(), err)
		case kind == 4:
			told[i] = fmt.Sprint(s.undo(p.t.Context(), held))
		case kind == 5 && n%4 == 0: // an operator's; seldom
			told[i] = fmt.Sprint(s.reset(p.t.Context(), "d", held.Checks))
		}
		if len(message.GetDescriptors()) > 0 {
			a, err := rateLimit{Server: s}.answer(p.t.Context(), questionOf(p.t, message))
			told[i] = fmt.Sprint(a.decision, err)
		}
	}
	if told[0] != told[1] {
		p.t.Errorf("with the memory %s, without %s", told[0], told[1])
	}
}

// ask asks the replica that remembers, in both worlds.
func (p *agreement) ask(m *rls.RateLimitRequest, o limit.Operation) {
	on := p.worlds[0].decide(p.t, p.worlds[0].here, m, o)
	if on.unasked {
		p.unasked++
		if lately(p.given) {
			return // the store may admit it; what was refused unasked has changed nothing
		}
	}
	p.same(m, on, p.worlds[1].decide(p.t, p.worlds[1].here, m, o))
}

func lately(at time.Time) bool { return !at.IsZero() && time.Since(at) < remembered }

// same compares the answer of the world that remembers with that of the one that asks.
func (p *agreement) same(m *rls.RateLimitRequest, on, off traceAnswer) {
	p.t.Helper()
	if !on.unasked {
		ignore := cmp.Options{cmpopts.IgnoreFields(limit.Decision{}, "Lease", "Expired"), cmp.AllowUnexported(traceAnswer{}), cmpopts.IgnoreFields(traceAnswer{}, "unasked")}
		if diff := cmp.Diff(off, on, ignore); diff != "" {
			p.t.Errorf("%v: -asks +remembers\n%s", m, diff)
		}
		return
	}
	if off.err != "" {
		p.t.Fatalf("%v: refused unasked, the store says %s", m, off.err)
	}
	slack := time.Duration(0) // the store cuts its time to milliseconds
	if p.fine {
		slack = time.Millisecond
	}
	atMost := lately(p.spent) // what the other replica spends makes the wait longer, and is not known
	got, want := on.verdict, off.verdict
	if off.decision.Admitted || got.Admitted || got.Class != want.Class || got.Retryable != want.Retryable || got.RetryAfter > want.RetryAfter+slack || got.RetryAfter <= 0 {
		p.t.Errorf("%v: unasked %+v, the store says %+v", m, got, want)
	}
	known := 0
	for i, got := range on.decision.Results {
		want := off.decision.Results[i]
		if got.Unknown {
			continue
		}
		known++
		// A token that came within the last millisecond may not be told.
		near := func(got, want time.Duration) bool { return got <= want+slack && (got >= want || atMost) }
		if got.Passed || want.Passed || !near(got.RetryAfter, want.RetryAfter) || !near(got.ResetAfter, want.ResetAfter) || got.Remaining > want.Remaining && !atMost || got.Remaining < want.Remaining-1 {
			p.t.Errorf("%v: of check %d unasked %+v, the store says %+v", m, i, got, want)
		}
	}
	if known == len(want.Violations) && !atMost && !p.fine { // nothing else refuses: so all of the verdict is known
		if diff := cmp.Diff(want, got); diff != "" {
			p.t.Errorf("%v: -the store says +unasked\n%s", m, diff)
		}
	}
}

// The same trace of requests, of several limits each, and of all that gives back gets the same
// answers with the memory and without: what is given back, spent and changed here counts at
// once, and what another replica gives back when the memory's time is over.
func TestRefusingUnaskedAgreesWithTheStore(t *testing.T) {
	unasked := 0
	for seed := range uint64(250) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { unasked += runTrace(t, traceOf(seed)) })
	}
	t.Logf("%d refusals were unasked", unasked)
	if unasked < 3000 {
		t.Errorf("in all traces %d refusals were unasked, want more: nothing is shown", unasked)
	}
}

func traceOf(seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 18))
	data := make([]byte, 2500)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	return data
}

func FuzzUnaskedAgrees(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(traceOf(seed)[:200<<(seed%4)])
	}
	f.Fuzz(func(t *testing.T, data []byte) { runTrace(t, data) })
}
