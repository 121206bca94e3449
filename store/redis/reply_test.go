package redis

import (
	"strings"
	"testing"
	"time"

	"weir/limit"
)

// An error is logged, and who knows a lease's token can end it.
func TestErrorsOfRepliesHaveNoTokens(t *testing.T) {
	const token = "token-4711"
	checks := []limit.Check{{Limit: limit.Concurrency{Max: 1, Lease: time.Second}}, {Limit: limit.Window{Max: 1, Unit: limit.Day, Multiplier: 1}}}
	for _, reply := range []any{
		token,
		[]any{int64(1), []any{int64(1), token, int64(2)}},
		[]any{token, nil, nil},
		[]any{int64(1), []any{token}, nil},
		[]any{int64(1), []any{int64(1), token, int64(2)}, []any{token, token}},
	} {
		if states, err := inspected(checks, reply); err == nil || strings.Contains(err.Error(), token) {
			t.Errorf("inspected(%v) = %v, %v, want an error without the token", reply, states, err)
		}
		if d, err := decision(limit.Request{Checks: checks}, reply); err == nil || strings.Contains(err.Error(), token) {
			t.Errorf("decision(%v) = %v, %v, want an error without the token", reply, d, err)
		}
	}
}
