package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"weir/client"
)

type serve struct {
	Listen   string        `default:"127.0.0.1:9000" help:"Where to serve HTTP."`
	Weir     []string      `default:"127.0.0.1:8081" help:"The gRPC addresses of weir's replicas, which are asked in turn."`
	Timeout  time.Duration `default:"250ms" help:"How long to wait for an answer of weir, before it is asked again."`
	Grace    time.Duration `default:"30s" help:"How long jobs may go on after SIGTERM."`
	LogLevel slog.Level    `default:"info" help:"debug tells the begin and the end of each job, and whose it is."`
}

// Run serves until ctx ends.
func (s *serve) Run(ctx context.Context) error {
	logs := slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: s.LogLevel})
	log, registry := slog.New(logs), prometheus.NewRegistry()
	conn, err := dial(s.Weir)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()

	limits := client.New(conn, client.Options{
		Domain:   "images",
		Timeout:  s.Timeout,
		Tries:    5,                       // an image costs more than a question
		Retry:    client.Retry{Budget: 1}, // of questions whose answers were lost, for each image
		Observer: newObserver(registry),
		Logger:   log,
	})
	defer limits.Close() // it waits for releases that weir has not heard of

	mux := http.NewServeMux()
	mux.Handle("POST /images", measured(registry, authenticated(limits.Middleware(ask)(newStudio(registry, log)))))
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	return s.serve(ctx, mux, logs)
}

// dial connects to all replicas. Where DNS names them all, "dns:///weir:8081" does, with
// the same round_robin.
func dial(replicas []string) (*grpc.ClientConn, error) {
	var state resolver.State
	for _, r := range replicas {
		state.Addresses = append(state.Addresses, resolver.Address{Addr: r})
	}
	all := manual.NewBuilderWithScheme("replicas")
	all.InitialState(state)
	patience := backoff.DefaultConfig
	patience.MaxDelay = 5 * time.Second // not two minutes: a replica that comes back is of use
	return grpc.NewClient("replicas:///weir", grpc.WithResolvers(all),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: patience}),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// ask is what weir is asked before any work: the account's tokens and slots, and a place
// in the pool. All of them are taken in one step, or none is.
func ask(r *http.Request) client.Request {
	return client.Ask(client.Describe("account", accountOf(r)), client.Describe("pool", "images"))
}

// accountOf is whose request it is. Something in front has authenticated it, and
// overwrites the header; what a caller can choose is no account.
func accountOf(r *http.Request) string { return r.Header.Get("X-Account") }

func authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if accountOf(r) == "" {
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// studio makes images, for requests that hold what they need.
type studio struct {
	jobs prometheus.Gauge
	log  *slog.Logger
}

func newStudio(r prometheus.Registerer, log *slog.Logger) *studio {
	return &studio{log: log, jobs: promauto.With(r).NewGauge(prometheus.GaugeOpts{
		Name: "imageservice_jobs", Help: "Images that are being made.",
	})}
}

// ServeHTTP makes an image: POST /images?work=2s takes two seconds. With end=error or
// end=panic it fails after that. However it ends, the middleware gives the slots back.
func (s *studio) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	length, err := time.ParseDuration(cmp.Or(r.FormValue("work"), "0s"))
	if err != nil {
		http.Error(w, "work: not a duration such as 2s", http.StatusBadRequest)
		return
	}
	lease := client.FromContext(r.Context())
	if lease.Bypass() != client.NoBypass { // the work goes on, and nobody overlooks it
		w.Header().Set("Limits-Bypassed", lease.BypassReason())
	}
	ctx := lease.Context(r.Context()) // a GPU works for nobody whose lease is lost, or who left

	begun := s.log.With("account", accountOf(r), "bypass", lease.Bypass())
	begun.DebugContext(ctx, "work begins")
	s.jobs.Inc()
	defer func() {
		s.jobs.Dec()
		begun.DebugContext(ctx, "work ends")
	}()
	select {
	case <-time.After(length):
	case <-ctx.Done():
		http.Error(w, "the work was stopped", http.StatusServiceUnavailable)
		return
	}
	switch r.FormValue("end") {
	case "panic":
		panic("this image can't be made")
	case "error":
		http.Error(w, "this image can't be made", http.StatusInternalServerError)
	default:
		_, _ = fmt.Fprintln(w, "an image") // who does not read it has left
	}
}

// serve serves until ctx ends, and then waits for the jobs.
func (s *serve) serve(ctx context.Context, handler http.Handler, logs slog.Handler) error {
	log := slog.New(logs)
	listener, err := net.Listen("tcp", s.Listen)
	if err != nil {
		return err
	}
	jobs, stopJobs := context.WithCancel(context.WithoutCancel(ctx))
	defer stopJobs()
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 10 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return jobs },
		ErrorLog:          slog.NewLogLogger(logs, slog.LevelError),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	log.InfoContext(ctx, "listening", "http", listener.Addr().String())
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	// Those that go on after that are stopped, and give their slots back.
	defer time.AfterFunc(s.Grace, stopJobs).Stop()
	return server.Shutdown(context.WithoutCancel(ctx))
}
