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
	var b strings.Builder
	b.Grow(64)
	keyPrefix(&b, domain)
	switch l := l.(type) {
	case TokenBucket:
		b.WriteString("b:")
	case Window:
		if l.Sliding {
			b.WriteString("s:")
		} else {
			b.WriteString("w:")
		}
		b.WriteString(l.Unit.String())
		if l.Multiplier != 1 {
			b.WriteByte('*')
			b.WriteString(strconv.FormatInt(l.Multiplier, 10))
		}
		b.WriteByte(':')
	case Concurrency:
		b.WriteString("c:")
	}
	for i, e := range subject {
		if i > 0 {
			b.WriteByte(',')
		}
		escape(&b, e.Key, maxPlain)
		b.WriteByte('=')
		if e.hashed {
			b.WriteByte('#')
			b.WriteString(e.Value)
			continue
		}
		escape(&b, e.Value, maxPlain)
	}
	return b.String()
}

// LeaseKey is the name of a lease's record.
func LeaseKey(id LeaseID) string {
	token, domain := id.split()
	return "weir:{" + domain + "}:lease:" + token
}

// LeasePrefix begins the names of the records of a domain's leases; the rest is the
// token of the lease, see [LeaseKey].
func LeasePrefix(domain string) string {
	var b strings.Builder
	keyPrefix(&b, domain)
	b.WriteString("lease:")
	return b.String()
}

// LeasesKey is the name of the domain's index of leases.
func LeasesKey(domain string) string {
	var b strings.Builder
	keyPrefix(&b, domain)
	b.WriteString("leases")
	return b.String()
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
	var b strings.Builder
	keyPrefix(&b, domain)
	b.WriteString(kind)
	escape(&b, stream, maxPlain)
	return b.String()
}

func keyPrefix(b *strings.Builder, domain string) {
	b.WriteString("weir:{")
	escape(b, domain, len(domain))
	b.WriteString("}:")
}

// escape writes s so that it contains no separator, brace, space or control
// character, or its digest if it is longer than limit bytes.
func escape(b *strings.Builder, s string, limit int) {
	if len(s) > limit {
		sum := sha256.Sum256([]byte(s))
		b.WriteByte('#')
		b.WriteString(base64.RawURLEncoding.EncodeToString(sum[:]))
		return
	}
	const hex = "0123456789ABCDEF"
	from := 0
	for i := range len(s) {
		c := s[i]
		if c > ' ' && c != 0x7f && c != '%' && c != ':' && c != ',' && c != '=' && c != '{' && c != '}' && c != '#' {
			continue
		}
		b.WriteString(s[from:i])
		b.Write([]byte{'%', hex[c>>4], hex[c&15]})
		from = i + 1
	}
	b.WriteString(s[from:])
}

// unescape undoes escape for texts that were not hashed.
func unescape(s string) string {
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
