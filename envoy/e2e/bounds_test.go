package e2e

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What a client can make long is limited all the same: a message that weir turned down
// would pass.
func TestAHeaderAsLongAsEnvoyTakesIsLimited(t *testing.T) {
	t.Parallel()
	s := start(t, nil)
	long := strings.Repeat("a", 58<<10) // of 60 for all headers
	var all []held
	for range 3 {
		all = append(all, s.hold(t, long))
	}
	s.get(t, long, "/ok").wantRefused(t, http.StatusTooManyRequests, "lane")
	s.get(t, long+"b", "/ok").want(t, http.StatusOK)
	for _, h := range all {
		h.end(t, s)
	}
	if d := cmp.Diff(map[string]int{"ok": 4, "over_limit": 1}, s.envoy.counters(t)); d != "" {
		t.Errorf("Envoy's counters (-want +got):\n%s", d)
	}
	s.get(t, strings.Repeat("a", 61<<10), "/ok").want(t, http.StatusRequestHeaderFieldsTooLarge)
}
