// Package standby decides while the store cannot: by the failure mode of each limit.
// Limits that are decided here go by this process's share of them, which follows
// what the store admits, so that the change from one to the other is no fresh burst.
package standby

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"weir/limit"
	"weir/store"
	"weir/store/memory"
)

// RetryAfter is told of a limit that is closed: nobody knows when the store is back.
const RetryAfter = time.Second

// Options configure a standby. The zero value admits.
type Options struct {
	// Mode is that of limits whose policy says none; the zero value means ModeOpen.
	Mode limit.FailureMode
	// Replicas is how many processes share the load; 0 means 1.
	Replicas int
	// Now returns milliseconds since the epoch; nil means the machine's clock.
	Now func() int64
	// MaxFollowed is how many states follow the store at most; 0 means [MaxFollowed].
	MaxFollowed int
}

// Standby decides in this process. Its methods may be called at once from many
// goroutines. Use [New].
type Standby struct {
	mode     limit.FailureMode
	replicas int64
	process  uint32 // in the ids of its leases
	local    *memory.Store
	max      int // states

	unfollowed atomic.Int64
}

// Unfollowed is how often something was not followed, since there was too much.
func (s *Standby) Unfollowed() int64 { return s.unfollowed.Load() }

// New returns a standby that knows of nothing yet.
func New(o Options) *Standby {
	s := &Standby{
		mode: o.Mode, replicas: int64(max(o.Replicas, 1)), max: cmp.Or(o.MaxFollowed, MaxFollowed),
		local: memory.New(memory.Options{Now: o.Now}),
	}
	if s.mode == limit.DefaultMode {
		s.mode = limit.ModeOpen
	}
	random := random()
	s.process = binary.BigEndian.Uint32(random[:])
	return s
}

func random() (b [16]byte) {
	_, _ = rand.Read(b[:]) // it never fails
	return b
}

// Mode is what becomes of c without the store.
func (s *Standby) Mode(c limit.Check) limit.FailureMode {
	if c.FailureMode == limit.DefaultMode {
		return s.mode
	}
	return c.FailureMode
}

// What stands in the place of a check that is not decided here: limits that always
// pass, and never. Neither has a state, nor a reservation: whatever were settled of one
// would be charged to all.
var (
	open   = limit.Window{Max: 1, Unit: limit.Second, Multiplier: 1}
	closed = limit.Window{Max: 0, Unit: limit.Second, Multiplier: 1}
)

// Decide decides r as a whole, without the store; reason says in a word why. A limit
// that can never pass refuses in any mode: that needs no store. One whose share is
// less than the hits is closed. An error is [store.ErrOtherRequest] or
// [store.ErrLateAttempt].
func (s *Standby) Decide(r limit.Request, reason string) (limit.Decision, error) {
	asked := limit.Request{Domain: r.Domain, Checks: make([]limit.Check, len(r.Checks))}
	modes := make([]limit.FailureMode, len(r.Checks))
	for i, c := range r.Checks {
		asked.Checks[i], modes[i] = s.standIn(c)
		if modes[i] == limit.ModeLocal {
			asked.Operation = r.Operation // without a share nothing is taken, and nothing kept
		}
	}
	if asked.NeedsLease() {
		asked.Lease, asked.Stream = limit.NewLocalLeaseID(r.Domain, s.process, random()), r.Stream
	}
	d, err := s.local.Decide(context.Background(), asked)
	if errors.Is(err, store.ErrOtherRequest) || errors.Is(err, store.ErrLateAttempt) {
		return limit.Decision{}, fmt.Errorf("standby: %w", err)
	}
	if err != nil { // a request that breaks the store's contract; standIn makes none
		panic(fmt.Sprintf("standby: %v", err))
	}
	d.Expired = 0 // they are the store's leases too
	shadows := limit.DefaultMode
	for i, mode := range modes {
		result := &d.Results[i]
		switch mode {
		case limit.DefaultMode:
			continue
		case limit.ModeOpen:
			*result = limit.Result{Passed: true}
		case limit.ModeClosed:
			*result = limit.Result{RetryAfter: RetryAfter}
		case limit.ModeLocal:
		}
		result.Bypass = mode
		if r.Checks[i].Shadow {
			shadows = max(shadows, mode)
		} else {
			d.Bypass = max(d.Bypass, mode)
		}
	}
	if d.Bypass == limit.DefaultMode {
		d.Bypass = shadows
	}
	if d.Bypass != limit.DefaultMode {
		d.BypassReason = reason
	}
	return d, nil
}

