// Package main is a worker that does jobs, each by one call to a vendor. The workers of all
// processes share the vendor's quota, without a burst, and wait for it in a bounded queue.
package main

import (
	"context"
	"expvar"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weir/client"
)

func main() {
	fakeVendor := flag.Bool("fake-vendor", false, "be the vendor, until SIGTERM")
	listen := flag.String("listen", "127.0.0.1:0", "where to serve /debug/vars, or the vendor")
	weir := flag.String("weir", "127.0.0.1:8081", "weir, as a target of gRPC, like dns:///weir:8081")
	vendor := flag.String("vendor", "http://127.0.0.1:9000", "where the vendor is")
	jobs := flag.String("jobs", "jobs", "folder with a file for each job; beside it are those that are done, and failed")
	workers := flag.Int("workers", 3, "how many calls of this process may be going on")
	depth := flag.Int("depth", 10, "how many jobs of this process may wait")
	perMinute := flag.Int("per-minute", 100, "the vendor's quota, as in policy.yaml")
	jitter := flag.Duration("jitter", 100*time.Millisecond, "how much later than Retry-After to ask at most")
	flag.Parse()

	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := func() error {
		listener, err := net.Listen("tcp", *listen)
		if err != nil {
			return err
		}
		log.InfoContext(ctx, "listening", "http", listener.Addr().String())
		if *fakeVendor {
			context.AfterFunc(ctx, func() { _ = listener.Close() })
			if err := http.Serve(listener, new(fake)); ctx.Err() == nil {
				return err
			}
			return nil
		}
		go func() { _ = http.Serve(listener, nil) }() // expvar's page, until the process ends
		conn, err := grpc.NewClient(*weir, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		limits := client.New(conn, client.Options{
			Domain:      "outgoing",
			FailureMode: client.FailClosed, // a job can wait
			Timeout:     5 * time.Second,
			Observer:    counters{expvar.NewMap("weir")},
			Logger:      log,
		})
		defer limits.Close()
		queue := limits.NewQueue(client.QueueOptions{
			Workers: *workers,
			Depth:   *depth,
			// Other processes take tokens that this one has waited for: there is no telling
			// how often it must ask.
			Retry: client.Retry{Attempts: 1 << 20, Patience: time.Hour, Jitter: *jitter, Budget: 1000},
		})
		w := &worker{limits: limits, queue: queue, vendor: *vendor, jobs: *jobs, perMinute: *perMinute, log: log, ended: make(chan string)}
		return w.run(ctx)
	}()
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "vendor: %v\n", err)
		os.Exit(1)
	}
}

// counters show at /debug/vars what the client of weir does: "queue_depth" is how many
// jobs wait.
type counters struct{ *expvar.Map }

func (c counters) Count(of client.Counter, word string) { c.Add(string(of)+" "+word, 1) }
func (c counters) Level(of client.Gauge, change int)    { c.Add(string(of), int64(change)) }
func (c counters) Took(of client.Histogram, d time.Duration) {
	c.AddFloat(string(of)+" seconds", d.Seconds())
}
