package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc/credentials"

	"weir/server"
)

// secureFlags say how callers connect, and who of them may call what.
type secureFlags struct {
	TLSCertFile      string        `name:"tls-cert-file" env:"WEIR_TLS_CERT_FILE" placeholder:"FILE" help:"Certificate (PEM, its intermediate authorities behind it) of the gRPC and HTTP ports, which then speak TLS only. Read again when it changes."`
	TLSKeyFile       string        `name:"tls-key-file" env:"WEIR_TLS_KEY_FILE" placeholder:"FILE" help:"Its private key (PEM)."`
	TLSClientCAFile  string        `name:"tls-client-ca-file" env:"WEIR_TLS_CLIENT_CA_FILE" placeholder:"FILE" help:"Authorities (PEM) of clients. With it callers need a certificate of theirs, for all but /healthz. Read again when it changes."`
	RateLimitClients []string      `name:"ratelimit-clients" env:"WEIR_RATELIMIT_CLIENTS" placeholder:"NAME" help:"Who may call ShouldRateLimit, the access log service and /json: names (SAN) of client certificates, such as spiffe://example.org/edge/*, *.edge.example.org or 10.0.0.7. Repeat it, or separate by commas. Default: every client with a certificate."`
	LeaseClients     []string      `env:"WEIR_LEASE_CLIENTS" placeholder:"NAME" help:"Who may call LeaseService. Default: every client with a certificate."`
	AdminClients     []string      `env:"WEIR_ADMIN_CLIENTS" placeholder:"NAME" help:"Who may call the admin port, which then speaks TLS. Default: clear text, for all who reach it."`
	MaxConnectionAge time.Duration `env:"WEIR_MAX_CONNECTION_AGE" default:"1h" placeholder:"DURATION" help:"How old a gRPC connection gets before its client is asked to make a new one (${default}), so that load spreads over replicas, and who may no longer connect is gone; 0: as old as it likes."`
}

// minConnectionAge bounds how often clients can be made to connect anew.
const minConnectionAge = time.Second

// security is how the ports are served. Its zero value is clear text, for everybody.
type security struct {
	identity   *identity // nil: clear text
	access     *server.Access
	handshakes *handshakes
}

// security reads the flags and the files.
func (c *secureFlags) security(ctx context.Context, parsed *kong.Context, log *slog.Logger, r prometheus.Registerer) (s security, err error) {
	access := &server.Access{}
	for _, l := range []struct {
		flag string
		list []string
		into *server.Clients
	}{
		{"ratelimit-clients", c.RateLimitClients, &access.RateLimit},
		{"lease-clients", c.LeaseClients, &access.Leases},
		{"admin-clients", c.AdminClients, &access.Admin},
	} {
		if len(l.list) == 0 && isArgument(parsed, l.flag) { // in the environment, empty is as good as absent
			return s, fmt.Errorf("--%s is empty, which would let everybody in; name somebody, or leave it out", l.flag)
		}
		if len(l.list) > 0 && c.TLSClientCAFile == "" {
			return s, fmt.Errorf("--%s needs --tls-client-ca-file: without it nobody proves who they are", l.flag)
		}
		if *l.into, err = server.ParseClients(l.list); err != nil {
			return s, fmt.Errorf("--%s: %w", l.flag, err)
		}
	}
	if c.MaxConnectionAge < 0 || c.MaxConnectionAge > 0 && c.MaxConnectionAge < minConnectionAge {
		return s, fmt.Errorf("--max-connection-age must be %v or more, or 0 for no end, got %v; the default is 1h", minConnectionAge, c.MaxConnectionAge)
	}
	switch {
	case c.TLSCertFile == "" && c.TLSKeyFile == "" && c.TLSClientCAFile == "":
		return s, nil
	case c.TLSCertFile == "" || c.TLSKeyFile == "":
		return s, errors.New("TLS needs both --tls-cert-file and --tls-key-file; give both, or leave out --tls-client-ca-file too")
	}
	if s.identity, err = newIdentity(ctx, c.TLSCertFile, c.TLSKeyFile, c.TLSClientCAFile, log, r); err != nil {
		return s, err
	}
	if c.TLSClientCAFile != "" {
		s.access = access
	}
	s.handshakes = newHandshakes(log, r)
	return s, nil
}

