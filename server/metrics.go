package server

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"go.opentelemetry.io/otel/trace"

	"weir/limit"
	"weir/policy"
)

// metrics are the counters of a server. Their labels come from configuration and
// from fixed words, never from requests.
type metrics struct {
	names limitNames

	decisionSeconds *prometheus.HistogramVec // domain
	waitSeconds     *prometheus.HistogramVec // domain
	refusals        *prometheus.CounterVec   // domain, limit, class, reason
	ended           *prometheus.CounterVec   // domain, by
	renewals        *prometheus.CounterVec   // domain, result
	resets          *prometheus.CounterVec   // domain

	decisions    *prometheus.CounterVec   // domain, verdict
	checks       *prometheus.CounterVec   // domain, limit, kind, result
	bypassed     *prometheus.CounterVec   // domain, limit, mode, reason
	storeSeconds *prometheus.HistogramVec // op
	storeErrors  *prometheus.CounterVec   // op, reason
	breakerOpen  *prometheus.GaugeVec     // domain
	granted      *prometheus.CounterVec   // domain
	released     *prometheus.CounterVec   // domain, result
	expired      *prometheus.CounterVec   // domain
	givenBack    *prometheus.CounterVec   // domain
	misuse       *prometheus.CounterVec   // domain, reason
	unasked      *prometheus.CounterVec   // domain
	usage        *prometheus.CounterVec   // domain, limit, result
	reservedHits *prometheus.CounterVec   // domain, limit
	settledHits  *prometheus.CounterVec   // domain, limit, direction
	replayed     *prometheus.CounterVec   // domain
	conflicts    *prometheus.CounterVec   // domain, reason
	waits        *prometheus.CounterVec   // domain, verdict
	logEntries   *prometheus.CounterVec   // domain, kind
	brokenLogs   prometheus.Counter
	policyLoads  *prometheus.CounterVec // result
	policyInfo   *prometheus.GaugeVec   // version

	decideSeconds atomic.Pointer[prometheus.Observer] // that of storeSeconds for decisions
}

