// Package main is an AI API in small. Its replicas share 60 requests a minute and 100,000
// tokens a day for each API key; a request reserves the tokens that it may use, and is
// charged for those that the model says it used.
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
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"weir/client"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:0", "where to serve HTTP")
	fakeModel := flag.Bool("fake-model", false, "be the model, instead of the API")
	weir := flag.String("weir", "127.0.0.1:8081", "weir's replicas, separated by commas")
	model := flag.String("model", "http://127.0.0.1:9000", "where the model is")
	keys := flag.String("keys", "keys.json", "who has which API key, and which plan")
	timeout := flag.Duration("timeout", time.Second, "how long one try to ask weir may take")
	tries := flag.Int("tries", 3, "how often to ask weir if its answers are lost")
	flag.Parse()

	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := func() error {
		if *fakeModel {
			return serve(ctx, *listen, new(fake).routes(), log)
		}
		conn, err := dial(*weir)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		limits := client.New(conn, client.Options{
			Domain: "api",
			// Tokens are money: who can't be counted is not served.
			FailureMode: client.FailClosed,
			Timeout:     *timeout,
			Tries:       *tries,
			Retry:       client.Retry{Budget: 1},
			Observer:    counters{expvar.NewMap("weir")},
			Logger:      log,
		})
		defer limits.Close() // waits until weir has heard of all that was used
		s := &service{limits: limits, model: *model, keys: *keys}
		return serve(ctx, *listen, s.routes(), log)
	}()
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "aiapi: %v\n", err)
		os.Exit(1)
	}
}

// serve serves until ctx ends, and then until the last request has been answered.
func serve(ctx context.Context, address string, h http.Handler, log *slog.Logger) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	log.InfoContext(ctx, "listening", "http", listener.Addr().String())
	s := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	ended := make(chan error, 1)
	context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), modelTimeout)
		defer cancel()
		ended <- s.Shutdown(ctx)
	})
	if err := s.Serve(listener); ctx.Err() == nil {
		return err
	}
	return <-ended
}

// dial connects to replicas of weir, and asks them in turn. Where DNS knows them all under
// one name, grpc.NewClient("dns:///weir:8081", …) does it without a list.
func dial(addresses string) (*grpc.ClientConn, error) {
	replicas := manual.NewBuilderWithScheme("weir")
	var state resolver.State
	for address := range strings.SplitSeq(addresses, ",") {
		state.Endpoints = append(state.Endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: address}}})
	}
	replicas.InitialState(state)
	return grpc.NewClient("weir:///", grpc.WithResolvers(replicas),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// counters show at /debug/vars what the client of weir does. Alert on "bypasses".
type counters struct{ *expvar.Map }

func (c counters) Count(of client.Counter, word string) { c.Add(string(of)+" "+word, 1) }
func (c counters) Level(of client.Gauge, change int)    { c.Add(string(of), int64(change)) }
func (c counters) Took(of client.Histogram, d time.Duration) {
	c.AddFloat(string(of)+" seconds", d.Seconds())
}
