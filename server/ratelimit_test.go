package server_test

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weir/envoy"
	"weir/store/storetest"
)

// hourPolicy is that of cases R05, R06 and R19, with a lane for C13.
const hourPolicy = `
domain: d
descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 5}}
  - {key: user, concurrency: {max_in_flight: 1, lease: 30s}}
`

// script sends requests one after the other: pairs of what is asked and answered.
func script(t *testing.T, s *service, steps ...string) {
	t.Helper()
	for step := range slices.Chunk(steps, 2) {
		if got := ask(t, s.envoy, "d", step[0], 0); got != step[1] {
			t.Errorf("%s = %s, want %s", step[0], got, step[1])
		}
	}
}

// R01: a refused request consumes nothing.
func TestARequestTakesAllOrNothing(t *testing.T) {
	s := serve(t, `
domain: d
descriptors:
  - {key: group, value: bar, rate_limit: {unit: hour, requests_per_unit: 10}}
  - {key: special, value: bar, rate_limit: {unit: hour, requests_per_unit: 3}}
`)
	const both = "[group=bar][special=bar]"
	script(t, s,
		both, "OK [OK 9][OK 2]", both, "OK [OK 8][OK 1]", both, "OK [OK 7][OK 0]",
		both, "OVER [OK 7][OVER 0]", both, "OVER [OK 7][OVER 0]", both, "OVER [OK 7][OVER 0]",
		"[group=bar]", "OK [OK 6]")
}

// R05: a unit that is none.
func TestAnOverrideWithoutAUnitIsInvalid(t *testing.T) {
	s := serve(t, hourPolicy)
	script(t, s,
		"[a=1;limit=3/UNKNOWN]", "InvalidArgument",
		"[a=1;limit=3/99]", "InvalidArgument",
		"[a=1;limit=3/-1]", "InvalidArgument",
		"[a=1][a=2;limit=3/UNKNOWN]", "InvalidArgument",
		"[a=1]", "OK [OK 4]",
		"[a=1;limit=3/DAY]", "OK [OK 2]")
}

// R06: hits near 2^64, and just where Lua's numbers end.
func TestHugeHitsAreRefusedAndChargeNothing(t *testing.T) {
	s := serve(t, hourPolicy)
	script(t, s,
		"[a=1]", "OK [OK 4]", "[a=1]", "OK [OK 3]", "[a=1]", "OK [OK 2]", "[a=1]", "OK [OK 1]", "[a=1]", "OK [OK 0]", "[a=1]", "OVER [OVER 0]",
		"[a=1;hits=18446744073709551611]", "OVER [OVER 0]",
		"[a=1]", "OVER [OVER 0]",
		"[a=2;hits=9223372036854775807]", "OVER [OVER 0]",
		"[a=2;hits=9223372036854775807]", "OVER [OVER 0]",
		"[a=2;hits=9007199254740993]", "OVER [OVER 0]",
		"[a=2;hits=9007199254740993][a=2;hits=18446744073709551615]", "OVER [OVER 0][OVER 0]",
		"[a=2]", "OK [OK 4]")
}

// R19: a wide request is answered, a wider one refused before anything is charged.
func TestAWideRequestIsAnsweredWhole(t *testing.T) {
	s := serve(t, hourPolicy)
	wide := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "[a=%d]", i)
		}
		return b.String()
	}
	script(t, s,
		wide(1000), "OK "+strings.Repeat("[OK 4]", 1000),
		wide(5000), "InvalidArgument",
		"[a=0]", "OK [OK 3]", "[a=4999]", "OK [OK 4]",
		wide(envoy.MaxDescriptors), "OK [OK 2]"+strings.Repeat("[OK 3]", 999)+strings.Repeat("[OK 4]", envoy.MaxDescriptors-1000))
}

