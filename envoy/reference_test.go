package envoy

import (
	"bytes"
	"iter"
	"unicode/utf8"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"weir/limit"
)

// unmarshal reads a message by protobuf's own code, into an empty m. It too takes any bytes
// as the value of an entry.
func unmarshal(message []byte, m *rls.RateLimitRequest) error {
	err := proto.Unmarshal(message, m)
	if err == nil {
		return nil
	}
	// Again, with texts in the place of the values; as many bytes, so that the rest
	// stays as it is.
	message = bytes.Clone(message)
	var values []string
	for descriptor := range parts(message, 2) {
		for entry := range parts(descriptor, 1) {
			value := ""
			for v := range parts(entry, 2) { // the last counts
				value = string(v)
				if !utf8.Valid(v) {
					mark(v)
				}
			}
			values = append(values, value)
		}
	}
	if proto.Unmarshal(message, m) != nil {
		return err
	}
	for _, d := range m.GetDescriptors() {
		for _, e := range d.GetEntries() {
			e.Value, values = values[0], values[1:]
		}
	}
	return nil
}

// parts are the contents of the fields with one number.
func parts(message []byte, number protowire.Number) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for n, part := range contents(message) {
			if n == number && !yield(part) {
				return
			}
		}
	}
}

// requestOf is what read should find in m.
func requestOf(m *rls.RateLimitRequest) request {
	r := request{domain: m.GetDomain(), hits: m.GetHitsAddend()}
	for _, d := range m.GetDescriptors() {
		from := len(r.entries)
		for _, e := range d.GetEntries() {
			r.entries = append(r.entries, limit.Entry{Key: e.GetKey(), Value: e.GetValue()})
		}
		r.descriptors = append(r.descriptors, asSent{
			from: from, to: len(r.entries),
			hits: d.GetHitsAddend().GetValue(), hasHits: d.GetHitsAddend() != nil, negative: d.GetIsNegativeHits(),
			hasLimit: d.GetLimit() != nil,
			limit: ownLimit{
				perUnit: d.GetLimit().GetRequestsPerUnit(), unit: int32(d.GetLimit().GetUnit()), multiplier: d.GetLimit().GetUnitMultiplier().GetValue(),
			},
		})
	}
	return r
}

// tooMany reports whether a message has more parts than may be, whatever it is.
func tooMany(message []byte) bool {
	fields, inner := 0, 0
	for len(message) > 0 {
		n, kind, size := protowire.ConsumeField(message)
		if size < 0 {
			break
		}
		fields++
		if n == 2 && kind == protowire.BytesType {
			_, _, tag := protowire.ConsumeTag(message)
			part, _ := protowire.ConsumeBytes(message[tag:])
			for range all(part) {
				inner++
			}
		}
		message = message[size:]
	}
	return fields > MaxFields || inner > MaxParts
}

// all are the fields of a message, up to where it is no message any more.
func all(message []byte) iter.Seq[protowire.Number] {
	return func(yield func(protowire.Number) bool) {
		for len(message) > 0 {
			n, _, size := protowire.ConsumeField(message)
			if size < 0 || !yield(n) {
				return
			}
			message = message[size:]
		}
	}
}

// decode is what a message asks for, by its bytes.
func decode(m *rls.RateLimitRequest) (Ask, error) {
	b, err := proto.Marshal(m)
	if err != nil {
		return Ask{}, err
	}
	return decodeBytes(b)
}

func decodeBytes(message []byte) (Ask, error) {
	var d Decoder
	if err := d.Read(message); err != nil {
		return Ask{}, err
	}
	return d.Decode()
}
