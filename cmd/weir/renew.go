package main

import (
	"context"

	weirv1 "weir/proto/weir/v1"
)

type renewCommand struct {
	remote
	Leases []string `arg:"" name:"lease" help:"Lease ids, as weir decide printed them."`
}

// Help is shown by weir renew --help.
func (c *renewCommand) Help() string {
	return `Example: weir renew <the lease>

A lease is renewed to its full life from now on. LOST: it ended, expired, or is not known; its slots may be somebody else's.

Exit 0: every lease has its line, whatever it says; 2: error, or some are UNAVAILABLE: renew them again before they expire.`
}

// Run renews all leases in one call and prints one line for each, in order.
func (c *renewCommand) Run(con console) error {
	var results []weirv1.RenewStatus
	err := c.call(con.ctx, func(ctx context.Context, client weirv1.LeaseServiceClient) error {
		answer, err := client.Renew(ctx, &weirv1.RenewRequest{LeaseIds: c.Leases})
		for _, r := range answer.GetResults() {
			results = append(results, r.GetStatus())
		}
		return err
	})
	if err != nil {
		return err
	}
	return printResults(con.stdout, results, "RENEW_STATUS_", weirv1.RenewStatus_RENEW_STATUS_UNAVAILABLE, "renew them again before they expire")
}
