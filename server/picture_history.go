package server

import (
	"math"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"weir/limit"
	"weir/policy"
	"weir/server/page"
)

const (
	sampleEvery = 5 * time.Second
	maxSamples  = 61 // of the last 5 minutes
	rateOver    = 10 * time.Second
)

// shown are the limits of the status page: of each name and kind one, and at most
// [page.MaxLimits]. It never changes.
type shown struct {
	limits  []shownLimit // by domain, in the order of the files
	domains map[string]bool
	index   map[limitKind]int // into limits
	more    int               // that are not shown
}

// limitKind is a limit as on the status page. A policy's bucket and its concurrency have
// one name.
type limitKind struct {
	limitName
	kind string // as kind says
}

type shownLimit struct {
	id limitKind
	// check of the policies; that of overrides has no Limit.
	check limit.Check
	pools []limit.Check // of a concurrency whose subjects the policies name
}

// shownOf chooses the limits of a set, whose pools are known.
func shownOf(set *policy.Set, pools map[string][]limit.Check) *shown {
	s := &shown{domains: make(map[string]bool), index: make(map[limitKind]int)}
	more := make(map[limitKind]bool)
	for domain, c := range set.Limits() {
		id := limitKind{limitName{domain, c.Name}, kind(c.Limit)}
		if c.Limit == nil {
			id.kind = kind(limit.Window{}) // an override
		}
		switch _, again := s.index[id]; {
		case again:
		case len(s.limits) < page.MaxLimits:
			s.domains[domain] = true
			s.index[id] = len(s.limits)
			s.limits = append(s.limits, shownLimit{id: id, check: c})
		case c.Limit != nil:
			more[id] = true
		}
	}
	for domain, list := range pools {
		for _, c := range list {
			if i, is := s.index[limitKind{limitName{domain, c.Name}, kind(c.Limit)}]; is {
				one := &s.limits[i]
				if one.pools = append(one.pools, c); len(one.pools) == 1 {
					one.check = c
				}
			}
		}
	}
	s.more = len(more)
	return s
}

// checkCounts are those of a limit, by result.
type checkCounts struct{ passed, refused, over, shadow float64 }

// domainCounts are those of a domain.
type domainCounts struct{ admitted, refused, expired float64 }

// sample is the counters as they were once.
type sample struct {
	at        time.Time
	shown     *shown        // nil: no limits
	limits    []checkCounts // as in shown
	domains   map[string]domainCounts
	unknown   float64   // requests for unknown domains
	decisions []float64 // in each bucket of the histogram, and above the last
	store     []float64
}

// limit returns the counts of a limit, which are now those given: zero at the start, and those of
// now if it was not shown then.
func (s *sample) limit(id limitKind, now checkCounts) checkCounts {
	if s.shown == nil {
		return checkCounts{}
	}
	if i, is := s.shown.index[id]; is {
		return s.limits[i]
	}
	return now
}

// count reads the counters of what is shown.
func (s *Server) count(now time.Time) sample {
	out := sample{at: now, shown: s.loaded.Load().shown, domains: make(map[string]domainCounts)}
	if out.shown == nil {
		out.shown = &shown{}
	}
	out.limits = make([]checkCounts, len(out.shown.limits))
	eachMetric(s.metrics.checks, func(m *dto.Metric) {
		i, is := out.shown.index[limitKind{limitName{labelOf(m, "domain"), labelOf(m, "limit")}, labelOf(m, "kind")}]
		if !is {
			return
		}
		c, n := &out.limits[i], m.GetCounter().GetValue()
		switch labelOf(m, "result") {
		case "passed":
			c.passed += n
		case "refused":
			c.refused += n
		case "over":
			c.over += n
		case "shadow_refused":
			c.shadow += n
		}
	})
	eachMetric(s.metrics.decisions, func(m *dto.Metric) {
		n, domain := m.GetCounter().GetValue(), labelOf(m, "domain")
		if !out.shown.domains[domain] {
			if domain == unknownDomain {
				out.unknown += n
			}
			return
		}
		d := out.domains[domain]
		if labelOf(m, "verdict") == "admitted" {
			d.admitted += n
		} else {
			d.refused += n
		}
		out.domains[domain] = d
	})
	eachMetric(s.metrics.expired, func(m *dto.Metric) {
		if domain := labelOf(m, "domain"); out.shown.domains[domain] {
			d := out.domains[domain]
			d.expired += m.GetCounter().GetValue()
			out.domains[domain] = d
		}
	})
	out.decisions, out.store = make([]float64, len(latencyBuckets)+1), make([]float64, len(latencyBuckets)+1)
	eachMetric(s.metrics.decisionSeconds, func(m *dto.Metric) { addBuckets(out.decisions, m.GetHistogram()) })
	eachMetric(s.metrics.storeSeconds, func(m *dto.Metric) {
		if labelOf(m, "op") != "ping" {
			addBuckets(out.store, m.GetHistogram())
		}
	})
	return out
}

