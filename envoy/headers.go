package envoy

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"weir/limit"
	"weir/policy"
)

// appendResponseHeaders appends the headers for the client. Envoy appends them, whatever
// produced the response.
func appendResponseHeaders(b []byte, m policy.Match, d limit.Decision, v limit.Verdict, o Options) []byte {
	if !v.Admitted {
		// RFC 9110, 10.2.3: "A delay-seconds value is a non-negative decimal
		// integer". At least 1: 0 would mean at once.
		if v.Retryable {
			var digits [20]byte
			b = appendHeader(b, 3, "retry-after", strconv.AppendInt(digits[:0], max(1, seconds(v.RetryAfter)), 10))
		}
		b = appendHeader(b, 3, "content-type", "application/problem+json")
	}
	if o.RateLimitHeaders {
		// RFC 9651, 3.1: an empty List is told by not sending the field.
		if current, policies := rateLimit(m, d, v); current != "" {
			b = appendHeader(appendHeader(b, 3, "ratelimit", current), 3, "ratelimit-policy", policies)
		}
	}
	return b
}

// appendHeader appends a HeaderValue.
func appendHeader[value string | []byte](b []byte, field protowire.Number, key string, v value) []byte {
	b, at := begin(b, field)
	return end(text(text(b, 1, key), 2, v), at)
}

// item is one limit of the RateLimit and RateLimit-Policy fields. Subjects of one
// limit share an item, the tightest: a partition key would tell them apart, and
// is made of personal data.
type item struct {
	standing
	kind   kind
	length time.Duration // of a window
	suffix string
}

type kind uint8

const (
	bucket kind = iota
	window
	concurrency
)

// rateLimit returns the fields of draft-ietf-httpapi-ratelimit-headers-11 for the
// enforced limits that the request met; "" if there are none, or in a bypass,
// where nobody knows how they stand.
func rateLimit(m policy.Match, d limit.Decision, v limit.Verdict) (current, policies string) {
	if d.Bypass != limit.DefaultMode {
		return "", ""
	}
	items := make([]item, 0, len(m.Checks))
	for i := range m.Checks {
		if c := &m.Checks[i]; !c.Shadow && !d.Results[i].Unknown {
			items = append(items, newItem(stand(c, d.Results[i], v)))
		}
	}
	slices.SortFunc(items, func(a, b item) int { return cmp.Or(a.identity(b), compare(a.standing, b.standing)) })
	items = slices.CompactFunc(items, func(a, b item) bool { return a.identity(b) == 0 })
	// A policy's bucket and concurrency have one name by default: the first of a
	// name keeps it, the others say what they are.
	for i := 1; i < len(items); i++ {
		if items[i].check.Name == items[i-1].check.Name {
			items[i].disambiguate()
		}
	}

	slices.SortStableFunc(items, func(a, b item) int { return compare(a.standing, b.standing) })
	items = items[:min(len(items), limit.MaxNames)]
	var buf []byte
	for i, it := range items {
		buf = it.appendCurrent(separate(buf, i), v)
	}
	current = string(buf)

	// 3: "The field value SHOULD remain consistent over a sequence of HTTP
	// responses."
	slices.SortFunc(items, item.identity)
	buf = buf[:0]
	for i, it := range items {
		buf = it.appendPolicy(separate(buf, i))
	}
	return current, string(buf)
}

func newItem(s standing) item {
	it := item{standing: s}
	switch l := s.check.Limit.(type) {
	case limit.TokenBucket:
	case limit.Window:
		it.kind, it.length = window, l.Length()
	case limit.Concurrency:
		it.kind = concurrency
	}
	return it
}

// identity compares what makes two items different ones.
func (it item) identity(other item) int {
	return cmp.Or(
		cmp.Compare(it.check.Name, other.check.Name),
		cmp.Compare(it.kind, other.kind),
		cmp.Compare(it.length, other.length),
	)
}

func (it *item) disambiguate() {
	switch l := it.check.Limit.(type) {
	case limit.TokenBucket: // always the first of its name
	case limit.Window:
		it.suffix = "-"
		if l.Multiplier != 1 {
			it.suffix += strconv.FormatInt(l.Multiplier, 10)
		}
		it.suffix += l.Unit.String()
	case limit.Concurrency:
		it.suffix = "-concurrency"
	}
}

func separate(b []byte, i int) []byte {
	if i > 0 {
		return append(b, ", "...)
	}
	return b
}

// appendCurrent appends a Service Limit Item: what is left, and until when.
func (it item) appendCurrent(b []byte, v limit.Verdict) []byte {
	b = appendString(b, it.check.Name, it.suffix)
	b = appendInteger(append(b, ";r="...), it.remaining())
	if after, ok := it.resetAfter(v); ok {
		b = appendInteger(append(b, ";t="...), seconds(after))
	}
	return b
}

// appendPolicy appends a Quota Policy Item: what the limit allows.
func (it item) appendPolicy(b []byte) []byte {
	b = appendString(b, it.check.Name, it.suffix)
	b = append(b, ";q="...)
	switch l := it.check.Limit.(type) {
	case limit.TokenBucket:
		b = appendInteger(b, l.Capacity)
		b = appendInteger(append(b, ";w="...), seconds(l.FillTime()))
	case limit.Window:
		b = appendInteger(b, l.Max)
		b = appendInteger(append(b, ";w="...), seconds(l.Length()))
	case limit.Concurrency:
		// 3.1.2: "the quota is based on the number of concurrent requests processed
		// by the resource server". It has no window.
		b = appendInteger(b, l.Max)
		b = append(b, `;qu="concurrent-requests"`...)
	}
	return b
}

// appendInteger appends an Integer of RFC 9651, 3.3.1: "in the range of
// -999,999,999,999,999 to 999,999,999,999,999 inclusive".
func appendInteger(b []byte, n int64) []byte {
	const largest = 999_999_999_999_999
	return strconv.AppendInt(b, min(max(0, n), largest), 10)
}

// appendString appends the parts as one String of RFC 9651, 3.3.3: "zero or more
// printable ASCII characters", with \ before " and \. Other bytes are
// percent-encoded, as in its Display Strings.
func appendString(b []byte, parts ...string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for _, s := range parts {
		for i := range len(s) {
			switch c := s[i]; {
			case c == '"' || c == '\\':
				b = append(b, '\\', c)
			case c < ' ' || c > '~':
				b = append(b, '%', hex[c>>4], hex[c&15])
			default:
				b = append(b, c)
			}
		}
	}
	return append(b, '"')
}
