package limit

import (
	"slices"
	"strconv"
	"unicode/utf8"
)

// The codes of HTTP for a refusal, by RFC 6585 and RFC 9110.
const (
	tooManyRequests    = 429
	serviceUnavailable = 503
)

// Code is the code of HTTP for a refusal of this class: 429, or 503.
func (c Class) Code() int {
	if c == Pool {
		return serviceUnavailable
	}
	return tooManyRequests
}

// Problem is what AppendProblem appends.
func (v Verdict) Problem() []byte { return v.AppendProblem(make([]byte, 0, 512)) }

// AppendProblem appends the body of HTTP for a refused request to b, problem details of RFC
// 9457 in JSON. It has names from the policy, and no values of requests. A StoreUnavailable
// without a Limit is that of a service that does not answer.
//
// The types are those of draft-ietf-httpapi-ratelimit-headers-11, section 5, and the titles
// those that it registers. The bytes are those that encoding/json writes, without what it costs
// (TestAProblemIsAsEncodingJSONWritesIt).
func (v Verdict) AppendProblem(b []byte) []byte {
	if v.Class == Pool {
		b = append(b, `{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","title":"Temporary Reduced Capacity","status":`...)
	} else {
		b = append(b, `{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":`...)
	}
	b = strconv.AppendInt(b, int64(v.Class.Code()), 10)
	var room [256]byte // on the stack, for most names
	b = appendJSON(append(b, `,"detail":`...), v.appendDetail(room[:0]))
	if v.Retryable {
		b = strconv.AppendInt(append(b, `,"retry_after_ms":`...), v.RetryAfter.Milliseconds(), 10)
	}
	b = append(b, `,"violated-policies":[`...)
	for i, name := range Names(v.Violations) {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendJSON(b, name)
	}
	b = strconv.AppendBool(append(b, `],"retryable":`...), v.Retryable)
	return append(b, '}')
}

// appendDetail says in one sentence what happened and what helps.
func (v Verdict) appendDetail(b []byte) []byte {
	switch v.Reason {
	case BucketEmpty:
		b = append(v.appendLimit(b, "The token bucket of limit "), " has too few tokens left"...)
	case WindowFull:
		b = append(v.appendLimit(b, "The quota of limit "), " has too little left in its window"...)
	case LaneFull:
		b = append(v.appendLimit(b, "All in-flight slots of limit "), " are taken"...)
	case PoolFull:
		b = append(v.appendLimit(b, "All in-flight slots of limit "), ", which callers share, are taken"...)
	case CostExceedsCapacity:
		b = append(v.appendLimit(b, "The request costs more than limit "), " can ever allow"...)
	case Banned:
		b = append(v.appendLimit(b, "Limit "), " allows no requests"...)
	case StoreUnavailable:
		if v.Limit == "" {
			b = append(b, "The limits cannot be looked up at present"...)
		} else {
			b = append(v.appendLimit(b, "Limit "), " cannot be looked up at present"...)
		}
	case StreamEnded:
		b = append(b, "The end of the stream that asks was told before"...)
	case NoReason:
		b = append(b, "The request was refused"...)
	default:
		b = append(v.appendLimit(b, "Limit "), " refused the request ("...)
		b = append(append(b, v.Reason...), ')')
	}
	switch {
	case !v.Retryable:
		b = append(b, "; retrying does not help"...)
	case v.Estimated:
		b = append(append(append(b, "; retry after about "...), v.RetryAfter.String()...), ", which is an estimate"...)
	default:
		b = append(append(b, "; retry after "...), v.RetryAfter.String()...)
	}
	return append(b, '.')
}

// appendLimit appends words, and the limit's name in quotes.
func (v Verdict) appendLimit(b []byte, words string) []byte {
	return strconv.AppendQuote(append(b, words...), v.Limit)
}

// appendJSON appends a string of JSON, as encoding/json does: safe in HTML and in JavaScript,
// and with U+FFFD for what is not UTF-8.
func appendJSON[text string | []byte](b []byte, s text) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	from := 0 // what is not appended yet
	for i := 0; i < len(s); {
		c := s[i]
		if c >= ' ' && c < utf8.RuneSelf && c != '"' && c != '\\' && c != '<' && c != '>' && c != '&' {
			i++
			continue
		}
		size := 1
		if c >= utf8.RuneSelf {
			var r rune
			r, size = utf8.DecodeRuneInString(string(s[i:min(len(s), i+utf8.UTFMax)]))
			if (r != utf8.RuneError || size > 1) && r != '\u2028' && r != '\u2029' {
				i += size
				continue
			}
			b = append(b, s[from:i]...)
			if r == utf8.RuneError {
				b = append(b, `\ufffd`...)
			} else {
				b = append(b, `\u202`...)
				b = append(b, hex[r&15])
			}
		} else {
			b = append(b, s[from:i]...)
			switch c {
			case '"', '\\':
				b = append(b, '\\', c)
			case '\b':
				b = append(b, `\b`...)
			case '\f':
				b = append(b, `\f`...)
			case '\n':
				b = append(b, `\n`...)
			case '\r':
				b = append(b, `\r`...)
			case '\t':
				b = append(b, `\t`...)
			default:
				b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
			}
		}
		i += size
		from = i
	}
	return append(append(b, s[from:]...), '"')
}

// MaxNames is how many names of limits a body or a header lists at most: those that matter
// most come first.
const MaxNames = 64

// Names are the different names of the limits, in order, at most MaxNames; never nil.
func Names(vs []Violation) []string {
	// This is inlined, so that a caller that does not keep the list has it on its stack.
	return appendNames(make([]string, 0, 4), vs)
}

func appendNames(list []string, vs []Violation) []string {
	for i := range vs {
		if len(list) == MaxNames {
			break
		}
		if !slices.Contains(list, vs[i].Limit) {
			list = append(list, vs[i].Limit)
		}
	}
	return list
}