// eachMetric tells the metrics of a collector.
func eachMetric(c prometheus.Collector, f func(*dto.Metric)) {
	metrics := make(chan prometheus.Metric)
	go func() { // ends with the loop below
		defer close(metrics)
		c.Collect(metrics)
	}()
	for m := range metrics {
		var out dto.Metric
		if err := m.Write(&out); err == nil {
			f(&out)
		}
	}
}

func labelOf(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// addBuckets adds what is in each of a histogram's buckets.
func addBuckets(to []float64, h *dto.Histogram) {
	below := uint64(0)
	for i, b := range h.GetBucket() {
		if i < len(to)-1 {
			to[i] += float64(b.GetCumulativeCount() - below)
			below = b.GetCumulativeCount()
		}
	}
	to[len(to)-1] += float64(h.GetSampleCount() - below)
}

// history keeps samples of the last 5 minutes, so that who opens the page sees those too.
type history struct {
	mu      sync.Mutex
	samples []sample // at least the one of the start; the oldest first
}

// sample keeps what count counts, if the last has been for sampleEvery.
func (h *history) sample(now time.Time, count func(time.Time) sample) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if last := h.samples[len(h.samples)-1].at; !now.Truncate(sampleEvery).After(last.Truncate(sampleEvery)) {
		return
	}
	if len(h.samples) >= maxSamples {
		h.samples = append(h.samples[:0], h.samples[1:]...)
	}
	h.samples = append(h.samples, count(now))
}

// all returns the samples, which do not change.
func (h *history) all() []sample {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]sample(nil), h.samples...)
}

// before returns the newest of the samples that is older than age, or the oldest.
func before(all []sample, now time.Time, age time.Duration) *sample {
	for i := len(all) - 1; i > 0; i-- {
		if now.Sub(all[i].at) >= age {
			return &all[i]
		}
	}
	return &all[0]
}

// grown is by how much a counter grew that was before; one that is less began anew.
func grown(now, before float64) float64 {
	if now < before {
		return now
	}
	return now - before
}

// percentiles tells a histogram's p50, p95 and p99 between samples, and over all up to now.
func percentiles(all []sample, now sample, buckets func(*sample) []float64) page.Percentiles {
	out := page.Percentiles{Times: []int64{}, P50: []*float64{}, P95: []*float64{}, P99: []*float64{}, All: []float64{}}
	sum := make([]float64, len(latencyBuckets)+1)
	for i := range all {
		next := &now
		if i < len(all)-1 {
			next = &all[i+1]
		}
		delta := grownBuckets(buckets(next), buckets(&all[i]))
		for j := range delta {
			sum[j] += delta[j]
		}
		if i == len(all)-1 {
			break // it is not over
		}
		out.Times = append(out.Times, next.at.Unix())
		q := quantiles(delta)
		if q == nil {
			out.P50, out.P95, out.P99 = append(out.P50, nil), append(out.P95, nil), append(out.P99, nil)
			continue
		}
		out.P50, out.P95, out.P99 = append(out.P50, &q[0]), append(out.P95, &q[1]), append(out.P99, &q[2])
	}
	for _, n := range sum {
		out.Count += n
	}
	if q := quantiles(sum); q != nil {
		out.All = q
	}
	return out
}

func grownBuckets(now, before []float64) []float64 {
	out := append([]float64(nil), now...)
	for i := range before {
		if now[i] < before[i] { // it began anew
			return append(out[:0], now...)
		}
		out[i] -= before[i]
	}
	return out
}

// quantiles are p50, p95 and p99 in milliseconds, nil if the buckets are empty.
func quantiles(buckets []float64) []float64 {
	total := 0.0
	for _, n := range buckets {
		total += n
	}
	if total == 0 {
		return nil
	}
	var out []float64
	for _, q := range []float64{.5, .95, .99} {
		rank, i := q*total, 0
		for ; i < len(buckets)-1 && rank > buckets[i]; i++ {
			rank -= buckets[i]
		}
		if i == len(latencyBuckets) { // above the last, nobody knows how far
			out = append(out, latencyBuckets[i-1]*1000)
			continue
		}
		low := 0.0
		if i > 0 {
			low = latencyBuckets[i-1]
		}
		seconds := low
		if buckets[i] > 0 {
			seconds += (latencyBuckets[i] - low) * rank / buckets[i]
		}
		out = append(out, math.Round(seconds*1e6)/1e3)
	}
	return out
}
