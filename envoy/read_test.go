package envoy

import (
	"bytes"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"weir/limit"
)

// testRead has a message read, and compares it with what protobuf's own code reads.
func testRead(t *testing.T, d *Decoder, message []byte) {
	t.Helper()
	sent := bytes.Clone(message)
	err := d.Read(message)
	m := new(rls.RateLimitRequest)
	wrong := unmarshal(bytes.Clone(sent), m)
	switch many := tooMany(sent); {
	case !bytes.Equal(message, sent):
		t.Fatalf("Read changed %.200q to %.200q", sent, message)
	case (err != nil) != (wrong != nil || many):
		t.Fatalf("Read(%.200q) = %v; protobuf says %v, and that it has too many parts is %v", sent, err, wrong, many)
	case err != nil && wrong == nil && !errors.Is(err, errTooMany), err != nil && !many && !errors.Is(err, ErrNoMessage):
		t.Fatalf("Read(%.200q) = %v; protobuf says %v, and that it has too many parts is %v", sent, err, wrong, many)
	case err != nil:
		return
	}
	clear(message) // what is kept is a copy
	same := cmp.AllowUnexported(request{}, asSent{}, ownLimit{}, limit.Entry{}, Ask{})
	want := requestOf(m)
	got := d.request
	got.descriptors, got.entries = nilIfEmpty(got.descriptors), nilIfEmpty(got.entries)
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("Read(%.200q) (-protobuf's +got):\n%s", sent, cmp.Diff(want, got, same))
	}
	wantAsk, wantErr := (&Decoder{request: want}).Decode()
	gotAsk, gotErr := d.Decode()
	if wantErr != nil || gotErr != nil {
		if wantErr == nil || gotErr == nil || wantErr.Error() != gotErr.Error() {
			t.Fatalf("Decode(%.200q) = %v, want %v", sent, gotErr, wantErr)
		}
		return
	}
	wantAsk.Request.Descriptors, gotAsk.Request.Descriptors = nilIfEmpty(wantAsk.Request.Descriptors), nilIfEmpty(gotAsk.Request.Descriptors)
	if !reflect.DeepEqual(gotAsk, wantAsk) {
		t.Fatalf("Decode(%.200q) (-protobuf's +got):\n%s", sent, cmp.Diff(wantAsk, gotAsk, same))
	}
}

func nilIfEmpty[T any](list []T) []T {
	if len(list) == 0 {
		return nil
	}
	return list
}

// marshal are the bytes of a message.
func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// in is a message as a field of another.
func in(number protowire.Number, message ...[]byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), slices.Concat(message...))
}

// varint is a field of a number.
func varint(number protowire.Number, n uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(nil, number, protowire.VarintType), n)
}

