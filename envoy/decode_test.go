package envoy

import (
	"fmt"
	"strings"
	"testing"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"weir/limit"
	"weir/policy"
)

const leaseText = "AAAAAAAAAAAAAAAAAAAAAA.d"

// ask is a message of domain d.
func ask(ds ...*ratelimit.RateLimitDescriptor) *rls.RateLimitRequest {
	return &rls.RateLimitRequest{Domain: "d", Descriptors: ds}
}

// descriptor is a descriptor of the pairs of keys and values.
func descriptor(pairs ...string) *ratelimit.RateLimitDescriptor {
	d := &ratelimit.RateLimitDescriptor{}
	for i := 0; i < len(pairs); i += 2 {
		d.Entries = append(d.Entries, &ratelimit.RateLimitDescriptor_Entry{Key: pairs[i], Value: pairs[i+1]})
	}
	return d
}

func withHits(d *ratelimit.RateLimitDescriptor, hits uint64) *ratelimit.RateLimitDescriptor {
	d.HitsAddend = wrapperspb.UInt64(hits)
	return d
}

func withNegativeHits(d *ratelimit.RateLimitDescriptor) *ratelimit.RateLimitDescriptor {
	d.IsNegativeHits = true
	return d
}

func withLimit(d *ratelimit.RateLimitDescriptor, perUnit uint32, unit typev3.RateLimitUnit, multiplier *wrapperspb.UInt32Value) *ratelimit.RateLimitDescriptor {
	d.Limit = &ratelimit.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: perUnit, Unit: unit, UnitMultiplier: multiplier}
	return d
}

func entries(pairs ...string) []limit.Entry {
	var list []limit.Entry
	for i := 0; i < len(pairs); i += 2 {
		list = append(list, limit.Entry{Key: pairs[i], Value: pairs[i+1]})
	}
	return list
}

