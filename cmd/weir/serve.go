package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc"

	"weir/envoy"
	"weir/policy"
	"weir/server"
	"weir/store"
	"weir/store/memory"
	"weir/store/redis"
)

type serveCommand struct {
	Policy           []string      `required:"" env:"WEIR_POLICY" placeholder:"PATH" help:"Policy file, or folder of files (*.yaml, *.yml). Repeat it, or separate by commas. Required."`
	Redis            string        `env:"WEIR_REDIS" placeholder:"URL" help:"Redis that all replicas share: redis://[user:password@]host:port[/db]. Without it the state is in this process."`
	HashKeyFile      string        `env:"WEIR_HASH_KEY_FILE" placeholder:"PATH" help:"File with the secret, of 32 bytes or more, under which the values of sensitive policies are hashed: the same for all replicas. With --redis such policies need it; in memory the default is a random one."`
	GRPCListen       string        `name:"grpc-listen" env:"WEIR_GRPC_LISTEN" default:":8081" placeholder:"ADDR" help:"Address of the gRPC services (${default})."`
	HTTPListen       string        `name:"http-listen" env:"WEIR_HTTP_LISTEN" default:":8080" placeholder:"ADDR" help:"Address of /healthz, /metrics, /json (${default})."`
	AdminListen      string        `env:"WEIR_ADMIN_LISTEN" default:"127.0.0.1:6070" placeholder:"ADDR" help:"Address of /rlconfig and /debug/pprof/ (${default}); keep it private. Empty: none."`
	StoreTimeout     time.Duration `env:"WEIR_STORE_TIMEOUT" default:"10ms" help:"How long a decision waits for Redis; below the 20ms that Envoy waits (${default})."`
	FailureMode      string        `env:"WEIR_FAILURE_MODE" enum:"open" default:"open" help:"What happens when Redis does not answer: open admits, counted and flagged. (Only open in this version.)"`
	Replicas         int           `env:"WEIR_REPLICAS" default:"1" help:"How many replicas share the load (${default}). (It has no effect yet: it is for the failure mode local.)"`
	MaxWait          time.Duration `env:"WEIR_MAX_WAIT" default:"2ms" help:"How long a full lane or pool waits for a slot (${default}). (It has no effect yet: nothing waits.)"`
	Shadow           bool          `env:"WEIR_SHADOW" help:"Refuse nobody: evaluate and count every limit as if it were in shadow_mode, for a first week."`
	Lenient          bool          `env:"WEIR_LENIENT" help:"Load, with a warning, what envoyproxy/ratelimit accepts by mistake."`
	LeaseHeader      bool          `env:"WEIR_LEASE_HEADER" help:"Send the lease id to the upstream as x-weir-lease, so that it can release."`
	RateLimitHeaders bool          `name:"ratelimit-headers" env:"WEIR_RATELIMIT_HEADERS" help:"Send the RateLimit and RateLimit-Policy headers (IETF draft) to clients."`
	DrainTimeout     time.Duration `env:"WEIR_DRAIN_TIMEOUT" default:"10s" help:"How long a stop waits for requests under way (${default})."`
	LogLevel         slog.Level    `env:"WEIR_LOG_LEVEL" default:"info" placeholder:"LEVEL" help:"debug, info, warn or error (${default})."`
}

// Help is shown by weir serve --help.
func (c *serveCommand) Help() string {
	return `Each flag can also be set in the environment: --store-timeout as WEIR_STORE_TIMEOUT. Policy files are read again when they change, and on SIGHUP: one that is wrong stays in force as it was, and until all have been right once the service is not ready.

The service stops on SIGTERM or SIGINT: it says that it is not ready, finishes what is under way, and exits with 0; with 2 if it cannot start or listen.`
}

// gcHeadroom is counted as heap and never touched, so it takes no memory: with it
// the collector runs every 32 MiB of garbage at the earliest, about 6,000
// decisions, and not every 4 MiB. State in memory that is larger grows as before,
// which a GOGC of 400 would not promise.
const gcHeadroom = 32 << 20

// Run runs the service until its context ends.
func (c *serveCommand) Run(con console) error {
	signal.Ignore(syscall.SIGPIPE) // a log that nobody reads must not end the service
	if c.StoreTimeout <= 0 {
		return fmt.Errorf("--store-timeout must be above 0, got %v; the default is 10ms", c.StoreTimeout)
	}
	headroom := make([]byte, gcHeadroom)
	defer runtime.KeepAlive(headroom)
	log := slog.New(slog.NewTextHandler(con.stderr, &slog.HandlerOptions{Level: c.LogLevel}))
	options, err := c.policyOptions(con.ctx, log)
	if err != nil {
		return err
	}
	if c.Shadow {
		log.WarnContext(con.ctx, "shadow: no limit refuses anybody")
	}
	files := policy.NewFiles(c.Policy, options)
	st, err := c.store()
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), buildInfo())
	srv := server.New(server.Options{
		Store:        st,
		StoreTimeout: c.StoreTimeout,
		Logger:       log,
		Registerer:   registry,
		Encode:       envoy.Options{LeaseHeader: c.LeaseHeader, RateLimitHeaders: c.RateLimitHeaders},
	})
	srv.SetPolicy(con.ctx, files.Read())

	l, err := c.listen(con.ctx)
	if err != nil {
		return errors.Join(err, st.Close())
	}
	watching, unwatch := context.WithCancel(con.ctx)
	var watcher sync.WaitGroup
	watcher.Go(func() {
		watch(watching, c.Policy, log, func() {
			if r := files.Read(); r.Changed {
				srv.SetPolicy(watching, r)
			}
		})
	})
	err = c.serve(con.ctx, srv, st, l, registry, log)
	unwatch()
	watcher.Wait()
	srv.Close()
	return errors.Join(err, st.Close())
}

