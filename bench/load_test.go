package main

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
)

// server answers by answer, and notes who asked.
type server struct {
	rls.UnimplementedRateLimitServiceServer
	answer func(ctx context.Context) (*rls.RateLimitResponse, error)

	mu    sync.Mutex
	asked map[string]int // by the first descriptor's value
}

func (s *server) ShouldRateLimit(ctx context.Context, r *rls.RateLimitRequest) (*rls.RateLimitResponse, error) {
	s.mu.Lock()
	for _, d := range r.GetDescriptors() {
		s.asked[d.GetEntries()[0].GetValue()]++
	}
	s.mu.Unlock()
	return s.answer(ctx)
}

func admit(context.Context) (*rls.RateLimitResponse, error) {
	return &rls.RateLimitResponse{OverallCode: rls.RateLimitResponse_OK}, nil
}

func never(ctx context.Context) (*rls.RateLimitResponse, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// serve starts a server, and returns a load for it that asks for ten subjects.
func serve(t *testing.T, answer func(ctx context.Context) (*rls.RateLimitResponse, error)) (*server, *load) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{answer: answer, asked: map[string]int{}}
	g := grpc.NewServer()
	rls.RegisterRateLimitServiceServer(g, s)
	done := make(chan error, 1)
	go func() { done <- g.Serve(listener) }()
	t.Cleanup(func() {
		g.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	request, err := newTemplate("account", 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	return s, &load{
		address: listener.Addr().String(), callers: 8, request: request, first: 90, subjects: 10,
		want: rls.RateLimitResponse_OK, drain: time.Minute,
	}
}

func nothing() error { return nil }

func TestOnceAsksForEachSubjectOnce(t *testing.T) {
	s, l := serve(t, admit)
	var err error
	if l.request, err = newTemplate("account", 5, 0); err != nil {
		t.Fatal(err)
	}
	if err := l.once(); err != nil {
		t.Fatal(err)
	}
	if len(s.asked) != 10 || s.asked["a000000090"] != 1 || s.asked["a000000099"] != 1 {
		t.Errorf("asked %v, want each from a000000090 to a000000099 once", s.asked)
	}
}

func TestAnOpenLoopCountsEveryDecisionThatWasDue(t *testing.T) {
	_, l := serve(t, admit)
	d, err := l.open(1000, 50*time.Millisecond, nothing, nothing)
	if err != nil {
		t.Fatal(err)
	}
	if len(d.latencies) != 50 || d.unfinished != 0 {
		t.Errorf("%d were due and %d never ended, want 50 and none", len(d.latencies), d.unfinished)
	}
	for i, latency := range d.latencies {
		if latency <= 0 {
			t.Errorf("decision %d took %v", i, latency)
		}
	}
}

func TestWhatNeverEndsIsCountedWithTheTimeThatItWaited(t *testing.T) {
	_, l := serve(t, never)
	l.drain = 10 * time.Millisecond
	d, err := l.open(1000, 50*time.Millisecond, nothing, nothing)
	if err != nil {
		t.Fatal(err)
	}
	if len(d.latencies) != 50 || d.unfinished != 50 || d.ended != 0 {
		t.Errorf("%d were due, %d ended and %d never did, want 50, none and 50", len(d.latencies), d.ended, d.unfinished)
	}
	for i, latency := range d.latencies {
		if latency < l.drain {
			t.Errorf("decision %d had waited %v when the load gave up after %v", i, latency, l.drain)
		}
	}
}

func TestAClosedLoopDoesNotWaitForEverForAnAnswer(t *testing.T) {
	_, l := serve(t, never)
	l.drain = 10 * time.Millisecond
	if _, err := l.closed(time.Millisecond, nothing, nothing); err == nil || !strings.Contains(err.Error(), "hung up after 10ms") {
		t.Errorf("closed: %v, want that it hung up", err)
	}
}

func TestAnotherAnswerThanTheExpectedEndsTheRun(t *testing.T) {
	_, l := serve(t, admit)
	l.want = rls.RateLimitResponse_OVER_LIMIT
	const want = "the answer is OK, want OVER_LIMIT"
	if _, err := l.closed(time.Millisecond, nothing, nothing); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("closed: %v, want %q", err, want)
	}
	if _, err := l.open(1000, time.Millisecond, nothing, nothing); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("open: %v, want %q", err, want)
	}
}

// A server that refuses at once, and one that admits the first, are ready for the scenario of
// one refused key; and nothing else is.
func TestABucketIsEmptiedByAnAdmissionOrNone(t *testing.T) {
	for _, tt := range []struct {
		answer *rls.RateLimitResponse
		ready  bool
	}{
		{&rls.RateLimitResponse{OverallCode: rls.RateLimitResponse_OVER_LIMIT}, true},
		{&rls.RateLimitResponse{OverallCode: rls.RateLimitResponse_OK}, true},
		{&rls.RateLimitResponse{}, false},
		{nil, false},
	} {
		_, l := serve(t, func(context.Context) (*rls.RateLimitResponse, error) {
			if tt.answer == nil {
				return nil, errors.New("away")
			}
			return tt.answer, nil
		})
		s := scenario{keys: "refused", subjects: 1, want: rls.RateLimitResponse_OVER_LIMIT}
		if _, err := s.prepare(target{name: "weir", address: l.address}); (err == nil) != tt.ready {
			t.Errorf("after %v: %v, want an error unless it is ready: %v", tt.answer, err, tt.ready)
		}
	}
}
