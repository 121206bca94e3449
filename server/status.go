package server

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

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
// INVALID_ARGUMENT. grpc-go has sent its INTERNAL before a handler sees the error,
// so the bytes are taken as they are and decoded here. Its server must use
// [wire].
type tolerant struct{ grpc.ServiceRegistrar }

func (r tolerant) RegisterService(desc *grpc.ServiceDesc, impl any) {
	own := *desc
	own.Methods = slices.Clone(desc.Methods)
	for i, m := range own.Methods {
		own.Methods[i].Handler = func(srv any, ctx context.Context, receive func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			return m.Handler(srv, ctx, func(into any) error {
				var b received
				if err := receive(&b); err != nil {
					return err
				}
				defer b.Free()
				message, ok := into.(proto.Message)
				if !ok {
					return status.Errorf(codes.Internal, "%T is no protobuf", into) // generated code has no such
				}
				if err := proto.Unmarshal(b.ReadOnlyData(), message); err != nil {
					return status.Error(codes.InvalidArgument, "the message cannot be decoded: it is no valid protobuf, or a text in it is no valid UTF-8")
				}
				return nil
			}, interceptor)
		}
	}
	r.ServiceRegistrar.RegisterService(&own, impl)
}

// received is a message as it came.
type received struct{ mem.Buffer }

// wire is gRPC's codec for protobuf, that leaves a received message alone.
type wire struct{ encoding.CodecV2 }

func (w wire) Unmarshal(data mem.BufferSlice, into any) error {
	if b, ok := into.(*received); ok {
		b.Buffer = data.MaterializeToBuffer(mem.DefaultBufferPool())
		return nil
	}
	return w.CodecV2.Unmarshal(data, into)
}
