package server_test

import (
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"weir/store/storetest"
)

func TestAStopFinishesTheRequestsUnderWay(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--store-timeout", "20s", "--drain-timeout", "20s")
	r.ready(t)
	pause(t, redis)
	under := r.begin(t, "[one=x]")
	r.Terminate(t)
	storetest.Eventually(t, "/healthz says that it drains", func() bool {
		code, h := r.healthz(t)
		return code == 503 && h.Status == "draining"
	})
	r.Signal(t, syscall.SIGHUP) // which ends those who do not expect it
	resume(t, redis)
	m, err := under.end()
	if err != nil {
		t.Fatalf("the request under way: %v, want its answer", err)
	}
	if bypass := m.GetDynamicMetadata().GetFields()["bypass"]; m.GetOverallCode() != rls.RateLimitResponse_OK || bypass != nil {
		t.Errorf("the request under way: %v, want OK by the store", m)
	}
	if code := r.Wait(t); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	r.expectLogged(t, "msg=stopping", 1)
	r.expectLogged(t, "msg=stopped", 1)
}

func TestAStopEndsWithinItsBoundWhateverHangs(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--store-timeout", "1m", "--drain-timeout", "100ms")
	r.ready(t)
	pause(t, redis)
	var hanging sync.WaitGroup
	for range 1000 { // more than the store's connections give up in a few seconds
		c := r.begin(t, "[lane=x][a=1]")
		hanging.Go(func() { _, _ = c.end() })
	}
	start := time.Now()
	r.Terminate(t)
	if code := r.Wait(t); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	hanging.Wait()
	// 100 ms to drain, a second for what outlives its callers, a second for pages.
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("the stop took %v with a drain-timeout of 100ms", took)
	}
	r.expectLogged(t, "msg=stopped", 1)
}

func TestAWatcherOfHealthDoesNotHoldUpAStop(t *testing.T) {
	r := newReplica(t, outagePolicy, "--drain-timeout", "15s")
	r.ready(t)
	watch, err := r.health.Watch(storetest.Context(t), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	r.Terminate(t)
	if code := r.Wait(t); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("the stop took %v: all of its drain-timeout, with nothing to wait for", took)
	}
}

func TestASilentConnectionDoesNotHoldUpAStop(t *testing.T) {
	r := newReplica(t, outagePolicy, "--drain-timeout", "100ms")
	r.ready(t)
	silent, err := net.Dial("tcp", r.GRPC)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	start := time.Now()
	r.Terminate(t)
	if code := r.Wait(t); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("the stop took %v with a drain-timeout of 100ms", took)
	}
}
