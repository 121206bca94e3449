package envoy

import (
	"testing"
	"time"
	"unicode/utf8"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"weir/limit"
	"weir/policy"
	"weir/store/storetest"
)

// FuzzDecode decodes its input twice: as the bytes of a message, and as choices
// that make one up, which gets past the wire format.
func FuzzDecode(f *testing.F) {
	for _, m := range []*rls.RateLimitRequest{
		ask(descriptor("account", "1", "weir.stream_id", "s"), withHits(descriptor("a", "\x00"), 5)),
		ask(descriptor("weir.event", "release", "weir.lease_id", leaseText, "weir.outcome", "ok")),
		ask(withNegativeHits(withLimit(descriptor("a", "1"), 3, typev3.RateLimitUnit_HOUR, wrapperspb.UInt32(2)))),
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte{2, 0, 7, 1, 3, 8, 9, 1, 2, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		m := new(rls.RateLimitRequest)
		if unmarshal(data, m) == nil {
			testDecode(t, m)
		}
		testDecode(t, madeUp(data))
	})
}

// madeUp makes a message of choices.
func madeUp(data []byte) *rls.RateLimitRequest {
	choices := storetest.Choices(data)
	choose := choices.Next
	texts := []string{
		"", "a", "weir", "weir.", "weir.event", "weir.lease_id", "weir.outcome", "weir.stream_id", "acquire", "release", "usage",
		leaseText, leaseText + "%00", "é\x00", "\xff", string(make([]byte, 300)),
	}
	m := &rls.RateLimitRequest{Domain: texts[choose(len(texts))], HitsAddend: uint32(choose(3))}
	for len(choices) > 0 {
		var d *ratelimit.RateLimitDescriptor
		if choose(9) > 0 {
			d = new(ratelimit.RateLimitDescriptor)
			for range choose(6) {
				d.Entries = append(d.Entries, &ratelimit.RateLimitDescriptor_Entry{Key: texts[choose(len(texts))], Value: texts[choose(len(texts))]})
			}
			if choose(4) == 1 {
				d.HitsAddend = wrapperspb.UInt64(uint64(choose(3)) - 1)
			}
			if choose(4) == 1 {
				d.Limit = &ratelimit.RateLimitDescriptor_RateLimitOverride{
					RequestsPerUnit: uint32(choose(3)), Unit: typev3.RateLimitUnit(choose(9) - 1), UnitMultiplier: wrapperspb.UInt32(uint32(choose(3)) - 1),
				}
			}
		}
		m.Descriptors = append(m.Descriptors, d)
	}
	return m
}

func testDecode(t *testing.T, m *rls.RateLimitRequest) {
	t.Helper()
	a, err := (&Decoder{request: requestOf(m)}).Decode()
	if err != nil {
		if !utf8.ValidString(err.Error()) {
			t.Errorf("Decode(%v) = %q, which is no UTF-8", m, err)
		}
		return
	}
	if len(a.places) != len(m.GetDescriptors()) {
		t.Fatalf("Decode(%v) has %d places, want %d", m, len(a.places), len(m.GetDescriptors()))
	}
	next, released := 0, 0
	for i, place := range a.places {
		if place < 0 {
			continue
		}
		if place != next {
			t.Fatalf("Decode(%v): descriptor %d is at %d, want %d", m, i, place, next)
		}
		next++
		testDescriptor(t, a.Request.Descriptors[place], m.GetDescriptors()[i])
	}
	if next != len(a.Request.Descriptors) {
		t.Fatalf("Decode(%v) asks %d descriptors, of which %d have a place", m, len(a.Request.Descriptors), next)
	}
	for _, d := range m.GetDescriptors() {
		for _, e := range d.GetEntries() {
			if e.GetKey() == keyEvent && e.GetValue() == eventRelease {
				released++
			}
		}
	}
	if released < len(a.Endings) {
		t.Errorf("Decode(%v) has %d endings, want at most %d", m, len(a.Endings), released)
	}
	for _, e := range a.Endings {
		if _, err := limit.ParseLeaseID(string(e.Lease)); err != nil && (e.Lease != "" || e.Domain == "" || e.Stream == "" || e.Stream != a.Stream) {
			t.Errorf("Decode(%v) has ending %+v", m, e)
		}
	}
	for _, u := range a.Usage.Descriptors {
		if a.Stream == "" || !u.HasHits || len(u.Entries) == 0 {
			t.Errorf("Decode(%v) has usage %+v of stream %q", m, u, a.Stream)
		}
	}

	// What is decoded can be answered.
	match := policy.Match{Descriptors: make([]policy.Matched, len(a.Request.Descriptors))}
	d := limit.Decision{}
	for i := range match.Descriptors {
		match.Descriptors[i].Checks = []int{i}
		match.Checks = append(match.Checks, hourly("a", 1))
		d.Results = append(d.Results, failed(0, time.Second, time.Second))
	}
	d.Admitted = !limit.Refused(match.Checks, d.Results)
	v := limit.Judge(match.Checks, d, func(limit.Check) time.Duration { return estimate })
	r := Encode(a, match, d, v, Options{LeaseHeader: true, RateLimitHeaders: true})
	if got, want := len(r.GetStatuses()), len(m.GetDescriptors()); got != want {
		t.Errorf("Encode(%v) has %d statuses, want %d", m, got, want)
	}
	if _, err := proto.Marshal(r); err != nil {
		t.Errorf("Marshal(Encode(%v)) = %v", m, err)
	}
}

// testDescriptor compares an asked descriptor with the message's.
func testDescriptor(t *testing.T, got policy.Descriptor, d *ratelimit.RateLimitDescriptor) {
	t.Helper()
	i := 0
	for _, e := range d.GetEntries() {
		if len(e.GetKey()) >= 5 && e.GetKey()[:5] == "weir." {
			continue
		}
		if i == len(got.Entries) || got.Entries[i] != (limit.Entry{Key: e.GetKey(), Value: e.GetValue()}) {
			t.Fatalf("asked %v for %v", got.Entries, d)
		}
		i++
	}
	if i == 0 || i != len(got.Entries) {
		t.Fatalf("asked %v for %v", got.Entries, d)
	}
	if got.HasHits != (d.GetHitsAddend() != nil) || got.Hits != d.GetHitsAddend().GetValue() || got.Negative != d.GetIsNegativeHits() {
		t.Errorf("asked %+v for %v", got, d)
	}
	if (got.Override != nil) != (d.GetLimit() != nil) {
		t.Errorf("asked override %v for %v", got.Override, d)
	}
}