func TestAMessageIsReadAsItIsMeant(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   *rls.RateLimitRequest
		want Ask
	}{
		{
			name: "one descriptor",
			in:   ask(descriptor("a", "1")),
			want: Ask{
				Request: policy.Request{Domain: "d", Descriptors: []policy.Descriptor{{Entries: entries("a", "1")}}},
				places:  []int{0},
			},
		},
		{
			name: "hits of the request and of descriptors",
			in: &rls.RateLimitRequest{Domain: "d", HitsAddend: 7, Descriptors: []*ratelimit.RateLimitDescriptor{
				descriptor("a", "1"),
				withHits(descriptor("a", "2"), 0),
				withHits(descriptor("a", "3"), 5),
				withNegativeHits(withHits(descriptor("a", "4"), 6)),
				withNegativeHits(descriptor("a", "5")),
			}},
			want: Ask{
				Request: policy.Request{Domain: "d", Hits: 7, Descriptors: []policy.Descriptor{
					{Entries: entries("a", "1")},
					{Entries: entries("a", "2"), HasHits: true},
					{Entries: entries("a", "3"), HasHits: true, Hits: 5},
					{Entries: entries("a", "4"), HasHits: true, Hits: 6, Negative: true},
					{Entries: entries("a", "5"), Negative: true},
				}},
				places: []int{0, 1, 2, 3, 4},
			},
		},
		{
			name: "R06: hits near 2^64 arrive as they are",
			in:   ask(withHits(descriptor("a", "1"), 18446744073709551611), withHits(descriptor("a", "2"), 9007199254740993)),
			want: Ask{
				Request: policy.Request{Domain: "d", Descriptors: []policy.Descriptor{
					{Entries: entries("a", "1"), HasHits: true, Hits: 18446744073709551611},
					{Entries: entries("a", "2"), HasHits: true, Hits: 9007199254740993},
				}},
				places: []int{0, 1},
			},
		},
		{
			name: "C13: a refund without a handle is a refund, and no release",
			in:   ask(withNegativeHits(withHits(descriptor("user", "u"), 1))),
			want: Ask{
				Request: policy.Request{Domain: "d", Descriptors: []policy.Descriptor{{Entries: entries("user", "u"), HasHits: true, Hits: 1, Negative: true}}},
				places:  []int{0},
			},
		},
		{
			name: "overrides",
			in: ask(
				withLimit(descriptor("a", "1"), 0, typev3.RateLimitUnit_SECOND, nil),
				withLimit(descriptor("a", "2"), 4294967295, typev3.RateLimitUnit_MINUTE, wrapperspb.UInt32(0)),
				withLimit(descriptor("a", "3"), 3, typev3.RateLimitUnit_HOUR, wrapperspb.UInt32(1)),
				withLimit(descriptor("a", "4"), 4, typev3.RateLimitUnit_DAY, wrapperspb.UInt32(30)),
				withLimit(descriptor("a", "5"), 5, typev3.RateLimitUnit_MONTH, nil),
				withLimit(descriptor("a", "6"), 6, typev3.RateLimitUnit_YEAR, nil),
			),
			want: Ask{
				Request: policy.Request{Domain: "d", Descriptors: []policy.Descriptor{
					{Entries: entries("a", "1"), Override: &limit.Window{Max: 0, Unit: limit.Second, Multiplier: 1}},
					{Entries: entries("a", "2"), Override: &limit.Window{Max: 4294967295, Unit: limit.Minute, Multiplier: 1}},
					{Entries: entries("a", "3"), Override: &limit.Window{Max: 3, Unit: limit.Hour, Multiplier: 1}},
					{Entries: entries("a", "4"), Override: &limit.Window{Max: 4, Unit: limit.Day, Multiplier: 30}},
					{Entries: entries("a", "5"), Override: &limit.Window{Max: 5, Unit: limit.Month, Multiplier: 1}},
					{Entries: entries("a", "6"), Override: &limit.Window{Max: 6, Unit: limit.Year, Multiplier: 1}},
				}},
				places: []int{0, 1, 2, 3, 4, 5},
			},
		},
		{
			name: "reserved entries are stripped, and a descriptor of nothing else is not asked",
			in: ask(
				descriptor("weir.stream_id", "s"),
				descriptor("weir.event", "acquire", "a", "1", "weir.later", "x", "b", "2"),
				descriptor("weir.event", "acquire"),
				descriptor("weir", "w", "weird", "x"),
			),
			want: Ask{
				Stream: "s",
				Request: policy.Request{Domain: "d", Descriptors: []policy.Descriptor{
					{Entries: entries("a", "1", "b", "2")},
					{Entries: entries("weir", "w", "weird", "x")},
				}},
				places: []int{-1, 0, -1, 1},
			},
		},
		{
			name: "releases and ordinary descriptors in one message",
			in: ask(
				descriptor("a", "1"),
				withHits(descriptor("account", "x", "weir.event", "release", "weir.stream_id", "s", "weir.lease_id", leaseText, "weir.outcome", "via_upstream"), 9),
				descriptor("b", "2"),
				descriptor("weir.lease_id", "BBBBBBBBBBBBBBBBBBBBBA.another%20one", "weir.event", "release"),
			),
			want: Ask{
				Request: policy.Request{Domain: "d", Descriptors: []policy.Descriptor{
					{Entries: entries("a", "1")},
					{Entries: entries("b", "2")},
				}},
				Stream:  "s",
				Endings: []limit.Ending{{Lease: leaseText}, {Lease: "BBBBBBBBBBBBBBBBBBBBBA.another%20one"}},
				places:  []int{0, -1, 1, -1},
			},
		},
		{
			name: "a lease id without an event is stripped like any reserved entry",
			in:   ask(descriptor("a", "1", "weir.lease_id", "not one")),
			want: Ask{
				Request: policy.Request{Domain: "d", Descriptors: []policy.Descriptor{{Entries: entries("a", "1")}}},
				places:  []int{0},
			},
		},
		{
			name: "the limit of a descriptor that is not asked is not read",
			in: ask(
				withLimit(descriptor("weir.stream_id", "s"), 1, typev3.RateLimitUnit_UNKNOWN, nil),
				withLimit(descriptor("weir.event", "release", "weir.lease_id", leaseText), 1, 99, nil),
			),
			want: Ask{Stream: "s", Request: policy.Request{Domain: "d"}, Endings: []limit.Ending{{Lease: leaseText}}, places: []int{-1, -1}},
		},
		{
			name: "releases by the stream",
			in: ask(
				descriptor("weir.event", "release", "weir.stream_id", "s", "weir.outcome", "via_upstream"),
				descriptor("weir.event", "release", "weir.stream_id", "s", "weir.outcome", "downstream_remote_disconnect", "weir.lease_id", ""),
				// We refused it: none comes behind.
				descriptor("weir.event", "release", "weir.stream_id", "s", "weir.outcome", "request_rate_limited"),
				// Envoy got our answer, without a lease.
				descriptor("weir.event", "release", "weir.stream_id", "s", "weir.verdict", "admitted"),
				descriptor("weir.event", "release", "weir.lease_id", leaseText, "weir.verdict", "admitted", "weir.outcome", "response_timeout"),
			),
			want: Ask{
				Stream:  "s",
				Request: policy.Request{Domain: "d"},
				Endings: []limit.Ending{
					{Domain: "d", Stream: "s", Tombstone: true},
					{Domain: "d", Stream: "s", Tombstone: true, Early: true},
					{Domain: "d", Stream: "s"},
					{Lease: leaseText, Early: true},
				},
				places: []int{-1, -1, -1, -1, -1},
			},
		},
		{
			name: "usage, with hits of its own",
			in: &rls.RateLimitRequest{Domain: "d", HitsAddend: 7, Descriptors: []*ratelimit.RateLimitDescriptor{
				withHits(descriptor("weir.event", "usage", "weir.stream_id", "s", "account", "alice"), 1234),
				withNegativeHits(withHits(descriptor("weir.event", "usage", "weir.stream_id", "s", "account", "bob"), 5)),
			}},
			want: Ask{
				Stream:  "s",
				Request: policy.Request{Domain: "d", Hits: 7},
				Usage: policy.Request{Domain: "d", Descriptors: []policy.Descriptor{
					{Entries: entries("account", "alice"), HasHits: true, Hits: 1234},
					{Entries: entries("account", "bob"), HasHits: true, Hits: 5, Negative: true},
				}},
				places: []int{-1, -1},
			},
		},
		{
			name: "any text is a value",
			in:   ask(descriptor("a\x00", "\x00\u2028💧", "é", "")),
			want: Ask{
				Request: policy.Request{Domain: "d", Descriptors: []policy.Descriptor{{Entries: entries("a\x00", "\x00\u2028💧", "é", "")}}},
				places:  []int{0},
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := decode(tt.in)
			if err != nil {
				t.Fatalf("Decode(%v) = %v", tt.in, err)
			}
			if len(got.Request.Descriptors) == 0 {
				got.Request.Descriptors = nil
			}
			tt.want.Usage.Domain = "d"
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(Ask{}, limit.Entry{})); diff != "" {
				t.Errorf("Decode(%v) (-want +got):\n%s", tt.in, diff)
			}
		})
	}
}

