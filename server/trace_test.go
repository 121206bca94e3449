package server_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/metadata"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"weir/server"
	"weir/store/memory"
	"weir/store/storetest"
)

// attributes are those of a span, by name.
func attributes(s sdktrace.ReadOnlySpan) map[string]string {
	all := make(map[string]string)
	for _, a := range s.Attributes() {
		all[string(a.Key)] = a.Value.String()
	}
	return all
}

// A decision is a span below that of its RPC, which is below the caller's, and has the
// calls of the store below it. None has a value of a request.
func TestADecisionIsASpan(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	clock := storetest.NewClock()
	s := serviceWith(t, memory.New(memory.Options{Now: clock.Now}), clock, func(o *server.Options) {
		o.Traces = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	})
	s.setPolicy(t, lanePolicy)
	const trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	ask := func() {
		t.Helper()
		ctx := metadata.AppendToOutgoingContext(storetest.Context(t), "traceparent", "00-"+trace+"-"+parent+"-01")
		if _, err := s.envoy.ShouldRateLimit(ctx, &rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(t, "[account=secret-4711]")}); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 { // the third is refused: the lane is full
		ask()
	}
	rpc := "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
	storetest.Eventually(t, "three RPCs have ended", func() bool {
		return len(spansOf(spans.Ended(), rpc)) == 3
	})
	ended := spans.Ended()
	decides := spansOf(ended, "decide")
	if len(decides) != 3 {
		t.Fatalf("%d spans of decisions, want 3", len(decides))
	}
	last := decides[2]
	want := map[string]string{
		"weir.domain": "d", "weir.limits": `["account","account"]`, "weir.verdict": "refused", "weir.reject_class": "lane",
		"weir.reason": "lane_full", "weir.limit": "account", "weir.retry_after_ms": "1000",
	}
	if got := attributes(last); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("the span of a refusal has %v, want %v", got, want)
	}
	if got := attributes(decides[0])["weir.verdict"]; got != "admitted" {
		t.Errorf("the span of an admission says %q", got)
	}
	for _, d := range decides {
		over := slices.IndexFunc(ended, func(s sdktrace.ReadOnlySpan) bool { return s.SpanContext().SpanID() == d.Parent().SpanID() })
		if d.SpanContext().TraceID().String() != trace || over < 0 || ended[over].Name() != rpc || ended[over].Parent().SpanID().String() != parent {
			t.Errorf("the decision's span is not below the RPC's, and that below the caller's")
		}
	}
	below := 0
	for _, c := range spansOf(ended, "store.decide") {
		if c.Parent().SpanID() == last.SpanContext().SpanID() {
			below++
		}
	}
	if below == 0 {
		t.Error("the decision's span has no call of the store below it")
	}
	for _, s := range ended {
		for _, a := range s.Attributes() {
			if strings.Contains(a.Value.String(), "4711") {
				t.Errorf("the span %s has a request's value: %s", s.Name(), a.Key)
			}
		}
	}
	// The durations of a sampled trace name it.
	if !strings.Contains(s.openMetrics(t), `trace_id="`+trace+`"`) {
		t.Error("no exemplar names the trace")
	}
}

func spansOf(spans []sdktrace.ReadOnlySpan, name string) (some []sdktrace.ReadOnlySpan) {
	for _, s := range spans {
		if s.Name() == name {
			some = append(some, s)
		}
	}
	return some
}

// What the store's failure was is in its span.
func TestAFailedCallOfTheStoreIsASpan(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	clock := storetest.NewClock()
	st := &missing{Store: memory.New(memory.Options{Now: clock.Now})}
	s := serviceWith(t, st, clock, func(o *server.Options) {
		o.Traces = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	})
	s.setPolicy(t, lanePolicy)
	st.away.Store(true)
	ask(t, s.envoy, "d", "[account=x]", 0)
	calls := spansOf(spans.Ended(), "store.decide")
	if len(calls) != 1 || attributes(calls[0])["weir.store.error"] != "store_unavailable" {
		t.Errorf("the call's spans are %v, want one with store_unavailable", calls)
	}
	decides := spansOf(spans.Ended(), "decide")
	if got := attributes(decides[0]); got["weir.bypass"] != "open" || got["weir.bypass_reason"] != "store_unavailable" {
		t.Errorf("the decision's span has %v, want a bypass", got)
	}
}