// standIn is the check that decides c here, and the mode by which it does so:
// DefaultMode if c needs no store.
func (s *Standby) standIn(c limit.Check) (limit.Check, limit.FailureMode) {
	if c.Impossible() != limit.NoReason {
		// Not under the key of the share: its state would be turned into one of the
		// whole limit, and gain as that does. What is asked here never has a state.
		c.Key, c.Reserve = "never "+c.Key, 0
		if w, ok := c.Limit.(limit.Window); ok {
			w.ChargeOver = false
			c.Limit = w
		}
		return c, limit.DefaultMode
	}
	mode := s.Mode(c)
	if mode == limit.ModeLocal {
		share := c
		if share.Limit = limit.Share(c.Limit, c.Fraction, s.replicas); share.Limit != nil && share.Impossible() == limit.NoReason {
			return share, mode
		}
		mode = limit.ModeClosed
	}
	c.Reserve = 0
	if mode == limit.ModeClosed && c.Hits >= 0 {
		c.Key, c.Limit, c.Hits = "closed", closed, 1
		return c, mode
	}
	c.Key, c.Limit, c.Hits = "open", open, 0
	return c, limit.ModeOpen // a refund never refuses
}

// MaxFollowed is how many states are kept at most of what the store admits, at some
// 284 bytes each. Subjects beyond have their whole share when the store goes.
const MaxFollowed = 1 << 18

// Follow takes from the shares what the store has charged: the checks of an admitted
// request, or usage, with the lease that it was granted, or "".
func (s *Standby) Follow(domain string, checks []limit.Check, lease limit.LeaseID) {
	s.FollowRequest(limit.Request{Domain: domain, Checks: checks, Lease: lease})
}

// FollowRequest is Follow for r, which the store has admitted: r.Lease is what it was
// granted, or "". What its stream ends or settles is followed too.
func (s *Standby) FollowRequest(r limit.Request) {
	followed := limit.Request{Domain: r.Domain, Lease: r.Lease}
	for _, c := range r.Checks {
		if s.Mode(c) != limit.ModeLocal {
			continue
		}
		if r.Lease == "" { // no slot was taken, and nothing reserved
			if _, slot := c.Limit.(limit.Concurrency); slot {
				continue
			}
			c.Reserve = 0
		}
		if c.Limit = limit.Share(c.Limit, c.Fraction, s.replicas); c.Limit != nil {
			// In shadow it is charged if that much is left, and refuses nothing.
			c.Shadow = true
			followed.Checks = append(followed.Checks, c)
		}
	}
	switch {
	case len(followed.Checks) == 0:
		return
	case s.local.Len() >= s.max:
		s.unfollowed.Add(1)
		return
	}
	if r.Lease != "" && r.Stream != "" {
		followed.Stream = followedStream(r.Stream)
	}
	if _, err := s.local.Decide(context.Background(), followed); err != nil { // it breaks the store's contract; none does
		s.unfollowed.Add(1)
	}
}

// followedStream names a stream whose lease the store keeps: by its own name a stream has
// what was granted here.
func followedStream(stream string) string { return "\x00" + stream }

// Release ends what was granted here, and says whether e is about that. If it is not,
// the store must be asked, and what follows its lease here is ended.
func (s *Standby) Release(e limit.Ending) (r limit.Release, mine bool, err error) {
	switch process, local := e.Lease.Local(); {
	case local && process != s.process:
		return r, true, errElsewhere
	case e.Lease == "":
		e.Tombstone = false // the store keeps them
		if r, err = s.local.Release(context.Background(), e); err != nil || r.Result != limit.NotHeld {
			return r, true, err
		}
		e.Stream = followedStream(e.Stream)
		_, err = s.local.Release(context.Background(), e)
		return r, false, err
	default:
		r, err = s.local.Release(context.Background(), e)
		return r, local, err
	}
}