// S22: Envoy's words for how a stream ended, as far as its upstream may still work.
func TestAStreamEndsEarlyByEnvoysWords(t *testing.T) {
	for outcome, want := range map[string]bool{
		"downstream_remote_disconnect":                               true,
		"downstream_local_disconnect(filter_chain_is_being_removed)": true, // a drain's end
		"downstream_local_disconnect(http2_ping_timeout)":            true,
		"http2.remote_reset":                                         true,
		"http1.codec_error":                                          true, // what its client sent was no HTTP any more
		"http2.violation.of.messaging.rule":                          true,
		"codec_error:The_user_callback_function_failed":              true, // a client of HTTP/2 that resets and vanishes
		"response_timeout":                                           true,
		"stream_idle_timeout":                                        true,
		"max_duration_timeout":                                       true,
		"upstream_per_try_idle_timeout":                              true,
		"upstream_max_stream_duration_reached":                       true,
		"":                                                           false,
		"unknown":                                                    true, // as of a reset with NO_ERROR
		"http2.too_many_headers":                                     true,
		"http3.remote_reset":                                         true,
		"overload manager reset":                                     true,
		"no_healthy_upstream":                                        false,
		"internal_redirect":                                          false,
		"via_upstream":                                               false,
		"request_rate_limited":                                       false,
		"upstream_reset_before_response_started{connection_termination}": false,
	} {
		if got := endedEarly(outcome); got != want {
			t.Errorf("endedEarly(%q) = %v, want %v", outcome, got, want)
		}
	}
}

