package server_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"weir/envoy"
	"weir/limit"
	"weir/policy"
	"weir/server"
	"weir/server/page"
	"weir/store"
	"weir/store/memory"
	"weir/store/storetest"
)

// snapshot is what /status.json tells of now, not of half a second ago.
func (s *service) snapshot(t testing.TB) *page.Snapshot {
	t.Helper()
	text, err := json.Marshal(s.TakeSnapshot())
	if err != nil {
		t.Fatal(err)
	}
	var out page.Snapshot
	if err := json.Unmarshal(text, &out); err != nil {
		t.Fatal(err)
	}
	return &out
}

// settled is a snapshot for which ok is true.
func (s *service) settled(t testing.TB, what string, ok func(*page.Snapshot) bool) (out *page.Snapshot) {
	t.Helper()
	storetest.Eventually(t, what, func() bool {
		out = s.snapshot(t)
		return ok(out)
	})
	return out
}

func limitIn(t testing.TB, s *page.Snapshot, name string) page.Limit {
	t.Helper()
	for _, d := range s.Domains {
		for _, l := range d.Limits {
			if l.Name == name {
				return l
			}
		}
	}
	t.Fatalf("no limit %s in %+v", name, s.Domains)
	return page.Limit{}
}

const picturePolicy = `
domain: d
descriptors:
  - {key: account, token_bucket: {capacity: 3, refill: 1/d}}
  - {key: trial, token_bucket: {capacity: 1, refill: 1/d}, shadow_mode: true}
  - {key: pool, value: images, concurrency: {max_in_flight: 2, lease: 1m, max_wait: 1ms}, reject_as: pool}
  - {key: closed, token_bucket: {capacity: 3, refill: 1/d}, failure_mode: closed}
  - {key: local, token_bucket: {capacity: 3, refill: 1/d}, failure_mode: local}
`

func TestTheSnapshotTellsWhatWasSent(t *testing.T) {
	s := serve(t, picturePolicy)
	for range 10 { // 3 pass
		ask(t, s.envoy, "d", "[account=alice]", 0)
	}
	for range 4 { // 1 would pass
		ask(t, s.envoy, "d", "[trial=bob]", 0)
	}
	for range 5 { // 2 pass
		ask(t, s.envoy, "d", "[pool=images]", 0)
	}
	ask(t, s.envoy, "elsewhere", "[account=alice]", 0)

	got := s.settled(t, "the last request is told", func(s *page.Snapshot) bool { return s.Unknown.Total == 1 })
	if len(got.Domains) != 1 {
		t.Fatalf("domains %+v, want one", got.Domains)
	}
	d := got.Domains[0]
	if d.Admitted != 3+4+2 || d.Refused != 7+3 || d.LeasesHeld == nil || *d.LeasesHeld != 2 || d.File != "test.yaml" {
		t.Errorf("domain %+v, want 9 admitted, 10 refused, 2 leases of test.yaml", d)
	}
	account := limitIn(t, got, "account")
	if account.Passed != 3 || account.Refused != 7 || account.Kind != "token_bucket" || account.Capacity != 3 {
		t.Errorf("account %+v, want a bucket of 3 with 3 passed and 7 refused", account)
	}
	if r := account.RetryAfter; r == nil || r.Count != 7 || r.Last <= 0 || r.Last > 86400 {
		t.Errorf("retry after of account %+v, want 7 of less than a day", r)
	}
	if trial := limitIn(t, got, "trial"); trial.Passed != 1 || trial.WouldRefuse != 3 || trial.WouldRefuseLately != 3 || trial.Refused != 0 || !trial.Shadow {
		t.Errorf("trial %+v, want 1 passed and 3 that it would refuse", trial)
	}
	images := limitIn(t, got, "pool")
	if p := images.Pool; !p.Full() || *p.InFlight != 2 || p.Capacity != 2 || p.Old || images.Refused != 3 {
		t.Errorf("pool %+v with %+v, want 2 of 2, and 3 refused", images, p)
	}
	if got.Headline != (page.Problem{Level: "bad", Text: "Pool pool is full: 2 of 2"}) {
		t.Errorf("headline %+v, want the full pool", got.Headline)
	}
	want := []page.Subject{
		{Domain: "d", Limit: "account", Subject: "account=alice", Count: 7},
		{Domain: "d", Limit: "pool", Subject: "pool=images", Count: 3},
	}
	for i := range got.Refused {
		got.Refused[i].Last = time.Time{}
	}
	if diff := cmp.Diff(want, got.Refused); diff != "" {
		t.Errorf("who was refused (-want +got):\n%s", diff)
	}
	if n := got.Latency.Decisions.Count; n != 20 || len(got.Latency.Decisions.All) != 3 {
		t.Errorf("latency of %v decisions, %v; want of 20", n, got.Latency.Decisions.All)
	}
	if got.Store.Kind != "memory" || got.Store.State != "up" || got.Bypassed != (page.Bypassed{}) {
		t.Errorf("store %+v, bypassed %+v; want memory, up, and none", got.Store, got.Bypassed)
	}
	if got.Policies.Version != s.version(t) || got.Policies.LoadedAt.IsZero() || len(got.Policies.Errors) != 0 {
		t.Errorf("policies %+v, want version %s without an error", got.Policies, s.version(t))
	}
}