// wires are messages of all that the wire may have in them.
func wires(t testing.TB) map[string][]byte {
	entry := in(1, in(1, []byte("a")), in(2, []byte("1")))
	domain := in(1, []byte("d"))
	group := slices.Concat(protowire.AppendTag(nil, 7, protowire.StartGroupType), varint(1, 5), protowire.AppendTag(nil, 7, protowire.EndGroupType))
	full := marshal(t, &rls.RateLimitRequest{Domain: "d", HitsAddend: 7, Descriptors: ask(
		withNegativeHits(withLimit(withHits(descriptor("a", "1", "b", "", "weir.stream_id", "s"), 1<<63), 3, typev3.RateLimitUnit_HOUR, wrapperspb.UInt32(2))),
		withHits(descriptor("weir.event", "usage", "weir.stream_id", "s", "weir.lease_id", leaseText, "a", "2"), 0),
		descriptor("weir.event", "release", "weir.lease_id", leaseText, "weir.outcome", "ok"),
	).Descriptors})
	return map[string][]byte{
		"nothing":                             nil,
		"all that a request has":              full,
		"its last byte is missing":            full[:len(full)-1],
		"any bytes as a value":                withValues(t, "ab\xff\xfe", "\xc3(gh"),
		"a key that is no UTF-8":              slices.Concat(domain, in(2, in(1, in(1, []byte("a\xff"))))),
		"and another behind it":               slices.Concat(domain, in(2, in(1, in(1, []byte("a\xff")), in(1, []byte("a"))))),
		"a domain that is no UTF-8":           slices.Concat(in(1, []byte("\xc3")), domain, in(2, entry)),
		"two domains, the last behind":        slices.Concat(domain, in(2, entry), in(1, []byte("e"))),
		"two keys and two values":             slices.Concat(domain, in(2, in(1, in(1, []byte("a")), in(2, []byte("1")), in(2, []byte("\xff")), in(1, []byte("b"))))),
		"two hits of the request":             slices.Concat(domain, varint(3, 5), in(2, entry), varint(3, 1<<40|6)),
		"hits that are none, behind some":     slices.Concat(domain, in(2, entry, in(3, varint(1, 5)), in(3))),
		"two hits of a descriptor":            slices.Concat(domain, in(2, entry, in(3, varint(1, 5)), in(3, varint(1, 6), varint(2, 7)))),
		"a limit in pieces":                   slices.Concat(domain, in(2, in(2, varint(1, 9), varint(2, 3)), entry, in(2, in(3, varint(1, 2))), in(2, varint(1, 1<<33|8)), in(2, in(3)))),
		"a unit that is negative":             slices.Concat(domain, in(2, entry, in(2, varint(2, 1<<64-1)))),
		"a refund told twice":                 slices.Concat(domain, in(2, entry, varint(4, 1), varint(4, 0))),
		"a refund told by a large number":     slices.Concat(domain, in(2, entry, varint(4, 1<<40))),
		"unknown fields everywhere":           slices.Concat(domain, in(9, []byte("\xff")), in(2, entry, varint(9, 1), in(1, in(1, []byte("b")), varint(3, 1)), in(2, varint(8, 1), varint(2, 1)), in(3, in(2))), group),
		"fields of another type":              slices.Concat(domain, varint(1, 1), varint(2, 1), in(3, []byte("x")), in(2, entry, varint(1, 1), varint(2, 1), varint(3, 1), in(4)), protowire.AppendFixed32(protowire.AppendTag(nil, 3, protowire.Fixed32Type), 1), protowire.AppendFixed64(protowire.AppendTag(nil, 1, protowire.Fixed64Type), 1)),
		"a group in place of a descriptor":    slices.Concat(domain, protowire.AppendTag(nil, 2, protowire.StartGroupType), entry, protowire.AppendTag(nil, 2, protowire.EndGroupType)),
		"a group that does not end":           slices.Concat(domain, protowire.AppendTag(nil, 7, protowire.StartGroupType), varint(1, 5)),
		"a group that ends as another":        slices.Concat(domain, protowire.AppendTag(nil, 7, protowire.StartGroupType), protowire.AppendTag(nil, 8, protowire.EndGroupType)),
		"the end of no group":                 slices.Concat(domain, protowire.AppendTag(nil, 7, protowire.EndGroupType)),
		"a field with the number 0":           slices.Concat(domain, []byte{0x02, 0x00}),
		"a field with a number that is none":  slices.Concat(domain, protowire.AppendVarint(nil, (1<<29)<<3), []byte{0}),
		"the last number of a field":          slices.Concat(domain, protowire.AppendVarint(nil, (1<<29-1)<<3), []byte{0}),
		"a wire type that is none":            slices.Concat(domain, []byte{0x0f, 0x00}),
		"a tag in more bytes than it needs":   slices.Concat([]byte{0x8a, 0x80, 0x00, 0x01, 'd'}, in(2, entry)),
		"a length in more bytes, and too far": slices.Concat(domain, []byte{0x12, 0x85, 0x80, 0x00, 0x00}),
		"a number that is too long":           slices.Concat(domain, []byte{0x18}, bytes.Repeat([]byte{0xff}, 10), []byte{1}),
		"as many fields as may be":            slices.Concat(domain, bytes.Repeat(in(2, entry), 1024), bytes.Repeat(varint(9, 1), MaxFields-1025)),
		"one more":                            slices.Concat(domain, bytes.Repeat(in(2, entry), 1024), bytes.Repeat(varint(9, 1), MaxFields-1024)),
		"one more, and then noise":            slices.Concat(domain, bytes.Repeat(varint(9, 1), MaxFields), []byte{0xff}),
		"as many parts as may be":             slices.Concat(domain, in(2, bytes.Repeat([]byte{0x0a, 0}, MaxParts))),
		"one part more":                       slices.Concat(domain, in(2, bytes.Repeat([]byte{0x0a, 0}, MaxParts)), in(2, entry)),
		"large texts":                         marshal(t, ask(descriptor("a", strings.Repeat("x", 100_000)))),
	}
}

func TestTheWireIsReadAsProtobufReadsIt(t *testing.T) {
	var one Decoder // for all, one after the other
	for name, message := range wires(t) {
		t.Run(name, func(t *testing.T) {
			testRead(t, new(Decoder), bytes.Clone(message))
			testRead(t, &one, bytes.Clone(message))
		})
		t.Run(name+", cut off", func(t *testing.T) {
			for n := range min(len(message), 300) {
				testRead(t, &one, bytes.Clone(message[:n]))
			}
			one.Forget()
		})
	}
}

func TestADecoderForgetsItsMessage(t *testing.T) {
	var d Decoder
	if err := d.Read(marshal(t, ask(withLimit(descriptor("a", "1", "b", "2"), 3, typev3.RateLimitUnit_HOUR, nil), descriptor("weir.stream_id", "s")))); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Decode(); err != nil {
		t.Fatal(err)
	}
	d.Forget()
	for i, e := range d.request.entries[:cap(d.request.entries)] {
		if e != (limit.Entry{}) {
			t.Errorf("entry %d is still %v", i, e)
		}
	}
	for i, a := range d.asked[:cap(d.asked)] {
		if a.Entries != nil || a.Override != nil {
			t.Errorf("descriptor %d is still %v", i, a)
		}
	}
	if d.request.domain != "" {
		t.Errorf("the domain is still %q", d.request.domain)
	}
	if err := d.Read(marshal(t, ask(slices.Repeat(ask(descriptor("a", "1")).Descriptors, 1000)...))); err != nil {
		t.Fatal(err)
	}
	d.Forget()
	if n := cap(d.request.entries) + cap(d.request.descriptors); n != 0 {
		t.Errorf("%d elements are kept for a thousand descriptors", n)
	}
}

// FuzzDecodeWire has bytes read as protobuf reads them, and choices that make a message up.
func FuzzDecodeWire(f *testing.F) {
	for _, message := range wires(f) {
		if len(message) < 10_000 {
			f.Add(message)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		testRead(t, new(Decoder), bytes.Clone(data))
		if message, err := proto.Marshal(madeUp(data)); err == nil { // not of a text that is no UTF-8
			testRead(t, new(Decoder), message)
		}
	})
}
