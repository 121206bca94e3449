package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weir/client"
	"weir/policy"
	"weir/server"
	"weir/store/memory"
)

// accountOf is the account that the request was authenticated for.
func accountOf(r *http.Request) string { return r.Header.Get("X-Account") }

func Example() {
	conn, stop := examplesService()
	defer stop()
	mux := http.NewServeMux()
	images := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "an image") })

	limits := client.New(conn, client.Options{Domain: "inference"})
	defer limits.Close()
	mux.Handle("/images", limits.Middleware(func(r *http.Request) client.Request {
		return client.Ask(client.Describe("account", accountOf(r)), client.Describe("pool", "images"))
	})(images))

	for range 3 {
		w, r := httptest.NewRecorder(), httptest.NewRequest("POST", "/images", nil)
		r.Header.Set("X-Account", "alice")
		mux.ServeHTTP(w, r)
		fmt.Printf("%d, Retry-After %q\n", w.Code, w.Header().Get("Retry-After"))
	}
	// Output:
	// 200, Retry-After ""
	// 200, Retry-After ""
	// 429, Retry-After "3600"
}

func ExampleClient_Acquire() {
	conn, stop := examplesService()
	defer stop()
	limits := client.New(conn, client.Options{Domain: "inference"})
	defer limits.Close()
	ctx := context.Background()

	paint := func() error {
		lease, err := limits.Acquire(ctx, client.Ask(client.Describe("account", "alice")))
		if err != nil {
			return err
		}
		defer lease.Release(ctx)
		// Here is the work. A GPU works for nobody whose lease is lost.
		ctx := lease.Context(ctx)
		return ctx.Err()
	}
	for range 3 {
		err := paint()
		if limited, ok := errors.AsType[*client.LimitedError](err); ok {
			fmt.Println("come back in", limited.RetryAfter.Round(time.Minute), "because of", limited.Reason)
			continue
		}
		fmt.Println(err)
	}
	// Output:
	// <nil>
	// <nil>
	// come back in 1h0m0s because of bucket_empty
}

func ExampleClient_Wait() {
	conn, stop := examplesService()
	defer stop()
	limits := client.New(conn, client.Options{Domain: "inference", Retry: client.Retry{Attempts: 10, Patience: 10 * time.Second}})
	defer limits.Close()
	ctx := context.Background()

	for range 3 { // of a vendor that allows ten a second, without a burst
		lease, err := limits.Wait(ctx, client.Ask(client.Describe("vendor", "acme")))
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println("call the vendor")
		lease.Release(ctx)
	}
	// Output:
	// call the vendor
	// call the vendor
	// call the vendor
}

func ExampleQueue() {
	conn, stop := examplesService()
	defer stop()
	limits := client.New(conn, client.Options{Domain: "inference"})
	defer limits.Close()
	queue := limits.NewQueue(client.QueueOptions{Workers: 3})
	ctx := context.Background()

	request := client.Ask(client.Describe("account", "alice"))
	for range 2 {
		err := queue.Go(ctx, "alice", request, func(context.Context, *client.Lease) error {
			fmt.Println("an image")
			return nil
		}, nil)
		if errors.Is(err, client.ErrQueueFull) {
			fmt.Println("come back later") // and keep the job where it is safe
		}
	}
	fmt.Println(queue.Close(ctx))
	// Output:
	// an image
	// an image
	// <nil>
}

func ExampleClient_UnaryInterceptor() {
	conn, stop := examplesService()
	defer stop()
	limits := client.New(conn, client.Options{Domain: "inference"})
	defer limits.Close()

	ask := func(ctx context.Context, method string, _ any) client.Request {
		if method == "/grpc.health.v1.Health/Check" {
			return client.Request{} // free
		}
		return client.Ask(client.Describe("account", "the authenticated caller of ctx"))
	}
	grpc.NewServer(grpc.UnaryInterceptor(limits.UnaryInterceptor(ask)), grpc.StreamInterceptor(limits.StreamInterceptor(ask)))
	// Output:
}

// examplesService is weir in this process, and a connection to it.
func examplesService() (_ grpc.ClientConnInterface, stop func()) {
	set, err := policy.Parse("policy.yaml", []byte(`
domain: inference
descriptors:
  - key: account
    token_bucket: {capacity: 2, refill: 1/h}
    concurrency: {max_in_flight: 3, lease: 2m}
  - {key: vendor, token_bucket: {capacity: 1, refill: 10/s}}
`), policy.Options{})
	if err != nil {
		panic(err)
	}
	s := server.New(server.Options{
		Store: memory.New(memory.Options{}), StoreTimeout: time.Minute, Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry(),
	})
	s.SetPolicy(context.Background(), policy.Reading{Set: set, Changed: true})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	g := s.GRPC()
	go func() { _ = g.Serve(listener) }()
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		panic(err)
	}
	return conn, func() {
		_ = conn.Close()
		g.Stop()
		s.Close()
	}
}
