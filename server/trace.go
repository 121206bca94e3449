package server

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"weir/limit"
)

// tracer makes spans, if somebody wants them. Nothing of a request's values is in one.
type tracer struct{ trace.Tracer } // nil: nobody does

func newTracer(p trace.TracerProvider) tracer {
	if p == nil {
		return tracer{}
	}
	return tracer{p.Tracer("weir")}
}

// start begins a span; end it. Without a tracer that is of no effect and costs nothing.
func (t tracer) start(ctx context.Context, name string, attributes ...attribute.KeyValue) (context.Context, trace.Span) {
	if t.Tracer == nil {
		return ctx, noSpan
	}
	return t.Start(ctx, name, trace.WithAttributes(attributes...))
}

// startCall begins the span of a call of the store.
func (t tracer) startCall(ctx context.Context, op string) trace.Span {
	if t.Tracer == nil {
		return noSpan
	}
	_, span := t.start(ctx, "store."+op)
	return span
}

var noSpan = trace.SpanFromContext(context.Background())

// endCall ends the span of a call of the store.
func endCall(span trace.Span, err error) {
	if err != nil && span.IsRecording() {
		span.SetAttributes(attribute.String("weir.store.error", reason(err)))
		span.SetStatus(codes.Error, reason(err))
	}
	span.End()
}

// tracedLimits is how many limits a span names.
const tracedLimits = 32

// tellSpan says in a span what was decided. The domain is one of metrics.
func tellSpan(span trace.Span, domain string, checks []limit.Check, d limit.Decision, v limit.Verdict) {
	if !span.IsRecording() {
		return
	}
	var names []string
	for _, c := range checks[:min(len(checks), tracedLimits)] {
		names = append(names, c.Name)
	}
	span.SetAttributes(
		attribute.String("weir.domain", domain),
		attribute.StringSlice("weir.limits", names),
		attribute.String("weir.verdict", verdict(d)),
	)
	if !v.Admitted {
		span.SetAttributes(
			attribute.String("weir.reject_class", v.Class.String()), attribute.String("weir.reason", string(v.Reason)),
			attribute.String("weir.limit", v.Limit), attribute.Int64("weir.retry_after_ms", v.RetryAfter.Milliseconds()),
		)
	}
	if d.Bypass != limit.DefaultMode {
		span.SetAttributes(attribute.String("weir.bypass", d.Bypass.String()), attribute.String("weir.bypass_reason", d.BypassReason))
	}
	if d.Replayed {
		span.SetAttributes(attribute.Bool("weir.replayed", true))
	}
}
