package envoy

import (
	"bytes"
	"iter"
	"unicode/utf8"

	als "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

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