// Settle settles what was reserved here, and returns the rest, for the store: what is
// NotReserved, in order. All that a lease of the store's has reserved is for the store, and
// FollowUsage follows its answer.
func (s *Standby) Settle(u limit.Usage) (all []limit.Settlement, rest limit.Usage, err error) {
	process, local := u.Lease.Local()
	if local && process != s.process {
		return nil, u, errElsewhere
	}
	if u.Lease != "" && !local {
		for range len(u.Checks) + len(u.Limits) {
			all = append(all, limit.Settlement{Result: limit.NotReserved})
		}
		return all, u, nil
	}
	here := u
	here.Reserved = true // what was not reserved is the store's to charge
	all, err = s.local.Settle(context.Background(), here)
	if err != nil {
		return nil, u, fmt.Errorf("standby: %w", err)
	}
	rest = u
	rest.Checks, rest.Limits, rest.Lease = nil, nil, ""
	for i, c := range u.Checks {
		if all[i].Result == limit.NotReserved {
			rest.Checks = append(rest.Checks, c)
		}
	}
	return all, rest, nil
}

// FollowUsage takes from the shares, or gives back to them, what the store has settled of
// u: once, like the store. What follows a lease here is settled as what it follows. If
// nothing does, what was used more is charged to the share; what was used less is given back
// where it was taken.
func (s *Standby) FollowUsage(u limit.Usage, settled []limit.Settlement) {
	here := u
	here.Checks, here.Limits, here.Reserved = nil, nil, true
	if u.Lease != "" {
		here.Stream = ""
	} else {
		here.Stream = followedStream(u.Stream)
	}
	var charged []limit.Check
	for i, c := range u.Checks {
		switch r := settled[i]; r.Result {
		case limit.Settled:
			here.Checks = append(here.Checks, c)
			one, err := s.local.Settle(context.Background(), here)
			here.Checks = nil
			if err == nil && one[0].Result == limit.NotReserved && u.Lease == "" && r.Difference > 0 {
				c.Hits, c.Reserve = r.Difference, 0
				charged = append(charged, c)
			}
		case limit.Charged:
			c.Hits, c.Reserve = r.Difference, 0
			charged = append(charged, c)
		case limit.AlreadySettled, limit.Late, limit.NotReserved:
		}
	}
	for i, used := range u.Limits {
		if settled[len(u.Checks)+i].Result == limit.Settled {
			here.Limits = append(here.Limits, used)
		}
	}
	if len(here.Limits) > 0 {
		_, _ = s.local.Settle(context.Background(), here) // what is not reserved here is not followed
	}
	s.Follow(u.Domain, charged, "")
}

// Renew extends what was granted here, and says whether the lease is. If it is not,
// the store must be asked, and what follows it here is extended.
func (s *Standby) Renew(e limit.Extension) (n limit.Renewal, mine bool, err error) {
	process, local := e.Lease.Local()
	if local && process != s.process {
		return n, true, errElsewhere
	}
	n, err = s.local.Renew(context.Background(), e)
	return n, local, err
}

// Leases lists the leases that were granted here: see [store.Store]. A page may have none, and
// others may follow it.
func (s *Standby) Leases(domain string, after limit.Slot, n int) limit.Listing {
	page, _ := s.local.Leases(context.Background(), domain, after, n) // it never fails
	page.Leases = slices.DeleteFunc(page.Leases, func(l limit.Listed) bool {
		_, local := l.Lease.Local()
		return !local // it follows one of the store's
	})
	return page
}

// Reset forgets what checks have taken from the shares here.
func (s *Standby) Reset(checks []limit.Check) {
	var shares []limit.Check
	for _, c := range checks {
		if c.Limit = limit.Share(c.Limit, c.Fraction, s.replicas); c.Limit != nil {
			shares = append(shares, c)
		}
	}
	_ = s.local.Reset(context.Background(), shares) // it never fails
}

// errElsewhere is about a lease that another replica granted: who tries again may
// reach that one.
var errElsewhere = fmt.Errorf("standby: %w: the lease is kept by another replica, which granted it without the store", store.ErrUnavailable)

// Forget drops state that means nothing any more, a bounded part of it. Call it now
// and then.
func (s *Standby) Forget() { _ = s.local.Ping(context.Background()) }
