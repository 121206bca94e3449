package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cenkalti/backoff/v7"
	"google.golang.org/grpc/status"

	weirv1 "weir/proto/weir/v1"
)

// Settlement is what became of the usage of one limit.
type Settlement struct {
	// Status is one of "settled", "already_settled", "late" (the lease has expired, or
	// the window has passed), "not_reserved".
	Status string
	// Difference is what was charged now beyond the reservation; negative: what was
	// given back.
	Difference int64
}

// Reconcile settles what the lease reserved by what was used in truth, as [Lease.Use]
// says, before or after the release. Each reservation is settled once, by the first that
// arrives; so it may be called any number of times. It is not sent in the background: an
// error means that it may not have arrived, and should be called again. Without a lease
// it returns nil.
func (l *Lease) Reconcile(ctx context.Context, usage map[string]uint64) (map[string]Settlement, error) {
	if l.ID() == "" || len(usage) == 0 {
		return nil, nil
	}
	limits := limitUsage(usage)
	c := l.client
	results, err := backoff.Retry(ctx, func() ([]*weirv1.Settlement, error) {
		ctx, cancel := context.WithTimeout(ctx, c.options.Timeout)
		defer cancel()
		m, err := c.service.Reconcile(ctx, &weirv1.ReconcileRequest{Usage: []*weirv1.LeaseUsage{{LeaseId: l.id, Limits: limits}}})
		switch {
		case err != nil && !away(status.Code(err)):
			return nil, backoff.Permanent(err)
		case err != nil:
			return nil, err
		case len(m.GetResults()) != 1 || len(m.GetResults()[0].GetLimits()) != len(limits):
			return nil, backoff.Permanent(errors.New("the service's answer has not a result for each limit"))
		case c.countSettlements(ctx, limits, m.GetResults()[0]):
			return nil, errors.New("the service can't reach its store")
		}
		return m.GetResults()[0].GetLimits(), nil
	}, backoff.WithMaxTries(uint(c.options.Tries)))
	if gaveUp := backoff.AsRetryError(err); gaveUp != nil {
		return nil, fmt.Errorf("client: reconcile: %w", gaveUp.LastErr)
	}
	settled := make(map[string]Settlement, len(limits))
	for i, s := range results {
		settled[limits[i].GetLimit()] = Settlement{Status: settlementWord(s.GetStatus()), Difference: s.GetDifference()}
	}
	return settled, nil
}

// limitUsage is usage as messages, in the order of the names.
func limitUsage(usage map[string]uint64) []*weirv1.LimitUsage {
	var out []*weirv1.LimitUsage
	for _, name := range slices.Sorted(maps.Keys(usage)) {
		out = append(out, &weirv1.LimitUsage{Limit: strings.ToValidUTF8(name, "?"), Hits: usage[name]})
	}
	return out
}

// countSettlements counts those of one lease, one for each of limits, and reports whether
// one should be sent again.
func (c *Client) countSettlements(ctx context.Context, limits []*weirv1.LimitUsage, r *weirv1.ReconcileResult) (again bool) {
	for i, s := range r.GetLimits() {
		c.observer.Count(Settlements, settlementWord(s.GetStatus()))
		again = again || s.GetStatus() == weirv1.SettlementStatus_SETTLEMENT_STATUS_UNAVAILABLE
		if s.GetStatus() == weirv1.SettlementStatus_SETTLEMENT_STATUS_NOT_RESERVED && i < len(limits) {
			c.warnOfName(ctx, limits[i].GetLimit())
		}
	}
	return again
}

// maxWarned is how many names are warned of: each is in a program's text.
const maxWarned = 100

// warnOfName says once that usage is told of a limit that reserved nothing: most often it
// is misspelt, and each estimate stands.
func (c *Client) warnOfName(ctx context.Context, limit string) {
	c.warnedMu.Lock()
	known := limit == "" || c.warned[limit] || len(c.warned) >= maxWarned
	if !known {
		c.warned[limit] = true
	}
	c.warnedMu.Unlock()
	if !known {
		c.log.WarnContext(ctx, "usage of a limit that had reserved nothing changes nothing; is it the name that weir check prints, and does the limit have reserve?", "limit", limit)
	}
}

// settlementWord is the name of a status, as one of metrics.
func settlementWord(s weirv1.SettlementStatus) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "SETTLEMENT_STATUS_"))
}
