package redis

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// packer writes what a script takes as one item, in MessagePack, as common.lua says: how many
// keys it has, and then integers and strings. The zero value has none. Redis brings cmsgpack,
// which reads it.
type packer struct {
	bytes []byte
	n     uint32 // without that of keys
}

const (
	number = 5          // bytes: of the number of keys, and of an array's header
	header = number * 3 // bytes: the number of keys, an array's header, and once more
	flat   = 1000       // items: more are an array
)

// head makes room for the header.
func (p *packer) head() {
	if p.bytes == nil {
		p.bytes = make([]byte, 0, 128)
	}
	p.bytes = append(p.bytes, make([]byte, header)...)
}

func (p *packer) begin() {
	if len(p.bytes) == 0 {
		p.head()
	}
	p.n++
}

// int adds n.
func (p *packer) int(n int64) {
	p.begin()
	switch {
	case n >= -32 && n < 128:
		p.bytes = append(p.bytes, byte(n))
	case n >= 0 && n <= math.MaxUint16:
		p.bytes = binary.BigEndian.AppendUint16(append(p.bytes, 0xcd), uint16(n))
	case n >= 0 && n <= math.MaxUint32:
		p.bytes = binary.BigEndian.AppendUint32(append(p.bytes, 0xce), uint32(n))
	default:
		p.bytes = binary.BigEndian.AppendUint64(append(p.bytes, 0xd3), uint64(n))
	}
}

// ints adds all of them.
func (p *packer) ints(all ...int64) {
	for _, n := range all {
		p.int(n)
	}
}

// string adds s, of any bytes.
func (p *packer) string(s string) {
	p.begin()
	switch n := len(s); {
	case n < 32:
		p.bytes = append(p.bytes, 0xa0|byte(n))
	case n <= math.MaxUint8:
		p.bytes = append(p.bytes, 0xd9, byte(n))
	default:
		p.bytes = binary.BigEndian.AppendUint32(append(p.bytes, 0xdb), uint32(n))
	}
	p.bytes = append(p.bytes, s...)
}

// limit adds a bucket's limit as one string, which its state has as it is: three integers of
// nine bytes at most.
func (p *packer) limit(capacity, scale, refill int64) {
	p.begin()
	at, n := len(p.bytes), p.n
	p.bytes = append(p.bytes, 0)
	p.ints(capacity, scale, refill)
	p.bytes[at], p.n = 0xa0|byte(len(p.bytes)-at-1), n
}

// item is the number of keys and all that was added.
func (p *packer) item(keys int) []byte {
	if len(p.bytes) == 0 {
		p.head()
	}
	p.bytes[0], p.bytes[number], p.bytes[2*number] = 0xce, 0xdd, 0xce
	binary.BigEndian.PutUint32(p.bytes[1:], uint32(keys))
	binary.BigEndian.PutUint32(p.bytes[number+1:], 1+p.n)
	binary.BigEndian.PutUint32(p.bytes[2*number+1:], uint32(keys))
	if p.n > flat {
		return p.bytes
	}
	return p.bytes[2*number:]
}

// unpacker reads a script's reply: integers, strings and arrays of them. After the first
// that is not what was asked for err is set, and all that is read is zero.
type unpacker struct {
	rest string
	err  error
}

var errPacked = errors.New("not what a script replies")

func (u *unpacker) take(n int) string {
	if n < 0 || n > len(u.rest) {
		u.err, u.rest = errPacked, ""
		return ""
	}
	s := u.rest[:n]
	u.rest = u.rest[n:]
	return s
}

// number reads n bytes, big-endian.
func (u *unpacker) number(n int) (out uint64) {
	for _, b := range []byte(u.take(n)) {
		out = out<<8 | uint64(b)
	}
	return out
}

func (u *unpacker) code() byte {
	if s := u.take(1); s != "" {
		return s[0]
	}
	return 0xc1 // is never used
}

// array reads the header of an array: how many items follow.
func (u *unpacker) array() int {
	switch c := u.code(); {
	case c&0xf0 == 0x90:
		return int(c & 0x0f)
	case c == 0xdc:
		return int(u.number(2))
	case c == 0xdd:
		return int(u.number(4))
	}
	u.err = errPacked
	return 0
}

// int reads an integer.
func (u *unpacker) int() int64 {
	switch c := u.code(); {
	case c < 0x80 || c >= 0xe0:
		return int64(int8(c))
	case c >= 0xcc && c <= 0xcf:
		return int64(u.number(1 << (c - 0xcc)))
	case c >= 0xd0 && c <= 0xd3:
		size := 1 << (c - 0xd0)
		return int64(u.number(size)) << (64 - 8*size) >> (64 - 8*size)
	}
	u.err = errPacked
	return 0
}

// text reads a string.
func (u *unpacker) text() string {
	switch c := u.code(); {
	case c&0xe0 == 0xa0:
		return u.take(int(c & 0x1f))
	case c >= 0xd9 && c <= 0xdb:
		return u.take(int(u.number(1 << (c - 0xd9))))
	}
	u.err = errPacked
	return ""
}

// isText reports whether a string comes next.
func (u *unpacker) isText() bool {
	if u.rest == "" {
		return false
	}
	c := u.rest[0]
	return c&0xe0 == 0xa0 || c >= 0xd9 && c <= 0xdb
}

// end returns an error if anything was not what it should be, or is left.
func (u *unpacker) end() error {
	if u.err == nil && u.rest != "" {
		return fmt.Errorf("%w: %d bytes too many", errPacked, len(u.rest))
	}
	return u.err
}
