package server

import (
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"weir/limit"
	"weir/policy"
)

// domainSeries are the series of a domain that each decision counts, and its breaker, so
// that none is looked up twice: a look-up hashes all labels under a lock. None is there
// before it is counted.
type domainSeries struct {
	label     string
	decisions [2]series // refused, admitted
	seconds   atomic.Pointer[prometheus.Observer]
	breaker   func() *breaker
	limits    map[string]*limitSeries // by the limit's name; those with the label of others share one
}

// limitSeries are those of a limit.
type limitSeries struct {
	domain, label string
	checks        [kinds][results]series
	refusal       atomic.Pointer[refusalSeries] // the last: a limit seldom refuses for several reasons
}

type refusalSeries struct {
	class   limit.Class
	reason  limit.Reason
	counter prometheus.Counter
}

// The kinds of limits, and the results of checks, in the order of their words.
const kinds, results = 3, 4

var (
	kindWords   = [kinds]string{"token_bucket", "rate_limit", "concurrency"}
	resultWords = [results]string{"passed", "refused", "over", "shadow_refused"}
)

const (
	hasPassed = iota
	hasRefused
	isOver
	wouldRefuse
)

// seriesOf are those of all domains of a set, whose names the metrics have taken.
func (m *metrics) seriesOf(set *policy.Set, breakers *breakers) map[string]*domainSeries {
	all := make(map[string]*domainSeries)
	for _, domain := range set.Domains() {
		all[domain] = newDomainSeries(domain, breakers)
	}
	others := make(map[string]*limitSeries)
	for domain, c := range set.Limits() {
		limits := all[domain].limits
		if limits[c.Name] != nil {
			continue
		}
		label := m.names.of(domain, c.Name)
		if label != otherLimit {
			limits[c.Name] = &limitSeries{domain: domain, label: label}
			continue
		}
		if others[domain] == nil {
			others[domain] = &limitSeries{domain: domain, label: label}
		}
		limits[c.Name] = others[domain]
	}
	return all
}

func newDomainSeries(label string, all *breakers) *domainSeries {
	return &domainSeries{
		label: label, limits: make(map[string]*limitSeries),
		breaker: sync.OnceValue(func() *breaker { return all.of(label) }),
	}
}

// of are the series of a limit of the domain.
func (d *domainSeries) of(m *metrics, name string) *limitSeries {
	if known := d.limits[name]; known != nil {
		return known
	}
	return &limitSeries{domain: d.label, label: m.names.of(d.label, name)} // of newer policies, say
}

// decided counts a request that is decided.
func (d *domainSeries) decided(m *metrics, admitted bool) {
	s, word := &d.decisions[0], "refused"
	if admitted {
		s, word = &d.decisions[1], "admitted"
	}
	c := s.known()
	if c == nil {
		c = s.is(m.decisions.WithLabelValues(d.label, word))
	}
	c.Inc()
}

// took is the histogram of how long decisions take.
func (d *domainSeries) took(m *metrics) prometheus.Observer {
	if h := d.seconds.Load(); h != nil {
		return *h
	}
	h := m.decisionSeconds.WithLabelValues(d.label)
	d.seconds.Store(&h)
	return h
}

// check counts a check with its result.
func (l *limitSeries) check(m *metrics, of limit.Limit, result int) {
	kind := kindIndex(of)
	s := &l.checks[kind][result]
	c := s.known()
	if c == nil {
		c = s.is(m.checks.WithLabelValues(l.domain, l.label, kindWords[kind], resultWords[result]))
	}
	c.Inc()
}

// refuse counts a refusal.
func (l *limitSeries) refuse(m *metrics, v limit.Violation) {
	last := l.refusal.Load()
	if last == nil || last.class != v.Class || last.reason != v.Reason {
		last = &refusalSeries{v.Class, v.Reason, m.refusals.WithLabelValues(l.domain, l.label, v.Class.String(), string(v.Reason))}
		l.refusal.Store(last)
	}
	last.counter.Inc()
}

// kindIndex is the place of a limit's kind in kindWords.
func kindIndex(l limit.Limit) int {
	switch l.(type) {
	case limit.TokenBucket:
		return 0
	case limit.Window:
		return 1
	case limit.Concurrency:
		return 2
	}
	return 0 // there is no other
}

// kind is the key of a limit in policy files; "" for none.
func kind(l limit.Limit) string {
	if l == nil {
		return ""
	}
	return kindWords[kindIndex(l)]
}

// ofStore is the histogram of how long calls of the store take. Most are decisions, whose
// own is looked up once.
func (m *metrics) ofStore(op string) prometheus.Observer {
	if op != opDecide {
		return m.storeSeconds.WithLabelValues(op)
	}
	if h := m.decideSeconds.Load(); h != nil {
		return *h
	}
	h := m.storeSeconds.WithLabelValues(op)
	m.decideSeconds.Store(&h)
	return h
}
