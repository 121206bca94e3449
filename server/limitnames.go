package server

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"weir/policy"
)

// maxNames is how many limits have series of their own, over all domains; the others
// share those of otherLimit. A file with more limits is one that a program wrote.
const maxNames = 2000

// otherLimit is the label of limits beyond maxNames.
const otherLimit = "other"

// unknownLimit is the label of what a request calls a limit, and is none.
const unknownLimit = "unknown"

// limitNames are the limits with series of their own. Names that are no limit's, as
// "unknown", are left as they are.
type limitNames struct {
	now atomic.Pointer[map[limitName]bool] // true: it has series of its own
}

type limitName struct{ domain, limit string }

// set takes the names of a new set of policies, and has forget drop the series of those
// that are gone. It is not called at once with itself.
func (n *limitNames) set(set *policy.Set, forget func(limitName)) {
	now := make(map[limitName]bool)
	own := 0
	for domain, c := range set.Limits() {
		name := limitName{domain, c.Name}
		if _, again := now[name]; !again {
			now[name] = own < maxNames
			own++
		}
	}
	old := n.now.Swap(&now)
	if old == nil {
		return
	}
	for name, had := range *old {
		if had && !now[name] {
			forget(name)
		}
	}
}

// of is the label of a limit.
func (n *limitNames) of(domain, name string) string {
	if now := n.now.Load(); now != nil && len(*now) > maxNames {
		if own, is := (*now)[limitName{domain, name}]; is && !own {
			return otherLimit
		}
	}
	return name
}

// forget drops the series of a limit that is not in the policies any more.
func (m *metrics) forget(name limitName) {
	labels := prometheus.Labels{"domain": name.domain, "limit": name.limit}
	for _, v := range []*prometheus.CounterVec{m.checks, m.bypassed, m.refusals, m.usage, m.reservedHits, m.settledHits} {
		v.DeletePartialMatch(labels)
	}
}
