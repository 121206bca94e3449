package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

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
	parts, err := usageOf(usage)
	if err != nil {
		return nil, err
	}
	settled := make(map[string]Settlement, len(usage))
	for _, limits := range parts {
		results, err := l.reconcile(ctx, limits)
		if err != nil {
			return nil, fmt.Errorf("client: reconcile: %w", err)
		}
		for i, s := range results {
			settled[limits[i].GetLimit()] = Settlement{Status: settlementWord(s.GetStatus()), Difference: s.GetDifference()}
		}
	}
	return settled, nil
}

// reconcile settles one part of a usage: what the last of its tries found is counted.
func (l *Lease) reconcile(ctx context.Context, limits []*weirv1.LimitUsage) ([]*weirv1.Settlement, error) {
	c := l.client
	var found *weirv1.ReconcileResult
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		ctx, cancel := context.WithTimeout(ctx, c.options.Timeout)
		defer cancel()
		m, err := c.service.Reconcile(ctx, &weirv1.ReconcileRequest{Usage: []*weirv1.LeaseUsage{{LeaseId: l.id, Limits: limits}}})
		found = nil
		switch {
		case err != nil && !away(status.Code(err)):
			return struct{}{}, backoff.Permanent(err)
		case err != nil:
			return struct{}{}, err
		case len(m.GetResults()) != 1 || len(m.GetResults()[0].GetLimits()) != len(limits):
			return struct{}{}, backoff.Permanent(errors.New("the service's answer has not a result for each limit"))
		}
		if found = m.GetResults()[0]; len(unsettled(limits, found)) > 0 {
			return struct{}{}, errNoStore
		}
		return struct{}{}, nil
	}, backoff.WithMaxTries(uint(c.options.Tries)))
	c.countSettlements(ctx, limits, found)
	for range unsettled(limits, found) {
		c.observer.Count(Settlements, settlementWord(weirv1.SettlementStatus_SETTLEMENT_STATUS_UNAVAILABLE))
	}
	if gaveUp := backoff.AsRetryError(err); gaveUp != nil {
		return nil, gaveUp.LastErr
	}
	return found.GetLimits(), nil
}

// errNoStore is the error of what the service could not do.
var errNoStore = errors.New("the service can't reach its store")

// What the usage of one lease may be.
const (
	maxUsage     = 64  // limits
	maxLimitName = 128 // bytes
)

// usageParts are messages of a usage, to be settled one after the other: what they name
// first, and then each that is left.
type usageParts [][]*weirv1.LimitUsage

// usageOf is a usage as messages, in the order of the names. With an error they are what
// can be told of it.
func usageOf(usage map[string]uint64) (parts usageParts, err error) {
	var named []*weirv1.LimitUsage
	for _, name := range slices.Sorted(maps.Keys(usage)) {
		switch {
		case len(name) > maxLimitName || !utf8.ValidString(name):
			err = fmt.Errorf("client: usage of a limit whose name is no text of at most %d bytes: it is not told", maxLimitName)
		case name != "":
			named = append(named, &weirv1.LimitUsage{Limit: name, Hits: usage[name]})
		}
	}
	if len(named) > maxUsage {
		return nil, fmt.Errorf("client: usage of %d limits, at most %d may be told: it is not", len(named), maxUsage)
	}
	if len(named) > 0 {
		parts = append(parts, named)
	}
	if hits, ok := usage[""]; ok {
		parts = append(parts, []*weirv1.LimitUsage{{Hits: hits}})
	}
	return parts, err
}

// unsettled is the part of limits that the service could not settle now.
func unsettled(limits []*weirv1.LimitUsage, r *weirv1.ReconcileResult) (left []*weirv1.LimitUsage) {
	for i, s := range r.GetLimits() {
		if i < len(limits) && s.GetStatus() == weirv1.SettlementStatus_SETTLEMENT_STATUS_UNAVAILABLE {
			left = append(left, limits[i])
		}
	}
	return left
}

// countSettlements counts those of one lease, one for each of limits, but for those that
// the service could not make now.
func (c *Client) countSettlements(ctx context.Context, limits []*weirv1.LimitUsage, r *weirv1.ReconcileResult) {
	for i, s := range r.GetLimits() {
		if s.GetStatus() == weirv1.SettlementStatus_SETTLEMENT_STATUS_UNAVAILABLE {
			continue
		}
		c.observer.Count(Settlements, settlementWord(s.GetStatus()))
		if s.GetStatus() == weirv1.SettlementStatus_SETTLEMENT_STATUS_NOT_RESERVED && i < len(limits) {
			c.warnOfName(ctx, limits[i].GetLimit())
		}
	}
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
