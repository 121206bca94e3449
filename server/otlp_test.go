package server_test

import (
	"context"
	"net"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"

	"weir/store/storetest"
)

// collected is a collector of OpenTelemetry.
type collected struct {
	collector.UnimplementedTraceServiceServer
	names chan string // of spans, and of the service
}

func (c collected) Export(_ context.Context, m *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	for _, r := range m.GetResourceSpans() {
		for _, a := range r.GetResource().GetAttributes() {
			if a.GetKey() == "service.name" {
				c.names <- "service " + a.GetValue().GetStringValue()
			}
		}
		for _, s := range r.GetScopeSpans() {
			for _, span := range s.GetSpans() {
				c.names <- span.GetName()
			}
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// OpenTelemetry's own environment is all that it takes, and a stop loses nothing.
func TestTracesAreExported(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := collected{names: make(chan string, 1000)}
	g := grpc.NewServer()
	collector.RegisterTraceServiceServer(g, c)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = g.Serve(l)
	}()
	defer func() {
		g.Stop()
		<-served
	}()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+l.Addr().String())
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
	t.Setenv("OTEL_SERVICE_NAME", "limits")
	r := newReplica(t, outagePolicy)
	r.ready(t)
	if got := ask(t, r.envoy, "d", "[a=x]", 0); got != "OK [OK 999]" {
		t.Errorf("[a=x] = %s", got)
	}
	r.Terminate(t)
	if code := r.Wait(t); code != 0 {
		t.Errorf("it ends with %d", code)
	}
	want := map[string]bool{"service limits": true, "decide": true, "store.decide": true, "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit": true}
	ctx := storetest.Context(t)
	for len(want) > 0 {
		select {
		case name := <-c.names:
			delete(want, name)
		case <-ctx.Done():
			t.Fatalf("the collector has no %v", want)
		}
	}
}