func TestTheLargestMessageIsRead(t *testing.T) {
	full := &ratelimit.RateLimitDescriptor{}
	for range MaxEntries {
		full.Entries = append(full.Entries, &ratelimit.RateLimitDescriptor_Entry{Key: "k"})
	}
	m := &rls.RateLimitRequest{Domain: strings.Repeat("d", MaxDomain)}
	for range MaxDescriptors {
		m.Descriptors = append(m.Descriptors, full)
	}
	a, err := decode(m)
	if err != nil {
		t.Fatalf("Decode = %v", err)
	}
	if got := len(a.Request.Descriptors); got != MaxDescriptors {
		t.Errorf("Decode has %d descriptors, want %d", got, MaxDescriptors)
	}
	for i, d := range a.Request.Descriptors {
		if len(d.Entries) != MaxEntries || cap(d.Entries) != MaxEntries {
			t.Fatalf("descriptor %d has %d entries, capacity %d, want %d", i, len(d.Entries), cap(d.Entries), MaxEntries)
		}
	}
}

func TestAWrongMessageIsAnErrorThatSaysTheRemedy(t *testing.T) {
	wide := descriptor()
	for range MaxEntries + 1 {
		wide.Entries = append(wide.Entries, &ratelimit.RateLimitDescriptor_Entry{Key: "k"})
	}
	many := ask()
	for range MaxDescriptors + 1 {
		many.Descriptors = append(many.Descriptors, descriptor("a", "1"))
	}
	for _, tt := range []struct {
		name string
		in   *rls.RateLimitRequest
		want string
	}{
		{name: "nil", in: nil, want: "domain is empty; set it to the domain of a policy"},
		{name: "no domain", in: &rls.RateLimitRequest{Descriptors: ask(descriptor("a", "1")).Descriptors}, want: "domain is empty; set it to the domain of a policy"},
		{name: "long domain", in: &rls.RateLimitRequest{Domain: strings.Repeat("d", 257)}, want: "domain has 257 bytes; use at most 256"},
		{name: "no descriptors", in: ask(), want: "descriptors is empty; send at least one"},
		{name: "too many descriptors", in: many, want: "descriptors has 1025 elements; send at most 1024"},
		{name: "no entries", in: ask(descriptor("a", "1"), descriptor()), want: "descriptors[1].entries is empty; send at least one entry"},
		{name: "nil descriptor", in: ask(nil), want: "descriptors[0].entries is empty; send at least one entry"},
		{name: "too many entries", in: ask(wide), want: "descriptors[0].entries has 65 elements; send at most 64"},
		{name: "empty key", in: ask(descriptor("a", "1"), descriptor("a", "1", "", "secret")), want: "descriptors[1].entries[1].key is empty; give every entry a key"},
		{name: "long key", in: ask(descriptor(strings.Repeat("k", 4096), "1", strings.Repeat("k", 4097), "secret")), want: "descriptors[0].entries[1].key has 4097 bytes; use at most 4096"},
		{name: "nil entry", in: ask(&ratelimit.RateLimitDescriptor{Entries: []*ratelimit.RateLimitDescriptor_Entry{nil}}), want: "descriptors[0].entries[0].key is empty; give every entry a key"},
		{name: "R05: unit UNKNOWN", in: ask(withLimit(descriptor("a", "1"), 3, typev3.RateLimitUnit_UNKNOWN, nil)), want: "descriptors[0].limit: unit 0 is no unit of time; use one of SECOND, MINUTE, HOUR, DAY, MONTH, YEAR"},
		{name: "R05: unit outside of the enum", in: ask(withLimit(descriptor("a", "1"), 3, 99, nil)), want: "descriptors[0].limit: unit 99 is no unit of time; use one of SECOND, MINUTE, HOUR, DAY, MONTH, YEAR"},
		{name: "negative unit", in: ask(withLimit(descriptor("a", "1"), 3, -1, nil)), want: "descriptors[0].limit: unit -1 is no unit of time; use one of SECOND, MINUTE, HOUR, DAY, MONTH, YEAR"},
		{name: "multiplier out of range", in: ask(withLimit(descriptor("a", "1"), 3, typev3.RateLimitUnit_YEAR, wrapperspb.UInt32(4294967295))), want: "descriptors[0].limit: unit_multiplier must be 1..290 for unit year, got 4294967295"},
		{name: "unknown event", in: ask(descriptor("weir.event", "secret")), want: "descriptors[0]: weir.event is unknown; use one of acquire, release, usage"},
		{name: "empty event", in: ask(descriptor("weir.event", "")), want: "descriptors[0]: weir.event is unknown; use one of acquire, release, usage"},
		{name: "two events", in: ask(descriptor("weir.event", "acquire", "weir.event", "acquire")), want: "descriptors[0]: weir.event stands twice; send it once a descriptor"},
		{name: "two leases", in: ask(descriptor("weir.event", "release", "weir.lease_id", leaseText, "weir.lease_id", leaseText)), want: "descriptors[0]: weir.lease_id stands twice; send it once a descriptor"},
		{name: "two streams in a descriptor", in: ask(descriptor("weir.stream_id", "secret", "weir.stream_id", "secret")), want: "descriptors[0]: weir.stream_id stands twice; send it once a descriptor"},
		{name: "two streams in a message", in: ask(descriptor("weir.stream_id", "secret"), descriptor("weir.stream_id", "other")), want: "descriptors[1]: weir.stream_id is another than before; a message is about one stream"},
		{name: "long stream", in: ask(descriptor("weir.stream_id", strings.Repeat("s", 257))), want: "descriptors[0]: weir.stream_id has 257 bytes; use at most 256"},
		{name: "malformed lease", in: ask(descriptor("weir.event", "release", "weir.lease_id", "secret")), want: "descriptors[0]: weir.lease_id: lease id must be 22 base64url characters, a dot and the domain; send back the id of the answer that granted the lease"},
		{name: "long lease", in: ask(descriptor("weir.event", "release", "weir.lease_id", leaseText+strings.Repeat("d", 512))), want: "descriptors[0]: weir.lease_id: lease id is longer than 512 bytes; send back the id of the answer that granted the lease"},
		{name: "release of nothing", in: ask(descriptor("a", "1"), descriptor("weir.event", "release")), want: "descriptors[1]: a release names neither a lease nor a stream; send weir.lease_id or weir.stream_id"},
		{name: "release of an empty lease id", in: ask(descriptor("weir.event", "release", "weir.lease_id", "")), want: "descriptors[0]: a release names neither a lease nor a stream; send weir.lease_id or weir.stream_id"},
		{name: "usage of no stream", in: ask(withHits(descriptor("weir.event", "usage", "a", "1"), 5)), want: "descriptors[0]: usage names no stream, so that it could be charged twice; send weir.stream_id"},
		{name: "usage without hits", in: ask(descriptor("weir.event", "usage", "weir.stream_id", "s", "a", "1")), want: "descriptors[0]: usage has no hits_addend of its own; send how much was used"},
		{name: "usage of nothing", in: ask(withHits(descriptor("weir.event", "usage", "weir.stream_id", "s"), 5)), want: "descriptors[0]: usage has no entries of its own; send those of the limits to settle"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := decode(tt.in)
			if err == nil {
				t.Fatalf("Decode(%v) = %+v, want error %q", tt.in, got, tt.want)
			}
			if err.Error() != tt.want {
				t.Errorf("Decode(%v) = %q, want %q", tt.in, err, tt.want)
			}
		})
	}
}

// What a request costs before it is asked: BenchmarkDecode/3 is a usual one.
func BenchmarkDecode(b *testing.B) {
	for _, n := range []int{1, 3, 1000} {
		m := ask()
		for i := range n {
			m.Descriptors = append(m.Descriptors, descriptor("account", fmt.Sprint(i), "plan", "trial"))
		}
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			message := marshal(b, m)
			var d Decoder
			b.ReportAllocs()
			for b.Loop() {
				err := d.Read(message)
				if err == nil {
					_, err = d.Decode()
				}
				if err != nil {
					b.Fatal(err)
				}
				d.Forget()
			}
		})
	}
}
