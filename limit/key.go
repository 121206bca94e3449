package limit

import (
	"crypto/sha256"
	"encoding/base64"
	"strconv"
	"strings"
)

// Entry is one key/value of a descriptor.
type Entry struct {
	Key, Value string
	// hashed: Value is a digest that [Hashed] wrote.
	hashed bool
}

// Hashed is the entry of a key and a value that must not be seen: digest stands
// for the value. It must be a keyed one, of the key and the value at least.
func Hashed(key string, digest [16]byte) Entry {
	return Entry{Key: key, Value: base64.RawURLEncoding.EncodeToString(digest[:]), hashed: true}
}

// ReservedPrefix begins the keys of entries that speak to weir itself: they are
// taken out of every descriptor before it is matched.
const ReservedPrefix = "weir."

// maxPlain is the longest value that stands in a key as it is.
const maxPlain = 64

// Key returns the name of the state that l keeps for the subject in domain:
//
//	weir:{inference}:b:account=alice
//	weir:{inference}:w:day*7:account=alice,plan=trial
//	weir:{inference}:s:minute:vendor=maps
//	weir:{inference}:c:pool=images
//
// b is a token bucket, w a window with its unit, s a sliding one, c a concurrency.
// All keys of a domain share one hash tag. Separators and braces in names are %-escaped, texts
// of more than 64 bytes stand as # and the 43 characters of their SHA-256, and
// [Hashed] values as # and the 22 of their digest (a # in a text is escaped, so
// nobody can forge either).
func Key(domain string, l Limit, subject []Entry) string {
	var room [256]byte // for most keys, so that only the key itself is allocated
	return string(appendSubject(appendKeyPrefix(room[:0], domain, l), subject))
}

// KeyPrefix begins the names of the states that l keeps in domain.
func KeyPrefix(domain string, l Limit) string {
	return string(appendKeyPrefix(make([]byte, 0, 64), domain, l))
}

// KeyOf returns the [Key] of the subject that begins with this [KeyPrefix].
func KeyOf(prefix string, subject []Entry) string {
	var room [256]byte
	return string(appendSubject(append(room[:0], prefix...), subject))
}

func appendKeyPrefix(b []byte, domain string, l Limit) []byte {
	b = appendDomain(b, domain)
	switch l := l.(type) {
	case TokenBucket:
		b = append(b, "b:"...)
	case Window:
		if l.Sliding {
			b = append(b, "s:"...)
		} else {
			b = append(b, "w:"...)
		}
		b = append(b, l.Unit.String()...)
		if l.Multiplier != 1 {
			b = append(b, '*')
			b = strconv.AppendInt(b, l.Multiplier, 10)
		}
		b = append(b, ':')
	case Concurrency:
		b = append(b, "c:"...)
	}
	return b
}

func appendSubject(b []byte, subject []Entry) []byte {
	for i, e := range subject {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendEscaped(b, e.Key, maxPlain)
		b = append(b, '=')
		if e.hashed {
			b = append(b, '#')
			b = append(b, e.Value...)
			continue
		}
		b = appendEscaped(b, e.Value, maxPlain)
	}
	return b
}

// LeaseKey is the name of a lease's record.
func LeaseKey(id LeaseID) string {
	token, domain := id.split()
	return "weir:{" + domain + "}:lease:" + token
}

// LeasePrefix begins the names of the records of a domain's leases; the rest is the
// token of the lease, see [LeaseKey].
func LeasePrefix(domain string) string {
	return string(append(appendDomain(make([]byte, 0, 64), domain), "lease:"...))
}

// LeasesKey is the name of the domain's index of leases.
func LeasesKey(domain string) string {
	return string(append(appendDomain(make([]byte, 0, 64), domain), "leases"...))
}

// StreamKey is the name of what is known of a stream: which lease it holds.
func StreamKey(domain, stream string) string { return streamKey(domain, "stream:", stream) }

// UsageKey is the name of the list of limits that a stream's usage was charged to, or settled
// of.
func UsageKey(domain, stream string) string { return streamKey(domain, "usage:", stream) }

// UsageKeyOf is the [UsageKey] of the stream with this [StreamKey].
func UsageKeyOf(streamKey string) string {
	return strings.Replace(streamKey, "}:stream:", "}:usage:", 1)
}

// OperationKey is the name of what is known of an operation: which lease it holds.
func OperationKey(domain, operation string) string { return streamKey(domain, "operation:", operation) }

func streamKey(domain, kind, stream string) string {
	var room [256]byte
	b := append(appendDomain(room[:0], domain), kind...)
	return string(appendEscaped(b, stream, maxPlain))
}

func appendDomain(b []byte, domain string) []byte {
	b = append(b, "weir:{"...)
	b = appendEscaped(b, domain, len(domain))
	return append(b, "}:"...)
}

// appendEscaped appends s so that it contains no separator, brace, space or control
// character, or its digest if it is longer than limit bytes.
func appendEscaped(b []byte, s string, limit int) []byte {
	if len(s) > limit {
		sum := sha256.Sum256([]byte(s))
		return base64.RawURLEncoding.AppendEncode(append(b, '#'), sum[:])
	}
	const hex = "0123456789ABCDEF"
	from := 0
	for i := range len(s) {
		c := s[i]
		if !escaped[c] {
			continue
		}
		b = append(b, s[from:i]...)
		b = append(b, '%', hex[c>>4], hex[c&15])
		from = i + 1
	}
	return append(b, s[from:]...)
}

// escaped says which bytes do not stand in a key as they are.
var escaped = func() (is [256]bool) {
	for c := range is {
		is[c] = c <= ' ' || c == 0x7f || strings.IndexByte("%:,={}#", byte(c)) >= 0
	}
	return is
}()

// unescape undoes [appendEscaped] for texts that were not hashed.
func unescape(s string) string {
	if strings.IndexByte(s, '%') < 0 {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+3], 16, 8); err == nil {
				b.WriteByte(byte(n))
				i += 2
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
