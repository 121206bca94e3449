package server

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weir/store"
)

// toStatus is where an error becomes a gRPC status; one that is a status already
// stays as it is. What a store says is not told: callers can do nothing with it.
func toStatus(err error) error {
	if _, ok := status.FromError(err); ok {
		return err
	}
	switch {
	case errors.Is(err, errNoPolicy):
		return status.Error(codes.Unavailable, err.Error())
	case errors.Is(err, store.ErrUnavailable):
		return status.Error(codes.Unavailable, "the store is away; try again")
	case errors.As(err, new(badOperation)):
		return status.Error(codes.FailedPrecondition, err.Error())
	case errors.As(err, new(badRequest)):
		return status.Error(codes.InvalidArgument, err.Error())
	}
	return status.Error(codes.Unavailable, "the store failed; try again")
}

// badOperation is about an operation that may not ask so.
type badOperation struct{ error }

// Error says what is wrong, for the caller.
func (e badOperation) Error() string {
	if errors.Is(e.error, store.ErrLateAttempt) {
		return "attempt is late: the lease of this operation_id has been released since; ask with a higher attempt, or a new operation_id"
	}
	return "operation_id holds a lease for another request; use an operation_id of its own for each"
}

// Unwrap lets errors.Is see what is wrong.
func (e badOperation) Unwrap() error { return e.error }

// badRequest is an error of the caller's, in words for the caller.
type badRequest struct{ error }

// Unwrap lets errors.Is see what is wrong.
func (e badRequest) Unwrap() error { return e.error }

func badRequestf(format string, args ...any) error { return badRequest{fmt.Errorf(format, args...)} }
