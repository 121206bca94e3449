package envoy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"weir/limit"
	"weir/policy"
)

func TestAnAnswerTellsCodesAndWhatRemains(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   decision
		want string
	}{
		{
			"no match", decide(nil, nil), "OK [OK nil][OK nil]",
		},
		{
			"R01: refused by the second limit, the first is untouched",
			decide(
				[]decided{{hourly("group", 10), passed(7, time.Hour)}},
				[]decided{{hourly("special", 3), failed(0, time.Hour, time.Hour)}},
			),
			"OVER [OK 7][OVER 0]",
		},
		{
			"R11: unlimited", decide([]decided{unlimited}), "OK [OK 4294967295]",
		},
		{
			"an enforced limit beside an unlimited one tells its own",
			decide([]decided{unlimited, {lane("pool", 5), passed(4, 0)}}), "OK [OK 4]",
		},
		{
			"R14: two limits of one descriptor, the tighter one stands for it",
			decide([]decided{{hourly("a", 9), passed(5, time.Hour)}, {aBucket("a", 10), passed(2, time.Minute)}}), "OK [OK 2]",
		},
		{
			"what refused stands for it, however much is left of the other",
			decide([]decided{{hourly("a", 9), passed(0, time.Hour)}, {costing(aBucket("a", 10), 9), failed(8, 10*time.Second, time.Minute)}}), "OVER [OVER 0]",
		},
		{
			"what can never pass stands for it before what waits",
			decide([]decided{{costing(aBucket("b", 1), 2), failed(1, 0, 0)}, {hourly("a", 9), failed(0, time.Hour, time.Hour)}}), "OVER [OVER 0]",
		},
		{
			"R16: a quota limit that is over in an admitted request",
			decide(
				[]decided{{quota(hourly("q1", 1), 1), failed(0, time.Minute, time.Minute)}},
				[]decided{{quota(hourly("q2", 2), 2), passed(0, time.Minute)}},
			),
			"OK [OVER 0][OK 0]",
		},
		{
			"R16: every quota limit is over",
			decide(
				[]decided{{quota(hourly("q1", 1), 1), failed(0, time.Minute, time.Minute)}},
				[]decided{{quota(hourly("q2", 2), 2), failed(0, time.Minute, time.Minute)}},
			),
			"OVER [OVER 0][OVER 0]",
		},
		{
			"R18: the same descriptor twice is one check and two equal statuses",
			decide(
				[]decided{{costing(hourly("a", 3), 2), passed(1, time.Hour)}},
				[]decided{{costing(hourly("a", 3), 2), passed(1, time.Hour)}},
			),
			"OK [OK 1][OK 1]",
		},
		{
			"R18: refused",
			decide(
				[]decided{{costing(hourly("a", 3), 2), failed(1, time.Hour, time.Hour)}},
				[]decided{{costing(hourly("a", 3), 2), failed(1, time.Hour, time.Hour)}},
			),
			"OVER [OVER 0][OVER 0]",
		},
		{
			"shadow limits alone, would refuse",
			decide([]decided{{shadow(hourly("a", 1)), failed(0, time.Hour, time.Hour)}}), "OK [OK nil]",
		},
		{
			"a shadow limit never touches the status of an enforced one",
			decide([]decided{{shadow(hourly("a", 1)), failed(0, time.Hour, time.Hour)}, {hourly("b", 9), passed(8, time.Hour)}}), "OK [OK 8]",
		},
		{
			"remaining saturates",
			decide([]decided{{aBucket("a", math.MaxUint32+9), passed(math.MaxUint32+8, time.Hour)}}), "OK [OK 4294967295]",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := notation(tt.in.encode(Options{})); got != tt.want {
				t.Errorf("Encode = %s, want %s", got, tt.want)
			}
		})
	}
}

// A descriptor that is not asked has a plain OK, and the others keep their place.
func TestStatusesKeepTheirPlace(t *testing.T) {
	in := decide(
		[]decided{{hourly("a", 9), passed(5, time.Hour)}},
		[]decided{{hourly("b", 9), passed(6, time.Hour)}},
	)
	in.a.places = []int{-1, 0, -1, 1, -1}
	if got, want := notation(in.encode(Options{})), "OK [OK nil][OK 5][OK nil][OK 6][OK nil]"; got != want {
		t.Errorf("Encode = %s, want %s", got, want)
	}
}

