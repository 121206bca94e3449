package limit

import (
	"strings"
	"time"
)

// How much one page of a [Listing] tells at most. A page ends with the lease that
// reaches MaxListedParts, so that a store is never busy for long.
const (
	MaxListed      = 1000 // leases
	MaxListedParts = 1000 // slots and reservations, and those of one lease more
)

// Listing is a page of the live leases of a domain, those that expire first first, and
// by their tokens those that expire together.
type Listing struct {
	Leases []Listed
	// Next is where the next page begins; the zero value: there is none. Who reads all pages
	// sees each lease that was live all the while, but for one that began to linger: it may expire sooner
	// than it would have. One that is renewed meanwhile may come twice.
	Next Slot
}

// Listed is a live lease.
type Listed struct {
	// Lease can end the lease: only operators are shown it whole.
	Lease LeaseID
	// HeldFor is how long it has been held, >= 0; 0 too if its record is lost, and then
	// nothing is known but the two.
	HeldFor      time.Duration
	ExpiresAfter time.Duration // > 0
	Lingering    bool
	// Stream and Operation are those that it was granted to, as they stand in keys (see
	// [Key]); "" for none. A stream that has asked again since is still told.
	Stream, Operation string
	Slots             []ListedSlot
	Reserved          []ListedReservation
}

// ListedSlot is a slot that a lease holds.
type ListedSlot struct {
	Key   string // of its limit's state
	Limit string // the limit's name
}

// ListedReservation is what a lease has reserved.
type ListedReservation struct {
	Key     string // of its limit's state
	Limit   string // the limit's name
	Hits    int64
	Settled bool
}

// Subject is whose state the key names, as it stands there, like account=alice: see
// [Key].
func Subject(key string) string { return key[strings.LastIndexByte(key, ':')+1:] }

// PageSize is n, or what is near it that a [Listing] may have: 1..MaxListed.
func PageSize(n int) int { return min(max(n, 1), MaxListed) }
