package server

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"weir/limit"
	"weir/policy"
)

// held collects what is held now, which the store counts over all replicas: the leases of
// each domain, and the slots of the pools. What the store does not count has no value.
type held struct{ *Server }

// maxPools is how many pools are counted at most: each is a question at each scrape.
const maxPools = 200

var (
	heldDesc = prometheus.NewDesc("weir_leases_held",
		"Leases held now, over all replicas of this store: each tells the same, so take the max.", []string{"domain"}, nil)
	inFlightDesc = prometheus.NewDesc("weir_in_flight",
		"Slots that are taken of concurrency limits of one subject (every entry has a value in the policy), over all replicas of this store: take the max.", []string{"domain", "limit"}, nil)
	maxInFlightDesc = prometheus.NewDesc("weir_max_in_flight",
		"Slots that there are of concurrency limits of one subject.", []string{"domain", "limit"}, nil)
)

// Describe implements [prometheus.Collector].
func (h held) Describe(c chan<- *prometheus.Desc) {
	c <- heldDesc
	c <- inFlightDesc
	c <- maxInFlightDesc
}

// Collect implements [prometheus.Collector].
func (h held) Collect(c chan<- prometheus.Metric) {
	now := h.loaded.Load()
	if now.set == nil {
		return
	}
	gauge := func(d *prometheus.Desc, n int64, labels ...string) {
		c <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels...)
	}
	ctx, cancel := context.WithTimeout(context.Background(), detachedTimeout)
	defer cancel()
	for _, domain := range now.set.Domains() {
		pools := now.pools[domain]
		for _, p := range pools {
			if l, ok := p.Limit.(limit.Concurrency); ok {
				gauge(maxInFlightDesc, l.Max, domain, h.metrics.names.of(domain, p.Name))
			}
		}
		if h.breakers.of(domain).open.Load() {
			continue // nobody waits to see that the store is away
		}
		n, states, err := h.countHeld(ctx, domain, pools)
		if n >= 0 {
			gauge(heldDesc, n, domain)
		}
		for i := range states {
			gauge(inFlightDesc, states[i].Count, domain, h.metrics.names.of(domain, pools[i].Name))
		}
		if err != nil && ctx.Err() != nil {
			return
		} // else it may be on a node of a cluster that is away alone
	}
}

// countHeld asks the store for the leases of a domain, -1 if it does not tell, and for the
// states of its pools. An error is counted.
func (s *Server) countHeld(ctx context.Context, domain string, pools []limit.Check) (leases int64, states []limit.State, err error) {
	leases, err = s.store.Held(ctx, domain)
	if err != nil {
		leases = -1
	} else if len(pools) > 0 {
		states, err = s.store.Inspect(ctx, pools)
	}
	if err != nil {
		s.metrics.storeErrors.WithLabelValues("held", reason(err)).Inc()
	}
	return leases, states, err
}

// poolsOf are the pools of a set that are counted, by domain: of each limit's name one.
func poolsOf(set *policy.Set) map[string][]limit.Check {
	pools := make(map[string][]limit.Check)
	seen := make(map[limitName]bool)
	for domain, c := range set.Pools() {
		if name := (limitName{domain, c.Name}); !seen[name] && len(seen) < maxPools {
			seen[name] = true
			pools[domain] = append(pools[domain], c)
		}
	}
	return pools
}