func TestAMessageOfReleasesAloneIsAdmitted(t *testing.T) {
	a, err := decode(ask(descriptor("weir.event", "release", "weir.lease_id", leaseText)))
	if err != nil {
		t.Fatal(err)
	}
	got := Encode(a, policy.Match{}, limit.Decision{Admitted: true}, limit.Verdict{Admitted: true}, Options{})
	if want := "OK [OK nil]"; notation(got) != want {
		t.Errorf("Encode = %s, want %s", notation(got), want)
	}
}

func TestCurrentLimitTellsSizeAndUnit(t *testing.T) {
	type current = rls.RateLimitResponse_RateLimit
	const (
		unknown = rls.RateLimitResponse_RateLimit_UNKNOWN
		second  = rls.RateLimitResponse_RateLimit_SECOND
	)
	window := func(unit limit.Unit, multiplier int64) limit.Window {
		return limit.Window{Max: 5, Unit: unit, Multiplier: multiplier}
	}
	for _, tt := range []struct {
		in   limit.Limit
		want *current
	}{
		{window(limit.Second, 1), &current{Name: "x", RequestsPerUnit: 5, Unit: second}},
		{window(limit.Minute, 1), &current{Name: "x", RequestsPerUnit: 5, Unit: rls.RateLimitResponse_RateLimit_MINUTE}},
		{window(limit.Hour, 2), &current{Name: "x", RequestsPerUnit: 5, Unit: rls.RateLimitResponse_RateLimit_HOUR, UnitMultiplier: wrapperspb.UInt32(2)}},
		{window(limit.Day, 1), &current{Name: "x", RequestsPerUnit: 5, Unit: rls.RateLimitResponse_RateLimit_DAY}},
		{window(limit.Week, 1), &current{Name: "x", RequestsPerUnit: 5, Unit: rls.RateLimitResponse_RateLimit_WEEK}},
		{window(limit.Month, 1), &current{Name: "x", RequestsPerUnit: 5, Unit: rls.RateLimitResponse_RateLimit_MONTH}},
		{window(limit.Year, 1), &current{Name: "x", RequestsPerUnit: 5, Unit: rls.RateLimitResponse_RateLimit_YEAR}},
		// 10 tokens at one each 10 s.
		{limit.TokenBucket{Capacity: 10, Scale: 10_000, Refill: 1}, &current{Name: "x", RequestsPerUnit: 10, Unit: second, UnitMultiplier: wrapperspb.UInt32(100)}},
		// 7 tokens at 3 a second: 2334 ms.
		{limit.TokenBucket{Capacity: 7, Scale: 1000, Refill: 3}, &current{Name: "x", RequestsPerUnit: 7, Unit: second, UnitMultiplier: wrapperspb.UInt32(3)}},
		{limit.TokenBucket{Capacity: 1, Scale: 1, Refill: 1000}, &current{Name: "x", RequestsPerUnit: 1, Unit: second, UnitMultiplier: wrapperspb.UInt32(1)}},
		// 2^33 tokens at one each 1000 s.
		{limit.TokenBucket{Capacity: 1 << 33, Scale: 1_000_000, Refill: 1}, &current{Name: "x", RequestsPerUnit: math.MaxUint32, Unit: second, UnitMultiplier: wrapperspb.UInt32(math.MaxUint32)}},
		{limit.Concurrency{Max: 3, Lease: time.Minute}, &current{Name: "x", RequestsPerUnit: 3, Unit: unknown}},
	} {
		got := decide([]decided{{check("x", tt.in), passed(1, time.Second)}}).encode(Options{}).GetStatuses()[0].GetCurrentLimit()
		if diff := cmp.Diff(tt.want, got, protocmp.Transform()); diff != "" {
			t.Errorf("current_limit of %+v (-want +got):\n%s", tt.in, diff)
		}
	}
}

