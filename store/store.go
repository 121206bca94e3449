// Package store is the contract that every store of weir keeps: it decides
// requests atomically and looks after leases. What the decisions are is written
// in testdata/*.txt, which every store passes byte for byte.
package store

import (
	"context"
	"errors"

	"weir/limit"
)

// ErrUnavailable is wrapped by every error that means that the store was not
// reached or did not answer in time. The call may have taken effect.
var ErrUnavailable = errors.New("store unavailable")

// ErrNotServing is wrapped beside [ErrUnavailable] if the store itself answered that it
// cannot do what was asked now: it is there, and other calls may succeed, as a release
// does while it has no memory left for decisions.
var ErrNotServing = errors.New("the store cannot do that now")

// CheckRequest returns an error for a request that breaks the contract of
// [limit.Request]: a bug of the caller's, which no store may turn into state.
func CheckRequest(r limit.Request) error {
	switch {
	case r.Lease == "" && limit.NeedsLease(r.Checks):
		return errors.New("a request that meets a concurrency limit must bring a lease id")
	case r.Lease == "" && r.Stream != "":
		return errors.New("a request with a stream must bring a lease id")
	}
	return nil
}

// CheckUsage returns an error for usage that breaks the contract of [limit.Usage].
func CheckUsage(u limit.Usage) error {
	switch {
	case u.Domain == "" || u.Stream == "":
		return errors.New("usage must bring its domain and its stream")
	case limit.NeedsLease(u.Checks):
		return errors.New("usage cannot be charged to a concurrency limit")
	}
	return nil
}

// Store decides requests and looks after leases. Its methods may be called at
// once from many goroutines. A cancelled or expired ctx ends a call with an
// error that wraps [ErrUnavailable]; the call may have taken effect all the
// same.
type Store interface {
	// Decide decides all checks of r at one instant of the store's clock. If the
	// request is admitted, every check that passed is charged; otherwise none is
	// and no state changes, except that windows with ChargeOver that were
	// themselves over are charged, expired leases are cleaned away, and a bucket
	// whose limit has changed is carried over to its new limit.
	//
	// If Decide fails, the store itself releases the lease should it turn out to
	// have been granted; charged hits stay charged. If even that fails, the lease
	// ends by its expiry.
	//
	// A request with a Stream is remembered under it: a lease that it was granted can
	// be found by it, until the stream asks again, whatever the answer: from then on
	// the stream alone finds nothing. On a tombstone a request takes nothing, is
	// refused (StreamEnded), and consumes it.
	Decide(ctx context.Context, r limit.Request) (limit.Decision, error)

	// Release ends a lease and frees the slots that it holds, and no others. It
	// may be called any number of times and in any order; a lease that is not
	// there is no error.
	Release(ctx context.Context, e limit.Ending) (limit.Release, error)

	// Charge charges what a stream has used, once for each of its limits, and reports
	// which of u.Checks it charged now. Two checks of one Key are charged once, so
	// each carries the hits of both.
	Charge(ctx context.Context, u limit.Usage) ([]bool, error)

	// Renew extends a live lease by its whole life from now on. It never revives
	// one that ended, expired or was lost. To a stream's sign of life a lease that
	// lingers is lost.
	Renew(ctx context.Context, e limit.Extension) (limit.Renewal, error)

	// Inspect tells how each check's limit stands for its subject, all at one
	// instant of the store's clock; the hits of a check do not matter. It writes
	// nothing, and does not even clean expired leases away, which it never counts.
	// Of each concurrency limit it tells at most [limit.MaxHolders] leases, the
	// first to expire first. A subject without state stands as new.
	Inspect(ctx context.Context, checks []limit.Check) ([]limit.State, error)

	// Held counts the live leases of a domain.
	Held(ctx context.Context, domain string) (int64, error)

	// Ping reports whether the store can be reached.
	Ping(ctx context.Context) error

	// Close frees what the store holds. Calls under way that wait, and those that
	// come later, fail with [ErrUnavailable] or are answered. It may be called
	// again.
	Close() error
}
