package envoy

import "weir/limit"

// appendMetadata appends what Envoy's access log, mappers and later filters can read under
// envoy.filters.http.ratelimit. Keys without a value are absent. All lie at the
// top, and limits is a list of strings, as metadata matchers want it.
func appendMetadata(b []byte, d limit.Decision, v limit.Verdict) []byte {
	if v.Admitted {
		b = structText(b, "verdict", "admitted")
		if d.Lease != "" {
			b = structText(b, "lease_id", string(d.Lease))
		}
		if len(v.Shadowed) > 0 {
			b = structTexts(b, "limits", limit.Names(v.Shadowed))
		}
	} else {
		b = structText(b, "verdict", "refused")
		b = structText(b, "reject_class", v.Class.String())
		b = structText(b, "reason", string(v.Reason))
		if v.Limit != "" { // not of a stream that had ended
			b = structText(b, "limit", v.Limit)
			b = structTexts(b, "limits", limit.Names(v.Violations))
		}
		b = structBool(b, "estimated", v.Estimated)
		b = structBool(b, "retryable", v.Retryable)
		if v.Retryable {
			b = structNumber(b, "retry_after_ms", float64(v.RetryAfter.Milliseconds()))
		}
	}
	if d.Bypass != limit.DefaultMode {
		b = structText(b, "bypass", d.Bypass.String())
		b = structText(b, "bypass_reason", d.BypassReason)
	}
	return b
}
