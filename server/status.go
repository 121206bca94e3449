package server

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weir/envoy"
	"weir/store"
)

// toStatus is the one place where an error becomes a gRPC status. What a store
// says is not told: callers can do nothing with it.
func toStatus(err error) error {
	switch {
	case errors.Is(err, errNoPolicy):
		return status.Error(codes.Unavailable, err.Error())
	case errors.Is(err, envoy.ErrNotSupported):
		return status.Error(codes.Unimplemented, err.Error())
	case errors.Is(err, store.ErrUnavailable):
		return status.Error(codes.Unavailable, "the store is away; try again")
	case errors.As(err, new(badRequest)):
		return status.Error(codes.InvalidArgument, err.Error())
	}
	return status.Error(codes.Unavailable, "the store failed; try again")
}

// badRequest is an error of the caller's, in words for the caller.
type badRequest string

func (e badRequest) Error() string { return string(e) }

// tolerant registers services whose messages may be broken in transit or by a
// caller: a message that cannot be decoded (say, for its UTF-8) is
// INVALID_ARGUMENT, where grpc-go would say INTERNAL.
type tolerant struct{ grpc.ServiceRegistrar }

func (r tolerant) RegisterService(desc *grpc.ServiceDesc, impl any) {
	own := *desc
	own.Methods = slices.Clone(desc.Methods)
	for i, m := range own.Methods {
		own.Methods[i].Handler = func(srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			return m.Handler(srv, ctx, func(into any) error {
				if err := decode(into); err != nil {
					return status.Error(codes.InvalidArgument, "the message cannot be decoded: it is no valid protobuf, or a text in it is no valid UTF-8")
				}
				return nil
			}, interceptor)
		}
	}
	r.ServiceRegistrar.RegisterService(&own, impl)
}
