package limit

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"strings"
	"time"
)

// MaxLeaseID is the longest lease id, in bytes.
const MaxLeaseID = 512

const tokenLen = 22 // 128 bits as unpadded base64url

// LeaseID names a lease: 22 base64url characters (128 bits, all but a few random), a
// dot and the escaped domain. It is all that a release needs to find its slots, and a
// capability: whoever has it can end the lease, so it is shown shortened.
type LeaseID string

// The first bits of an id say where its lease is kept: 0 in the store, 10 in a process.
// (So none begins with "-", and no shell command takes it for a flag.)
const (
	notInStore  = 0x80
	whereMask   = 0xc0
	processByte = 1 // of the 4 with the process's number
)

// NewLeaseID returns the id of a lease in domain that the store keeps, from 128
// random bits.
func NewLeaseID(domain string, random [16]byte) LeaseID {
	random[0] &^= notInStore
	return newLeaseID(domain, random)
}

// NewLocalLeaseID returns the id of a lease in domain that one process keeps, while the
// store is away, from 128 random bits.
func NewLocalLeaseID(domain string, process uint32, random [16]byte) LeaseID {
	random[0] = random[0]&^whereMask | notInStore
	binary.BigEndian.PutUint32(random[processByte:], process)
	return newLeaseID(domain, random)
}

// LeaseOf returns the id of the lease in domain that has this token.
func LeaseOf(domain, token string) LeaseID {
	var room [128]byte
	b := append(append(room[:0], token...), '.')
	return LeaseID(appendEscaped(b, domain, len(domain)))
}

// Local returns which process keeps the lease, if it is not in the store.
func (id LeaseID) Local() (process uint32, local bool) {
	bits, err := base64.RawURLEncoding.DecodeString(id.Token())
	if err != nil || len(bits) != 16 || bits[0]&whereMask != notInStore {
		return 0, false
	}
	return binary.BigEndian.Uint32(bits[processByte:]), true
}

func newLeaseID(domain string, random [16]byte) LeaseID {
	return LeaseOf(domain, base64.RawURLEncoding.EncodeToString(random[:]))
}

// ParseLeaseID checks the shape of a lease id from outside: its length, its
// token, and that its domain is escaped as NewLeaseID does. It does not tell
// whether the lease exists.
func ParseLeaseID(s string) (LeaseID, error) {
	if len(s) > MaxLeaseID {
		return "", errors.New("lease id is longer than 512 bytes")
	}
	token, domain, ok := strings.Cut(s, ".")
	if !ok || len(token) != tokenLen || domain == "" {
		return "", errors.New("lease id must be 22 base64url characters, a dot and the domain")
	}
	if bits, err := base64.RawURLEncoding.Strict().DecodeString(token); err != nil || len(bits) != 16 { // it skips ends of lines
		return "", errors.New("lease id must start with 22 base64url characters")
	}
	plain := unescape(domain)
	var again [MaxLeaseID]byte
	if string(appendEscaped(again[:0], plain, len(plain))) != domain {
		return "", errors.New("lease id has a domain that is not escaped as in any lease id")
	}
	return LeaseID(s), nil
}

// Domain is the domain that the lease belongs to.
func (id LeaseID) Domain() string {
	_, d := id.split()
	if !strings.Contains(d, "%") {
		return d
	}
	return unescape(d)
}

// Token is the random part of the id: the member of the sets that count it.
func (id LeaseID) Token() string {
	token, _ := id.split()
	return token
}

func (id LeaseID) split() (token, domain string) {
	token, domain, _ = strings.Cut(string(id), ".")
	return token, domain
}

// RecordSlack is how long the record of a lease outlives the lease, so that a
// late release can be told EXPIRED from NOT_HELD.
const RecordSlack = time.Minute

// ReservedSlack is how long the record of a lease outlives the lease while something
// that it reserved is not settled.
const ReservedSlack = time.Hour

// StreamSlack is how long a stream is known after its lease while something that it
// reserved is not settled, unless the lease was released: streams may be longer than their
// leases, and their estimates stand.
const StreamSlack = 24 * time.Hour

// TombstoneLife is how long the end of a stream that holds no lease is remembered,
// for a request of it that may still be under way.
const TombstoneLife = 30 * time.Second

// UsageLife is how long it is remembered that a stream's usage was charged, or settled.
const UsageLife = 10 * time.Minute

