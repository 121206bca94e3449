package redis

import (
	"strings"
	"testing"
	"time"

	"weir/limit"
)

// packed is an array in MessagePack, as scripts reply: of integers, strings and arrays.
func packed(items ...any) string {
	var p packer
	for _, item := range items {
		switch item := item.(type) {
		case int:
			p.int(int64(item))
		case string:
			p.string(item)
		case []any:
			p.begin()
			p.bytes = append(p.bytes, packed(item...)...)
		}
	}
	n := len(items)
	return "\xdc" + string([]byte{byte(n >> 8), byte(n)}) + string(p.item(0)[number:])
}

// An error is logged, and who knows a lease's token can end it.
func TestErrorsOfRepliesHaveNoTokens(t *testing.T) {
	const token = "token-4711"
	checks := []limit.Check{{Limit: limit.Concurrency{Max: 1, Lease: time.Second}}, {Limit: limit.Window{Max: 1, Unit: limit.Day, Multiplier: 1}}}
	for _, reply := range []string{
		"", token, "\xa1", "\xdd\xff\xff\xff\xff",
		packed(token),
		packed(1, []any{1, token, 2}),
		packed(token, []any{}, []any{}),
		packed(1, []any{token}, []any{}),
		packed(1, []any{1, token, 2}, []any{token, token}),
		packed(1, []any{1, token, 2}, []any{}, token),
		packed(1, 0, 0, 1, 1, 1, 1, 1, 1, 1, token),
	} {
		if states, err := inspected(checks, unpacker{rest: reply}); err == nil || strings.Contains(err.Error(), token) {
			t.Errorf("inspected(%q) = %v, %v, want an error without the token", reply, states, err)
		}
		if d, err := decision(limit.Request{Checks: checks}, unpacker{rest: reply}); err == nil || strings.Contains(err.Error(), token) {
			t.Errorf("decision(%q) = %v, %v, want an error without the token", reply, d, err)
		}
	}
}