func TestDurationUntilResetIsTheWaitOfARefusal(t *testing.T) {
	overQuota := func(wait time.Duration, c limit.Check) decision {
		return decide([]decided{{quota(c, 1), failed(0, wait, time.Hour)}}, []decided{{quota(hourly("other", 9), 2), passed(1, time.Hour)}})
	}
	for _, tt := range []struct {
		name string
		in   decision
		want *durationpb.Duration
	}{
		{"rounded up", decide([]decided{{hourly("a", 9), passed(1, 5600*time.Millisecond)}}), &durationpb.Duration{Seconds: 6}},
		{"whole", decide([]decided{{hourly("a", 9), passed(1, 5*time.Second)}}), &durationpb.Duration{Seconds: 5}},
		{"one millisecond", decide([]decided{{aBucket("a", 9), passed(8, time.Millisecond)}}), &durationpb.Duration{Seconds: 1}},
		{"a full bucket", decide([]decided{{aBucket("a", 9), passed(9, 0)}}), &durationpb.Duration{}},
		{"concurrency admitted", decide([]decided{{lane("a", 9), passed(8, 0)}}), nil},
		{"a refusing bucket tells the wait", decide([]decided{{aBucket("a", 9), failed(0, 9999*time.Millisecond, 90*time.Second)}}), &durationpb.Duration{Seconds: 10}},
		{"a full lane tells the estimate", decide([]decided{{lane("a", 1), failed(0, 0, 0)}}), &durationpb.Duration{Seconds: 4}},
		{"T06: what can never pass tells none", decide([]decided{{costing(aBucket("a", 10), 11), failed(10, 0, 0)}}), nil},
		{
			"what can never pass stands for the descriptor",
			decide([]decided{{hourly("a", 9), failed(0, time.Hour, time.Hour)}, {costing(aBucket("b", 1), 2), failed(1, 0, 0)}}),
			nil,
		},
		{"over quota in an admitted request", overQuota(90*time.Second, hourly("q", 1)), &durationpb.Duration{Seconds: 90}},
		{"over quota for ever in an admitted request", overQuota(0, hourly("q", 0)), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.in.encode(Options{}).GetStatuses()[0].GetDurationUntilReset()
			if diff := cmp.Diff(tt.want, got, protocmp.Transform()); diff != "" {
				t.Errorf("duration_until_reset (-want +got):\n%s", diff)
			}
		})
	}
}

// What Envoy is told of an admitted request.
func TestAnAdmissionTellsItsLeaseShadowsAndBypass(t *testing.T) {
	plain := decide([]decided{{hourly("a", 9), passed(5, time.Minute)}})
	statuses := plain.encode(Options{}).GetStatuses()
	leased := decide([]decided{{lane("pool", 9), passed(5, 0)}})
	leased.d.Lease = leaseText
	shadowed := decide([]decided{
		{hourly("a", 9), passed(5, time.Minute)},
		{shadow(aBucket("s1", 1)), failed(0, time.Second, time.Second)},
		{shadow(lane("s2", 1)), failed(0, 0, 0)},
		{shadow(lane("s3", 1)), passed(0, 0)},
	})
	bypassed := plain
	bypassed.d = limit.Decision{Admitted: true, Bypass: limit.ModeOpen, BypassReason: "timeout", Results: []limit.Result{{Passed: true, Bypass: limit.ModeOpen}}}
	bypassed.judge()

	for _, tt := range []struct {
		name string
		in   decision
		o    Options
		want *rls.RateLimitResponse
	}{
		{
			name: "plain", in: plain,
			want: &rls.RateLimitResponse{
				OverallCode:     rls.RateLimitResponse_OK,
				Statuses:        statuses,
				DynamicMetadata: fields("verdict", "admitted"),
			},
		},
		{
			name: "the header is only for leases", in: plain, o: Options{LeaseHeader: true},
			want: &rls.RateLimitResponse{
				OverallCode:     rls.RateLimitResponse_OK,
				Statuses:        statuses,
				DynamicMetadata: fields("verdict", "admitted"),
			},
		},
		{
			name: "lease", in: leased,
			want: &rls.RateLimitResponse{
				OverallCode:     rls.RateLimitResponse_OK,
				Statuses:        leased.encode(Options{}).GetStatuses(),
				DynamicMetadata: fields("verdict", "admitted", "lease_id", leaseText),
			},
		},
		{
			name: "lease header", in: leased, o: Options{LeaseHeader: true},
			want: &rls.RateLimitResponse{
				OverallCode:         rls.RateLimitResponse_OK,
				Statuses:            leased.encode(Options{}).GetStatuses(),
				RequestHeadersToAdd: headers("x-weir-lease", leaseText),
				DynamicMetadata:     fields("verdict", "admitted", "lease_id", leaseText),
			},
		},
		{
			name: "shadow would refuse", in: shadowed,
			want: &rls.RateLimitResponse{
				OverallCode:     rls.RateLimitResponse_OK,
				Statuses:        statuses,
				DynamicMetadata: fields("verdict", "admitted", "limits", []any{"s2", "s1"}),
			},
		},
		{
			name: "ratelimit headers leave shadow limits out", in: shadowed, o: Options{RateLimitHeaders: true},
			want: &rls.RateLimitResponse{
				OverallCode:          rls.RateLimitResponse_OK,
				Statuses:             statuses,
				ResponseHeadersToAdd: headers("ratelimit", `"a";r=5;t=60`, "ratelimit-policy", `"a";q=9;w=3600`),
				DynamicMetadata:      fields("verdict", "admitted", "limits", []any{"s2", "s1"}),
			},
		},
		{
			name: "bypass", in: bypassed, o: Options{LeaseHeader: true, RateLimitHeaders: true},
			want: &rls.RateLimitResponse{
				OverallCode:     rls.RateLimitResponse_OK,
				Statuses:        []*rls.RateLimitResponse_DescriptorStatus{{Code: rls.RateLimitResponse_OK}},
				DynamicMetadata: fields("verdict", "admitted", "bypass", "open", "bypass_reason", "timeout"),
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, tt.in.encode(tt.o), protocmp.Transform()); diff != "" {
				t.Errorf("Encode (-want +got):\n%s", diff)
			}
		})
	}
}

