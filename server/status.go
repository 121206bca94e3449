package server

import (
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weir/envoy"
	"weir/store"
)

// toStatus is where an error becomes a gRPC status. What a store
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
