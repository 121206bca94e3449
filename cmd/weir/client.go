package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	weirv1 "weir/proto/weir/v1"
)

// remote are the flags of commands that ask a running service.
type remote struct {
	Addr    string        `env:"WEIR_ADDR" default:"127.0.0.1:8081" placeholder:"HOST:PORT" help:"The service's gRPC address (${default})."`
	Timeout time.Duration `default:"5s" help:"How long to wait for the answer (${default})."`
}

// call runs f with a client of the service.
func (r remote) call(ctx context.Context, f func(context.Context, weirv1.LeaseServiceClient) error) error {
	return r.connect(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		return f(ctx, weirv1.NewLeaseServiceClient(conn))
	})
}

// connect runs f with a connection to the service.
func (r remote) connect(ctx context.Context, f func(context.Context, grpc.ClientConnInterface) error) error {
	conn, err := grpc.NewClient("passthrough:///"+r.Addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("--addr %s: %w", r.Addr, err)
	}
	ctx, cancel := context.WithTimeout(ctx, r.Timeout)
	defer cancel()
	err = f(ctx, conn)
	_ = conn.Close() // nothing more is asked
	if err == nil {
		return nil
	}
	s, _ := status.FromError(err)
	switch {
	case strings.HasPrefix(s.Message(), "connection error"), s.Code() == codes.Unimplemented, s.Code() == codes.DeadlineExceeded:
		return fmt.Errorf("%s: %s (%s); is it a weir, is it ready, and is --addr right?", r.Addr, s.Message(), s.Code())
	}
	return fmt.Errorf("%s: %s (%s)", r.Addr, s.Message(), s.Code())
}
