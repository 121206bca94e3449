package client

import (
	"crypto/rand"
	"math"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weirv1 "weir/proto/weir/v1"
)

// Request is what is asked: whether work may start, over all limits that the
// descriptors meet.
type Request struct {
	// Domain has the policy; empty: that of the Options.
	Domain string
	// Descriptors say what the work is about; at least one.
	Descriptors []Descriptor
	// Hits is the cost of each descriptor that has none of its own, as new(uint64(7));
	// nil means 1, and 0 asks without charging buckets and windows.
	Hits *uint64
	// Operation names the work, so that asking again takes nothing twice: at most 128
	// bytes that others can't guess. Empty: each Acquire or Wait is an operation of its
	// own. Set it to an id that is kept with the work, if that outlives the process.
	Operation string
	// Attempt is which try of Operation this is, from 1 on; 0: not told. A call uses
	// this number and, if answers are lost or refusals waited for, those after it: at
	// most Tries, in a Wait times Retry.Attempts. The next call begins above them. After
	// the highest number, 2^32 - 1, comes the same again.
	Attempt uint32
}

// Descriptor is a list of entries that is matched against the policy's tree.
type Descriptor struct {
	Entries []Entry
	// Hits is the cost of this descriptor; nil: the request's.
	Hits *uint64
	// Refund gives the hits back instead of taking them.
	Refund bool
}

// Entry is one key and its value.
type Entry struct{ Key, Value string }

// Ask is a Request of these descriptors.
func Ask(descriptors ...Descriptor) Request { return Request{Descriptors: descriptors} }

// Describe is a descriptor of pairs: a key, its value, the next key and so on. It panics
// if the last value is missing.
func Describe(pairs ...string) Descriptor {
	if len(pairs)%2 != 0 {
		panic("client: Describe: a key without a value") // the caller's bug
	}
	d := Descriptor{Entries: make([]Entry, 0, len(pairs)/2)}
	for i := 0; i < len(pairs); i += 2 {
		d.Entries = append(d.Entries, Entry{Key: pairs[i], Value: pairs[i+1]})
	}
	return d
}

// ask is an operation while it is asked for: each message of it has the next attempt.
type ask struct {
	first   *weirv1.AcquireRequest
	attempt uint32    // of the next message; 0: it has none
	own     bool      // this client made its id, and nobody else asks for it
	lost    bool      // a message was sent, and nothing has been answered since
	lostAt  time.Time // before the first of those messages
}

// newAsk reads a request. Its error is the status that the service has for such a one.
// (gRPC would not send a text that is none, and say INTERNAL: whoever asks may choose the
// text, and that must not be a way around the limits.)
func (c *Client) newAsk(r Request) (*ask, error) {
	m := &weirv1.AcquireRequest{Domain: r.Domain, Hits: r.Hits, OperationId: r.Operation}
	if m.GetDomain() == "" {
		m.Domain = c.options.Domain
	}
	text := utf8.ValidString(m.GetDomain()) && utf8.ValidString(r.Operation)
	for _, d := range r.Descriptors {
		out := &weirv1.Descriptor{Hits: d.Hits, Refund: d.Refund}
		for _, e := range d.Entries {
			text = text && utf8.ValidString(e.Key) && utf8.ValidString(e.Value)
			out.Entries = append(out.Entries, &weirv1.Entry{Key: e.Key, Value: e.Value})
		}
		m.Descriptors = append(m.Descriptors, out)
	}
	if !text {
		return nil, status.Error(codes.InvalidArgument, "client: a text of the request is not UTF-8; quote what is not text")
	}
	a := &ask{first: m, attempt: r.Attempt}
	if r.Operation == "" && !c.options.NoOperations {
		m.OperationId, a.attempt, a.own = rand.Text(), 1, true // 130 random bits
	}
	return a, nil
}

// next is the message of the next try. What was sent before stays as it is.
func (a *ask) next() *weirv1.AcquireRequest {
	m := &weirv1.AcquireRequest{
		Domain: a.first.GetDomain(), Descriptors: a.first.GetDescriptors(), Hits: a.first.Hits,
		OperationId: a.first.GetOperationId(), Attempt: a.attempt,
	}
	if a.attempt > 0 && a.attempt < math.MaxUint32 { // 0 would be: not told
		a.attempt++
	}
	return m
}

// heard notes what became of a message: an answer, or an error, of which wasSent says
// whether the message may have arrived.
func (a *ask) heard(err error, wasSent bool, at time.Time) {
	switch {
	case err == nil:
		a.lost = false
	case wasSent && !a.lost:
		a.lost, a.lostAt = true, at
	}
}

// repeatable reports whether a try whose answer was lost may be sent again.
func (a *ask) repeatable() bool { return a.first.GetOperationId() != "" }
