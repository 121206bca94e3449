package limit

import (
	"testing"
	"time"
)

func TestADetailIsTrueOfAnyVerdict(t *testing.T) {
	for _, tt := range []struct {
		in   Verdict
		want string
	}{
		{Verdict{Limit: "a", Reason: "something_new", Retryable: true, RetryAfter: time.Second}, `Limit "a" refused the request (something_new); retry after 1s.`},
		{Verdict{Reason: StreamEnded}, "The end of the stream that asks was told before; retrying does not help."},
		{Verdict{}, "The request was refused; retrying does not help."},
	} {
		if got := tt.in.detail(); got != tt.want {
			t.Errorf("detail(%+v) = %q, want %q", tt.in, got, tt.want)
		}
	}
}