func newMetrics(r prometheus.Registerer, s *Server) *metrics {
	f := promauto.With(r)
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	m := &metrics{
		decisions: counter("weir_decisions_total",
			"Requests decided, by verdict: admitted or refused. Bypassed ones count too.", "domain", "verdict"),
		checks: counter("weir_checks_total",
			"Limits asked, by result: passed, refused (it refused the request), over (it did not pass, and the request was not refused for it), shadow_refused (it would have refused).",
			"domain", "limit", "kind", "result"),
		bypassed: counter("weir_bypassed_total",
			"Limits that were decided without the store, by what was done instead and why. Above zero means that limits were not enforced.", "domain", "limit", "mode", "reason"),
		storeSeconds: f.NewHistogramVec(latency("weir_store_duration_seconds", "How long calls of the store took, those that failed included."), []string{"op"}),
		storeErrors:  counter("weir_store_errors_total", "Calls of the store that failed, or were not made since those before them had failed (breaker_open).", "op", "reason"),
		granted:      counter("weir_leases_granted_total", "Leases granted by this replica.", "domain"),
		released:     counter("weir_leases_released_total", "Releases that this replica answered, by result: RELEASED, LINGERING (some of its slots stay taken for a while), NOT_HELD, EXPIRED.", "domain", "result"),
		expired:      counter("weir_leases_expired_total", "Leases that ended by expiry: nobody released them, or they lingered. Each is counted by one replica.", "domain"),
		givenBack:    counter("weir_leases_given_back_total", "Leases whose caller had gone before it was told: they are released at once.", "domain"),
		misuse:       counter("weir_misuse_total", "Requests that ask for what weir does not do: negative_hits_on_concurrency frees no slot.", "domain", "reason"),
	}
	m.decisionSeconds = f.NewHistogramVec(latency("weir_decision_duration_seconds", "How long decisions took, from the request's policies to the verdict; with waiting for a slot."), []string{"domain"})
	m.waitSeconds = f.NewHistogramVec(latency("weir_wait_duration_seconds", "How long requests waited for a slot, admitted or refused then."), []string{"domain"})
	m.refusals = counter("weir_refusals_total", "Limits that refused a request, by class (lane, pool) and reason.", "domain", "limit", "class", "reason")
	m.ended = counter("weir_leases_ended_total", "Leases that this replica ended before their expiry, by what told it: lease_service, ratelimit_service (Envoy's filter), access_log, admin (an operator), or give_back (nobody was told of them).", "domain", "by")
	m.renewals = counter("weir_renewals_total", "Renewals of leases, by result: renewed, lost, or unavailable.", "domain", "result")
	m.resets = counter("weir_resets_total", "Times that an operator has had the state of a subject forgotten, on the admin port.", "domain")
	m.breakerOpen = f.NewGaugeVec(prometheus.GaugeOpts{Name: "weir_store_breaker_open", Help: "1 while the store is not asked about a domain, since it did not answer."}, []string{"domain"})
	m.usage = counter("weir_usage_total", "Settlements of what work has used, by result: settled (by what was reserved), charged (nothing was), already_settled, late (its lease had expired, or its window has passed) or not_reserved. Usage of all limits of a lease at once has the limit *.", "domain", "limit", "result")
	m.reservedHits = counter("weir_reserved_hits_total", "Hits that leases have reserved by an estimate.", "domain", "limit")
	m.settledHits = counter("weir_settled_hits_total", "Hits by which settlements have changed limits, by direction: charged, or refunded. Those of all limits of a lease at once have the limit *, so add all limits of a domain before you compare them with what was reserved.", "domain", "limit", "direction")
	m.unasked = counter("weir_refused_unasked_total", "Requests refused without asking the store, which had just said that they cannot pass yet.", "domain")
	m.replayed = counter("weir_replayed_total", "Operations that asked again and were told of the lease that they hold.", "domain")
	m.conflicts = counter("weir_operation_conflicts_total", "Operations that were not decided, by reason: other_request (it holds a lease for something else) or late_attempt.", "domain", "reason")
	m.waits = counter("weir_waits_total", "Requests that waited for a slot, by verdict: admitted or refused.", "domain", "verdict")
	m.logEntries = counter("weir_access_log_entries_total", "Entries of Envoy's access log, by kind: end (of a stream that may hold a lease), renewal (of one that goes on), ignored.", "domain", "kind")
	m.brokenLogs = f.NewCounter(prometheus.CounterOpts{Name: "weir_access_logs_broken_total", Help: "Access logs that ended without a word, as when an Envoy dies: its leases wait for their expiry."})
	m.policyLoads = counter("weir_policy_loads_total", "Readings of the policy files that changed something, by result: ok, or failed if a file was wrong.", "result")
	m.policyInfo = f.NewGaugeVec(prometheus.GaugeOpts{Name: "weir_policy_info", Help: "1, with the version of the policies in force: replicas with the same files have the same."}, []string{"version"})
	for _, result := range []string{"ok", "failed"} {
		m.policyLoads.WithLabelValues(result)
	}
	f.NewGaugeFunc(prometheus.GaugeOpts{Name: "weir_policy_wrong_files", Help: "Policy files that are not in force as they are, since something is wrong with them."},
		func() float64 { return float64(s.loaded.Load().wrong) })
	f.NewGaugeFunc(prometheus.GaugeOpts{Name: "weir_policy_load_timestamp_seconds", Help: "When the policies in force were loaded; 0 without any."},
		func() float64 { return s.loaded.Load().seconds() })
	f.NewCounterFunc(prometheus.CounterOpts{Name: "weir_unfollowed_total", Help: "Admitted requests that local shares did not follow, since there are too many subjects: when the store goes, those begin with a whole share."},
		func() float64 { return float64(s.standby.Unfollowed()) })
	f.NewGaugeFunc(prometheus.GaugeOpts{Name: "weir_waiting", Help: "Requests that wait for a slot now, each once for each full limit."},
		func() float64 { return s.waits.count() })
	f.NewGaugeFunc(prometheus.GaugeOpts{Name: "weir_store_up", Help: "0 after a call of the store failed, until it answers and nothing has failed for a second."},
		func() float64 { return number(s.storeFound.Load() && !s.storeAway.Load()) })
	f.NewGaugeFunc(prometheus.GaugeOpts{Name: "weir_ready", Help: "1 if this replica says that it is ready."},
		func() float64 { return number(s.ready()) })
	r.MustRegister(held{s})
	return m
}

