package e2e

import (
	"net/http"
	"testing"

	"weir/store/storetest"
)

// The value of a header may be any bytes, and a client that sends some which are no
// UTF-8 does not get past its limits by that. (Protobuf's texts are UTF-8; Envoy does
// not look, and lets a request pass unasked if its question is turned down.)
func TestAValueThatIsNoUTF8IsLimited(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{
		"memory": nil,
		"redis":  onRedis(storetest.StartRedis(t, storetest.AnyRedis(t))),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, flags)
			var all []held
			for range 3 {
				all = append(all, s.hold(t, "al\xff"))
			}
			s.get(t, "al\xff", "/ok").wantRefused(t, http.StatusTooManyRequests, "lane")
			for _, other := range []string{"al\xfe", "al?", "al\uFFFD", "al", "al\xff\xff"} {
				s.get(t, other, "/ok").want(t, http.StatusOK) // it has a lane of its own
			}
			for _, h := range all {
				h.end(t, s)
			}
			s.idle(t)
			if got := s.envoy.counter(t, "cluster.upstream.ratelimit.failure_mode_allowed"); got != 0 {
				t.Errorf("Envoy let %d requests pass unasked, want 0", got)
			}
		})
	}
}

// Whatever a client sends that Envoy notes in its access log, the log goes on.
func TestAnAccessLogGoesOnWhateverIsInIt(t *testing.T) {
	t.Parallel()
	s := start(t, nil)
	const ends = `weir_access_log_entries_total{domain="inference",kind="end"}`
	for i, headers := range [][]string{
		{"user-agent", "\xff\xfe"},
		{"referer", "http://\xc3/"},
		{"x-request-id", "\xff"},
		{"x-forwarded-for", "\xff"},
		{"x-account", "\xff"},
		{"x-envoy-original-path", "/\xff"},
	} {
		s.get(t, "alice", "/ok", headers...).want(t, http.StatusOK)
		s.eventually(t, ends, i+1)
	}
	if got := s.metric(t, "weir_access_logs_broken_total"); got != 0 {
		t.Errorf("%d access logs are broken, want 0", got)
	}
}
