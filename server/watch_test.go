package server_test

import (
	"net"
	"testing"
	"time"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"weir/store/storetest"
)

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
