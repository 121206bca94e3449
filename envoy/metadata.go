package envoy

import (
	"google.golang.org/protobuf/types/known/structpb"

	"weir/limit"
)

// metadata is what Envoy's access log, mappers and later filters can read under
// envoy.filters.http.ratelimit. Keys without a value are absent. All lie at the
// top, and limits is a list of strings, as metadata matchers want it.
func metadata(d limit.Decision, v limit.Verdict) *structpb.Struct {
	fields := make(map[string]*structpb.Value, 8)
	if v.Admitted {
		fields["verdict"] = structpb.NewStringValue("admitted")
		if d.Lease != "" {
			fields["lease_id"] = structpb.NewStringValue(string(d.Lease))
		}
		if len(v.Shadowed) > 0 {
			fields["limits"] = list(limit.Names(v.Shadowed))
		}
	} else {
		fields["verdict"] = structpb.NewStringValue("refused")
		fields["reject_class"] = structpb.NewStringValue(v.Class.String())
		fields["reason"] = structpb.NewStringValue(string(v.Reason))
		if v.Limit != "" { // not of a stream that had ended
			fields["limit"] = structpb.NewStringValue(v.Limit)
			fields["limits"] = list(limit.Names(v.Violations))
		}
		fields["estimated"] = structpb.NewBoolValue(v.Estimated)
		fields["retryable"] = structpb.NewBoolValue(v.Retryable)
		if v.Retryable {
			fields["retry_after_ms"] = structpb.NewNumberValue(float64(v.RetryAfter.Milliseconds()))
		}
	}
	if d.Bypass != limit.DefaultMode {
		fields["bypass"] = structpb.NewStringValue(d.Bypass.String())
		fields["bypass_reason"] = structpb.NewStringValue(d.BypassReason)
	}
	return &structpb.Struct{Fields: fields}
}

func list(texts []string) *structpb.Value {
	values := make([]*structpb.Value, len(texts))
	for i, t := range texts {
		values[i] = structpb.NewStringValue(t)
	}
	return structpb.NewListValue(&structpb.ListValue{Values: values})
}
