package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"weir/envoy"
	"weir/limit"
	"weir/policy"
	"weir/server"
	"weir/store"
	"weir/store/memory"
	"weir/store/redis"
	"weir/store/standby"
	"weir/store/unasked"
)

type serveCommand struct {
	Policy                    []string      `required:"" env:"WEIR_POLICY" placeholder:"PATH" help:"Policy file, or folder of files (*.yaml, *.yml). Repeat it, or separate by commas. Required."`
	Redis                     string        `env:"WEIR_REDIS" placeholder:"URL" help:"Redis that all replicas share: redis://[user@]host:port[/db], rediss:// (TLS), unix://, redis+sentinel://host:port,…/primary[/db] or redis+cluster://host:port,…. Without it the state is in this process."`
	RedisPasswordFile         string        `env:"WEIR_REDIS_PASSWORD_FILE" placeholder:"FILE" help:"File with the password of Redis; read again for each new connection."`
	RedisSentinelPasswordFile string        `env:"WEIR_REDIS_SENTINEL_PASSWORD_FILE" placeholder:"FILE" help:"File with the password of the sentinels."`
	RedisCAFile               string        `name:"redis-ca-file" env:"WEIR_REDIS_CA_FILE" placeholder:"FILE" help:"Authorities (PEM) whose Redis servers are trusted by rediss://, instead of the system's."`
	HashKeyFile               string        `env:"WEIR_HASH_KEY_FILE" placeholder:"FILE" help:"File with the secret, of 32 bytes or more, under which the values of sensitive policies are hashed: the same for all replicas. With --redis such policies need it; in memory the default is a random one."`
	GRPCListen                string        `name:"grpc-listen" env:"WEIR_GRPC_LISTEN" default:":8081" placeholder:"ADDR" help:"Address of the gRPC services (${default})."`
	HTTPListen                string        `name:"http-listen" env:"WEIR_HTTP_LISTEN" default:":8080" placeholder:"ADDR" help:"Address of the status page, /healthz, /metrics, /json (${default})."`
	AdminListen               string        `env:"WEIR_ADMIN_LISTEN" default:"127.0.0.1:6070" placeholder:"ADDR" help:"Address of /rlconfig, /debug/pprof/, and of weir leases, reset and explain (${default}); keep it private. Empty: none."`
	StoreTimeout              time.Duration `env:"WEIR_STORE_TIMEOUT" default:"10ms" help:"How long a decision waits for a Redis that answers nobody; below the 20ms that Envoy waits if it is not told otherwise (${default})."`
	FailureMode               string        `env:"WEIR_FAILURE_MODE" enum:"open,closed,local" default:"open" help:"What becomes of limits while Redis does not answer, where their policy does not say: open admits, closed refuses, local decides by this replica's share (${default})."`
	Replicas                  int           `env:"WEIR_REPLICAS" default:"1" help:"How many replicas share the load, at most: the share of one in the failure mode local (${default})."`
	UnreadyWithoutStore       bool          `env:"WEIR_UNREADY_WITHOUT_STORE" help:"Say not ready while Redis does not answer. Otherwise it is ready, and degraded."`
	MaxWait                   time.Duration `env:"WEIR_MAX_WAIT" default:"2ms" help:"How long a request waits for a slot of a full lane or pool before it is refused, where its policy does not say (${default}); 0: it does not wait."`
	RememberRefusals          time.Duration `env:"WEIR_REMEMBER_REFUSALS" default:"250ms" help:"How long what Redis has refused is refused again without asking it, unless it can pass before (${default}, at most a second): so late may count what another replica gives back. 0: each is asked for."`
	Shadow                    bool          `env:"WEIR_SHADOW" help:"Refuse nobody: evaluate and count every limit as if it were in shadow_mode, for a first week."`
	Lenient                   bool          `env:"WEIR_LENIENT" help:"Load, with a warning, what envoyproxy/ratelimit accepts by mistake."`
	LeaseHeader               bool          `env:"WEIR_LEASE_HEADER" help:"Send the lease id to the upstream as x-weir-lease, so that it can release."`
	RateLimitHeaders          bool          `name:"ratelimit-headers" env:"WEIR_RATELIMIT_HEADERS" help:"Send the RateLimit and RateLimit-Policy headers (IETF draft) to clients."`
	DrainTimeout              time.Duration `env:"WEIR_DRAIN_TIMEOUT" default:"10s" help:"How long a stop waits for requests under way (${default})."`
	LogLevel                  slog.Level    `env:"WEIR_LOG_LEVEL" default:"info" placeholder:"LEVEL" help:"debug, info, warn or error (${default}); the admin port changes it: PUT /loglevel?level=debug."`
	LogFormat                 string        `env:"WEIR_LOG_FORMAT" enum:"text,json" default:"text" help:"text or json (${default})."`
	secureFlags
}

// Help is shown by weir serve --help.
func (c *serveCommand) Help() string {
	return `Example: weir serve --policy examples/policy.yaml --redis redis://127.0.0.1:6379

Each flag can also be set in the environment: --store-timeout as WEIR_STORE_TIMEOUT. Policy files are read again when they change, and on SIGHUP: one that is wrong stays in force as it was, and until all have been right once the service is not ready.

The service stops on SIGTERM or SIGINT: it says that it is not ready, finishes what is under way, and exits with 0; with 2 if it cannot start or listen.`
}

// gcHeadroom is counted as heap and never touched, so it takes no memory: with it
// the collector runs every 32 MiB of garbage at the earliest, about 6,000
// decisions, and not every 4 MiB. State in memory that is larger grows as before,
// which a GOGC of 400 would not promise.
const gcHeadroom = 32 << 20

// maxReplicas is more than anybody has.
const maxReplicas = 100_000

