package e2e

import (
	"context"
	"net/http"
	"os"
	"slices"
	"sync"
	"testing"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

// A client that sends many requests at once gets no more of them past its lane, with the
// time-outs as they are shipped.
func TestABurstOfOneClientPassesNoLimit(t *testing.T) {
	envoyBinary(t)
	policy, err := os.ReadFile("testdata/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s := &stack{client: http2(t)}
	s.weir = servertest.Start(t, string(policy), onRedis(storetest.StartRedis(t, storetest.AnyRedis(t)))...)
	s.weirs = []*servertest.Process{s.weir}
	s.upstream = startUpstream(t, weirv1.NewLeaseServiceClient(s.weir.Dial(t)))
	s.envoy = startEnvoy(t, configure(t, slices.Concat([]change{
		port("9901", "0"), port("10000", "0"),
		port("9000", portOf(t, s.upstream.Listener.Addr().String())),
		{weirEndpoint, endpoint(t, s.weir.GRPC)},
	})...))

	const n = 500
	ctx, leave := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var mu sync.Mutex
	refused := 0
	for range n {
		all.Go(func() {
			if a, err := s.send(ctx, "alice", "/hold"); err == nil && a.code == http.StatusTooManyRequests {
				mu.Lock()
				refused++
				mu.Unlock()
			}
		})
	}
	storetest.Eventually(t, "each is refused or has reached the upstream", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return refused+len(s.upstream.of("alice")) >= n
	})
	if got := len(s.upstream.of("alice")); got > 3 {
		t.Errorf("%d of %d requests reached the upstream, want the 3 of the lane; %d passed Envoy unasked", got, n, s.envoy.counters(t)["failure_mode_allowed"])
	}
	leave()
	all.Wait()
}