// policyOptions are those of every load.
func (c *serveCommand) policyOptions(ctx context.Context, log *slog.Logger) (policy.Options, error) {
	o := policy.Options{Lenient: c.Lenient, Shadow: c.Shadow}
	switch {
	case c.HashKeyFile != "":
		key, err := readHashKey(c.HashKeyFile)
		if err != nil {
			return o, err
		}
		o.HashKey = key
		log.InfoContext(ctx, "hash key", "file", c.HashKeyFile, "fingerprint", fingerprint(key))
	case c.Redis != "":
		o.NeedHashKey = true
	}
	return o, nil
}

func (c *serveCommand) store() (store.Store, error) {
	if c.Redis == "" {
		return memory.New(memory.Options{}), nil
	}
	s, err := redis.Open(redis.Options{URL: c.Redis, ReplyTimeout: c.StoreTimeout})
	if err != nil {
		return nil, fmt.Errorf("--redis: %w", err)
	}
	return s, nil
}

// listeners are the sockets of the service; admin may be nil.
type listeners struct{ grpc, http, admin net.Listener }

func (c *serveCommand) listen(ctx context.Context) (l listeners, err error) {
	defer func() {
		if err != nil {
			for _, open := range []net.Listener{l.grpc, l.http, l.admin} {
				if open != nil {
					_ = open.Close()
				}
			}
		}
	}()
	if l.grpc, err = listen(ctx, "--grpc-listen", c.GRPCListen); err != nil {
		return l, err
	}
	if l.http, err = listen(ctx, "--http-listen", c.HTTPListen); err != nil {
		return l, err
	}
	if c.AdminListen != "" {
		l.admin, err = listen(ctx, "--admin-listen", c.AdminListen)
	}
	return l, err
}

func listen(ctx context.Context, flag, addr string) (net.Listener, error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s is in use; stop what listens there, or choose another address with %s", addr, flag)
	case err != nil:
		return nil, fmt.Errorf("%s %s: %w", flag, addr, err)
	}
	return l, nil
}

// serve answers until ctx ends or a listener fails, then stops in order: not
// ready, no new requests, those under way finished, within DrainTimeout.
func (c *serveCommand) serve(ctx context.Context, srv *server.Server, st store.Store, l listeners, registry *prometheus.Registry, log *slog.Logger) error {
	g := srv.GRPC()
	pages := &http.Server{Handler: srv.HTTP(registry), ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, MaxHeaderBytes: 64 << 10}
	admin := &http.Server{Handler: srv.Admin(), ReadTimeout: 10 * time.Second, MaxHeaderBytes: 64 << 10}

	watch, unwatch := context.WithCancel(ctx)
	var work sync.WaitGroup
	failed := make(chan error, 3)
	work.Go(func() { srv.Run(watch) })
	go func() { failed <- g.Serve(l.grpc) }() // it ends with drain, or with the process
	work.Go(func() { failed <- pages.Serve(l.http) })
	addresses := []any{"grpc", l.grpc.Addr().String(), "http", l.http.Addr().String()}
	if l.admin != nil {
		work.Go(func() { failed <- admin.Serve(l.admin) })
		addresses = append(addresses, "admin", l.admin.Addr().String())
	}
	kept := "memory"
	if c.Redis != "" {
		kept = "redis"
	}
	log.InfoContext(ctx, "listening", append(addresses, "store", kept, "version", versionText())...)

	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	log.InfoContext(ctx, "stopping", "drain_timeout", c.DrainTimeout)
	srv.Drain()
	c.drain(g, st)
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = pages.Shutdown(stop) // what is left is cut off
	_ = admin.Shutdown(stop)
	unwatch()
	work.Wait()
	log.InfoContext(ctx, "stopped")
	return err
}

// cutOff is how long a stop waits, at the very end, for what was cut off.
const cutOff = time.Second

// drain finishes the requests under way. When DrainTimeout is over it closes the
// store, so that what still waits there fails, and cuts off the rest.
func (c *serveCommand) drain(g *grpc.Server, st store.Store) {
	stopped := make(chan struct{})
	go func() { // it ends with the process at the latest
		g.GracefulStop()
		close(stopped)
	}()
	if ended(stopped, c.DrainTimeout) {
		return
	}
	_ = st.Close() // its error is told when it is closed for good
	go g.Stop()    // it may wait for a connection that has not said a word
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