// Run runs the service until its context ends.
func (c *serveCommand) Run(con console, parsed *kong.Context) error {
	signal.Ignore(syscall.SIGPIPE) // a log that nobody reads must not end the service
	hangUp, stop := hangUps()      // nor a SIGHUP, however early or late
	defer stop()
	if c.RememberRefusals < 0 || c.RememberRefusals > unasked.MaxLife {
		return fmt.Errorf("--remember-refusals must be 0..%v, got %v; the default is 250ms", unasked.MaxLife, c.RememberRefusals)
	}
	if c.MaxWait < 0 || c.MaxWait > limit.MaxWait {
		return fmt.Errorf("--max-wait must be 0..%v, got %v; the default is 2ms", limit.MaxWait, c.MaxWait)
	}
	if len(c.Policy) == 0 || slices.Contains(c.Policy, "") {
		return errors.New("--policy is empty; name a file or a folder")
	}
	if c.StoreTimeout <= 0 {
		return fmt.Errorf("--store-timeout must be above 0, got %v; the default is 10ms", c.StoreTimeout)
	}
	if c.Replicas < 1 || c.Replicas > maxReplicas {
		return fmt.Errorf("--replicas must be 1..%d, got %d; write how many processes there are at most", maxReplicas, c.Replicas)
	}
	if redis.HasPassword(c.Redis) && isArgument(parsed, "redis") {
		return errors.New("--redis has a password, which everybody on this machine can see in the list of processes: put it into a file for --redis-password-file, or set WEIR_REDIS instead")
	}
	headroom := make([]byte, gcHeadroom)
	defer runtime.KeepAlive(headroom)
	level := new(slog.LevelVar)
	level.Set(c.LogLevel)
	log := slog.New(newLogHandler(con.stderr, c.LogFormat, level))
	options, err := c.policyOptions(con.ctx, log)
	if err != nil {
		return err
	}
	if c.Shadow {
		log.WarnContext(con.ctx, "shadow: no limit refuses anybody")
	}
	files := policy.NewFiles(c.Policy, options)
	st, err := c.store(log)
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), buildInfo())
	secure, err := c.security(con.ctx, parsed, log, registry)
	if err != nil {
		return errors.Join(err, st.Close())
	}
	traces, err := newTraces(con.ctx, log)
	if err != nil {
		return errors.Join(err, st.Close())
	}
	kind := "memory"
	if c.Redis != "" {
		kind = "redis"
	}
	var load func() (connections, idle, waiting int)
	if r, ok := st.(*redis.Store); ok {
		load = func() (connections, idle, waiting int) {
			l := r.Load()
			return l.Connections, l.Idle, l.Waiting
		}
	}
	srv := server.New(server.Options{
		Store:               st,
		StoreKind:           kind,
		StoreAddress:        redis.Address(c.Redis),
		Host:                hostName(),
		Version:             version,
		StoreTimeout:        c.StoreTimeout,
		Instant:             c.Redis == "",
		Standby:             standby.Options{Mode: limit.ParseFailureMode(c.FailureMode), Replicas: c.Replicas},
		MaxWait:             c.MaxWait,
		StoreLoad:           load,
		RememberRefusals:    c.rememberRefusals(),
		Logger:              log,
		Registerer:          registry,
		UnreadyWithoutStore: c.UnreadyWithoutStore,
		Encode:              envoy.Options{LeaseHeader: c.LeaseHeader, RateLimitHeaders: c.RateLimitHeaders},
		MaxAge:              c.MaxConnectionAge,
		Credentials:         secure.credentials(),
		Access:              secure.access,
		Traces:              traces.TracerProvider,
		LogLevel:            level,
	})
	srv.SetPolicy(con.ctx, files.Read())

	l, err := c.listen(con.ctx)
	if err == nil {
		s := service{serveCommand: c, log: log, server: srv, store: st, files: files, registry: registry, hangUp: hangUp, secure: secure}
		err = s.run(con.ctx, secure.wrap(con.ctx, l, log))
		srv.Close()
	}
	return errors.Join(err, st.Close(), traces.end(con.ctx))
}

// hostName is that of this machine, or pod; "" if nobody knows.
func hostName() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name
}

// rememberRefusals is 0 without a Redis: to ask this process costs as little.
func (c *serveCommand) rememberRefusals() time.Duration {
	if c.Redis == "" {
		return 0
	}
	return c.RememberRefusals
}

// newLogHandler writes logs for people or for machines.
func newLogHandler(to io.Writer, format string, level slog.Leveler) slog.Handler {
	o := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.NewJSONHandler(to, o)
	}
	return slog.NewTextHandler(to, o)
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

// isArgument reports whether a flag was given as an argument, and not by the
// environment.
func isArgument(parsed *kong.Context, name string) bool {
	return slices.ContainsFunc(parsed.Path, func(p *kong.Path) bool { return p.Flag != nil && p.Flag.Name == name })
}

func (c *serveCommand) store(log *slog.Logger) (store.Store, error) {
	if c.Redis == "" {
		if c.RedisPasswordFile != "" || c.RedisSentinelPasswordFile != "" || c.RedisCAFile != "" {
			return nil, errors.New("there are files for Redis, and no --redis: add it, or leave them out")
		}
		return memory.New(memory.Options{}), nil
	}
	s, err := redis.Open(redis.Options{
		URL:                  c.Redis,
		PasswordFile:         c.RedisPasswordFile,
		SentinelPasswordFile: c.RedisSentinelPasswordFile,
		CAFile:               c.RedisCAFile,
		Logger:               log,
		ReplyTimeout:         c.StoreTimeout,
		Silence:              c.StoreTimeout,
	})
	if err != nil {
		return nil, fmt.Errorf("--redis: %w", err)
	}
	return s, nil
}