// latencyBuckets are the upper bounds of the histograms of latency, in seconds, ascending. The
// status page reads its quantiles from them, and the alerts' bounds (0.015, 0.1) must be among them.
var latencyBuckets = []float64{.0001, .0002, .0003, .0004, .0005, .0006, .0008, .001, .0015, .002, .003, .005, .0075, .01, .015, .02, .05, .1, .3, 1}

// registerLoad adds the metrics of the store's connections.
func registerLoad(r prometheus.Registerer, load func() (connections, idle, waiting int)) {
	f := promauto.With(r)
	connections := func(state string, count func() float64) {
		f.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "weir_store_connections", Help: "Connections to Redis, by state: idle, or used by calls under way.", ConstLabels: prometheus.Labels{"state": state},
		}, count)
	}
	connections("idle", func() float64 { _, idle, _ := load(); return float64(idle) })
	connections("used", func() float64 { all, idle, _ := load(); return float64(max(0, all-idle)) })
	f.NewGaugeFunc(prometheus.GaugeOpts{Name: "weir_store_waiting_calls", Help: "Calls of Redis that wait for a connection. They share the next that is free."},
		func() float64 { _, _, waiting := load(); return float64(waiting) })
}

// latency are the options of a histogram of short times. The classic buckets resolve
// 100 µs where most decisions are; the native ones are a tenth apart.
func latency(name, help string) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{
		Name: name, Help: help,
		Buckets:                         latencyBuckets,
		NativeHistogramBucketFactor:     1.1,
		NativeHistogramMaxBucketNumber:  160,
		NativeHistogramMinResetDuration: time.Hour,
	}
}