// What Envoy is told of a refused request: docs/semantics.md, "What a client is told".
func TestARefusalTellsItsReasonWaitAndRemedy(t *testing.T) {
	gone := decide([]decided{{lane("account", 3), passed(3, 0)}})
	gone.d.Admitted, gone.d.StreamEnded = false, true
	gone.judge()
	for _, tt := range []struct {
		name     string
		in       decision
		headers  []*corev3.HeaderValue
		metadata *structpb.Struct
		body     string
	}{
		{
			name:    "an empty bucket, with an exact wait",
			in:      decide([]decided{{aBucket("account", 10), failed(0, 5001*time.Millisecond, 100*time.Second)}}),
			headers: headers("retry-after", "6", "content-type", "application/problem+json"),
			metadata: fields("verdict", "refused", "reject_class", "lane", "reason", "bucket_empty", "limit", "account", "limits", []any{"account"},
				"retry_after_ms", 5001, "estimated", false, "retryable", true),
			body: `{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":429,` +
				`"detail":"The token bucket of limit \"account\" has too few tokens left; retry after 5.001s.",` +
				`"retry_after_ms":5001,"violated-policies":["account"],"retryable":true}`,
		},
		{
			name:    "a full window",
			in:      decide([]decided{{hourly("account", 10), failed(0, 55*time.Minute, 55*time.Minute)}}),
			headers: headers("retry-after", "3300", "content-type", "application/problem+json"),
			metadata: fields("verdict", "refused", "reject_class", "lane", "reason", "window_full", "limit", "account", "limits", []any{"account"},
				"retry_after_ms", 3300000, "estimated", false, "retryable", true),
			body: `{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":429,` +
				`"detail":"The quota of limit \"account\" has too little left in its window; retry after 55m0s.",` +
				`"retry_after_ms":3300000,"violated-policies":["account"],"retryable":true}`,
		},
		{
			name:    "a full lane, with an estimate",
			in:      decide([]decided{{lane("account", 3), failed(0, 0, 0)}}),
			headers: headers("retry-after", "4", "content-type", "application/problem+json"),
			metadata: fields("verdict", "refused", "reject_class", "lane", "reason", "lane_full", "limit", "account", "limits", []any{"account"},
				"retry_after_ms", 4000, "estimated", true, "retryable", true),
			body: `{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":429,` +
				`"detail":"All in-flight slots of limit \"account\" are taken; retry after about 4s, which is an estimate.",` +
				`"retry_after_ms":4000,"violated-policies":["account"],"retryable":true}`,
		},
		{
			name:    "a full pool",
			in:      decide([]decided{{pool("images", 200), failed(0, 0, 0)}}),
			headers: headers("retry-after", "4", "content-type", "application/problem+json"),
			metadata: fields("verdict", "refused", "reject_class", "pool", "reason", "pool_full", "limit", "images", "limits", []any{"images"},
				"retry_after_ms", 4000, "estimated", true, "retryable", true),
			body: `{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","title":"Temporary Reduced Capacity","status":503,` +
				`"detail":"All in-flight slots of limit \"images\", which callers share, are taken; retry after about 4s, which is an estimate.",` +
				`"retry_after_ms":4000,"violated-policies":["images"],"retryable":true}`,
		},
		{
			name:    "T06: a cost that can never pass has no retry-after",
			in:      decide([]decided{{costing(aBucket("account", 10), 11), failed(10, 0, 0)}}, []decided{{lane("b", 1), failed(0, 0, 0)}}),
			headers: headers("content-type", "application/problem+json"),
			metadata: fields("verdict", "refused", "reject_class", "lane", "reason", "cost_exceeds_capacity", "limit", "account", "limits", []any{"account", "b"},
				"estimated", false, "retryable", false),
			body: `{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":429,` +
				`"detail":"The request costs more than limit \"account\" can ever allow; retrying does not help.",` +
				`"violated-policies":["account","b"],"retryable":false}`,
		},
		{
			name:    "a ban",
			in:      decide([]decided{{hourly("nobody", 0), failed(0, 0, time.Hour)}}),
			headers: headers("content-type", "application/problem+json"),
			metadata: fields("verdict", "refused", "reject_class", "lane", "reason", "banned", "limit", "nobody", "limits", []any{"nobody"},
				"estimated", false, "retryable", false),
			body: `{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":429,` +
				`"detail":"Limit \"nobody\" allows no requests; retrying does not help.",` +
				`"violated-policies":["nobody"],"retryable":false}`,
		},
		{
			name:    "a limit that nobody can look up",
			in:      decide([]decided{{lane("account", 3), limit.Result{RetryAfter: time.Second, Bypass: limit.ModeClosed}}}),
			headers: headers("retry-after", "1", "content-type", "application/problem+json"),
			metadata: fields("verdict", "refused", "reject_class", "pool", "reason", "store_unavailable", "limit", "account", "limits", []any{"account"},
				"retry_after_ms", 1000, "estimated", true, "retryable", true),
			body: `{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","title":"Temporary Reduced Capacity","status":503,` +
				`"detail":"Limit \"account\" cannot be looked up at present; retry after about 1s, which is an estimate.",` +
				`"retry_after_ms":1000,"violated-policies":["account"],"retryable":true}`,
		},
		{
			name:     "S14: the end of a stream that is told before it asks",
			in:       gone,
			headers:  headers("content-type", "application/problem+json"),
			metadata: fields("verdict", "refused", "reject_class", "lane", "reason", "stream_ended", "estimated", false, "retryable", false),
			body: `{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":429,` +
				`"detail":"The end of the stream that asks was told before; retrying does not help.",` +
				`"violated-policies":[],"retryable":false}`,
		},
		{
			name: "one name is listed once",
			in: decide(
				[]decided{{aBucket("a", 1), failed(0, time.Millisecond, time.Second)}, {lane("a", 1), failed(0, 0, 0)}},
				[]decided{{lane("b", 1), failed(0, 0, 0)}},
			),
			headers: headers("retry-after", "4", "content-type", "application/problem+json"),
			metadata: fields("verdict", "refused", "reject_class", "lane", "reason", "lane_full", "limit", "a", "limits", []any{"a", "b"},
				"retry_after_ms", 4000, "estimated", true, "retryable", true),
			body: `{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":429,` +
				`"detail":"All in-flight slots of limit \"a\" are taken; retry after about 4s, which is an estimate.",` +
				`"retry_after_ms":4000,"violated-policies":["a","b"],"retryable":true}`,
		},
		{
			name:    "a wait below a second",
			in:      decide([]decided{{aBucket("a", 1), failed(0, time.Millisecond, time.Second)}}),
			headers: headers("retry-after", "1", "content-type", "application/problem+json"),
			metadata: fields("verdict", "refused", "reject_class", "lane", "reason", "bucket_empty", "limit", "a", "limits", []any{"a"},
				"retry_after_ms", 1, "estimated", false, "retryable", true),
			body: `{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":429,` +
				`"detail":"The token bucket of limit \"a\" has too few tokens left; retry after 1ms.",` +
				`"retry_after_ms":1,"violated-policies":["a"],"retryable":true}`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.in.d.Lease = "" // a store sends none
			got := tt.in.encode(Options{LeaseHeader: true})
			if got.GetOverallCode() != rls.RateLimitResponse_OVER_LIMIT {
				t.Errorf("overall_code = %v, want OVER_LIMIT", got.GetOverallCode())
			}
			if diff := cmp.Diff(tt.headers, got.GetResponseHeadersToAdd(), protocmp.Transform()); diff != "" {
				t.Errorf("response_headers_to_add (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.metadata, got.GetDynamicMetadata(), protocmp.Transform()); diff != "" {
				t.Errorf("dynamic_metadata (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.body, string(got.GetRawBody())); diff != "" {
				t.Errorf("raw_body (-want +got):\n%s", diff)
			}
			if got.GetRequestHeadersToAdd() != nil {
				t.Errorf("request_headers_to_add = %v, want none", got.GetRequestHeadersToAdd())
			}
		})
	}
}

// R12: with two limits denying, what Envoy makes its headers of is the longer
// wait, in either order.
func TestOfTwoRefusalsTheLongerWaitIsTold(t *testing.T) {
	h := []decided{{hourly("h", 1), failed(0, 20*time.Minute, 20*time.Minute)}}
	dd := []decided{{daily("dd", 1), failed(0, 7*time.Hour, 7*time.Hour)}}
	for _, in := range []decision{decide(h, dd), decide(dd, h)} {
		r := in.encode(Options{RateLimitHeaders: true})
		if got, want := notation(r), "OVER [OVER 0][OVER 0]"; got != want {
			t.Errorf("Encode = %s, want %s", got, want)
		}
		for i, s := range r.GetStatuses() {
			if got, want := s.GetDurationUntilReset().GetSeconds(), int64(7*60*60); got != want {
				t.Errorf("status %d has duration_until_reset %d, want %d", i, got, want)
			}
		}
		want := headers("retry-after", "25200", "content-type", "application/problem+json",
			"ratelimit", `"dd";r=0;t=25200, "h";r=0;t=25200`, "ratelimit-policy", `"dd";q=1;w=86400, "h";q=1;w=3600`)
		if diff := cmp.Diff(want, r.GetResponseHeadersToAdd(), protocmp.Transform()); diff != "" {
			t.Errorf("response_headers_to_add (-want +got):\n%s", diff)
		}
	}
}

// T29: the answer does not depend on the order of the descriptors, and the
// statuses move with them.
func TestTheOrderOfDescriptorsChangesNothing(t *testing.T) {
	descriptors := [][]decided{
		{{aBucket("bucket", 5), failed(0, 2500*time.Millisecond, 50*time.Second)}, {hourly("bucket", 9), passed(4, time.Hour)}},
		{{daily("day", 5), failed(0, 20*time.Second, 20*time.Second)}},
		{{lane("lane", 5), failed(0, 0, 0)}},
		{{hourly("fine", 5), passed(3, time.Hour)}, {shadow(daily("shadow", 5)), failed(0, time.Hour, time.Hour)}},
		{{lane("another lane", 5), failed(0, 0, 0)}},
		nil,
	}
	want := decide(descriptors...).encode(Options{RateLimitHeaders: true})
	if got, want := want.GetDynamicMetadata(), fields("verdict", "refused", "reject_class", "lane", "reason", "window_full", "limit", "day",
		"limits", []any{"day", "another lane", "lane", "bucket"}, "retry_after_ms", 20000, "estimated", false, "retryable", true); !proto.Equal(got, want) {
		t.Errorf("dynamic_metadata = %v, want %v", got, want)
	}
	if diff := cmp.Diff(headers("retry-after", "20", "content-type", "application/problem+json",
		"ratelimit", `"day";r=0;t=20, "another lane";r=0;t=20, "lane";r=0;t=20, "bucket";r=0;t=20, "fine";r=3;t=3600, "bucket-hour";r=4;t=3600`,
		"ratelimit-policy", `"another lane";q=5;qu="concurrent-requests", "bucket";q=5;w=50, "bucket-hour";q=9;w=3600, "day";q=5;w=86400, "fine";q=5;w=3600, "lane";q=5;qu="concurrent-requests"`,
	), want.GetResponseHeadersToAdd(), protocmp.Transform()); diff != "" {
		t.Errorf("response_headers_to_add (-want +got):\n%s", diff)
	}

	rng := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		order := rng.Perm(len(descriptors))
		permuted := make([][]decided, len(order))
		wantPermuted := proto.CloneOf(want)
		for to, from := range order {
			permuted[to] = descriptors[from]
			wantPermuted.Statuses[to] = want.GetStatuses()[from]
		}
		got := decide(permuted...).encode(Options{RateLimitHeaders: true})
		if diff := cmp.Diff(wantPermuted, got, protocmp.Transform()); diff != "" {
			t.Fatalf("Encode in order %v (-want +got):\n%s", order, diff)
		}
	}
}

