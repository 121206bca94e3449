package client

import (
	"context"
	"errors"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// pushback is the trailer that tells gRPC's own retries when to come, in ms; a negative
// number: never. (gRPC A6: "the server's pushback".)
const pushback = "grpc-retry-pushback-ms"

// RequestFunc says what to ask for a call of the method, as "/package.Service/Method".
// message is that of a unary call, and nil of a stream; ctx has the metadata and the
// authenticated peer. A Request without descriptors is not asked: the call is free.
type RequestFunc func(ctx context.Context, fullMethod string, message any) Request

// UnaryInterceptor acquires for each call, and releases when its handler returns or
// panics. A refused call does not reach the handler: its status is that of
// [LimitedError.GRPCStatus]. The handler finds the lease by [FromContext].
func (c *Client) UnaryInterceptor(ask RequestFunc) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, message any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (answer any, err error) {
		l, err := c.serve(ctx, ask(ctx, info.FullMethod, message), func(m metadata.MD) { _ = grpc.SetTrailer(ctx, m) })
		if err != nil {
			return nil, err
		}
		err = c.hold(ctx, l, func(ctx context.Context) (err error) {
			answer, err = handler(ctx, message)
			return err
		})
		return answer, err
	}
}

// StreamInterceptor is UnaryInterceptor for streams: one lease for the whole stream.
func (c *Client) StreamInterceptor(ask RequestFunc) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		l, err := c.serve(stream.Context(), ask(stream.Context(), info.FullMethod, nil), stream.SetTrailer)
		if err != nil {
			return err
		}
		return c.hold(stream.Context(), l, func(ctx context.Context) error {
			return handler(srv, &leasedStream{stream, ctx})
		})
	}
}

// leasedStream is a stream whose context has the lease.
type leasedStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *leasedStream) Context() context.Context { return s.ctx }

// serve acquires for a call of a server. Its error is a status for the caller.
func (c *Client) serve(ctx context.Context, r Request, trailer func(metadata.MD)) (*Lease, error) {
	if len(r.Descriptors) == 0 {
		return nil, nil
	}
	l, err := c.Acquire(ctx, r)
	limited, refused := errors.AsType[*LimitedError](err)
	switch {
	case refused:
		wait := int64(-1)
		if limited.Retryable {
			wait = roundUp(limited.RetryAfter, time.Millisecond)
		}
		trailer(metadata.Pairs(pushback, strconv.FormatInt(wait, 10)))
		return nil, limited.GRPCStatus().Err()
	case err != nil && ctx.Err() != nil:
		return nil, status.FromContextError(ctx.Err()).Err()
	case errors.Is(err, context.DeadlineExceeded): // the service saw it first
		return nil, status.FromContextError(context.DeadlineExceeded).Err()
	case errors.Is(err, ErrClosed):
		return nil, status.Error(codes.Unavailable, "the server is closing")
	case err != nil:
		return nil, status.Error(codes.Internal, "the request could not be admitted")
	}
	return l, nil
}

// GRPCStatus is the refusal for a gRPC caller: RESOURCE_EXHAUSTED for a lane and
// UNAVAILABLE for a pool, with a RetryInfo if asking again can help, and nothing of the
// policy.
func (e *LimitedError) GRPCStatus() *status.Status {
	s := status.New(codes.ResourceExhausted, "too many requests of this caller")
	if e.Class == Pool {
		s = status.New(codes.Unavailable, "the service has no room at present")
	}
	if !e.Retryable {
		return s
	}
	if detailed, err := s.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(e.RetryAfter)}); err == nil {
		return detailed
	}
	return s
}

// roundUp is how many units d has, the last one in part.
func roundUp(d, unit time.Duration) int64 { return int64((d + unit - 1) / unit) }