// C13: negative hits free no slot, since it could be anybody's; a release by the
// lease's id does.
func TestOnlyAReleaseFreesASlot(t *testing.T) {
	s := serve(t, hourPolicy)
	r, err := s.envoy.ShouldRateLimit(storetest.Context(t), &rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(t, "[user=u;hits=1]")})
	if err != nil {
		t.Fatal(err)
	}
	lease := r.GetDynamicMetadata().GetFields()["lease_id"].GetStringValue()
	if !strings.HasSuffix(lease, ".d") {
		t.Fatalf("lease_id is %q", lease)
	}
	const misuse = `weir_misuse_total{domain="d",reason="negative_hits_on_concurrency"}`
	held := func() float64 { return s.metric(t, `weir_leases_held{domain="d"}`) }
	script(t, s, "[user=u;hits=1;neg]", "OK [OK 0]", "[user=u]", "OVER [OVER 0]")
	if got, held := s.metric(t, misuse), held(); got != 1 || held != 1 {
		t.Errorf("%s is %v, want 1; %v leases are held, want 1", misuse, got, held)
	}
	script(t, s,
		"[weir.event=release,weir.lease_id="+lease+",weir.outcome=ok]", "OK [OK nil]",
		"[weir.event=release,weir.lease_id="+lease+"]", "OK [OK nil]", // again: nothing
		"[user=u]", "OK [OK 0]")
	if got := s.metric(t, `weir_leases_released_total{domain="d",result="RELEASED"}`); got != 1 {
		t.Errorf("%v leases were released, want 1", got)
	}
	if got := s.metric(t, `weir_leases_released_total{domain="d",result="NOT_HELD"}`); got != 1 {
		t.Errorf("%v releases found nothing, want 1", got)
	}
}

// A release and a request in one message: the slot is free for the request.
func TestAMessageReleasesBeforeItAsks(t *testing.T) {
	s := serve(t, hourPolicy)
	lease := acquire(t, s.leases, typed("user", "u")).GetLease().GetId()
	script(t, s, "[user=u]", "OVER [OVER 0]", "[user=u][weir.event=release,weir.lease_id="+lease+"]", "OK [OK 0][OK nil]")
}

// C13, S14: as Envoy's release filter tells it, in any order and any number of times.
func TestTheEndOfAStreamReleasesWhatItHolds(t *testing.T) {
	s := serve(t, hourPolicy)
	const release = "[weir.event=release,weir.stream_id="
	script(t, s,
		"[weir.stream_id=s1][user=u]", "OK [OK nil][OK 0]",
		"[weir.stream_id=s2][user=u]", "OVER [OK nil][OVER 0]",
		release+"s1,weir.outcome=via_upstream]", "OK [OK nil]",
		release+"s1,weir.outcome=via_upstream]", "OK [OK nil]",
		"[weir.stream_id=s3][user=u]", "OK [OK nil][OK 0]",
		release+"s1]", "OK [OK nil]",
		"[user=u]", "OVER [OVER 0]", // s3 has its slot still
		release+"s3]", "OK [OK nil]",

		// The end overtakes the request, whose client has gone: it takes nothing.
		release+"s4]", "OK [OK nil]",
		"[weir.stream_id=s4][user=u][a=1]", "OVER [OK nil][OK 1][OK 5]",
		"[a=1;hits=0]", "OK [OK 5]",
		// The end of a request that we refused, or answered without a lease, does not.
		release+"s5,weir.outcome=request_rate_limited]", "OK [OK nil]",
		release+"s5,weir.verdict=admitted]", "OK [OK nil]",
		"[weir.stream_id=s5][user=u]", "OK [OK nil][OK 0]",
	)
	for result, want := range map[string]float64{"RELEASED": 2, "NOT_HELD": 4} {
		if got := s.metric(t, `weir_leases_released_total{domain="d",result="`+result+`"}`); got != want {
			t.Errorf("%v releases were %s, want %v", got, result, want)
		}
	}
}