// Two values of one key share its name, if the policy gives them none.
func TestEachPoolOfALimitIsCounted(t *testing.T) {
	s := serve(t, `
domain: d
descriptors:
  - {key: pool, value: images, concurrency: {max_in_flight: 20, lease: 1m, max_wait: 0s}, reject_as: pool}
  - {key: pool, value: video, concurrency: {max_in_flight: 5, lease: 1m, max_wait: 0s}, reject_as: pool}
`)
	for range 16 {
		ask(t, s.envoy, "d", "[pool=images]", 0)
	}
	for range 6 {
		ask(t, s.envoy, "d", "[pool=video]", 0)
	}
	got := s.settled(t, "all is told", func(s *page.Snapshot) bool { return s.Domains[0].Refused == 1 })
	l := limitIn(t, got, "pool")
	var pools []string
	for _, p := range l.Pools {
		pools = append(pools, fmt.Sprintf("%s %d of %d", p.Subject, *p.InFlight, p.Capacity))
	}
	if diff := cmp.Diff([]string{"pool=images 16 of 20", "pool=video 5 of 5"}, pools); diff != "" {
		t.Errorf("pools (-want +got):\n%s", diff)
	}
	if l.Pool.Subject != "pool=video" || got.Headline != (page.Problem{Level: "bad", Text: "Pool pool=video is full: 5 of 5"}) {
		t.Errorf("pool %+v, headline %+v; want that of video, which is full", l.Pool, got.Headline)
	}
	s.expectMetrics(t, "each pool has its series", map[string]float64{
		`weir_in_flight{domain="d",limit="pool",subject="pool=images"}`:     16,
		`weir_in_flight{domain="d",limit="pool",subject="pool=video"}`:      5,
		`weir_max_in_flight{domain="d",limit="pool",subject="pool=images"}`: 20,
		`weir_max_in_flight{domain="d",limit="pool",subject="pool=video"}`:  5,
	})
}

