package page_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weir/server/page"
)

var (
	now  = time.Date(2026, 11, 30, 3, 16, 30, 0, time.UTC)
	went = time.Date(2026, 11, 30, 3, 12, 5, 0, time.UTC)
)

// healthy is a snapshot of a replica that is well.
func healthy() *page.Snapshot {
	return &page.Snapshot{
		At: now, Started: now.Add(-time.Hour), Status: "ok",
		Store:    page.Store{Kind: "redis", State: "up"},
		Policies: page.Policies{Version: "0123456789ab"},
	}
}

func away(s *page.Snapshot, c page.Counts) {
	s.Status = "degraded"
	s.Store.State, s.Store.Silent, s.Store.Since = "away", true, went
	s.Store.Outage = &page.Outage{From: went, Counts: c}
}

func pool(name string, inFlight, capacity int64) page.Limit {
	return page.Limit{Name: name, Kind: "concurrency", Pool: &page.Pool{InFlight: &inFlight, Capacity: capacity, At: went}}
}

func TestWordsSayWhatIsWrongTheWorstFirst(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*page.Snapshot)
		want   string // headline, and problems that are not in it
	}{
		{"all well", func(*page.Snapshot) {}, `
ok: All is well: Redis answers, no request passes unchecked, no pool is full`},
		{"in memory", func(s *page.Snapshot) { s.Store.Kind = "memory" }, `
ok: All is well: the state is in memory (this process only), no request passes unchecked, no pool is full`},
		{"Redis away", func(s *page.Snapshot) { away(s, page.Counts{Unchecked: 12345}) }, `
bad: Redis does not answer since 03:12:05 UTC (4 min): 12,345 requests passed unchecked`},
		{"Redis away, other modes", func(s *page.Snapshot) { away(s, page.Counts{Unchecked: 1, Local: 20, Refused: 3000}) }, `
bad: Redis does not answer since 03:12:05 UTC (4 min): 1 request passed unchecked, 20 decided by this replica's own share, 3,000 refused`},
		{"Redis fails now and then", func(s *page.Snapshot) {
			away(s, page.Counts{Unchecked: 7})
			s.Store.Silent = false
		}, `
warn: Redis fails some calls since 03:12:05 UTC (4 min): 7 requests passed unchecked`},
		{"a part of a cluster away", func(s *page.Snapshot) {
			away(s, page.Counts{Unchecked: 7})
			s.Store.Silent, s.Store.Breakers = false, []page.Breaker{{Domain: "a"}, {Domain: "b"}, {Domain: "c"}, {Domain: "d"}}
		}, `
bad: Redis does not answer for a, b, c, 1 more since 03:12:05 UTC (4 min): 7 requests passed unchecked`},
		{"Redis never found", func(s *page.Snapshot) {
			s.Status, s.Store.State, s.Store.Since = "not_ready", "not_found", went
		}, `
bad: Redis has not answered since the start at 03:12:05 UTC (4 min): this replica is not ready`},
		{"Redis never found, and requests", func(s *page.Snapshot) {
			away(s, page.Counts{Unchecked: 5})
			s.Store.State = "not_found"
		}, `
bad: Redis has not answered since the start at 03:12:05 UTC (4 min): this replica is not ready, and 5 requests passed unchecked`},
		{"back", func(s *page.Snapshot) {
			s.Store.LastHour = &page.Outages{Number: 1, Seconds: 42.5, To: went.Add(42 * time.Second), Counts: page.Counts{Unchecked: 12}}
		}, `
ok: All is well now: Redis answers, no pool is full
note: Redis answers again since 03:12:47 UTC. It was away for 42 s: 12 requests passed unchecked`},
		{"back for long", func(s *page.Snapshot) {
			s.Store.Outage = &page.Outage{From: went.Add(-2 * time.Hour), To: went.Add(-time.Hour)} // not of the last hour
		}, `
ok: All is well: Redis answers, no request passes unchecked, no pool is full`},
		{"back within a minute", func(s *page.Snapshot) {
			s.Store.Outage = &page.Outage{From: went, To: went.Add(42 * time.Second)}
			s.Store.LastHour = &page.Outages{Number: 3, Seconds: 62.9, To: went.Add(42 * time.Second), Counts: page.Counts{Unchecked: 456}}
			s.Bypassed = page.Bypassed{At: went.Add(41 * time.Second), LastMinute: page.Counts{Unchecked: 40}}
		}, `
warn: 40 requests passed unchecked in the last minute: Redis was away until 03:12:47 UTC
note: 3 times without Redis in the last hour, 62 s in all: 456 requests passed unchecked; the last until 03:12:47 UTC`},
		{"away again", func(s *page.Snapshot) {
			away(s, page.Counts{Unchecked: 1})
			s.Store.LastHour = &page.Outages{Number: 1, Seconds: 200, To: went.Add(-time.Minute), Counts: page.Counts{Unchecked: 12}}
		}, `
bad: Redis does not answer since 03:12:05 UTC (4 min): 1 request passed unchecked
note: 1 time before without Redis in the last hour, 3 min in all: 12 requests passed unchecked; the last until 03:11:05 UTC`},
		{"a late call after an outage", func(s *page.Snapshot) {
			s.Store.Outage = &page.Outage{From: went, To: went.Add(2 * time.Second), Late: true}
			s.Store.LastHour = &page.Outages{Number: 1, Seconds: 56, To: went.Add(-time.Minute), Counts: page.Counts{Unchecked: 452}}
			s.Store.LateLastHour = &page.Outages{Number: 1, Seconds: 2, To: went.Add(2 * time.Second), Counts: page.Counts{Unchecked: 4}}
		}, `
ok: All is well now: Redis answers, no pool is full
note: Redis answers again since 03:11:05 UTC. It was away for 56 s: 452 requests passed unchecked
note: Redis failed some calls 1 time in the last hour: 4 requests passed unchecked; the last until 03:12:07 UTC`},
		{"a late call of no request", func(s *page.Snapshot) {
			s.Store.LateLastHour = &page.Outages{Number: 1, Seconds: 2, To: went}
		}, `
ok: All is well: Redis answers, no request passes unchecked, no pool is full`},
		{"late calls", func(s *page.Snapshot) {
			s.Bypassed = page.Bypassed{At: went, LastMinute: page.Counts{Unchecked: 12}}
			s.Store.LastError = &page.StoreError{Reason: "store_timeout"}
			s.Store.Outage = &page.Outage{From: went, To: went.Add(time.Second), Late: true}
		}, `
warn: 12 requests passed unchecked in the last minute: Redis answered too late`},
		{"errors now and then", func(s *page.Snapshot) {
			s.Bypassed.LastMinute = page.Counts{Unchecked: 1}
			s.Store.LastError = &page.StoreError{Reason: "store_unavailable", Word: "TRYAGAIN"}
		}, `
warn: 1 request passed unchecked in the last minute: Redis answered with the error TRYAGAIN`},
		{"hurried callers", func(s *page.Snapshot) {
			s.Bypassed.LastMinute = page.Counts{Unchecked: 2}
			s.Store.LastError = &page.StoreError{Reason: "hurried"}
		}, `
warn: 2 requests passed unchecked in the last minute: their callers had too little time left to ask Redis`},
		{"errors alone, and a full pool", func(s *page.Snapshot) {
			away(s, page.Counts{Unchecked: 20})
			s.Store.Silent = false
			s.Store.Erring = &page.Outage{From: went, Counts: page.Counts{Unchecked: 20}}
			s.Store.LastError = &page.StoreError{Reason: "store_unavailable", Word: "OOM"}
			s.Domains = []page.Domain{{Name: "a", Limits: []page.Limit{pool("images", 200, 200)}}}
		}, `
bad: Redis answers with errors since 03:12:05 UTC (4 min): 20 requests passed unchecked; the last error is OOM
bad: Pool images is full: 200 of 200`},
		{"a full pool", func(s *page.Snapshot) {
			s.Domains = []page.Domain{{Name: "inference", Limits: []page.Limit{pool("images", 200, 200), pool("video", 179, 200)}}}
		}, `
bad: Pool images is full: 200 of 200`},
		{"pools of two domains, and Redis away", func(s *page.Snapshot) {
			away(s, page.Counts{})
			video := pool("video", 1800, 2000)
			video.Pool.Old = true
			s.Domains = []page.Domain{{Name: "a", Limits: []page.Limit{video}}, {Name: "b", Limits: []page.Limit{pool("images", 201, 200)}}}
		}, `
bad: Redis does not answer since 03:12:05 UTC (4 min): 0 requests passed unchecked
bad: Pool images of b is full: 201 of 200
warn: Pool video of a is nearly full: 1,800 of 2,000, when Redis last told at 03:12:05 UTC`},
		{"one of several pools of a limit", func(s *page.Snapshot) {
			few, all := int64(16), int64(5)
			l := page.Limit{Name: "pool", Pools: []page.Pool{{Subject: "pool=images", InFlight: &few, Capacity: 20}, {Subject: "pool=video", InFlight: &all, Capacity: 5}}}
			l.Pool = page.Fullest(l.Pools)
			s.Domains = []page.Domain{{Name: "a", Limits: []page.Limit{l}}, {Name: "b"}}
		}, `
bad: Pool pool=video of a is full: 5 of 5`},
		{"a pool that is not known", func(s *page.Snapshot) {
			s.Domains = []page.Domain{{Name: "a", Limits: []page.Limit{{Name: "p", Pool: &page.Pool{Capacity: 1}}}}}
		}, `
ok: All is well: Redis answers, no request passes unchecked, no pool is full`},
		{"no policies", func(s *page.Snapshot) { s.Status, s.Policies.Version = "not_ready", "" }, `
bad: No policies are loaded: no request is answered`},
		{"wrong files", func(s *page.Snapshot) { s.Policies.Wrong = 2 }, `
warn: 2 policy files are wrong: what a file said when it was right stays in force; the domain of a file that never was is not limited`},
		{"wrong files from the start", func(s *page.Snapshot) { s.Policies.Version, s.Policies.Wrong = "", 1 }, `
bad: A policy file is wrong: no policies are loaded, and no request is answered, until every file is right`},
		{"leases expire", func(s *page.Snapshot) { s.Domains = []page.Domain{{Name: "a", ExpiredLately: 1}} }, `
warn: 1 lease of a expired in the last 5 minutes: whoever held them died, or does not release`},
		{"an unknown domain", func(s *page.Snapshot) { s.Unknown.Lately = 1000 }, `
warn: 1,000 requests in the last minute named a domain that no policy file has: nothing limits those`},
		{"about to stop", func(s *page.Snapshot) { s.Status = "draining" }, `
warn: This replica is about to stop: it takes no new callers`},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := healthy()
			test.change(s)
			s.Problems = page.Words(s)
			lines := []page.Problem{page.Headline(s)}
			for _, p := range s.Problems {
				if p != lines[0] {
					lines = append(lines, p)
				}
			}
			var got strings.Builder
			for _, p := range lines {
				got.WriteString("\n" + p.Level + ": " + p.Text)
			}
			if diff := cmp.Diff(test.want, got.String()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestTimesAreSaidInTheirLargestUnits(t *testing.T) {
	for _, test := range []struct {
		ago  time.Duration
		want string
	}{
		{-time.Second, "(0 s)"},
		{59 * time.Second, "(59 s)"},
		{time.Minute, "(1 min)"},
		{59*time.Minute + 59*time.Second, "(59 min)"},
		{time.Hour, "(1 h 0 min)"},
		{47*time.Hour + 59*time.Minute, "(47 h 59 min)"},
		{72 * time.Hour, "(3 days)"},
	} {
		s := healthy()
		away(s, page.Counts{})
		s.Store.Since = now.Add(-test.ago)
		if got := page.Words(s)[0].Text; !strings.Contains(got, test.want) {
			t.Errorf("%v ago: %q, want %q in it", test.ago, got, test.want)
		}
	}
}