// Usage is charged at the end of a stream, once, whatever is left, and never takes a
// slot; then the gate is closed.
func TestUsageIsChargedOnceAStream(t *testing.T) {
	s := serve(t, hourPolicy)
	const usage = "[weir.event=usage,weir.stream_id="
	script(t, s,
		usage+"s1,a=1;hits=7]", "OK [OK nil]",
		usage+"s1,a=1;hits=7]", "OK [OK nil]", // Envoy tried again
		"[a=1;hits=0]", "OVER [OVER 0]",
		usage+"s2,a=1;hits=3;neg]", "OK [OK nil]",
		"[a=1]", "OK [OK 0]",
		usage+"s3,user=u;hits=1]", "OK [OK nil]",
		usage+"s3,nobody=x;hits=1]", "OK [OK nil]",
		"[weir.stream_id=s4][user=u]", "OK [OK nil][OK 0]",
		usage+"s4,a=2;hits=5][weir.event=release,weir.stream_id=s4]", "OK [OK nil][OK nil]",
		"[a=2]", "OVER [OVER 0]",
		"[user=u]", "OK [OK 0]",
	)
	for result, want := range map[string]float64{"charged": 3, "already_settled": 1} {
		if got := s.metric(t, `weir_usage_total{domain="d",limit="a",result="`+result+`"}`); got != want {
			t.Errorf("%v charges were %s, want %v", got, result, want)
		}
	}
}

// S14: a lease is released in its own domain only.
func TestAReleaseOfAnotherDomainsLeaseIsNotHeld(t *testing.T) {
	s := serve(t, hourPolicy)
	lease := acquire(t, s.leases, typed("user", "u")).GetLease().GetId()
	if got, want := ask(t, s.envoy, "other", "[weir.event=release,weir.lease_id="+lease+"]", 0), "OK [OK nil]"; got != want {
		t.Errorf("release in another domain = %s, want %s", got, want)
	}
	script(t, s, "[user=u]", "OVER [OVER 0]")
}

func TestWhatCannotBeReleasedIsAnError(t *testing.T) {
	s := serve(t, hourPolicy)
	script(t, s,
		"[a=1][weir.event=release,weir.lease_id=nonsense]", "InvalidArgument",
		"[a=1][weir.event=release]", "InvalidArgument",
		"[a=1][weir.event=release,weir.stream_id="+strings.Repeat("s", 257)+"]", "InvalidArgument",
		"[a=1][weir.event=usage,a=1;hits=1]", "InvalidArgument", // of no stream
		"[a=1][weir.event=usage,weir.stream_id=s,a=1]", "InvalidArgument", // without hits
		"[weir.stream_id=s][weir.stream_id=t]", "InvalidArgument",
		"[a=1][weir.event=nonsense]", "InvalidArgument",
		"[a=1][weir.event=release,weir.event=release]", "InvalidArgument",
		"[a=1]", "OK [OK 4]") // nothing was charged by the others
}

// S9: refunds, and what a descriptor's own hits mean.
func TestADescriptorsHitsComeBeforeTheRequests(t *testing.T) {
	s := serve(t, hourPolicy)
	for _, test := range []struct {
		ask  string
		hits uint32
		want string
	}{
		{"[a=1]", 3, "OK [OK 2]"},
		{"[a=1;hits=0]", 3, "OK [OK 2]"},
		{"[a=1;hits=1]", 3, "OK [OK 1]"},
		{"[a=1;hits=2;neg]", 3, "OK [OK 3]"},
		{"[a=1;hits=18446744073709551615;neg]", 0, "OK [OK 5]"},
		{"[a=1;neg]", 0, "OK [OK 5]"},
		{"[a=1;hits=1][a=1;hits=2]", 0, "OK [OK 2][OK 2]"},
		{"[a=1]", math.MaxUint32, "OVER [OVER 0]"},
		{"[a=1;hits=0]", 0, "OK [OK 2]"},
	} {
		if got := ask(t, s.envoy, "d", test.ask, test.hits); got != test.want {
			t.Errorf("%s with hits %d = %s, want %s", test.ask, test.hits, got, test.want)
		}
	}
}

