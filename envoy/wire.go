package envoy

import (
	"encoding/binary"
	"math"

	"google.golang.org/protobuf/encoding/protowire"
)

// What is appended here are the parts of protobuf's wire format that an answer has. As
// protobuf's own code does it leaves zeros out, but for messages, whose presence counts.

// tag appends the tag of a field. All fields of an answer are below 16: their tags are a byte.
func tag(b []byte, field protowire.Number, kind protowire.Type) []byte {
	return append(b, byte(field)<<3|byte(kind))
}

// appendVarint appends a number; most are short.
func appendVarint(b []byte, n uint64) []byte {
	if n < 1<<7 {
		return append(b, byte(n))
	}
	return protowire.AppendVarint(b, n)
}

// number appends a varint field: a number, an enum or a bool.
func number(b []byte, field protowire.Number, n uint64) []byte {
	if n == 0 {
		return b
	}
	return appendVarint(tag(b, field, protowire.VarintType), n)
}

// text appends a string, or bytes, which are not left out.
func text[value string | []byte](b []byte, field protowire.Number, s value) []byte {
	b = appendVarint(tag(b, field, protowire.BytesType), uint64(len(s)))
	return append(b, s...)
}

// begin begins a message in a message: what is appended to b until end is in it, and at is
// where that begins.
func begin(b []byte, field protowire.Number) (out []byte, at int) {
	b = append(tag(b, field, protowire.BytesType), 0) // its length, if it is short
	return b, len(b)
}

// end ends the message that begins at at.
func end(b []byte, at int) []byte {
	n := len(b) - at
	if n < 1<<7 {
		b[at-1] = byte(n)
		return b
	}
	if more := protowire.SizeVarint(uint64(n)) - 1; more > 0 {
		b = append(b, make([]byte, more)...)
		copy(b[at+more:], b[at:at+n])
	}
	binary.PutUvarint(b[at-1:], uint64(n))
	return b
}

// structText appends a field of a google.protobuf.Struct with a string.
func structText(b []byte, key, value string) []byte {
	b, entry := begin(b, 1)
	b = text(b, 1, key)
	b, inner := begin(b, 2)
	b = text(b, 3, value)
	return end(end(b, inner), entry)
}

// structBool appends one with a bool.
func structBool(b []byte, key string, value bool) []byte {
	b, entry := begin(b, 1)
	b = text(b, 1, key)
	b, inner := begin(b, 2)
	b = appendVarint(tag(b, 4, protowire.VarintType), protowire.EncodeBool(value))
	return end(end(b, inner), entry)
}

// structNumber appends one with a number.
func structNumber(b []byte, key string, value float64) []byte {
	b, entry := begin(b, 1)
	b = text(b, 1, key)
	b, inner := begin(b, 2)
	b = protowire.AppendFixed64(tag(b, 2, protowire.Fixed64Type), math.Float64bits(value))
	return end(end(b, inner), entry)
}

// structTexts appends one with a list of strings.
func structTexts(b []byte, key string, values []string) []byte {
	b, entry := begin(b, 1)
	b = text(b, 1, key)
	b, inner := begin(b, 2)
	b, list := begin(b, 6)
	for _, v := range values {
		var value int
		b, value = begin(b, 1)
		b = end(text(b, 3, v), value)
	}
	return end(end(end(b, list), inner), entry)
}
