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
		"Slots that are taken of concurrency limits of one subject (every entry has a value in the policy), over all replicas of this store: take the max.", []string{"domain", "limit", "subject"}, nil)
	maxInFlightDesc = prometheus.NewDesc("weir_max_in_flight",
		"Slots that there are of concurrency limits of one subject.", []string{"domain", "limit", "subject"}, nil)
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
		labels := h.poolLabels(domain, pools)
		for i, p := range pools {
			if l, ok := p.Limit.(limit.Concurrency); ok && labels[i] != nil {
				gauge(maxInFlightDesc, l.Max, labels[i]...)
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
			if labels[i] != nil {
				gauge(inFlightDesc, states[i].Count, labels[i]...)
			}
		}
		if err != nil && ctx.Err() != nil {
			return
		} // else it may be on a node of a cluster that is away alone
	}
}

// poolLabels are the labels of each pool of a domain; nil if those before it have the same,
// as two subjects may that are alike as far as they are shown.
func (h held) poolLabels(domain string, pools []limit.Check) [][]string {
	all := make([][]string, len(pools))
	seen := make(map[poolID]bool)
	for i, p := range pools {
		id := poolID{limitName{domain, h.metrics.names.of(domain, p.Name)}, subjectOf(p.Key)}
		if !seen[id] {
			seen[id] = true
			all[i] = []string{domain, id.limit, id.of}
		}
	}
	return all
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

// poolID is a pool of a limit: of its key in the store, or its subject as it is shown.
type poolID struct {
	limitName
	of string
}

// poolsOf are the pools of a set that are counted, by domain: each subject of a limit has
// its own.
func poolsOf(set *policy.Set) map[string][]limit.Check {
	pools := make(map[string][]limit.Check)
	seen := make(map[poolID]bool)
	for domain, c := range set.Pools() {
		if len(seen) >= maxPools {
			break
		}
		if id := (poolID{limitName{domain, c.Name}, c.Key}); !seen[id] {
			seen[id] = true
			pools[domain] = append(pools[domain], c)
		}
	}
	return pools
}
