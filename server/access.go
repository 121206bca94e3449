package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// Access says who may call what, by the names in client certificates. A list that is
// empty lets every client in that has a certificate of the authorities; but the admin
// pages everybody.
type Access struct {
	RateLimit Clients // ShouldRateLimit, the access log service and /json
	Leases    Clients // LeaseService
	Admin     Clients // the admin pages
}

// area is something that callers need a permission for.
type area struct {
	name string // in metrics and texts: one of areas
	flag string // whose list says who may
	list func(*Access) Clients
}

var (
	areaRateLimit = area{"ratelimit", "--ratelimit-clients", func(a *Access) Clients { return a.RateLimit }}
	areaLeases    = area{"lease", "--lease-clients", func(a *Access) Clients { return a.Leases }}
	areaAdmin     = area{"admin", "--admin-clients", func(a *Access) Clients { return a.Admin }}
	areaMetrics   = area{"metrics", "", func(*Access) Clients { return nil }}

	areas = []area{areaRateLimit, areaLeases, areaAdmin, areaMetrics}
)

// newDenied counts who is turned away, by area.
func newDenied(r prometheus.Registerer) *prometheus.CounterVec {
	denied := promauto.With(r).NewCounterVec(prometheus.CounterOpts{
		Name: "weir_denied_total",
		Help: "Calls of clients that lack the permission, by area: ratelimit, lease, admin or metrics.",
	}, []string{"area"})
	for _, a := range areas {
		denied.WithLabelValues(a.name)
	}
	return denied
}

// permit returns nil if somebody with this certificate, nil for none, may call what is
// in the area, and else a status that tells the caller why not. What it tells is
// nothing that the caller does not know.
func (s *Server) permit(ctx context.Context, to area, cert *x509.Certificate) error {
	list := to.list(s.access)
	var text string
	var who []string
	switch {
	case cert == nil:
		text = "this needs a client certificate"
	case len(list) == 0 || list.Have(cert):
		return nil
	default:
		who = Names(cert)
		who = who[:min(len(who), toldNames)]
		text = "no name of your certificate (" + strings.Join(who, ", ") + ") is in " + to.flag
		if len(who) == 0 {
			text = "your certificate has no name (SAN)"
		}
	}
	s.denied.WithLabelValues(to.name).Inc()
	if now := time.Now().Unix(); s.lastDenied.Swap(now) != now {
		s.log.WarnContext(ctx, "callers are denied; at most one a second is told", "area", to.name, "names", who)
	}
	return status.Error(codes.PermissionDenied, text)
}

// toldNames is how many names of a certificate are told at most.
const toldNames = 8

// guard registers services whose callers need a permission. Who has none is refused
// before the message is decoded.
func (s *Server) guard(to area, services grpc.ServiceRegistrar) grpc.ServiceRegistrar {
	if s.access == nil {
		return services
	}
	return guarded{services, func(ctx context.Context) error { return s.permit(ctx, to, peerCertificate(ctx)) }}
}

type guarded struct {
	grpc.ServiceRegistrar
	permit func(context.Context) error
}

// RegisterService implements [grpc.ServiceRegistrar].
func (g guarded) RegisterService(desc *grpc.ServiceDesc, impl any) {
	own := *desc
	own.Methods = make([]grpc.MethodDesc, len(desc.Methods))
	for i, m := range desc.Methods {
		own.Methods[i] = m
		own.Methods[i].Handler = func(srv any, ctx context.Context, next func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			if err := g.permit(ctx); err != nil {
				return nil, err
			}
			return m.Handler(srv, ctx, next, interceptor)
		}
	}
	own.Streams = make([]grpc.StreamDesc, len(desc.Streams))
	for i, m := range desc.Streams {
		own.Streams[i] = m
		own.Streams[i].Handler = func(srv any, stream grpc.ServerStream) error {
			if err := g.permit(stream.Context()); err != nil {
				return err
			}
			return m.Handler(srv, stream)
		}
	}
	g.ServiceRegistrar.RegisterService(&own, impl)
}

// guardPage is guard for a page.
func (s *Server) guardPage(to area, page http.Handler) http.Handler {
	if s.access == nil {
		return page
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := s.permit(r.Context(), to, verified(r.TLS)); err != nil {
			http.Error(w, status.Convert(err).Message(), http.StatusForbidden)
			return
		}
		page.ServeHTTP(w, r)
	})
}

// peerCertificate is the certificate of who calls by gRPC, nil for none.
func peerCertificate(ctx context.Context) *x509.Certificate {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return nil
	}
	return verified(&info.State)
}

// verified is the certificate of a client, if an authority vouches for it.
func verified(state *tls.ConnectionState) *x509.Certificate {
	if state == nil || len(state.VerifiedChains) == 0 || len(state.VerifiedChains[0]) == 0 {
		return nil
	}
	return state.VerifiedChains[0][0]
}
