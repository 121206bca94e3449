package server_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	logpb "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	als "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"weir/envoy"
	"weir/limit"
	"weir/store/memory"
	"weir/store/storetest"
)

const logPolicy = `
domain: d
descriptors:
  - {key: lane, concurrency: {max_in_flight: 1, lease: 30s}}
  - {key: gpu, concurrency: {max_in_flight: 1, lease: 30s, linger: 10s}}
`

// logStream is the access log of an Envoy.
type logStream struct {
	t      *testing.T
	stream als.AccessLogService_StreamAccessLogsClient
	cut    context.CancelFunc
	first  *als.StreamAccessLogsMessage_Identifier
}

func logOf(t *testing.T, s *service, domain string) *logStream {
	t.Helper()
	ctx, cut := context.WithCancel(storetest.Context(t))
	stream, err := als.NewAccessLogServiceClient(s.conn).StreamAccessLogs(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return &logStream{t, stream, cut, &als.StreamAccessLogsMessage_Identifier{LogName: domain, Node: &corev3.Node{Id: "envoy-1"}}}
}

// entry is one of the log, with metadata and the stream's header where they are given.
func entry(kind logpb.AccessLogType, details, stream string, metadata map[string]any) *logpb.HTTPAccessLogEntry {
	e := &logpb.HTTPAccessLogEntry{
		CommonProperties: &logpb.AccessLogCommon{AccessLogType: kind},
		Request:          &logpb.HTTPRequestProperties{},
		Response:         &logpb.HTTPResponseProperties{ResponseCodeDetails: details},
	}
	if stream != "" {
		e.Request.RequestHeaders = map[string]string{"x-weir-stream": stream}
	}
	if metadata != nil {
		fields, err := structpb.NewStruct(metadata)
		if err != nil {
			panic(err)
		}
		e.CommonProperties.Metadata = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"envoy.filters.http.ratelimit": fields}}
	}
	return e
}

func (l *logStream) send(entries ...*logpb.HTTPAccessLogEntry) {
	l.t.Helper()
	err := l.stream.Send(&als.StreamAccessLogsMessage{Identifier: l.first, LogEntries: &als.StreamAccessLogsMessage_HttpLogs{
		HttpLogs: &als.StreamAccessLogsMessage_HTTPAccessLogEntries{LogEntry: entries},
	}})
	if err != nil {
		l.t.Fatal(err)
	}
	l.first = nil // it is in the first message only
}

func TestAnAccessLogReleasesWhatEndedAndRenewsWhatGoesOn(t *testing.T) {
	const end, periodic, start = logpb.AccessLogType_DownstreamEnd, logpb.AccessLogType_DownstreamPeriodic, logpb.AccessLogType_DownstreamStart
	s := serve(t, logPolicy)
	l := logOf(t, s, "d")
	entries := func(kind string) float64 {
		return s.metric(t, `weir_access_log_entries_total{domain="d",kind="`+kind+`"}`)
	}
	held := func() float64 { return s.metric(t, `weir_leases_held{domain="d"}`) }

	// Its heartbeats keep the lease of a stream that outlives it.
	id := acquire(t, s.leases, typed("lane", "a")).GetLease().GetId()
	lease := map[string]any{"verdict": "admitted", "lease_id": id}
	for i := range 5 {
		s.clock.Advance(20 * time.Second)
		l.send(entry(periodic, "", "", lease), entry(start, "", "", nil))
		storetest.Eventually(t, "the entries are read", func() bool { return entries("renewal") == float64(i+1) && entries("ignored") == float64(i+1) })
	}
	if held() != 1 {
		t.Error("after 100 s of heartbeats the lease of 30 s is gone")
	}
	l.send(entry(end, "via_upstream", "", lease), entry(end, "via_upstream", "", lease))
	storetest.Eventually(t, "the end is read", func() bool { return entries("end") == 2 })
	if held() != 0 {
		t.Error("the end of the stream did not release it")
	}

	// By the stream, if Envoy did not get our answer; and only if it did not.
	script(t, s, "[weir.stream_id=s1][lane=a]", "OK [OK nil][OK 0]")
	l.send(entry(end, "via_upstream", "s1", map[string]any{"verdict": "admitted"}), entry(end, "via_upstream", "", nil))
	storetest.Eventually(t, "the entries are read", func() bool { return entries("ignored") == 7 })
	if held() != 1 {
		t.Error("an entry with an answer and no lease released something")
	}
	l.send(entry(end, "via_upstream", "s1", nil), entry(end, "via_upstream", "s2", nil))
	storetest.Eventually(t, "the end is read", func() bool { return entries("end") == 4 })
	// It leaves no tombstone: an entry may come long after its stream.
	script(t, s, "[weir.stream_id=s2][lane=a]", "OK [OK nil][OK 0]")

	// The client left, and the work goes on.
	script(t, s, "[weir.stream_id=s3][gpu=a]", "OK [OK nil][OK 0]")
	l.send(entry(end, "downstream_remote_disconnect", "s3", nil))
	storetest.Eventually(t, "the end is read", func() bool { return entries("end") == 5 })
	script(t, s, "[gpu=a]", "OVER [OVER 0]")
	s.clock.Advance(10 * time.Second)
	script(t, s, "[gpu=a]", "OK [OK 0]")

	if err := l.stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.stream.CloseAndRecv(); err == nil {
		t.Error("an access log was answered")
	}
	if got := s.metric(t, "weir_access_logs_broken_total"); got != 0 {
		t.Errorf("%v access logs are broken, want 0", got)
	}
}

