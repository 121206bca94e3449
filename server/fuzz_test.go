package server_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"weir/envoy"
	"weir/store/storetest"
)

const fuzzPolicy = `
domain: d
descriptors:
  - {key: probe, token_bucket: {capacity: 1000, refill: 1000/h}}
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 5}}
  - {key: lane, concurrency: {max_in_flight: 1, lease: 30s}}
  - {key: pool, concurrency: {max_in_flight: 2, lease: 30s}, reject_as: pool}
  - {key: banned, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: trial, token_bucket: {capacity: 1, refill: 1/d}, shadow_mode: true}
  - {key: free, rate_limit: {unlimited: true}}
  - key: a
    value: deep
    descriptors: [{key: "b*", value: "*", token_bucket: {capacity: 3, refill: 1/m}}]
`

// FuzzProtocol sends its input over a real connection twice: as bytes behind a
// good descriptor, and as choices that make a message up, some of whose bytes are
// then changed. The answer is right or INVALID_ARGUMENT, comes soon, and what is not
// admitted charges nothing.
func FuzzProtocol(f *testing.F) {
	for _, m := range []*rls.RateLimitRequest{
		{Domain: "d", Descriptors: descriptorsOf(f, "[a=1]")},
		{Domain: "d", Descriptors: descriptorsOf(f, "[a=1;limit=3/UNKNOWN]")},
		{Domain: "d", Descriptors: descriptorsOf(f, "[a=1;limit=3/99]")},
		{Domain: "d", Descriptors: descriptorsOf(f, "[a=1;hits=18446744073709551611][a=2;hits=9007199254740993]")},
		{Domain: "d", Descriptors: descriptorsOf(f, "[lane=1;neg][pool=1][banned=1][free=1]"), HitsAddend: 1<<32 - 1},
		{Domain: "d", Descriptors: descriptorsOf(f, "[weir.event=release,weir.lease_id=AAAAAAAAAAAAAAAAAAAAAA.d,weir.outcome=ok]")},
		{Domain: "d", Descriptors: descriptorsOf(f, "[weir.event=usage,a=1][weir.stream_id=s]")},
		{Domain: "other", Descriptors: descriptorsOf(f, "[a=\x00][=]")},
		{Descriptors: descriptorsOf(f, "[a="+strings.Repeat("x", 100_000)+"]")},
		{Domain: "d", Descriptors: slices.Repeat(descriptorsOf(f, "[a=1]"), 5000)},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte("\n\x01d\x12\x08\n\x06\n\x01a\x12\x01\xff")) // no UTF-8
	f.Add([]byte("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"))
	f.Add([]byte{0, 2, 3, 0, 1, 1, 4, 2, 8, 1, 1, 5, 2, 2, 0, 6, 0, 9, 1, 7, 3, 1, 2, 4, 2, 1, 3})

	s := serve(f, fuzzPolicy)
	good, err := proto.Marshal(&rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(f, "[probe=p]")})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s.expectRightAnswer(t, slices.Concat(good, data))
		s.expectRightAnswer(t, madeUp(t, data))
	})
}

