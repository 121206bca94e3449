package main

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

type healthCommand struct {
	remote
}

// Help is shown by weir health --help.
func (c *healthCommand) Help() string {
	return `Example: weir health --addr 127.0.0.1:8081

It is the health check of the container, which has no other program. What is amiss is on :8080/healthz.`
}

// Run asks the health service. Whatever keeps it from saying SERVING is a no: to
// Docker an exit code of 2 means nothing.
func (c *healthCommand) Run(con console) error {
	var status healthpb.HealthCheckResponse_ServingStatus
	err := c.connect(con.ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		answer, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
		status = answer.GetStatus()
		return err
	})
	switch {
	case err != nil:
		_, _ = fmt.Fprintf(con.stderr, "weir: %v\n", err)
		return exit(exitNo)
	case status != healthpb.HealthCheckResponse_SERVING:
		_, _ = fmt.Fprintf(con.stderr, "weir: %s: %v; its /healthz says why\n", c.Addr, status)
		return exit(exitNo)
	}
	_, err = fmt.Fprintln(con.stdout, status)
	return err
}
