package main

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"weir/policy"
	"weir/server"
	"weir/store"
)

// service is what weir serve runs.
type service struct {
	*serveCommand
	log      *slog.Logger
	server   *server.Server
	store    store.Store
	files    *policy.Files
	registry *prometheus.Registry
	hangUp   <-chan os.Signal
	secure   security
}

// run answers until ctx ends or a listener fails, then stops in order: not ready, no
// new requests, those under way finished, within DrainTimeout.
func (s service) run(ctx context.Context, l listeners) error {
	g := s.server.GRPC()
	pages := s.pages(s.server.HTTP(s.registry))
	admin := s.pages(s.server.Admin())
	admin.WriteTimeout = 0 // a profile takes as long as it is asked to

	looking, stopLooking := context.WithCancel(ctx)
	var work sync.WaitGroup
	failed := make(chan error, 3)
	work.Go(func() { s.server.Run(looking) })
	work.Go(func() {
		watch(looking, slices.Concat(s.Policy, s.secure.identity.files()), s.hangUp, s.log, func() { s.read(looking) })
	})
	go func() { failed <- g.Serve(l.grpc) }() // it ends with drain, or with the process
	work.Go(func() { failed <- pages.Serve(l.http) })
	addresses := []any{"grpc", l.grpc.Addr().String(), "http", l.http.Addr().String()}
	if l.admin != nil {
		work.Go(func() { failed <- admin.Serve(l.admin) })
		addresses = append(addresses, "admin", l.admin.Addr().String())
	}
	kept := "memory"
	if s.Redis != "" {
		kept = "redis"
	}
	s.log.InfoContext(ctx, "listening", append(addresses, "store", kept, "version", versionText())...)

	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	s.log.InfoContext(ctx, "stopping", "drain_timeout", s.DrainTimeout)
	s.server.Drain()
	s.drain(g)
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), cutOff)
	defer cancel()
	for _, h := range []*http.Server{pages, admin} {
		if h.Shutdown(stop) != nil {
			_ = h.Close() // what is left is cut off
		}
	}
	stopLooking()
	work.Wait()
	s.log.InfoContext(ctx, "stopped")
	return err
}

// read reads the files again.
func (s service) read(ctx context.Context) {
	s.secure.identity.read(ctx)
	if r := s.files.Read(); r.Changed {
		s.server.SetPolicy(ctx, r)
	}
}

// pages is a server of HTTP pages.
func (s service) pages(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(s.secure.logHandler(s.log.Handler()), slog.LevelWarn),
	}
}

// cutOff is how long a stop waits, at the very end, for what was cut off.
const cutOff = time.Second

// drain finishes the requests under way. When DrainTimeout is over it closes the
// store, so that what still waits there fails, and cuts off the rest.
func (s service) drain(g *grpc.Server) {
	stopped := make(chan struct{})
	go func() { // it ends with the process at the latest
		g.GracefulStop()
		close(stopped)
	}()
	if ended(stopped, s.DrainTimeout) {
		return
	}
	_ = s.store.Close() // its error is told when it is closed for good
	go g.Stop()         // it may wait for a connection that has not said a word
	ended(stopped, cutOff)
}

// ended waits for done, at most for the given time.
func ended(done <-chan struct{}, within time.Duration) bool {
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}
