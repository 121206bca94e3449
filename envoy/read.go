package envoy

import (
	"errors"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	"weir/limit"
)

// ErrNoMessage means bytes that are no RateLimitRequest: no valid protobuf, or a text in
// them that is no valid UTF-8.
var ErrNoMessage = errors.New("no valid RateLimitRequest")

// What a message may have in parts, whatever it is: a little above 1,024 descriptors, or
// 1,000 leases, and 64 entries in each descriptor.
const (
	MaxFields = 2048    // of the message
	MaxParts  = 1 << 17 // fields of all its fields with the number 2: a request's are its descriptors, and their parts the entries
)

// errTooMany means more than MaxFields, or MaxParts.
var errTooMany = errors.New("too many parts")

// request is a RateLimitRequest as it was sent, read from the wire by protobuf's rules: of
// a scalar the last counts, a message is the sum of all of its kind, fields that are
// unknown, or of another type, are passed over. TestTheWireIsReadAsProtobufReadsIt holds
// it to protobuf's own code.
type request struct {
	domain      string
	hits        uint32
	descriptors []asSent
	entries     []limit.Entry // of all descriptors, one after the other
}

// asSent is a RateLimitDescriptor.
type asSent struct {
	from, to int // its entries
	hits     uint64
	hasHits  bool
	negative bool
	hasLimit bool
	limit    ownLimit
}

// ownLimit is a RateLimitOverride.
type ownLimit struct {
	perUnit, multiplier uint32
	unit                int32
}

// part is a piece of a message: its bytes, and the same as a text, of which what is kept
// is cut, so that a message is copied once.
type part struct {
	bytes []byte
	text  string
}

// field is one of a message.
type field struct {
	number protowire.Number
	kind   protowire.Type
	n      uint64 // of a varint
	part          // of a text or a message
}

// next takes the next field from p, and reports false if there is no valid one.
func (p *part) next(f *field) bool {
	tag, n := protowire.ConsumeVarint(p.bytes)
	if n < 0 || tag>>3 < uint64(protowire.MinValidNumber) || tag>>3 > uint64(protowire.MaxValidNumber) {
		return false
	}
	f.number, f.kind = protowire.Number(tag>>3), protowire.Type(tag&7)
	value := p.bytes[n:]
	var size int
	switch f.kind {
	case protowire.VarintType:
		f.n, size = protowire.ConsumeVarint(value)
	case protowire.BytesType:
		f.bytes, size = protowire.ConsumeBytes(value)
		if size >= 0 {
			f.text = p.text[n+size-len(f.bytes) : n+size]
		}
	default:
		size = protowire.ConsumeFieldValue(f.number, f.kind, value)
	}
	if size < 0 {
		return false
	}
	p.bytes, p.text = value[size:], p.text[n+size:]
	return true
}

// is reports whether a field has this number and this type. With another type it is unknown.
func (f *field) is(number protowire.Number, kind protowire.Type) bool {
	return f.number == number && f.kind == kind
}

// read reads a message into r, whose slices it uses again. As protobuf has it a text is
// UTF-8; Envoy does not look, and sends what stands in a header (RFC 9110, section 5.5:
// any bytes from 0x80). If such a message were turned down, its sender would pass unasked:
// so a value of an entry may be any bytes here, and they are its value. Other texts are
// Envoy's own.
func (r *request) read(message []byte) error {
	r.domain, r.hits = "", 0
	r.descriptors, r.entries = r.descriptors[:0], r.entries[:0]
	rest := part{message, string(message)}
	var f field
	fields, parts := 0, 0
	for len(rest.bytes) > 0 {
		if !rest.next(&f) {
			return ErrNoMessage
		}
		if fields++; fields > MaxFields {
			return errTooMany
		}
		switch {
		case f.is(1, protowire.BytesType):
			if r.domain = f.text; !utf8.ValidString(f.text) {
				return ErrNoMessage
			}
		case f.is(2, protowire.BytesType):
			if err := r.readDescriptor(f.part, &parts); err != nil {
				return err
			}
		case f.is(3, protowire.VarintType):
			r.hits = uint32(f.n)
		}
	}
	return nil
}

// readDescriptor reads one descriptor, and adds its parts to those of the message.
func (r *request) readDescriptor(rest part, parts *int) error {
	d := asSent{from: len(r.entries)}
	var f field
	for len(rest.bytes) > 0 {
		if !rest.next(&f) {
			return ErrNoMessage
		}
		if *parts++; *parts > MaxParts {
			return errTooMany
		}
		ok := true
		switch {
		case f.is(1, protowire.BytesType):
			ok = r.readEntry(f.part)
		case f.is(2, protowire.BytesType):
			d.hasLimit = true
			ok = d.limit.read(f.part)
		case f.is(3, protowire.BytesType):
			d.hasHits = true
			ok = readNumber(f.part, &d.hits)
		case f.is(4, protowire.VarintType):
			d.negative = protowire.DecodeBool(f.n)
		}
		if !ok {
			return ErrNoMessage
		}
	}
	d.to = len(r.entries)
	r.descriptors = append(r.descriptors, d)
	return nil
}

func (r *request) readEntry(rest part) bool {
	var e limit.Entry
	var f field
	for len(rest.bytes) > 0 {
		if !rest.next(&f) {
			return false
		}
		switch {
		case f.is(1, protowire.BytesType):
			if e.Key = f.text; !utf8.ValidString(f.text) {
				return false
			}
		case f.is(2, protowire.BytesType):
			e.Value = f.text
		}
	}
	r.entries = append(r.entries, e)
	return true
}

func (l *ownLimit) read(rest part) bool {
	var f field
	for len(rest.bytes) > 0 {
		if !rest.next(&f) {
			return false
		}
		switch {
		case f.is(1, protowire.VarintType):
			l.perUnit = uint32(f.n)
		case f.is(2, protowire.VarintType):
			l.unit = int32(f.n)
		case f.is(3, protowire.BytesType):
			n := uint64(l.multiplier)
			if !readNumber(f.part, &n) {
				return false
			}
			l.multiplier = uint32(n)
		}
	}
	return true
}

// readNumber reads a UInt64Value, or a UInt32Value of which the low half counts, into n.
func readNumber(rest part, n *uint64) bool {
	var f field
	for len(rest.bytes) > 0 {
		if !rest.next(&f) {
			return false
		}
		if f.is(1, protowire.VarintType) {
			*n = f.n
		}
	}
	return true
}
