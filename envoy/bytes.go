package envoy

import (
	"bytes"
	"iter"
	"unicode/utf8"

	als "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// UnmarshalRequest reads a message as it came, into an empty m. As protobuf has it a text is
// UTF-8, and Go keeps to that; Envoy does not look, and sends what stands in a header
// (RFC 9110, section 5.5: any bytes from 0x80). If such a message were turned down,
// its sender would pass unasked: so a value of an entry may be any bytes here, and
// they are its value. Other texts are Envoy's own.
func UnmarshalRequest(message []byte, m *rls.RateLimitRequest) error {
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

// UnmarshalLog reads a message of the access log as it came, into an empty m. It too
// may have bytes of a client's in its texts (in 1.40 x-request-id). Nothing here reads
// those, and so there are question marks instead.
func UnmarshalLog(message []byte, m *als.StreamAccessLogsMessage) error {
	err := proto.Unmarshal(message, m)
	if err == nil {
		return nil
	}
	message = bytes.Clone(message)
	question(message, m.ProtoReflect().Descriptor(), protowire.DefaultRecursionLimit)
	return proto.Unmarshal(message, m)
}

// question puts question marks in the place of texts that are no UTF-8, as deep as
// protobuf reads: metadata may hold the nested JSON of a client's token.
func question(message []byte, d protoreflect.MessageDescriptor, depth int) {
	for f, part := range contents(message) {
		switch field := d.Fields().ByNumber(f); {
		case field == nil:
		case field.Kind() == protoreflect.StringKind && !utf8.Valid(part):
			mark(part)
		case field.Kind() == protoreflect.MessageKind && depth > 0:
			question(part, field.Message(), depth-1)
		}
	}
}

// mark writes question marks.
func mark(text []byte) {
	for i := range text {
		text[i] = '?'
	}
}

// contents are the numbers and the contents of those fields of a message that are texts
// or messages, up to where it is no message any more.
func contents(message []byte) iter.Seq2[protowire.Number, []byte] {
	return func(yield func(protowire.Number, []byte) bool) {
		for len(message) > 0 {
			n, kind, tag := protowire.ConsumeTag(message)
			if tag < 0 {
				return
			}
			size := protowire.ConsumeFieldValue(n, kind, message[tag:])
			if size < 0 {
				return
			}
			if kind == protowire.BytesType {
				part, _ := protowire.ConsumeBytes(message[tag:])
				if !yield(n, part) {
					return
				}
			}
			message = message[tag+size:]
		}
	}
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
