package server

import (
	"context"
	"slices"
	"strings"
	"time"

	"weir/limit"
	"weir/server/page"
)

// pictureTimeout is how long a snapshot waits for the store.
const pictureTimeout = 250 * time.Millisecond

// noteForPage counts for the status page what metrics do not tell: requests that were decided
// without the store, and whom limits refused. Its domain is a label.
func (s *Server) noteForPage(domain string, checks []limit.Check, d limit.Decision, v limit.Verdict) {
	if d.Bypass == limit.DefaultMode && d.Admitted || d.Replayed {
		return
	}
	now := time.Now()
	if d.Bypass != limit.DefaultMode {
		s.bypasses.count(domain, &s.metrics.names, checks, d, v, now)
	}
	if !d.Admitted {
		s.refusals.note(domain, &s.metrics.names, checks, d, v, now)
	}
}

// shownAs is what the status page calls this replica and its store.
type shownAs struct{ host, version, storeKind, storeAddress string }

// inFlight is what the store told last of what is held. It is for snapshot alone, which is
// not called at once with itself.
type inFlight struct {
	pools  map[poolID]toldPool
	leases map[string]*int64 // by domain; without those that it did not tell just now
}

type toldPool struct {
	count int64
	at    time.Time
}

// ask asks the store what is held of the policies in force, unless it is known to be away.
func (f *inFlight) ask(s *Server, l *loaded, now time.Time) {
	ctx, cancel := context.WithTimeout(context.Background(), pictureTimeout)
	defer cancel()
	old := f.pools
	f.pools, f.leases = make(map[poolID]toldPool), make(map[string]*int64)
	for _, domain := range l.set.Domains() {
		pools := l.pools[domain]
		var states []limit.State
		if l.shown.domains[domain] && ctx.Err() == nil && !s.storeLost.Load() && !s.breakers.of(domain).open.Load() {
			var leases int64
			if leases, states, _ = s.countHeld(ctx, domain, pools); leases >= 0 { // an error is counted
				f.leases[domain] = &leases
			}
		}
		for i, p := range pools {
			id := poolID{limitName{domain, p.Name}, p.Key}
			if states != nil {
				f.pools[id] = toldPool{states[i].Count, now}
			} else if told, known := old[id]; known {
				f.pools[id] = told
			}
		}
	}
}

// of are the pools of a limit with what is in flight of each, in the order of the files.
func (f *inFlight) of(l shownLimit, now time.Time) (all []page.Pool) {
	for _, c := range l.pools {
		slots, ok := c.Limit.(limit.Concurrency)
		if !ok {
			continue
		}
		p := page.Pool{Subject: subjectOf(c.Key), Capacity: slots.Max}
		if told, known := f.pools[poolID{l.id.limitName, c.Key}]; known {
			p.InFlight, p.At, p.Old = &told.count, told.at.UTC(), !told.at.Equal(now)
		}
		all = append(all, p)
	}
	return all
}

// snapshot is the picture of now. It is not called at once with itself.
func (s *Server) snapshot() *page.Snapshot {
	l, now := s.loaded.Load(), time.Now()
	if l.set != nil {
		s.inFlight.ask(s, l, now)
	}
	count, all := s.count(now), s.history.all()
	out := &page.Snapshot{
		At: time.Now().UTC(), Started: s.started.UTC(), Host: s.shownAs.host, Version: s.shownAs.version, Domains: []page.Domain{},
		Policies: page.Policies{LoadedAt: l.at.UTC(), Wrong: l.wrong, Errors: []string{}, FailedAt: l.failedAt.UTC()},
		Refused:  s.refusals.top(now),
		Latency: page.Latency{
			Decisions: percentiles(all, count, func(s *sample) []float64 { return s.decisions }),
			Store:     percentiles(all, count, func(s *sample) []float64 { return s.store }),
		},
	}
	out.Status, out.Store.State = s.state()
	var outage *page.Outage
	out.Bypassed, outage = s.bypasses.tell(now)
	s.tellStore(&out.Store, outage)
	s.bypasses.tellFailures(&out.Store, now)
	out.Policies.Errors = append(out.Policies.Errors, l.failed[:min(len(l.failed), toldProblems)]...)
	minute := before(all, now, time.Minute)
	out.Unknown = page.Unknown{Total: count.unknown, Lately: grown(count.unknown, minute.unknown)}
	if l.set != nil {
		out.Policies.Version = l.set.Version()
		out.MoreLimits = l.shown.more
		s.tellDomains(out, l, &count, all)
	}
	out.Problems = page.Words(out)
	out.Headline = page.Headline(out)
	return out
}

// tellStore tells the health of the store.
func (s *Server) tellStore(out *page.Store, outage *page.Outage) {
	out.Kind, out.Address = s.shownAs.storeKind, s.shownAs.storeAddress
	out.Outage, out.Breakers = outage, []page.Breaker{}
	all, open := s.breakers.opened()
	for domain, since := range open {
		out.Breakers = append(out.Breakers, page.Breaker{Domain: domain, Since: since.UTC()})
	}
	slices.SortFunc(out.Breakers, func(a, b page.Breaker) int { return strings.Compare(a.Domain, b.Domain) })
	out.Silent = s.storeLost.Load() || all
	out.Since = s.started.UTC()
	switch {
	case outage == nil:
	case out.State == "up" && !outage.To.IsZero():
		out.Since = outage.To
	case out.State != "not_found":
		out.Since = outage.From
	}
}

// tellDomains tells of each domain and its limits.
func (s *Server) tellDomains(out *page.Snapshot, l *loaded, count *sample, all []sample) {
	now := count.at
	recent, minute := before(all, now, rateOver), before(all, now, time.Minute)
	rate := func(now, then float64) float64 {
		return grown(now, then) / max(count.at.Sub(recent.at), time.Second).Seconds()
	}
	at := make(map[string]int)
	for _, domain := range l.set.Domains() {
		if !l.shown.domains[domain] {
			continue
		}
		c, then, lately := count.domains[domain], recent.domains[domain], all[0].domains[domain]
		at[domain] = len(out.Domains)
		out.Domains = append(out.Domains, page.Domain{
			Name: domain, File: l.set.File(domain), Limits: []page.Limit{},
			Admitted: c.admitted, Refused: c.refused,
			AdmittedPerSecond: rate(c.admitted, then.admitted), RefusedPerSecond: rate(c.refused, then.refused),
			LeasesHeld: s.inFlight.leases[domain], LeasesExpired: c.expired, ExpiredLately: grown(c.expired, lately.expired),
		})
	}
	for _, one := range l.shown.limits {
		c := count.limit(one.id, checkCounts{})
		then, bypassed := recent.limit(one.id, c), s.bypasses.of(one.id)
		if one.check.Limit == nil && c == (checkCounts{}) && bypassed == 0 {
			continue // no request has overridden anything
		}
		_, capacity := kindOf(one.check.Limit)
		d, pools := &out.Domains[at[one.id.domain]], s.inFlight.of(one, now)
		d.Limits = append(d.Limits, page.Limit{
			Name: one.id.limit, Kind: kind(one.check.Limit), Capacity: int64(capacity), Shadow: one.check.Shadow,
			Pool: page.Fullest(pools), Pools: pools,
			Passed: c.passed, Refused: c.refused, Over: c.over, WouldRefuse: c.shadow, Bypassed: float64(bypassed),
			PassedPerSecond: rate(c.passed, then.passed), RefusedPerSecond: rate(c.refused, then.refused),
			WouldRefuseLately: grown(c.shadow, minute.limit(one.id, c).shadow),
			RetryAfter:        s.refusals.told(one.id),
		})
	}
}
