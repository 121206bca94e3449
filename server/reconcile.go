package server

import (
	"context"

	"weir/limit"
	"weir/policy"
	weirv1 "weir/proto/weir/v1"
)

// maxUsed is how many limits the usage of one lease may tell.
const maxUsed = 64

// Reconcile settles what leases have reserved. It finishes even if the caller has gone.
func (s leases) Reconcile(ctx context.Context, m *weirv1.ReconcileRequest) (*weirv1.ReconcileResponse, error) {
	if len(m.GetUsage()) == 0 {
		return nil, toStatus(badRequestf("no usage; send that of at least one lease"))
	}
	if err := checkUsage(m.GetUsage()); err != nil {
		return nil, toStatus(err)
	}
	ctx, cancel := detach(ctx)
	defer cancel()
	return &weirv1.ReconcileResponse{Results: s.reconcile(ctx, m.GetUsage())}, nil
}

// checkUsage bounds what a call may settle.
func checkUsage(list []*weirv1.LeaseUsage) error {
	if n := len(list); n > maxLeases {
		return badRequestf("usage of %d leases, at most %d may come in one call; send several calls", n, maxLeases)
	}
	for i, u := range list {
		limits := u.GetLimits()
		if n := len(limits); n == 0 || n > maxUsed {
			return badRequestf("usage[%d] has %d limits; send 1 to %d", i, n, maxUsed)
		}
		seen := make(map[string]bool, len(limits))
		for j, l := range limits {
			switch name := l.GetLimit(); {
			case len(name) > policy.MaxName:
				return badRequestf("usage[%d].limits[%d] has a name of %d bytes; no limit's has more than %d", i, j, len(name), policy.MaxName)
			case seen[name], len(limits) > 1 && name == "":
				return badRequestf("usage[%d].limits[%d] stands for a limit that another does; send each once", i, j)
			default:
				seen[name] = true
			}
		}
	}
	return nil
}

// reconcile settles usage, in any order: a lease that stands twice is settled once.
func (s leases) reconcile(ctx context.Context, list []*weirv1.LeaseUsage) []*weirv1.ReconcileResult {
	results := make([]*weirv1.ReconcileResult, len(list))
	each(list, func(i int, u *weirv1.LeaseUsage) { results[i] = s.reconcileOne(ctx, u) })
	return results
}

func (s leases) reconcileOne(ctx context.Context, m *weirv1.LeaseUsage) *weirv1.ReconcileResult {
	r := &weirv1.ReconcileResult{Limits: make([]*weirv1.Settlement, len(m.GetLimits()))}
	for i := range r.Limits {
		r.Limits[i] = &weirv1.Settlement{Status: weirv1.SettlementStatus_SETTLEMENT_STATUS_NOT_RESERVED}
	}
	id, err := limit.ParseLeaseID(m.GetLeaseId())
	if err != nil {
		return r // no lease has such an id
	}
	u := limit.Usage{Domain: id.Domain(), Lease: id}
	for _, l := range m.GetLimits() {
		u.Limits = append(u.Limits, limit.Used{Limit: l.GetLimit(), Hits: int64(min(l.GetHits(), limit.MaxExact))})
	}
	all, err := s.settle(ctx, u)
	for i := range r.Limits {
		if err != nil {
			r.Limits[i].Status = weirv1.SettlementStatus_SETTLEMENT_STATUS_UNAVAILABLE
			continue
		}
		r.Limits[i].Status, r.Limits[i].Difference = settlement(all[i].Result), all[i].Difference
	}
	return r
}

func settlement(r limit.SettlementResult) weirv1.SettlementStatus {
	switch r {
	case limit.Settled:
		return weirv1.SettlementStatus_SETTLEMENT_STATUS_SETTLED
	case limit.AlreadySettled:
		return weirv1.SettlementStatus_SETTLEMENT_STATUS_ALREADY_SETTLED
	case limit.Late:
		return weirv1.SettlementStatus_SETTLEMENT_STATUS_LATE
	case limit.NotReserved, limit.Charged: // by the limit's name nothing is charged
	}
	return weirv1.SettlementStatus_SETTLEMENT_STATUS_NOT_RESERVED
}
