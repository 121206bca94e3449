package server

import (
	"context"
	"strings"
	"time"

	"weir/limit"
	"weir/policy"
)

// loaded is what is known of the policies in force.
type loaded struct {
	set      *policy.Set              // nil before the first
	domains  map[string]*domainSeries // of the set
	unknown  *domainSeries            // of all other domains
	pools    map[string][]limit.Check // see poolsOf
	at       time.Time                // when they came into force; zero if none are
	wrong    int                      // files that are not in force as they are
	problems []string                 // what is wrong with them, a line each
	shown    *shown                   // on the status page
	failed   []string                 // problems of the last reading that had some
	failedAt time.Time                // when that was; zero if none had
}

// of are the series of a domain.
func (l *loaded) of(domain string) *domainSeries {
	if d := l.domains[domain]; d != nil {
		return d
	}
	return l.unknown
}

// name is a domain by a text of its own: whoever keeps it does not keep the message that
// brought it.
func (l *loaded) name(domain string) string {
	if d := l.domains[domain]; d != nil {
		return d.label
	}
	return strings.Clone(domain)
}

// seconds is when they came into force, since the epoch; 0 if none are.
func (l *loaded) seconds() float64 {
	if l.at.IsZero() {
		return 0
	}
	return float64(l.at.UnixMilli()) / 1000
}

// toldProblems is how many lines of what is wrong with policy files are logged, and
// told by /healthz. Prefer weir check for the rest.
const toldProblems = 20

// SetPolicy takes in a reading of the policy files that changed something: requests
// that come from now on use r.Set, and those under way keep the one that they
// started with. It logs and counts what is wrong. Readings come one after the
// other.
func (s *Server) SetPolicy(ctx context.Context, r policy.Reading) {
	before := s.loaded.Load()
	old := before.set
	now := &loaded{set: r.Set, domains: before.domains, unknown: before.unknown, pools: before.pools, at: before.at, wrong: r.Wrong, shown: before.shown, failed: before.failed, failedAt: before.failedAt}
	result := "ok"
	if r.Err != nil {
		result = "failed"
		now.problems = strings.Split(r.Err.Error(), "\n")
		now.failed, now.failedAt = now.problems, time.Now()
	}
	s.metrics.policyLoads.WithLabelValues(result).Inc()
	anew := r.Set != nil && r.Set != old
	if anew {
		now.at = time.Now()
		now.pools = poolsOf(r.Set)
		now.shown = shownOf(r.Set, now.pools)
		s.metrics.expect(r.Set, old, s.standby.Mode)
		now.domains = s.metrics.seriesOf(r.Set, s.breakers)
		if old != nil {
			s.metrics.policyInfo.DeleteLabelValues(old.Version())
		}
		s.metrics.policyInfo.WithLabelValues(r.Set.Version()).Set(1)
	}
	if anew && s.unasked != nil {
		defer s.unasked.GiveAll()() // a bucket that stood under another limit for a while may have gained more
	}
	s.loaded.Store(now)
	if anew {
		s.refusals.keep(now.shown.index)
		s.bypasses.keep(now.shown.index)
	}
	s.page.Wake()
	s.reportHealth()

	for _, line := range now.problems[:min(len(now.problems), toldProblems)] {
		s.log.ErrorContext(ctx, "policy file is wrong", "err", line)
	}
	if more := len(now.problems) - toldProblems; more > 0 {
		s.log.ErrorContext(ctx, "policy files are wrong in more places: see weir check", "more", more)
	}
	if anew {
		s.warn(ctx, r.Set, old)
		s.log.InfoContext(ctx, "policies loaded", "version", r.Set.Version(), "domains", len(r.Set.Domains()))
	}
	switch {
	case r.Err != nil && r.Set == nil:
		s.log.ErrorContext(ctx, "no policies are in force, and weir is not ready, until every file is right")
	case r.Err != nil:
		s.log.ErrorContext(ctx, "policy files are wrong: each stays in force as it was when it was right, if it ever was", "files", r.Wrong)
	case before.wrong > 0:
		s.log.InfoContext(ctx, "policy files are right again")
	}
}

// warn logs the warnings of a set that the one before did not have.
func (s *Server) warn(ctx context.Context, set, old *policy.Set) {
	known := make(map[string]bool)
	if old != nil {
		for _, w := range old.Warnings() {
			known[w] = true
		}
	}
	for _, w := range set.Warnings() {
		if !known[w] {
			s.log.WarnContext(ctx, "policy", "warning", w)
		}
	}
}
