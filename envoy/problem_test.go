package envoy

import (
	"testing"
	"time"

	"weir/limit"
)

func TestADetailIsTrueOfAnyVerdict(t *testing.T) {
	for _, tt := range []struct {
		in   limit.Verdict
		want string
	}{
		{limit.Verdict{Limit: "a", Reason: "something_new", Retryable: true, RetryAfter: time.Second}, `Limit "a" refused the request (something_new); retry after 1s.`},
		{limit.Verdict{Reason: limit.StreamEnded}, "The end of the stream that asks was told before; retrying does not help."},
		{limit.Verdict{}, "The request was refused; retrying does not help."},
	} {
		if got := detail(tt.in); got != tt.want {
			t.Errorf("detail(%+v) = %q, want %q", tt.in, got, tt.want)
		}
	}
}
