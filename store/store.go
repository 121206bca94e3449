// Package store is the contract that every store of weir keeps: it decides
// requests atomically and looks after leases. What the decisions are is written
// in testdata/*.txt, which every store passes byte for byte.
package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"weir/limit"
)

// ErrUnavailable is wrapped by every error that means that the store was not
// reached or did not answer in time. The call may have taken effect.
var ErrUnavailable = errors.New("store unavailable")

// ErrNotServing is wrapped beside [ErrUnavailable] if the store itself answered that it
// cannot do what was asked now: it is there, and other calls may succeed, as a release
// does while it has no memory left for decisions.
var ErrNotServing = errors.New("the store cannot do that now")

// ErrOtherRequest is wrapped by the error of a decision for an operation that holds a
// lease for something else, and ErrLateAttempt by that for an attempt that is not newer
// than those of a lease that was released. Nothing was taken.
var (
	ErrOtherRequest = errors.New("the operation holds a lease for another request")
	ErrLateAttempt  = errors.New("the lease that this attempt of the operation, or a later one, was granted has been released")
)

// CheckRequest returns an error for a request that breaks the contract of
// [limit.Request]: a bug of the caller's, which no store may turn into state.
func CheckRequest(r limit.Request) error {
	switch {
	case r.Lease == "" && r.NeedsLease():
		return errors.New("a request that takes a slot or reserves, or is of an operation, must bring a lease id")
	case r.Lease == "" && r.Stream != "":
		return errors.New("a request with a stream must bring a lease id")
	}
	if n := r.Reserving(); n > limit.MaxReserved {
		return fmt.Errorf("%d checks reserve, at most %d may", n, limit.MaxReserved)
	}
	if r.Stream != "" && r.Operation.ID != "" {
		return errors.New("a request is of a stream or of an operation, not of both")
	}
	return nil
}

// CheckUsage returns an error for usage that breaks the contract of [limit.Usage].
func CheckUsage(u limit.Usage) error {
	switch {
	case u.Domain == "" || u.Stream == "" && u.Lease == "":
		return errors.New("usage must bring its domain, and a stream or a lease")
	case u.Lease != "" && u.Lease.Domain() != u.Domain:
		return errors.New("usage must bring a lease of its domain")
	}
	for _, c := range u.Checks {
		if _, slot := c.Limit.(limit.Concurrency); slot {
			return errors.New("usage cannot be charged to a concurrency limit")
		}
	}
	return nil
}

// Until returns a context with the values of ctx and this deadline, which is never done: it needs
// no timer, so only stores look at its deadline.
func Until(ctx context.Context, deadline time.Time) context.Context {
	return until{context.WithoutCancel(ctx), deadline}
}

type until struct {
	context.Context
	deadline time.Time
}

// Deadline implements [context.Context].
func (u until) Deadline() (time.Time, bool) { return u.deadline, true }

// Store decides requests and looks after leases. Its methods may be called at
// once from many goroutines. A call ends when ctx is done, and at its deadline, also
// if ctx is never done ([Until]), with an error that wraps [ErrUnavailable]; it may
// have taken effect all the same.
type Store interface {
	// Decide decides all checks of r at one instant of the store's clock. If the
	// request is admitted, every check that passed is charged; otherwise none is
	// and no state changes, except that windows with ChargeOver that were
	// themselves over are charged, expired leases are cleaned away, and a bucket
	// whose limit has changed is carried over to its new limit.
	//
	// If Decide fails, the store itself undoes it should a lease turn out to have been
	// granted: see Undo. If even that fails, the lease ends by its expiry. Without a lease,
	// charged hits stay charged.
	//
	// An operation that holds a lease gets it again (Replayed), and takes nothing. A
	// refusal is not remembered, nor is an operation whose lease has ended, but for
	// attempts that come too late: see [ErrOtherRequest] and [ErrLateAttempt].
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

	// Undo ends the lease of r as if it had not been granted, should it be held: its slots
	// are free, the hits of its enforced checks that are in no quota group are given back
	// unless their window has passed or they are settled, and its operation is forgotten. A
	// bucket keeps the limit that it stands under: r may have been made by an older policy.
	// It does nothing if the operation has been told of the lease since.
	Undo(ctx context.Context, r limit.Request) (limit.Release, error)

	// Settle settles what a lease has reserved by what was used in truth, once each: the
	// difference is given back, never above capacity or below 0, or charged, whether or
	// not it is there. It returns one result for each of u.Checks, and then one for each of
	// u.Limits. Two checks of one Key are one, so each carries the hits of both. It may
	// come before or after the release, and any number of times: what was told of a stream
	// is remembered for [limit.UsageLife], whatever its lease. A bucket keeps the limit
	// that it stands under.
	Settle(ctx context.Context, u limit.Usage) ([]limit.Settlement, error)

	// Renew extends a live lease by its whole life from now on. It never revives
	// one that ended, expired or was lost. To a stream's sign of life a lease that
	// lingers is lost.
	Renew(ctx context.Context, e limit.Extension) (limit.Renewal, error)

	// Inspect tells how each check's limit stands for its subject, all at one
	// instant of the store's clock; the hits of a check are those that are waited for. It writes
	// nothing, and does not even clean expired leases away, which it never counts.
	// Of each concurrency limit it tells at most [limit.MaxHolders] leases, the
	// first to expire first. A subject without state stands as new.
	Inspect(ctx context.Context, checks []limit.Check) ([]limit.State, error)

	// Leases lists the live leases of a domain that hold slots or reserve, a page at a time:
	// at most n of them ([limit.PageSize]), those that come behind after, which is the
	// Next of the page before or the zero value. A slot that has ended before its lease, or
	// was reset, is not told. It writes nothing, and tells one instant of the store's clock a page.
	Leases(ctx context.Context, domain string, after limit.Slot, n int) (limit.Listing, error)

	// Reset forgets the states of checks, which are of one domain, all at one instant; a check's
	// hits do not matter. A bucket is full, a window has counted nothing, and of a
	// concurrency limit nobody holds a slot. Leases stay, with their other slots: a
	// release of one that has lost a slot is as ever, and it is lost to a renewal. What
	// is settled later of a reservation is given back or charged as ever: never above
	// capacity or below 0. A state that is not there is no error.
	Reset(ctx context.Context, checks []limit.Check) error

	// Held counts the live leases of a domain.
	Held(ctx context.Context, domain string) (int64, error)

	// Ping reports whether the store can be reached.
	Ping(ctx context.Context) error

	// Close frees what the store holds. Calls under way that wait, and those that
	// come later, fail with [ErrUnavailable] or are answered. It may be called
	// again.
	Close() error
}