// expect creates the series that alerts watch, at 0: an increase from nothing would
// be none to Prometheus. The series of old, which was in force before, are there; nil: none was.
func (m *metrics) expect(set, old *policy.Set, mode func(limit.Check) limit.FailureMode) {
	m.names.set(set, m.forget)
	for _, domain := range set.Domains() {
		if old != nil && old.Has(domain) { // those of a domain alone stay
			continue
		}
		m.breakerOpen.WithLabelValues(domain)
		m.granted.WithLabelValues(domain)
		m.expired.WithLabelValues(domain)
		m.givenBack.WithLabelValues(domain)
		m.unasked.WithLabelValues(domain)
		for _, by := range []string{byLeaseService, byRateLimitService, byAccessLog, byGiveBack, byAdmin} {
			m.ended.WithLabelValues(domain, by)
		}
		m.renewals.WithLabelValues(domain, "lost")
		m.resets.WithLabelValues(domain)
		for _, result := range []limit.ReleaseResult{limit.Released, limit.Lingering, limit.NotHeld, limit.Expired} {
			m.released.WithLabelValues(domain, result.String())
		}
	}
	type bypass struct{ limit, mode string }
	seen, of := make(map[bypass]bool), "" // many limits may have one label; those of a domain come together
	for domain, c := range set.Limits() {
		if domain != of {
			clear(seen)
			of = domain
		}
		name := m.names.of(domain, c.Name)
		if b := (bypass{name, mode(c).String()}); !seen[b] {
			seen[b] = true
			for _, reason := range reasons {
				m.bypassed.WithLabelValues(domain, name, b.mode, reason)
			}
		}
		if c.Reserve > 0 {
			m.usage.WithLabelValues(domain, name, limit.Late.String())
		}
	}
	for _, op := range []string{opDecide, "release", "undo", "renew", "settle", "inspect", "leases", "reset", "held", "ping"} {
		for _, reason := range reasons {
			m.storeErrors.WithLabelValues(op, reason)
		}
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func verdict(d limit.Decision) string {
	if d.Admitted {
		return "admitted"
	}
	return "refused"
}

// waited counts a request that waited for a slot, and what it was told then. Its
// domain is a label.
func (m *metrics) waited(domain string, d limit.Decision) {
	m.waits.WithLabelValues(domain, verdict(d)).Inc()
}

// decided counts a decision for a domain.
func (m *metrics) decided(domain *domainSeries, checks []limit.Check, d limit.Decision, v limit.Verdict) {
	domain.decided(m, d.Admitted)
	if d.Replayed {
		m.replayed.WithLabelValues(domain.label).Inc()
		return
	}
	if d.Lease != "" {
		m.granted.WithLabelValues(domain.label).Inc()
	}
	if d.Expired > 0 {
		m.expired.WithLabelValues(domain.label).Add(float64(d.Expired))
	}
	for _, w := range v.Violations {
		domain.of(m, w.Limit).refuse(m, w)
	}
	for i := range checks {
		c := &checks[i]
		limits := domain.of(m, c.Name)
		if c.Reserve > 0 && d.Lease != "" && d.Results[i].Passed && c.Hits > 0 {
			m.reservedHits.WithLabelValues(domain.label, limits.label).Add(float64(c.Hits))
		}
		if by := d.Results[i].Bypass; by != limit.DefaultMode {
			m.bypassed.WithLabelValues(domain.label, limits.label, by.String(), d.BypassReason).Inc()
			continue
		}
		if d.Results[i].Unknown {
			continue
		}
		result := hasPassed
		switch {
		case d.Results[i].Passed:
		case c.Shadow && d.Admitted:
			result = wouldRefuse
		case !c.Shadow && !d.Admitted && !d.StreamEnded && v.Refuses(*c):
			result = hasRefused
		default:
			result = isOver
		}
		limits.check(m, c.Limit, result)
	}
}

// settled counts settlements. Its domain is a label.
func (m *metrics) settled(domain string, u limit.Usage, all []limit.Settlement) {
	for i, one := range all {
		name := "*" // each that the lease has reserved something of
		switch n := i - len(u.Checks); {
		case n < 0:
			name = u.Checks[i].Name
		case u.Limits[n].Limit == "":
		case one.Result == limit.NotReserved:
			name = unknownLimit // a request's word
		default:
			name = u.Limits[n].Limit
		}
		name = m.names.of(domain, name)
		m.usage.WithLabelValues(domain, name, one.Result.String()).Inc()
		switch {
		case one.Difference > 0:
			m.settledHits.WithLabelValues(domain, name, "charged").Add(float64(one.Difference))
		case one.Difference < 0:
			m.settledHits.WithLabelValues(domain, name, "refunded").Add(-float64(one.Difference))
		}
	}
}

// took observes a duration. If a trace that is sampled has it, it is an exemplar.
func (m *metrics) took(ctx context.Context, h prometheus.Observer, start time.Time) {
	seconds := time.Since(start).Seconds()
	if span := trace.SpanContextFromContext(ctx); span.IsSampled() {
		if e, ok := h.(prometheus.ExemplarObserver); ok {
			e.ObserveWithExemplar(seconds, prometheus.Labels{"trace_id": span.TraceID().String()})
			return
		}
	}
	h.Observe(seconds)
}

// misused counts descriptors that hand back slots anonymously: it could be
// anybody's slot, so none is freed. Its domain is a label.
func (m *metrics) misused(domain string, r policy.Request, match policy.Match) {
	for i, d := range r.Descriptors {
		if !d.Negative {
			continue
		}
		for _, j := range match.Descriptors[i].Checks {
			if _, ok := match.Checks[j].Limit.(limit.Concurrency); ok {
				m.misuse.WithLabelValues(domain, "negative_hits_on_concurrency").Inc()
				break
			}
		}
	}
}
