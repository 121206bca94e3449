// Package server answers weir's RPCs and HTTP pages: it is where a decision is
// asked for, counted and told, and where it is said what happens when the store
// is away.
package server

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"

	"weir/envoy"
	"weir/policy"
	"weir/server/page"
	"weir/store"
	"weir/store/standby"
	"weir/store/unasked"
)

// tellStreams is how long those who watch the health have to be told of the drain
// before their streams end.
const tellStreams = 50 * time.Millisecond

// Options configure a server. Store, Logger and Registerer are required.
type Options struct {
	Store store.Store
	// StoreKind is redis or memory: what the status page calls the store; "" means memory.
	StoreKind string
	// StoreAddress is where the store is, without user and password; "" in memory.
	StoreAddress string
	// Host and Version are what the status page calls this replica, and what runs there.
	Host, Version string
	// StoreTimeout is how long a decision waits for its store, at least, and an
	// Inspect at most; 0 means 10 ms. A decision waits longer if its caller does: a store
	// that is silent must fail by itself.
	StoreTimeout time.Duration
	// Instant says that the store answers at once, in this process: its decisions need no
	// deadline and no breaker.
	Instant bool
	// Standby decides while the store cannot.
	Standby standby.Options
	// UnreadyWithoutStore makes the server say that it is not ready while the store is
	// away, not only until it has been found.
	UnreadyWithoutStore bool
	// RememberRefusals is how long what the store has refused is refused again without
	// asking, unless it can pass before: for a store that takes a while to ask. At most
	// [unasked.MaxLife]; 0: each is asked for.
	RememberRefusals time.Duration
	// StoreLoad tells, without a call, how many connections the store has open, how many of
	// these are idle, and how many calls wait for one; nil: it has none.
	StoreLoad func() (connections, idle, waiting int)
	// MaxWait is how long a request waits for a slot before it is refused, where its
	// policy does not say; 0: it does not wait.
	MaxWait    time.Duration
	Logger     *slog.Logger
	Registerer prometheus.Registerer
	// Encode says what goes into the answers of ShouldRateLimit.
	Encode envoy.Options
	// Credentials are those of the gRPC port; nil: it speaks clear text.
	Credentials credentials.TransportCredentials
	// Access, if it is not nil, asks each caller for a client certificate, which the
	// ports have verified, but for health.
	Access *Access
	// Traces, if it is not nil, gets a span for each decision and each call of the store; those
	// of RPCs come with the context of their callers (W3C).
	Traces trace.TracerProvider
	// LogLevel is what the admin port shows and changes; nil: it does not.
	LogLevel *slog.LevelVar
	// MaxAge is how old a gRPC connection gets before its client is asked to
	// make a new one; 0: it has no end.
	MaxAge time.Duration
}

// Server decides requests by the current policies and the store. Use [New].
type Server struct {
	store        store.Store
	storeTimeout time.Duration
	instant      bool // see Options.Instant
	breakers     *breakers
	standby      *standby.Standby
	unasked      *unasked.Memory // nil: each is asked for
	mustHave     bool            // the store, to be ready
	log          *slog.Logger
	encode       envoy.Options
	credentials  credentials.TransportCredentials
	access       *Access // nil: everybody may all
	denied       *prometheus.CounterVec
	maxAge       time.Duration        // of a gRPC connection; 0: no end
	traces       trace.TracerProvider // nil: none
	tracer       tracer
	logLevel     *slog.LevelVar // nil: fixed
	calls        *calls         // of gRPC
	metrics      *metrics
	holds        *holds
	waits        *waits
	health       *health.Server

	shownAs  shownAs
	started  time.Time
	bypasses *bypasses
	refusals *refusals
	history  *history
	inFlight *inFlight
	page     *page.Page

	loaded atomic.Pointer[loaded] // the policies in force

	storeAway   atomic.Bool  // a call failed, and no look since was quiet
	storeFound  atomic.Bool  // it has answered once
	storeLost   atomic.Bool  // it did not answer the last look
	failures    atomic.Int64 // since the last look
	lastStrange atomic.Int64 // the second of the last log line about an error that is no failure
	lastDenied  atomic.Int64 // the second of the last log line about a caller without permission
	draining    atomic.Bool

	reporting sync.Mutex // held while health is told, so that the newest is told last

	detached sync.WaitGroup // calls that outlive their callers

	streams    context.Context // of all streams: ends with the drain
	endStreams context.CancelFunc
}

// New returns a server without policies: it answers UNAVAILABLE until
// [Server.SetPolicy] brings some.
func New(o Options) *Server {
	s := &Server{
		store:        o.Store,
		storeTimeout: o.StoreTimeout,
		instant:      o.Instant,
		standby:      standby.New(o.Standby),
		mustHave:     o.UnreadyWithoutStore,
		log:          o.Logger,
		encode:       o.Encode,
		credentials:  cmp.Or(o.Credentials, insecure.NewCredentials()),
		access:       o.Access,
		maxAge:       o.MaxAge,
		traces:       o.Traces,
		logLevel:     o.LogLevel,
		tracer:       newTracer(o.Traces),
		holds:        newHolds(),
		waits:        newWaits(o.MaxWait),
		health:       health.NewServer(),
		shownAs:      shownAs{host: o.Host, version: o.Version, storeKind: cmp.Or(o.StoreKind, "memory"), storeAddress: o.StoreAddress},
		started:      time.Now(),
		refusals:     newRefusals(),
		inFlight:     &inFlight{},
	}
	s.bypasses, s.history = &bypasses{}, &history{samples: []sample{{at: s.started}}}
	if o.RememberRefusals > 0 {
		s.unasked = unasked.New(o.RememberRefusals)
	}
	s.streams, s.endStreams = context.WithCancel(context.Background())
	s.page = page.New(s.streams, s.snapshot)
	if s.storeTimeout == 0 {
		s.storeTimeout = 10 * time.Millisecond
	}
	s.breakers = newBreakers(s.breakerChanged)
	s.loaded.Store(&loaded{unknown: newDomainSeries(unknownDomain, s.breakers)})
	s.metrics = newMetrics(o.Registerer, s)
	if o.StoreLoad != nil {
		registerLoad(o.Registerer, o.StoreLoad)
	}
	s.calls = newCalls(o.Registerer)
	s.denied = newDenied(o.Registerer)
	s.reportHealth()
	return s
}

// Drain makes the server say that it is not ready, so that no new callers come,
// and ends streams, which only watch. It goes on answering.
func (s *Server) Drain() {
	s.draining.Store(true)
	s.reportHealth()
	time.AfterFunc(tellStreams, s.endStreams)
}

// Close waits for calls that outlived their callers, at most about a second. No
// request may come any more.
func (s *Server) Close() {
	s.endStreams()
	s.page.Close()
	s.detached.Wait()
}

// policies returns those in force, or nil before the first are loaded.
func (s *Server) policies() *policy.Set { return s.loaded.Load().set }

// label is the domain in metrics: labels come from configuration only.
func (s *Server) label(domain string) string { return s.loaded.Load().of(domain).label }

// unknownDomain is the label of domains that no policy has.
const unknownDomain = "unknown"

// errNoPolicy is the answer before the first policies are loaded.
var errNoPolicy = errors.New("no policy is loaded yet")