// A response is valid on the wire, whatever the names and numbers are.
func TestTheWidestAnswerIsValidAndItsHeadersAreBounded(t *testing.T) {
	var descriptors [][]decided
	for i := range MaxDescriptors {
		descriptors = append(descriptors, []decided{
			{aBucket(fmt.Sprintf("limit %d", i), limit.MaxExact), failed(0, math.MaxInt64, math.MaxInt64)},
			{lane(fmt.Sprintf("limit %d", i), limit.MaxInFlight), failed(0, 0, 0)},
		})
	}
	r := decide(descriptors...).encode(Options{RateLimitHeaders: true})
	b, err := proto.Marshal(r)
	if err != nil {
		t.Fatalf("Marshal = %v", err)
	}
	if err := proto.Unmarshal(b, new(rls.RateLimitResponse)); err != nil {
		t.Fatalf("Unmarshal = %v", err)
	}
	for _, h := range r.GetResponseHeadersToAdd() {
		if len(h.GetValue()) > 8<<10 {
			t.Errorf("%s has %d bytes, want at most 8 KiB", h.GetKey(), len(h.GetValue()))
		}
	}
	if len(r.GetRawBody()) > 8<<10 {
		t.Errorf("raw_body has %d bytes, want at most 8 KiB", len(r.GetRawBody()))
	}
}