func TestAnAccessLogCannotEndAnotherDomainsLease(t *testing.T) {
	s := serve(t, logPolicy)
	id := acquire(t, s.leases, typed("lane", "a")).GetLease().GetId()
	l := logOf(t, s, "other")
	for _, metadata := range []map[string]any{{"lease_id": id}, {"lease_id": "nonsense"}, {"lease_id": 7}, {}} {
		l.send(entry(logpb.AccessLogType_DownstreamEnd, "", "", metadata), entry(logpb.AccessLogType_DownstreamPeriodic, "", "", metadata))
	}
	storetest.Eventually(t, "the entries are read", func() bool {
		return s.metric(t, `weir_access_log_entries_total{domain="unknown",kind="ignored"}`) == 8
	})
	if got := s.metric(t, `weir_leases_held{domain="d"}`); got != 1 {
		t.Errorf("%v leases are held, want 1", got)
	}
}

func TestAnAccessLogThatEndsWithoutAWordIsCounted(t *testing.T) {
	s := serve(t, logPolicy)
	l := logOf(t, s, "d")
	l.send(entry(logpb.AccessLogType_DownstreamEnd, "", "", nil))
	storetest.Eventually(t, "the entry is read", func() bool { return s.metric(t, `weir_access_log_entries_total{domain="d",kind="ignored"}`) == 1 })
	l.cut()
	storetest.Eventually(t, "it is counted", func() bool { return s.metric(t, "weir_access_logs_broken_total") == 1 })
}

func TestAnAccessLogThatIsNoneEndsWithAnErrorAndIsCounted(t *testing.T) {
	s := serve(t, logPolicy)
	stream, err := s.conn.NewStream(storetest.Context(t), &grpc.StreamDesc{ClientStreams: true}, als.AccessLogService_StreamAccessLogs_FullMethodName, grpc.ForceCodec(raw{}))
	if err != nil {
		t.Fatal(err)
	}
	garbage := []byte("\xff\xff")
	if err := stream.SendMsg(&garbage); err != nil {
		t.Fatal(err)
	}
	if got := status.Code(stream.RecvMsg(&garbage)); got != codes.InvalidArgument {
		t.Errorf("the log ended with %v, want INVALID_ARGUMENT", got)
	}
	if got := s.metric(t, "weir_access_logs_broken_total"); got != 1 {
		t.Errorf("%v access logs are broken, want 1", got)
	}
}

// An entry that takes the store long holds up no sign of life behind it: with a store some
// milliseconds away, leases would expire while the log waits.
func TestASlowReleaseHoldsUpNoRenewal(t *testing.T) {
	clock := storetest.NewClock()
	stop := make(chan struct{})
	var under atomic.Int32
	s := serviceOn(t, &hooked{Store: memory.New(memory.Options{Now: clock.Now}), releasing: func(limit.Ending) {
		if n := under.Add(1); n > 32 {
			t.Errorf("%d entries are at the store at once, want 32 at most", n)
		}
		<-stop
		under.Add(-1)
	}}, clock, envoy.Options{})
	s.setPolicy(t, logPolicy)
	id := acquire(t, s.leases, typed("lane", "a")).GetLease().GetId()
	l := logOf(t, s, "d")
	for range 20 {
		l.send(entry(logpb.AccessLogType_DownstreamEnd, "via_upstream", "other", nil))
	}
	l.send(entry(logpb.AccessLogType_DownstreamPeriodic, "", "", map[string]any{"lease_id": id}))
	storetest.Eventually(t, "the lease is renewed", func() bool {
		return s.metric(t, `weir_access_log_entries_total{domain="d",kind="renewal"}`) == 1
	})
	for range 100 { // and they are bounded
		l.send(entry(logpb.AccessLogType_DownstreamEnd, "via_upstream", "other", nil))
	}
	storetest.Eventually(t, "as many as may are under way", func() bool { return under.Load() == 32 })
	close(stop)
	storetest.Eventually(t, "all are read", func() bool {
		return s.metric(t, `weir_access_log_entries_total{domain="d",kind="end"}`) == 120
	})
}

// A sign of life that is read behind the stream's end, as when the log is late, does not
// make its slots linger longer.
func TestALateSignOfLifeDoesNotExtendALinger(t *testing.T) {
	s := serve(t, logPolicy)
	answer, err := s.envoy.ShouldRateLimit(t.Context(), &rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(t, "[weir.stream_id=s1][gpu=a]")})
	if err != nil {
		t.Fatal(err)
	}
	id := answer.GetDynamicMetadata().GetFields()["lease_id"].GetStringValue()
	script(t, s, "[weir.event=release,weir.lease_id="+id+",weir.outcome=downstream_remote_disconnect]", "OK [OK nil]")
	l := logOf(t, s, "d")
	l.send(entry(logpb.AccessLogType_DownstreamPeriodic, "", "", map[string]any{"lease_id": id}))
	storetest.Eventually(t, "it is read", func() bool { return s.metric(t, `weir_access_log_entries_total{domain="d",kind="renewal"}`) == 1 })
	s.clock.Advance(10 * time.Second) // the linger
	script(t, s, "[gpu=a]", "OK [OK 0]")
}
