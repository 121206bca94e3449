// Package main is the floor of the benchmark: a gRPC server that answers OK
// without looking. No service on grpc-go can be faster.
package main

import (
	"context"
	"fmt"
	"net"
	"os"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"

	weirv1 "weir/proto/weir/v1"
)

type rateLimit struct {
	rls.UnimplementedRateLimitServiceServer
}

func (rateLimit) ShouldRateLimit(_ context.Context, r *rls.RateLimitRequest) (*rls.RateLimitResponse, error) {
	statuses := make([]*rls.RateLimitResponse_DescriptorStatus, len(r.GetDescriptors()))
	for i := range statuses {
		statuses[i] = &rls.RateLimitResponse_DescriptorStatus{
			Code:           rls.RateLimitResponse_OK,
			LimitRemaining: 999,
			CurrentLimit:   &rls.RateLimitResponse_RateLimit{RequestsPerUnit: 1000, Unit: rls.RateLimitResponse_RateLimit_HOUR},
		}
	}
	return &rls.RateLimitResponse{OverallCode: rls.RateLimitResponse_OK, Statuses: statuses}, nil
}

type leases struct {
	weirv1.UnimplementedLeaseServiceServer
}

func (leases) Release(context.Context, *weirv1.ReleaseRequest) (*weirv1.ReleaseResponse, error) {
	return &weirv1.ReleaseResponse{Results: []*weirv1.ReleaseResult{{Status: weirv1.ReleaseStatus_RELEASE_STATUS_RELEASED}}}, nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "floor:", err)
		os.Exit(1)
	}
}

func run() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	g := grpc.NewServer()
	rls.RegisterRateLimitServiceServer(g, rateLimit{})
	weirv1.RegisterLeaseServiceServer(g, leases{})
	fmt.Printf("listening grpc=%s\n", l.Addr())
	return g.Serve(l)
}