func headers(pairs ...string) []*corev3.HeaderValue {
	var list []*corev3.HeaderValue
	for i := 0; i < len(pairs); i += 2 {
		list = append(list, &corev3.HeaderValue{Key: pairs[i], Value: pairs[i+1]})
	}
	return list
}

func fields(pairs ...any) *structpb.Struct {
	m := make(map[string]any)
	for i := 0; i < len(pairs); i += 2 {
		m[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	s, err := structpb.NewStruct(m)
	if err != nil {
		panic(err) // a test's pairs
	}
	return s
}

// What a response costs after it is decided.
func BenchmarkEncode(b *testing.B) {
	admitted := decide(
		[]decided{{aBucket("account", 10), passed(5, time.Minute)}, {lane("account", 3), passed(2, 0)}},
		[]decided{{pool("images", 200), passed(150, 0)}},
	)
	admitted.d.Lease = leaseText
	refused := decide(
		[]decided{{aBucket("account", 10), failed(0, 5*time.Second, time.Minute)}, {lane("account", 3), passed(2, 0)}},
		[]decided{{pool("images", 200), passed(150, 0)}},
	)
	var many [][]decided
	for i := range 1000 {
		c := hourly("a", 5)
		c.Key = fmt.Sprint(i)
		many = append(many, []decided{{c, passed(4, time.Hour)}})
	}
	for _, bb := range []struct {
		name string
		in   decision
		o    Options
	}{
		{"admitted", admitted, Options{}},
		{"admitted with headers", admitted, Options{LeaseHeader: true, RateLimitHeaders: true}},
		{"refused", refused, Options{}},
		{"refused with headers", refused, Options{RateLimitHeaders: true}},
		{"1000 descriptors", decide(many...), Options{}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				bb.in.encode(bb.o)
			}
		})
	}
}