func TestOddTextsGetARightAnswer(t *testing.T) {
	s := serve(t, hourPolicy)
	long := strings.Repeat("x", 100_000)
	for _, value := range []string{"", long, long + "y", "\x00", "a\x00b", "{}", "weir:{d}", ",=:#%", "\u202e", "%00", "💥"} {
		for _, want := range []string{"OK [OK 4]", "OK [OK 3]"} {
			r, err := s.envoy.ShouldRateLimit(storetest.Context(t), &rls.RateLimitRequest{
				Domain: "d", Descriptors: []*ratelimit.RateLimitDescriptor{{Entries: []*ratelimit.RateLimitDescriptor_Entry{{Key: "a", Value: value}}}},
			})
			if err != nil {
				t.Fatalf("a=%.20q: %v", value, err)
			}
			if got := answerText(r); got != want {
				t.Errorf("a=%.20q (%d bytes) = %s, want %s", value, len(value), got, want)
			}
		}
	}
	for _, domain := range []string{"\x00", "unknown", "d\x00", "D", " d", "{d}", "d:"} {
		if got, want := ask(t, s.envoy, domain, "[a=1]", 0), "OK [OK nil]"; got != want {
			t.Errorf("in domain %q [a=1] = %s, want %s", domain, got, want)
		}
	}
	script(t, s, "[a=1]", "OK [OK 4]", "[a\x00=1]", "OK [OK nil]", "[A=1]", "OK [OK nil]", "[=1]", "InvalidArgument")
	if got, want := ask(t, s.envoy, "", "[a=1]", 0), "InvalidArgument"; got != want {
		t.Errorf("without a domain: %s, want %s", got, want)
	}
}

// raw is a codec for bytes that are sent and received as they are.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error) {
	b, ok := v.(*[]byte)
	if !ok {
		return nil, fmt.Errorf("raw: %T is no *[]byte", v)
	}
	return *b, nil
}

func (raw) Unmarshal(data []byte, v any) error {
	b, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("raw: %T is no *[]byte", v)
	}
	*b = slices.Clone(data)
	return nil
}

func (raw) Name() string { return "proto" }

const shouldRateLimit = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"

// send sends bytes as a message of the method.
func send(ctx context.Context, conn *grpc.ClientConn, method string, message []byte) (*rls.RateLimitResponse, error) {
	var answer []byte
	if err := conn.Invoke(ctx, method, &message, &answer, grpc.ForceCodec(raw{})); err != nil {
		return nil, err
	}
	r := &rls.RateLimitResponse{}
	return r, proto.Unmarshal(answer, r)
}

func TestAMessageThatIsTooLargeIsRefusedAsSuch(t *testing.T) {
	s := serve(t, hourPolicy)
	_, err := send(storetest.Context(t), s.conn, shouldRateLimit, make([]byte, 5<<20))
	if got := status.Code(err); got != codes.ResourceExhausted {
		t.Errorf("5 MiB: %v, want RESOURCE_EXHAUSTED", err)
	}
}

// What a refused caller is told, over the wire.
func TestARefusalTellsWhyAndHowLong(t *testing.T) {
	s := serve(t, hourPolicy)
	s.clock.Advance(30 * time.Minute)
	for range 5 {
		ask(t, s.envoy, "d", "[a=1]", 0)
	}
	r, err := s.envoy.ShouldRateLimit(storetest.Context(t), &rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(t, "[a=1]")})
	if err != nil {
		t.Fatal(err)
	}
	fields := r.GetDynamicMetadata().AsMap()
	for key, want := range map[string]any{
		"verdict": "refused", "reject_class": "lane", "reason": "window_full", "limit": "a", "retry_after_ms": 1_800_000.0, "estimated": false, "retryable": true,
	} {
		if fields[key] != want {
			t.Errorf("metadata %s is %v, want %v", key, fields[key], want)
		}
	}
	headers := make(map[string]string)
	for _, h := range r.GetResponseHeadersToAdd() {
		headers[h.GetKey()] = h.GetValue()
	}
	if headers["retry-after"] != "1800" || headers["content-type"] != "application/problem+json" {
		t.Errorf("headers are %v, want retry-after 1800 and a problem", headers)
	}
	if !strings.Contains(string(r.GetRawBody()), `"retry_after_ms":1800000`) {
		t.Errorf("the body is %s", r.GetRawBody())
	}
}