// credentials are those of the gRPC port; nil: clear text.
func (s security) credentials() credentials.TransportCredentials {
	if s.identity == nil {
		return nil
	}
	return watched{credentials.NewTLS(s.identity.config(tls.RequireAndVerifyClientCert, "h2")), s.handshakes}
}

// wrap has the pages speak TLS. Probes have no certificate, so that the HTTP port asks
// for one and lets each page say whether it needs it.
func (s security) wrap(ctx context.Context, l listeners, log *slog.Logger) listeners {
	if s.identity != nil {
		l.http = tls.NewListener(l.http, s.identity.config(tls.VerifyClientCertIfGiven, "http/1.1"))
	}
	if l.admin == nil {
		return l
	}
	if s.access != nil && len(s.access.Admin) > 0 {
		l.admin = tls.NewListener(l.admin, s.identity.config(tls.RequireAndVerifyClientCert, "http/1.1"))
	} else if a, ok := l.admin.Addr().(*net.TCPAddr); ok && !a.IP.IsLoopback() {
		log.WarnContext(ctx, "the admin port is open to other machines: everybody who reaches it sees the policies and who holds what, can take profiles, end leases and reset limits; listen on 127.0.0.1, or name who may by --admin-clients", "admin", a.String())
	}
	return l
}

// logHandler is where the HTTP ports say what went wrong.
func (s security) logHandler(h slog.Handler) slog.Handler {
	if s.identity == nil {
		return h
	}
	return pageErrors{h, s.handshakes}
}

// handshakes counts those that fail, and tells of them.
type handshakes struct {
	log    *slog.Logger
	failed *prometheus.CounterVec // port
	last   atomic.Int64           // the second of the last line
}

func newHandshakes(log *slog.Logger, r prometheus.Registerer) *handshakes {
	h := &handshakes{log: log, failed: promauto.With(r).NewCounterVec(prometheus.CounterOpts{
		Name: "weir_tls_handshake_errors_total",
		Help: "Connections that ended before TLS was agreed on, by port: grpc or http (with admin). Clients without a valid certificate are among them, and Envoy lets pass what it cannot ask.",
	}, []string{"port"})}
	h.failed.WithLabelValues("grpc")
	h.failed.WithLabelValues("http")
	return h
}

// failure counts one. One that a probe of the port makes, which says nothing and
// goes, is not told of.
func (h *handshakes) failure(port, text string, silent bool) {
	h.failed.WithLabelValues(port).Inc()
	level := slog.LevelWarn
	if now := time.Now().Unix(); silent || h.last.Swap(now) == now {
		level = slog.LevelDebug
	}
	h.log.Log(context.Background(), level, "TLS handshakes fail; at most one a second is told", "port", port, "err", text)
}

// watched has failed handshakes of gRPC counted.
type watched struct {
	credentials.TransportCredentials
	handshakes *handshakes
}

// ServerHandshake implements [credentials.TransportCredentials].
func (w watched) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := w.TransportCredentials.ServerHandshake(c)
	if err != nil {
		silent := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)
		w.handshakes.failure("grpc", c.RemoteAddr().String()+": "+err.Error(), silent)
	}
	return conn, info, err
}

// pageErrors is the log of an HTTP server, of which failed handshakes are counted:
// net/http tells of them only there.
type pageErrors struct {
	slog.Handler
	handshakes *handshakes
}

// Handle implements [slog.Handler].
func (p pageErrors) Handle(ctx context.Context, r slog.Record) error {
	text, ok := strings.CutPrefix(r.Message, "http: TLS handshake error from ")
	if !ok {
		return p.Handler.Handle(ctx, r)
	}
	p.handshakes.failure("http", text, strings.HasSuffix(text, ": EOF") || strings.HasSuffix(text, syscall.ECONNRESET.Error()))
	return nil
}
