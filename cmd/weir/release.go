package main

import (
	"context"
	"fmt"
	"strings"

	weirv1 "weir/proto/weir/v1"
)

type releaseCommand struct {
	remote
	Leases []string `arg:"" name:"lease" help:"Lease ids, as weir decide printed them."`
}

// Run releases all leases in one call and prints one line for each, in order.
func (c *releaseCommand) Run(con console) error {
	var answer *weirv1.ReleaseResponse
	err := c.call(con.ctx, func(ctx context.Context, client weirv1.LeaseServiceClient) (err error) {
		answer, err = client.Release(ctx, &weirv1.ReleaseRequest{LeaseIds: c.Leases})
		return err
	})
	if err != nil {
		return err
	}
	unavailable := 0
	for _, r := range answer.GetResults() {
		if r.GetStatus() == weirv1.ReleaseStatus_RELEASE_STATUS_UNAVAILABLE {
			unavailable++
		}
		if _, err := fmt.Fprintln(con.stdout, strings.TrimPrefix(r.GetStatus().String(), "RELEASE_STATUS_")); err != nil {
			return err
		}
	}
	if unavailable > 0 {
		return fmt.Errorf("%d of %d leases: the service's store did not answer; release them again", unavailable, len(answer.GetResults()))
	}
	return nil
}
