package server

import (
	"context"
	"slices"

	als "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"weir/envoy"
)

// tolerant registers services whose messages may be broken in transit or by a
// caller: a message that cannot be decoded is INVALID_ARGUMENT. grpc-go has sent its
// INTERNAL before a handler sees the error, so the bytes are taken as they are and
// decoded here. Its server must use [wire].
type tolerant struct{ grpc.ServiceRegistrar }

func (r tolerant) RegisterService(desc *grpc.ServiceDesc, impl any) {
	own := *desc
	own.Methods = slices.Clone(desc.Methods)
	for i, m := range own.Methods {
		own.Methods[i].Handler = func(srv any, ctx context.Context, next func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			return m.Handler(srv, ctx, func(into any) error { return receive(next, into) }, interceptor)
		}
	}
	own.Streams = slices.Clone(desc.Streams)
	for i, s := range own.Streams {
		own.Streams[i].Handler = func(srv any, stream grpc.ServerStream) error {
			return s.Handler(srv, tolerantStream{stream})
		}
	}
	r.ServiceRegistrar.RegisterService(&own, impl)
}

type tolerantStream struct{ grpc.ServerStream }

// RecvMsg implements [grpc.ServerStream].
func (s tolerantStream) RecvMsg(into any) error { return receive(s.ServerStream.RecvMsg, into) }

// receive reads the next message into one of a service's types.
func receive(next func(any) error, into any) error {
	var b received
	if err := next(&b); err != nil {
		return err
	}
	defer b.Free()
	message := b.ReadOnlyData()
	if err := countFields(message); err != nil {
		return toStatus(err)
	}
	var err error
	switch m := into.(type) {
	case *als.StreamAccessLogsMessage:
		err = envoy.UnmarshalLog(message, m)
	case proto.Message:
		err = proto.Unmarshal(message, m)
	default:
		return status.Errorf(codes.Internal, "%T is no protobuf", into) // generated code has no such
	}
	if err != nil {
		return toStatus(noMessage())
	}
	return nil
}

func noMessage() error {
	return badRequestf("the message cannot be decoded: it is no valid protobuf, or a text in it is no valid UTF-8")
}

// What a message may hold.
const (
	maxFields  = envoy.MaxFields
	maxEntries = envoy.MaxParts
)

// countFields refuses a message with too many parts before they are decoded: two
// bytes of an empty descriptor become a hundred in memory. Where a request has
// descriptors they are field 2, and their parts are the entries. What is no
// protobuf is left to the decoder.
func countFields(message []byte) error {
	fields, entries := 0, 0
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return nil
		}
		value := message[n:]
		size := protowire.ConsumeFieldValue(number, kind, value)
		if size < 0 {
			return nil
		}
		if fields++; fields > maxFields {
			return tooManyFields()
		}
		if number == 2 && kind == protowire.BytesType {
			inner, _ := protowire.ConsumeBytes(value)
			for len(inner) > 0 {
				_, _, n := protowire.ConsumeField(inner)
				if n < 0 {
					break
				}
				if entries++; entries > maxEntries {
					return tooManyEntries()
				}
				inner = inner[n:]
			}
		}
		message = value[size:]
	}
	return nil
}

func tooManyFields() error {
	return badRequestf("the message has more than %d fields; at most %d descriptors, or %d leases, may come in one", maxFields, envoy.MaxDescriptors, maxLeases)
}

func tooManyEntries() error {
	return badRequestf("the message has more than %d entries; at most %d may stand in a descriptor", maxEntries, envoy.MaxEntries)
}

// received is a message as it came.
type received struct{ mem.Buffer }

// release lets go of its bytes.
func (r *received) release() {
	r.Free()
	r.Buffer = nil
}

// answer is a message on the wire that is to be sent, once, in one piece of memory with
// what gRPC wants around it.
type answer struct {
	bytes mem.SliceBuffer
	whole [1]mem.Buffer
	room  [answerSize]byte
}

// answerSize is room for the answer about a limit or two.
const answerSize = 192

// wire is gRPC's codec for protobuf, that leaves a received message alone, and one that is
// encoded.
type wire struct{ encoding.CodecV2 }

// Marshal implements [encoding.CodecV2].
func (w wire) Marshal(m any) (mem.BufferSlice, error) {
	if a, ok := m.(*answer); ok {
		a.whole[0] = &a.bytes
		return a.whole[:], nil
	}
	return w.CodecV2.Marshal(m)
}

func (w wire) Unmarshal(data mem.BufferSlice, into any) error {
	if b, ok := into.(*received); ok {
		b.Buffer = data.MaterializeToBuffer(mem.DefaultBufferPool())
		return nil
	}
	return w.CodecV2.Unmarshal(data, into)
}
