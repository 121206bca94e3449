package server_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"weir/server/servertest"
	"weir/store/storetest"
)

const tlsPolicy = `
domain: d
descriptors:
  - {key: a, token_bucket: {capacity: 1000, refill: 1/d}, concurrency: {max_in_flight: 1000, lease: 1h}}
`

// secured is a process that speaks TLS, and its files.
type secured struct {
	*servertest.Process
	server  *storetest.Authority // of the process's certificate
	clients *storetest.Authority // of clients; nil: they need none
	dir     string               // of tls.crt, tls.key, and ca.crt
	first   storetest.Pair
}

// startTLS runs weir serve with a certificate, and with mutual asks clients for one.
// What the process's Dial and Get present is client's, if it has any name.
func startTLS(t testing.TB, mutual bool, client []string, flags ...string) *secured {
	t.Helper()
	s := &secured{server: storetest.NewAuthority(t), dir: t.TempDir()}
	s.first = s.server.Issue(t, []string{"127.0.0.1"})
	cert, key := s.first.Write(t, s.dir)
	flags = append([]string{"--tls-cert-file", cert, "--tls-key-file", key}, flags...)
	if mutual {
		s.clients = storetest.NewAuthority(t)
		flags = append(flags, "--tls-client-ca-file", s.clients.Write(t, s.dir))
	}
	s.Process = servertest.Start(t, tlsPolicy, flags...)
	s.TLS = s.as(t, client...)
	return s
}

// as is TLS of a client whose certificate has these names; without any it has none.
func (s *secured) as(t testing.TB, names ...string) *tls.Config {
	t.Helper()
	c := &tls.Config{RootCAs: s.server.Pool()}
	if len(names) > 0 {
		c.Certificates = []tls.Certificate{s.clients.Issue(t, names).TLS()}
	}
	return c
}

// dial connects as somebody.
func (s *secured) dial(t testing.TB, as *tls.Config) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+s.GRPC, grpc.WithTransportCredentials(credentials.NewTLS(as)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// check asks for the health, and returns the certificate that the server has shown.
func check(ctx context.Context, conn *grpc.ClientConn) (*x509.Certificate, error) {
	var p peer.Peer
	_, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{}, grpc.Peer(&p))
	if info, ok := p.AuthInfo.(credentials.TLSInfo); ok && err == nil {
		return info.State.PeerCertificates[0], nil
	}
	return nil, err
}

func TestCertificatesAreReadAgainWithoutBreakingConnections(t *testing.T) {
	s := startTLS(t, false, nil)
	old := s.Dial(t)
	shown := func(conn *grpc.ClientConn) string {
		t.Helper()
		c, err := check(storetest.Context(t), conn)
		if err != nil {
			t.Fatal(err)
		}
		return c.SerialNumber.Text(16)
	}
	first, second := s.first.Leaf.SerialNumber.Text(16), s.server.Issue(t, []string{"127.0.0.1"})
	if got := shown(old); got != first {
		t.Fatalf("the certificate has serial %s, want %s", got, first)
	}
	watch, err := healthpb.NewHealthClient(old).Watch(storetest.Context(t), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}

	second.Write(t, s.dir)
	storetest.Eventually(t, "a new connection sees the new certificate", func() bool {
		return shown(s.dial(t, s.TLS)) == second.Leaf.SerialNumber.Text(16)
	})
	// The old connection is the same one still, and its stream goes on.
	if got := shown(old); got != first {
		t.Errorf("the old connection has serial %s, want %s still", got, first)
	}
	s.Terminate(t)
	if m, err := watch.Recv(); err != nil || m.GetStatus() != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Errorf("the old stream says %v, %v, want NOT_SERVING at the stop", m, err)
	}
}

func TestClearTextIsTurnedAway(t *testing.T) {
	s := startTLS(t, false, nil)
	s.TLS = nil
	if _, err := check(storetest.Context(t), s.Dial(t)); status.Code(err) != codes.Unavailable {
		t.Errorf("gRPC in clear text: %v, want UNAVAILABLE", err)
	}
	if code, body := s.Get(t, "/healthz"); code != 400 {
		t.Errorf("HTTP in clear text: %d %q, want 400", code, body)
	}
}
