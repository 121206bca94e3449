package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	weirv1 "weir/proto/weir/v1"
)

type reconcileCommand struct {
	remote
	Lease string   `arg:"" help:"Lease id, as weir decide printed it."`
	Used  []string `arg:"" name:"used" placeholder:"LIMIT=HITS" help:"What was used in truth, of a limit with reserve, by its name; *=HITS for each that the lease reserved."`
}

// Help is shown by weir reconcile --help.
func (c *reconcileCommand) Help() string {
	return `Example: weir reconcile <the lease> tokens=150

It prints what became of each: SETTLED and the difference to what was reserved (negative: given back), ALREADY_SETTLED, LATE (the lease expired, or the window has passed) or NOT_RESERVED. It may come before the release, or after it.

Exit 0: every limit has its line, whatever it says; 2: error, or some are UNAVAILABLE: reconcile them again.`
}

// Run settles all limits in one call and prints one line for each, in order.
func (c *reconcileCommand) Run(con console) error {
	usage := &weirv1.LeaseUsage{LeaseId: c.Lease}
	for _, word := range c.Used {
		name, hits, ok := strings.Cut(word, "=")
		n, err := strconv.ParseUint(hits, 10, 64)
		if !ok || name == "" || err != nil {
			return fmt.Errorf("%q is no usage; write LIMIT=HITS, like tokens=150, or *=HITS for each limit that the lease reserved", word)
		}
		usage.Limits = append(usage.Limits, &weirv1.LimitUsage{Limit: strings.TrimPrefix(name, "*"), Hits: n})
	}
	var all []*weirv1.Settlement
	err := c.call(con.ctx, func(ctx context.Context, client weirv1.LeaseServiceClient) error {
		answer, err := client.Reconcile(ctx, &weirv1.ReconcileRequest{Usage: []*weirv1.LeaseUsage{usage}})
		for _, r := range answer.GetResults() {
			all = append(all, r.GetLimits()...)
		}
		return err
	})
	if err != nil {
		return err
	}
	for i, s := range all {
		text := strings.TrimPrefix(s.GetStatus().String(), "SETTLEMENT_STATUS_")
		if s.GetStatus() == weirv1.SettlementStatus_SETTLEMENT_STATUS_SETTLED {
			text += fmt.Sprintf(" %+d", s.GetDifference())
		}
		name, _, _ := strings.Cut(c.Used[i], "=")
		if _, err := fmt.Fprintln(con.stdout, name, text); err != nil {
			return err
		}
	}
	if slices.ContainsFunc(all, func(s *weirv1.Settlement) bool {
		return s.GetStatus() == weirv1.SettlementStatus_SETTLEMENT_STATUS_UNAVAILABLE
	}) {
		return fmt.Errorf("the service's store did not answer, or another replica granted the lease while it did not; reconcile again")
	}
	return nil
}