func TestABucketAndALaneOfOnePolicyAreToldApart(t *testing.T) {
	clock := storetest.NewClock()
	st := &missing{Store: memory.New(memory.Options{Now: clock.Now})}
	s := serviceOn(t, st, clock, envoy.Options{})
	s.setPolicy(t, "domain: d\ndescriptors:\n  - {key: account, token_bucket: {capacity: 9, refill: 1/d}, concurrency: {max_in_flight: 2, lease: 1m}}")
	for range 5 {
		ask(t, s.envoy, "d", "[account=a]", 0)
	}
	ask(t, s.envoy, "d", "[account=a;limit=1/DAY]", 0)
	st.away.Store(true)
	ask(t, s.envoy, "d", "[account=a]", 0)
	var got []string
	for _, l := range s.snapshot(t).Domains[0].Limits {
		got = append(got, fmt.Sprintf("%s %s: %v passed, %v refused, %v bypassed, told to wait: %t", l.Name, l.Kind, l.Passed, l.Refused, l.Bypassed, l.RetryAfter != nil))
	}
	want := []string{
		"override : 1 passed, 0 refused, 0 bypassed, told to wait: false",
		"account token_bucket: 5 passed, 0 refused, 1 bypassed, told to wait: false",
		"account concurrency: 2 passed, 4 refused, 1 bypassed, told to wait: true",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestTheSnapshotCountsRequestsThatPassedUnchecked(t *testing.T) {
	clock := storetest.NewClock()
	st := &missing{Store: memory.New(memory.Options{Now: clock.Now})}
	s := serviceOn(t, st, clock, envoy.Options{})
	s.setPolicy(t, picturePolicy)
	s.run(t)
	storetest.Eventually(t, "the store answers", func() bool { return s.metric(t, "weir_ready") == 1 })
	ask(t, s.envoy, "d", "[account=a]", 0)
	begun := time.Now()
	st.away.Store(true)
	for range 4 { // one request with several limits counts once
		ask(t, s.envoy, "d", "[account=a][trial=a][pool=images]", 0)
	}
	ask(t, s.envoy, "d", "[account=a][closed=a]", 0)
	ask(t, s.envoy, "d", "[local=a]", 0)
	ask(t, s.envoy, "d", "[nothing=a]", 0) // has no limit to look at
	want := page.Counts{Unchecked: 4, Local: 1, Refused: 1}
	got := s.settled(t, "it is silent, and all is counted", func(s *page.Snapshot) bool { return s.Store.Silent && s.Bypassed.Total == want })
	o := got.Store.Outage
	if got.Store.State != "away" || o == nil || o.Counts != want || !o.To.IsZero() || o.From.Before(begun.Add(-time.Second)) || !got.Store.Since.Equal(o.From) {
		t.Errorf("store %+v with %+v, want away since just now, with %+v", got.Store, o, want)
	}
	if got.Bypassed.Today.Total() == 0 || got.Bypassed.PerSecond <= 0 || got.Bypassed.At.IsZero() {
		t.Errorf("bypassed %+v, want some today and now", got.Bypassed)
	}
	if text := got.Headline.Text; got.Headline.Level != "bad" || !strings.HasPrefix(text, "The memory store does not answer since ") ||
		!strings.HasSuffix(text, ": 4 requests passed unchecked, 1 decided by this replica's own share, 1 refused") {
		t.Errorf("headline %+v, want that it does not answer, and the counts", got.Headline)
	}
	if p := limitIn(t, got, "pool").Pool; p.InFlight != nil && !p.Old {
		t.Errorf("pool %+v, want not known now", p)
	}

	st.away.Store(false)
	got = s.settled(t, "it is over", func(s *page.Snapshot) bool { return s.Store.State == "up" })
	o = got.Store.Outage
	if o.Counts != want || !o.To.After(o.From) || !got.Store.Since.Equal(o.To) {
		t.Errorf("store %+v with %+v; want over, with the same counts", got.Store, o)
	}
	if got.Headline.Level != "warn" || !strings.HasPrefix(got.Headline.Text, "4 requests passed unchecked, 1 decided by this replica's own share, 1 refused in the last minute: The memory store was away until ") {
		t.Errorf("headline %+v, want a warning for a minute", got.Headline)
	}
	if len(got.Problems) != 2 || got.Problems[1].Level != "note" || !strings.Contains(got.Problems[1].Text, "answers again since") {
		t.Errorf("problems %+v, want a note that it is over", got.Problems)
	}
}

// refusing is a store that answers, and fails decisions while it is said what with.
type refusing struct {
	*memory.Store
	err atomic.Pointer[error]
}

func (r *refusing) Decide(ctx context.Context, q limit.Request) (limit.Decision, error) {
	if err := r.err.Load(); err != nil {
		return limit.Decision{}, *err
	}
	return r.Store.Decide(ctx, q)
}

func TestAStoreThatAnswersWithErrorsAloneIsBad(t *testing.T) {
	clock := storetest.NewClock()
	st := &refusing{Store: memory.New(memory.Options{Now: clock.Now})}
	s := serviceWith(t, st, clock, func(o *server.Options) { o.StoreKind = "redis" })
	s.setPolicy(t, picturePolicy)
	s.run(t)
	storetest.Eventually(t, "the store answers", func() bool { return s.metric(t, "weir_ready") == 1 })
	ask(t, s.envoy, "d", "[account=a]", 0)
	full := fmt.Errorf("redis: decide: %w: %w: OOM command not allowed for account=secret", store.ErrUnavailable, store.ErrNotServing)
	st.err.Store(&full)
	for range 20 {
		ask(t, s.envoy, "d", "[account=a]", 0)
	}
	got := s.snapshot(t)
	if text := got.Headline.Text; got.Headline.Level != "bad" || !strings.HasPrefix(text, "Redis answers with errors since ") ||
		!strings.HasSuffix(text, ": 20 requests passed unchecked; the last error is OOM") {
		t.Errorf("headline %+v, want that it answers with errors, and the counts", got.Headline)
	}
	if e := got.Store.LastError; e == nil || e.Word != "OOM" || e.At.IsZero() {
		t.Errorf("last error %+v, want OOM", e)
	}

	st.err.Store(nil)
	ask(t, s.envoy, "d", "[account=a]", 0)
	got = s.settled(t, "it is over", func(s *page.Snapshot) bool { return s.Store.State == "up" })
	if got.Store.Erring != nil || got.Headline.Level != "warn" || got.Store.LastError == nil {
		t.Errorf("store %+v, headline %+v; want no errors any more, and a warning for a minute", got.Store, got.Headline)
	}
}

func TestALateCallIsNoOutageAndNotAllIsWell(t *testing.T) {
	clock := storetest.NewClock()
	st := &refusing{Store: memory.New(memory.Options{Now: clock.Now})}
	s := serviceWith(t, st, clock, func(o *server.Options) { o.StoreKind = "redis" })
	s.setPolicy(t, picturePolicy)
	s.run(t)
	storetest.Eventually(t, "the store answers", func() bool { return s.metric(t, "weir_ready") == 1 })
	late := fmt.Errorf("%w: %w", store.ErrUnavailable, context.DeadlineExceeded)
	st.err.Store(&late)
	ask(t, s.envoy, "d", "[account=a]", 0)
	st.err.Store(nil)
	if got := s.snapshot(t); got.Headline.Level != "warn" {
		t.Errorf("headline %+v, want a warning", got.Headline)
	}
	got := s.settled(t, "it is over", func(s *page.Snapshot) bool { return s.Store.State == "up" })
	want := page.Problem{Level: "warn", Text: "1 request passed unchecked in the last minute: Redis answered too late"}
	if got.Headline != want || got.Store.LastHour != nil || got.Store.LateLastHour == nil || got.Store.LateLastHour.Unchecked != 1 {
		t.Errorf("headline %+v, last hour %+v and %+v; want %+v and 1 that was late", got.Headline, got.Store.LastHour, got.Store.LateLastHour, want)
	}
}

func TestTheSnapshotTellsTheLastErrorOfPolicies(t *testing.T) {
	s := newService(t, envoy.Options{})
	none := s.snapshot(t)
	if none.Policies.Version != "" || none.Domains == nil || none.Problems == nil || none.Refused == nil {
		t.Errorf("without policies %+v, want no version, and lists that are empty, not null", none)
	}
	set := parse(t, picturePolicy)
	s.SetPolicy(t.Context(), policy.Reading{Set: set, Changed: true})
	s.SetPolicy(t.Context(), policy.Reading{Set: set, Changed: true, Wrong: 1, Err: errors.New("a.yaml:1: wrong\na.yaml:2: too")})
	got := s.settled(t, "the error is told", func(s *page.Snapshot) bool { return s.Policies.Wrong == 1 })
	want := []string{"a.yaml:1: wrong", "a.yaml:2: too"}
	if diff := cmp.Diff(want, got.Policies.Errors); diff != "" || got.Policies.FailedAt.IsZero() {
		t.Errorf("errors at %v (-want +got):\n%s", got.Policies.FailedAt, diff)
	}
	s.SetPolicy(t.Context(), policy.Reading{Set: set, Changed: true})
	got = s.settled(t, "it is right again", func(s *page.Snapshot) bool { return s.Policies.Wrong == 0 })
	if diff := cmp.Diff(want, got.Policies.Errors); diff != "" {
		t.Errorf("the last errors are forgotten (-want +got):\n%s", diff)
	}
}

func TestTheSnapshotIsBounded(t *testing.T) {
	s := serve(t, policyOf(page.MaxLimits+50))
	got := s.snapshot(t)
	n := 0
	for _, d := range got.Domains {
		n += len(d.Limits)
	}
	// One place is kept for overrides, which nobody has asked for.
	if n != page.MaxLimits-1 || got.MoreLimits != 51 {
		t.Errorf("%d limits and %d more, want %d and 51", n, got.MoreLimits, page.MaxLimits-1)
	}
}

func policyOf(limits int) string {
	var b strings.Builder
	b.WriteString("domain: d\ndescriptors:\n")
	for i := range limits {
		fmt.Fprintf(&b, "  - {key: k%d, token_bucket: {capacity: 1, refill: 1/s}}\n", i)
	}
	return b.String()
}

// hanging is a store that does not tell what is held.
type hanging struct{ store.Store }

func (hanging) Held(ctx context.Context, _ string) (int64, error) {
	<-ctx.Done()
	return 0, ctx.Err()
}

func TestASnapshotWaitsForTheStoreALittleOnly(t *testing.T) {
	clock := storetest.NewClock()
	s := serviceOn(t, hanging{memory.New(memory.Options{Now: clock.Now})}, clock, envoy.Options{})
	s.setPolicy(t, picturePolicy)
	got := s.snapshot(t)
	if d := got.Domains[0]; d.LeasesHeld != nil || limitIn(t, got, "pool").Pool.InFlight != nil {
		t.Errorf("domain %+v, want nothing known of what is held", d)
	}
}

func TestThePageIsForWhoMaySeeMetrics(t *testing.T) {
	clock := storetest.NewClock()
	s := serviceWith(t, memory.New(memory.Options{Now: clock.Now}), clock, func(o *server.Options) { o.Access = &server.Access{} })
	for _, path := range []string{"/", "/assets/app.js", "/status.json", "/status/events"} {
		if code, text := s.page(path); code != http.StatusForbidden {
			t.Errorf("%s without a certificate told %d: %.80s; want 403", path, code, text)
		}
	}
}

func BenchmarkPicture(b *testing.B) { // a snapshot a second while somebody watches, a sample each 5 s always
	for _, limits := range []int{3, page.MaxLimits} {
		s := newService(b, envoy.Options{})
		s.setPolicy(b, policyOf(limits))
		for i := range limits {
			ask(b, s.envoy, "d", fmt.Sprintf("[k%d=a]", i), 0)
		}
		b.Run(fmt.Sprintf("snapshot/limits=%d", limits), func(b *testing.B) {
			for b.Loop() {
				s.TakeSnapshot()
			}
		})
		b.Run(fmt.Sprintf("sample/limits=%d", limits), func(b *testing.B) {
			for b.Loop() {
				s.TakeSample()
			}
		})
	}
}

// The mean of what a limit told is between the least and the most that it told.
func TestTheMeanOfLongWaitsIsOne(t *testing.T) {
	s := newService(t, envoy.Options{})
	s.setPolicy(t, "domain: d\ndescriptors:\n  - {key: quota, token_bucket: {capacity: 1000, refill: 1/d}}\n")
	acquire(t, s.leases, costing(1000, typed("quota", "a")))
	for range 200 {
		ask(t, s.envoy, "d", "[quota=a;hits=1000]", 0)
	}
	if r := limitIn(t, s.snapshot(t), "quota").RetryAfter; r.Mean < r.Last/2 {
		t.Errorf("retry after %+v, all told the same", r)
	}
}

// A limit that a reload brings onto the page tells of the last minute what was in the last minute.
func TestALimitThatComesOntoThePageTellsNoOldNews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService(t, envoy.Options{})
		policyFrom := func(first int) (text string) {
			text = "domain: d\ndescriptors:\n"
			for i := first; i < page.MaxLimits+50; i++ {
				text += fmt.Sprintf("  - {key: k%d, token_bucket: {capacity: 1, refill: 1/d}, shadow_mode: true}\n", i)
			}
			return text
		}
		last := fmt.Sprintf("k%d", page.MaxLimits+49)
		s.setPolicy(t, policyFrom(0))
		s.run(t) // it takes samples
		for range 500 {
			ask(t, s.envoy, "d", "["+last+"=a]", 0)
		}
		time.Sleep(200 * time.Second)
		synctest.Wait()
		s.setPolicy(t, policyFrom(100))
		if l := limitIn(t, s.snapshot(t), last); l.WouldRefuseLately != 0 || l.PassedPerSecond != 0 {
			t.Errorf("%v would be refused in the last minute and %v/s passed; nobody asked for 200 s", l.WouldRefuseLately, l.PassedPerSecond)
		}
	})
}
