package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.37.0"
	"go.opentelemetry.io/otel/trace"
)

// traces are where spans go, and what ends that.
type traces struct {
	trace.TracerProvider // nil: nowhere
	end                  func(context.Context) error
}

// newTraces reads OpenTelemetry's standard environment. Nothing is traced unless it names
// an exporter or an endpoint: a service that has nobody to tell should not try.
func newTraces(ctx context.Context, log *slog.Logger) (traces, error) {
	none := traces{end: func(context.Context) error { return nil }}
	kind := os.Getenv("OTEL_TRACES_EXPORTER")
	if kind == "" && cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT")) != "" {
		kind = "otlp"
	}
	if kind == "" || kind == "none" || strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return none, nil
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		log.WarnContext(ctx, "traces are lost", "err", err)
	}))
	exporter, err := autoexport.NewSpanExporter(ctx, autoexport.WithFallbackSpanExporter(func(ctx context.Context) (sdktrace.SpanExporter, error) {
		return autoexport.NewSpanExporter(ctx) // OTLP, as the standard's default is
	}))
	if err != nil {
		return none, fmt.Errorf("OTEL_TRACES_EXPORTER: %w", err)
	}
	is, err := resource.New(ctx,
		resource.WithAttributes(semconv.ServiceName("weir"), semconv.ServiceVersion(version)), resource.WithFromEnv(), resource.WithTelemetrySDK(), resource.WithHost())
	if err != nil {
		log.WarnContext(ctx, "traces say less of this service than they should", "err", err)
	}
	p := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(is)) // OTEL_TRACES_SAMPLER is its own to read
	log.InfoContext(ctx, "traces are exported", "exporter", kind)
	return traces{p, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		return p.Shutdown(ctx)
	}}, nil
}
