package main

import (
	"context"

	weirv1 "weir/proto/weir/v1"
)

type releaseCommand struct {
	remote
	Leases []string `arg:"" name:"lease" help:"Lease ids, as weir decide printed them."`
}

// Help is shown by weir release --help.
func (c *releaseCommand) Help() string {
	return `Example: weir release <the lease>

Exit 0: every lease has its line, whatever it says; 2: error, or some are UNAVAILABLE: release them again.`
}

// Run releases all leases in one call and prints one line for each, in order.
func (c *releaseCommand) Run(con console) error {
	var results []weirv1.ReleaseStatus
	err := c.call(con.ctx, func(ctx context.Context, client weirv1.LeaseServiceClient) error {
		answer, err := client.Release(ctx, &weirv1.ReleaseRequest{LeaseIds: c.Leases})
		for _, r := range answer.GetResults() {
			results = append(results, r.GetStatus())
		}
		return err
	})
	if err != nil {
		return err
	}
	return printResults(con.stdout, results, "RELEASE_STATUS_", weirv1.ReleaseStatus_RELEASE_STATUS_UNAVAILABLE, "release them again")
}
