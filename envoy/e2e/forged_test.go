package e2e

import (
	"context"
	"net/http"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	logpb "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	als "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"weir/store/storetest"
)

// message is a RateLimitRequest; each descriptor is keys and values.
func message(domain string, descriptors ...[]string) *rls.RateLimitRequest {
	m := &rls.RateLimitRequest{Domain: domain}
	for _, d := range descriptors {
		var entries []*ratelimit.RateLimitDescriptor_Entry
		for i := 0; i < len(d); i += 2 {
			entries = append(entries, &ratelimit.RateLimitDescriptor_Entry{Key: d[i], Value: d[i+1]})
		}
		m.Descriptors = append(m.Descriptors, &ratelimit.RateLimitDescriptor{Entries: entries})
	}
	return m
}

// release is a descriptor of one, with further keys and values.
func release(more ...string) []string { return append([]string{"weir.event", "release"}, more...) }

// Nobody's slot is freed by a release that is not its own, whatever it says and
// whoever sends it.
func TestNobodyElsesSlotIsFreed(t *testing.T) {
	t.Parallel()
	s := start(t, onRedis(storetest.StartRedis(t, storetest.AnyRedis(t))))
	conn := s.weir.Dial(t)
	weir := rls.NewRateLimitServiceClient(conn)
	var victims []held
	for range 2 {
		victims = append(victims, s.hold(t, "alice"))
	}
	// The third slot of the lane is somebody's whose lease we know.
	answer, err := weir.ShouldRateLimit(storetest.Context(t), message("inference", []string{"weir.stream_id", "mine"}, []string{"account", "alice"}, []string{"pool", "images"}))
	if err != nil {
		t.Fatal(err)
	}
	mine := answer.GetDynamicMetadata().GetFields()["lease_id"].GetStringValue()
	if mine == "" {
		t.Fatalf("no lease in %v", answer)
	}
	unchanged := func(t *testing.T) {
		t.Helper()
		if got := s.metric(t, heldNow); got != 3 {
			t.Fatalf("%d leases are held, want 3", got)
		}
		s.get(t, "alice", "/ok").wantRefused(t, http.StatusTooManyRequests, "lane")
	}
	unchanged(t)

	victim, long := victims[0].visit.stream, strings.Repeat("x", 100_000)
	for _, c := range []struct {
		name string
		m    *rls.RateLimitRequest
		code codes.Code
		none int // releases that found nothing
	}{
		{"nothing", message("inference", release()), codes.InvalidArgument, 0},
		{"garbage", message("inference", release("weir.lease_id", "\x00;DROP")), codes.InvalidArgument, 0},
		{"100 kB", message("inference", release("weir.lease_id", long)), codes.InvalidArgument, 0},
		{"a part of a lease", message("inference", release("weir.lease_id", mine[:22])), codes.InvalidArgument, 0},
		{"a lease with more behind it", message("inference", release("weir.lease_id", mine+"x")), codes.OK, 1},
		{"a guess", message("inference", release("weir.lease_id", "AAAAAAAAAAAAAAAAAAAAAA.inference")), codes.OK, 1},
		{"another domain's lease", message("inference", release("weir.lease_id", "AAAAAAAAAAAAAAAAAAAAAA.other")), codes.OK, 1},
		{"garbage beside a stream", message("inference", release("weir.lease_id", "x", "weir.stream_id", victim)), codes.InvalidArgument, 0},
		{"a guess beside a stream", message("inference", release("weir.lease_id", "AAAAAAAAAAAAAAAAAAAAAA.inference", "weir.stream_id", victim)), codes.OK, 1},
		{"a stream of 100 kB", message("inference", release("weir.stream_id", long)), codes.InvalidArgument, 0},
		{"a stream beside one of 100 kB", message("inference", release("weir.stream_id", victim), release("weir.stream_id", long)), codes.InvalidArgument, 0},
		{"a stream of another's", message("inference", release("weir.stream_id", victim+"x")), codes.OK, 1},
		{"two streams", message("inference", release("weir.stream_id", victim), release("weir.stream_id", "other")), codes.InvalidArgument, 0},
		{"an outcome of 100 kB", message("inference", release("weir.stream_id", "other", "weir.outcome", long)), codes.OK, 1},
		{"a refusal", message("inference", release("weir.stream_id", "other", "weir.verdict", long)), codes.OK, 0},
		{"an event that is none", message("inference", []string{"weir.event", long, "weir.stream_id", victim}), codes.InvalidArgument, 0},
		{"no release", message("inference", []string{"weir.stream_id", victim, "weir.lease_id", mine}), codes.OK, 0},
		{"no domain", message("", release("weir.stream_id", victim)), codes.InvalidArgument, 0},
		{"a domain of 100 kB", message(long, release("weir.stream_id", victim)), codes.InvalidArgument, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := s.metric(t, notHeld)
			_, err := weir.ShouldRateLimit(storetest.Context(t), c.m)
			if got := grpcstatus.Code(err); got != c.code {
				t.Errorf("%v, want %v", err, c.code)
			}
			if len(grpcstatus.Convert(err).Message()) > 1000 {
				t.Error("the error repeats what was sent")
			}
			unchanged(t)
			if got := s.metric(t, notHeld) - before; got != c.none {
				t.Errorf("%d releases found nothing, want %d", got, c.none)
			}
		})
	}
	for _, domain := range []string{"other", "inference ", "Inference", "weir:{inference}", "inference}"} {
		t.Run("domain "+domain, func(t *testing.T) {
			for _, d := range [][]string{release("weir.stream_id", victim), release("weir.lease_id", mine)} {
				if _, err := weir.ShouldRateLimit(storetest.Context(t), message(domain, d)); err != nil {
					t.Error(err)
				}
			}
			unchanged(t)
		})
	}

	t.Run("access log", func(t *testing.T) {
		entry := func(kind logpb.AccessLogType, stream string, metadata map[string]any) *logpb.HTTPAccessLogEntry {
			fields, err := structpb.NewStruct(metadata)
			if err != nil {
				t.Fatal(err)
			}
			return &logpb.HTTPAccessLogEntry{
				CommonProperties: &logpb.AccessLogCommon{AccessLogType: kind, Metadata: &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"envoy.filters.http.ratelimit": fields}}},
				Request:          &logpb.HTTPRequestProperties{RequestHeaders: map[string]string{"x-weir-stream": stream}},
			}
		}
		const end = logpb.AccessLogType_DownstreamEnd
		harmless := []*logpb.HTTPAccessLogEntry{
			nil,
			{},
			entry(end, long, nil),
			entry(end, "other", nil),
			entry(end, victim, map[string]any{"verdict": "admitted"}),
			entry(end, victim, map[string]any{"verdict": long, "lease_id": long}),
			entry(end, "", map[string]any{"lease_id": long}),
			entry(end, "", map[string]any{"lease_id": map[string]any{"lease_id": mine}}),
			entry(end, "", map[string]any{"lease_id": mine + "x"}),
			entry(end, "", map[string]any{"lease_id": mine[:22] + ".other"}),
			entry(logpb.AccessLogType_DownstreamPeriodic, victim, nil),
			entry(logpb.AccessLogType_DownstreamPeriodic, "", map[string]any{"lease_id": long}),
			entry(logpb.AccessLogType_DownstreamStart, victim, map[string]any{"lease_id": mine}),
			entry(logpb.AccessLogType_NotSet, victim, map[string]any{"lease_id": mine}),
			entry(99, victim, map[string]any{"lease_id": mine}),
		}
		for name, entries := range map[string][]*logpb.HTTPAccessLogEntry{
			"inference":   harmless,
			"other":       append(harmless, entry(end, victim, nil), entry(end, "", map[string]any{"lease_id": mine})),
			"":            append(harmless, entry(end, victim, nil), entry(end, "", map[string]any{"lease_id": mine})),
			long:          append(harmless, entry(end, victim, nil), entry(end, "", map[string]any{"lease_id": mine})),
			"inference\n": append(harmless, entry(end, victim, nil)),
		} {
			ctx, cancel := context.WithCancel(storetest.Context(t))
			stream, err := als.NewAccessLogServiceClient(conn).StreamAccessLogs(ctx)
			if err != nil {
				t.Fatal(err)
			}
			first := &als.StreamAccessLogsMessage{LogEntries: &als.StreamAccessLogsMessage_TcpLogs{TcpLogs: &als.StreamAccessLogsMessage_TCPAccessLogEntries{LogEntry: []*logpb.TCPAccessLogEntry{{}}}}}
			if name != "" {
				first.Identifier = &als.StreamAccessLogsMessage_Identifier{LogName: name}
			}
			for _, m := range []*als.StreamAccessLogsMessage{first, {}, {LogEntries: &als.StreamAccessLogsMessage_HttpLogs{
				HttpLogs: &als.StreamAccessLogsMessage_HTTPAccessLogEntries{LogEntry: entries},
			}}} {
				if err := stream.Send(m); err != nil {
					t.Fatal(err)
				}
			}
			// Its end is read behind its entries.
			if _, err := stream.CloseAndRecv(); err == nil {
				t.Error("an access log was answered")
			}
			cancel()
			unchanged(t)
		}
	})

	t.Run("a client of Envoy", func(t *testing.T) {
		half := strings.Repeat("x", 50_000)
		for _, headers := range [][]string{
			{"x-weir-stream", victim, "x-weir-lease", mine},
			{"X-Weir-Stream", half},
			{"X-Weir-Lease", half},
			{"x-weir-stream", "", "x-weir-lease", ""},
			{"x-weir-stream", victim, "connection", "x-weir-stream"},
			{"weir.lease_id", mine, "x-envoy-original-path", "/" + victim},
		} {
			before := s.metric(t, released)
			s.get(t, "mallory", "/ok", headers...).want(t, http.StatusOK)
			visits := s.upstream.of("mallory")
			if got := visits[len(visits)-1].stream; got == "" || got == victim || got == half {
				t.Errorf("x-weir-stream %q at the upstream, want one of Envoy's own", got)
			}
			s.eventually(t, released, before+1)
			unchanged(t)
		}
		s.get(t, "mallory", "/ok", "x-weir-stream", half+half).want(t, http.StatusRequestHeaderFieldsTooLarge)
		unchanged(t)
	})

	// What is its own is released, once.
	before := s.metric(t, released)
	for i, none := range []int{0, 1, 1} {
		was := s.metric(t, notHeld)
		if _, err := weir.ShouldRateLimit(storetest.Context(t), message("inference", release("weir.lease_id", mine, "weir.stream_id", "mine"))); err != nil {
			t.Fatal(err)
		}
		if r, n := s.metric(t, released)-before, s.metric(t, notHeld)-was; r != 1 || n != none {
			t.Errorf("release %d: %d released in all and %d in vain, want 1 and %d", i, r, n, none)
		}
		if i == 0 {
			victims = append(victims, s.hold(t, "alice"))
		}
		unchanged(t)
	}
	for _, v := range victims {
		v.end(t, s)
	}
	s.eventually(t, heldNow, 0)
}
