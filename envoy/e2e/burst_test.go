package e2e

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"weir/store/storetest"
)

// A client that sends many requests at once gets no more of them past its lane. (How
// long they wait for their turn is a matter of the machine, so the tests are patient.)
func TestABurstOfOneClientPassesNoLimit(t *testing.T) {
	t.Parallel()
	s := start(t, onRedis(storetest.StartRedis(t, storetest.AnyRedis(t))))
	const n = 500
	ctx, leave := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var refused atomic.Int64
	for range n {
		all.Go(func() {
			if a, err := s.send(ctx, "alice", "/hold"); err == nil && a.code == http.StatusTooManyRequests {
				refused.Add(1)
			}
		})
	}
	storetest.Eventually(t, "each is refused or has reached the upstream", func() bool { return int(refused.Load())+len(s.upstream.of("alice")) >= n })
	if got := len(s.upstream.of("alice")); got != 3 {
		t.Errorf("%d of %d requests reached the upstream, want the 3 of the lane; %d passed Envoy unasked", got, n, s.envoy.counters(t)["failure_mode_allowed"])
	}
	leave()
	all.Wait()
}