// expectRightAnswer sends the bytes of a message.
func (s *service) expectRightAnswer(t *testing.T, message []byte) {
	// Buckets fill up, windows and leases end: what was sent before is forgotten.
	s.clock.Advance(48 * time.Hour)
	if got, want := ask(t, s.envoy, "d", "[probe=p;hits=0]", 0), "OK [OK 1000]"; got != want {
		t.Fatalf("the probe is %s before the message, want %s", got, want)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	r, err := send(ctx, s.conn, shouldRateLimit, message)
	switch status.Code(err) {
	case codes.OK:
		if problem := wrong(message, r); problem != "" {
			t.Fatalf("%s: %v", problem, r)
		}
	case codes.InvalidArgument:
	case codes.ResourceExhausted:
		if len(message) <= 4<<20 {
			t.Fatalf("%d bytes: %v", len(message), err)
		}
	default:
		t.Fatalf("%v, want an answer or INVALID_ARGUMENT", err)
	}
	if err == nil && r.GetOverallCode() == rls.RateLimitResponse_OK {
		return
	}
	if got, want := ask(t, s.envoy, "d", "[probe=p;hits=0]", 0), "OK [OK 1000]"; got != want {
		t.Fatalf("the probe is %s after %v, %v; want %s: nothing is charged in part", got, err, r, want)
	}
}

// wrong says what does not fit together in an answer.
func wrong(message []byte, r *rls.RateLimitResponse) string {
	var d envoy.Decoder
	if err := d.Read(message); err != nil {
		return fmt.Sprintf("an answer to bytes that are no message (%v)", err)
	}
	if _, err := d.Decode(); err != nil {
		return fmt.Sprintf("an answer to a message that is wrong (%v)", err)
	}
	if got, want := len(r.GetStatuses()), descriptorsIn(message); got != want {
		return fmt.Sprintf("%d statuses for %d descriptors", got, want)
	}
	over := slices.ContainsFunc(r.GetStatuses(), func(s *rls.RateLimitResponse_DescriptorStatus) bool {
		return s.GetCode() == rls.RateLimitResponse_OVER_LIMIT
	})
	for _, s := range r.GetStatuses() {
		switch {
		case s.GetCode() != rls.RateLimitResponse_OK && s.GetCode() != rls.RateLimitResponse_OVER_LIMIT:
			return "a status that is neither OK nor OVER_LIMIT"
		case s.GetCode() == rls.RateLimitResponse_OVER_LIMIT && s.GetLimitRemaining() != 0:
			return "something remains of a limit that refused"
		case s.GetCurrentLimit() != nil && s.GetLimitRemaining() > s.GetCurrentLimit().GetRequestsPerUnit():
			return "more remains than the limit has"
		}
	}
	verdict := r.GetDynamicMetadata().GetFields()["verdict"].GetStringValue()
	switch r.GetOverallCode() {
	case rls.RateLimitResponse_OK:
		if over || len(r.GetRawBody()) > 0 || verdict != "admitted" {
			return "admitted, and told otherwise"
		}
	case rls.RateLimitResponse_OVER_LIMIT:
		if !over || len(r.GetRawBody()) == 0 || verdict != "refused" {
			return "refused, and told otherwise"
		}
	default:
		return "neither OK nor OVER_LIMIT"
	}
	return ""
}

// descriptorsIn is how many descriptors a valid message has.
func descriptorsIn(message []byte) (n int) {
	for len(message) > 0 {
		number, kind, size := protowire.ConsumeField(message)
		if number == 2 && kind == protowire.BytesType {
			n++
		}
		message = message[size:]
	}
	return n
}

// madeUp makes a message of choices, which begins with a descriptor of the probe,
// and then changes some of its bytes.
func madeUp(t *testing.T, data []byte) []byte {
	choices := storetest.Choices(data)
	choose := choices.Next
	texts := []string{
		"a", "lane", "pool", "banned", "trial", "free", "probe", "deep", "bx", "", "x\x00", "é", strings.Repeat("y", 65), strings.Repeat("z", 100_000),
		"weir.event", "weir.lease_id", "weir.stream_id", "weir.outcome", "weir.", "release", "acquire", "usage", "AAAAAAAAAAAAAAAAAAAAAA.d", "AAAAAAAAAAAAAAAAAAAAAA.other",
	}
	hits := []uint64{0, 1, 2, 5, 1000, 1<<53 - 1, 1 << 53, 1<<53 + 1, 1<<63 - 1, 1 << 63, 1<<64 - 5, 1<<64 - 1}
	changes := choose(4)
	m := &rls.RateLimitRequest{
		Domain:      []string{"d", "d", "d", "other", "", strings.Repeat("d", 257)}[choose(6)],
		Descriptors: descriptorsOf(t, "[probe=p]"),
		HitsAddend:  uint32(hits[choose(len(hits))]),
	}
	for len(choices) > changes*3 {
		d := &ratelimit.RateLimitDescriptor{}
		for range []int{1, 1, 1, 2, 2, 3, 0, 64, 65}[choose(9)] {
			d.Entries = append(d.Entries, &ratelimit.RateLimitDescriptor_Entry{Key: texts[choose(len(texts))], Value: texts[choose(len(texts))]})
		}
		if choose(2) == 1 {
			d.HitsAddend = wrapperspb.UInt64(hits[choose(len(hits))])
		}
		d.IsNegativeHits = choose(4) == 1
		if choose(4) == 1 {
			d.Limit = &ratelimit.RateLimitDescriptor_RateLimitOverride{
				RequestsPerUnit: uint32(hits[choose(len(hits))]), Unit: typev3.RateLimitUnit(choose(12) - 2),
				UnitMultiplier: wrapperspb.UInt32(uint32(hits[choose(len(hits))])),
			}
		}
		n := []int{1, 1, 1, 1, 1, 2, 1022, 1024}[choose(8)]
		if n > 2 && proto.Size(d) > 1000 {
			n = 2 // or the message is too large to be read at all
		}
		m.Descriptors = append(m.Descriptors, slices.Repeat([]*ratelimit.RateLimitDescriptor{d}, n)...)
		if len(m.Descriptors) > 2*envoy.MaxDescriptors {
			break
		}
	}
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	for range changes {
		if len(choices) < 3 {
			break
		}
		b[int(binary.LittleEndian.Uint16(choices))%len(b)] = choices[2]
		choices = choices[3:]
	}
	return b
}