// Ending tells a store that some work has ended.
type Ending struct {
	// Lease is what the work held. If it is "", the lease is found by the stream that
	// it was granted to, unless that stream asked more than once.
	Lease          LeaseID
	Domain, Stream string // only without a Lease
	// Tombstone has a stream that holds no lease marked: a request of it that comes
	// later is refused, since nobody would release what it takes.
	Tombstone bool
	// Early: the stream ended before its upstream answered, so the work may go on.
	// The slots of limits with a Linger stay taken that much longer.
	Early bool
}

// Usage is what some work has used, known only now: all of it, not the difference to what
// was reserved.
type Usage struct {
	Domain string // required
	// Lease is what the work held. If it is "", the lease is found by the stream that it was
	// granted to, unless that stream asked more than once.
	Lease LeaseID
	// Stream is the one that did the work; "" if it is not known. One of the two is
	// required.
	Stream string
	// Checks are settled if the lease has reserved something of their limits for their
	// subjects. The others are charged with their hits, each once a stream, whether or not
	// that much is left: a bucket may go into debt. One with Reserve is not if there was a
	// lease and its record is gone: its reservation stands. No Concurrency is among them.
	Checks []Check
	// Limits are settled if the lease has reserved something of them.
	Limits []Used
	// Reserved: what the lease has not reserved is not charged.
	Reserved bool
}

// Used is what was used of a limit.
type Used struct {
	Limit string // its name; "" for each limit that the lease has reserved something of
	Hits  int64  // 0..MaxExact
}

// Settlement is what became of the usage of one limit. Several reservations, as those of
// a limit for two subjects, are told as one.
type Settlement struct {
	Result SettlementResult
	// Difference is the hits that were charged now, within ±MaxExact; negative if they
	// were given back.
	Difference int64
}

// SettlementResult says what a settlement found.
type SettlementResult uint8

// The results of a settlement. The zero value is invalid. The order matters: of several
// reservations that are told as one it is the first in this list.
const (
	// Settled: what was reserved is what was used, from now on.
	Settled SettlementResult = iota + 1
	// Charged: nothing was reserved, and what was used is charged now.
	Charged
	// AlreadySettled: it was settled or charged before, or told before and late.
	AlreadySettled
	// Late: the lease expired before it was released, or the window that it reserved in
	// has passed. The reservation stands, and nothing is changed. Of a stream whose lease
	// expired long ago it is told of each limit with Reserve.
	Late
	// NotReserved: the lease has reserved nothing of it, or nobody knows any more.
	NotReserved
)

// String is the result's name in metrics.
func (r SettlementResult) String() string {
	switch r {
	case Settled:
		return "settled"
	case Charged:
		return "charged"
	case AlreadySettled:
		return "already_settled"
	case Late:
		return "late"
	case NotReserved:
		return "not_reserved"
	}
	return "unknown"
}

// ReleaseResult says what a release found.
type ReleaseResult uint8

// The results of a release. The zero value is invalid.
const (
	// Released: the lease was held, and its slots are free now.
	Released ReleaseResult = iota + 1
	// NotHeld: no such lease: released before, never granted, another domain's,
	// or expired more than RecordSlack ago.
	NotHeld
	// Expired: the lease had ended by itself; its slots were free already.
	Expired
	// Lingering: the lease was held, and some of its slots stay taken for a while. A
	// release that is not Early ends it at once.
	Lingering
)

// String is the result's name on the wire.
func (r ReleaseResult) String() string {
	switch r {
	case Released:
		return "RELEASED"
	case NotHeld:
		return "NOT_HELD"
	case Expired:
		return "EXPIRED"
	case Lingering:
		return "LINGERING"
	}
	return "UNKNOWN"
}

// Release is a store's answer to a release.
type Release struct {
	Result ReleaseResult
	// HeldFor is how long the lease was held, and Freed the slots that are free now;
	// only with Released or Lingering.
	HeldFor time.Duration
	Freed   []Freed
}

// Freed is a slot that is free again.
type Freed struct {
	Key   string // of its limit's state: see [Key]
	Limit string // the limit's name
}

// Extension asks a store to extend a lease.
type Extension struct {
	Lease LeaseID
	// OfStream: it is a stream's sign of life, and not its holder's word. It says nothing
	// of work that lingers, and may come late.
	OfStream bool
}

// Renewal is a store's answer to a renewal. The zero value means LOST: the lease
// ended, expired, or is not known.
type Renewal struct {
	Renewed bool
	TTL     time.Duration // from now on; 0 if lost
}
