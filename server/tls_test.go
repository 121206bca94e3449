package server_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"os"
	"strings"
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

// A broken file leaves the certificate in force, and is seen.
func TestABrokenCertificateIsSeenAndNotServed(t *testing.T) {
	s := startTLS(t, false, nil)
	file := s.dir + "/tls.key"
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	storetest.Replace(t, file, good[:len(good)/2])
	storetest.Eventually(t, "the broken file is seen", func() bool {
		return metricOf(t, s.Process, `weir_tls_file_wrong{file="certificate"}`) == 1
	})
	if c, err := check(storetest.Context(t), s.Dial(t)); err != nil || c.SerialNumber.Cmp(s.first.Leaf.SerialNumber) != 0 {
		t.Errorf("a new connection: %v, %v, want the certificate that was good", c, err)
	}
	if !strings.Contains(s.Log(), "a file of TLS is wrong: what was good before stays in force") {
		t.Errorf("the log does not tell of it:\n%s", s.Log())
	}
	if got, want := metricOf(t, s.Process, `weir_tls_certificate_not_after_timestamp_seconds{file="certificate"}`), s.first.Leaf.NotAfter.Unix(); got != float64(want) {
		t.Errorf("the certificate ends at %.0f, want %d", got, want)
	}
	storetest.Replace(t, file, good)
	storetest.Eventually(t, "the file is good again", func() bool {
		return metricOf(t, s.Process, `weir_tls_file_wrong{file="certificate"}`) == 0
	})
}

// Another authority of clients is trusted at once, and one that is taken out lets
// nobody in any more; connections that are there go on until they are old.
func TestAuthoritiesOfClientsAreReadAgain(t *testing.T) {
	s := startTLS(t, true, []string{"old.example.org"}, "--log-level", "debug")
	file, first, second := s.dir+"/ca.crt", s.clients, storetest.NewAuthority(t)
	before := s.TLS
	s.clients = second
	after := s.as(t, "new.example.org")
	connects := func(as *tls.Config) bool {
		_, err := check(storetest.Context(t), s.dial(t, as))
		return err == nil
	}
	old := s.dial(t, before)
	if _, err := check(storetest.Context(t), old); err != nil {
		t.Fatal(err)
	}
	resuming := before.Clone()
	resuming.ClientSessionCache = tls.NewLRUClientSessionCache(8)
	if !connects(before) || !connects(resuming) {
		t.Error("a client of the authority that is there is not let in")
	}
	if connects(after) {
		t.Error("a client of an authority that is not there is let in")
	}
	storetest.Replace(t, file, first.PEM(second))
	storetest.Eventually(t, "clients of both authorities are let in", func() bool { return connects(after) && connects(before) })
	storetest.Replace(t, file, second.PEM())
	// A client that has had a session before cannot go on with it.
	storetest.Eventually(t, "clients of the first are not let in any more", func() bool { return !connects(before) && !connects(resuming) })
	if _, err := check(storetest.Context(t), old); err != nil {
		t.Errorf("the connection that was there: %v, want that it goes on", err)
	}
	s.TLS = after // as what the test ends with
	storetest.Eventually(t, "failed handshakes are counted", func() bool {
		return metricOf(t, s.Process, `weir_tls_handshake_errors_total{port="grpc"}`) >= 2
	})
}

func TestTLSIsOfNoOldVersionAndNoOldSession(t *testing.T) {
	s := startTLS(t, false, nil)
	for version, want := range map[uint16]bool{tls.VersionTLS11: false, tls.VersionTLS12: true, tls.VersionTLS13: true} {
		for port, protocol := range map[string]string{s.GRPC: "h2", s.HTTP: "http/1.1"} {
			conn, err := tls.Dial("tcp", port, &tls.Config{RootCAs: s.server.Pool(), MinVersion: version, MaxVersion: version, NextProtos: []string{protocol}})
			if (err == nil) != want {
				t.Errorf("%s by %s: %v, want %v", tls.VersionName(version), protocol, err, want)
			}
			if err == nil {
				_ = conn.Close()
			}
		}
	}
	// Sessions are not resumed. (A client of TLS 1.2 has its ticket when it is connected.)
	cache := tls.NewLRUClientSessionCache(1)
	for range 2 {
		conn, err := tls.Dial("tcp", s.GRPC, &tls.Config{RootCAs: s.server.Pool(), MaxVersion: tls.VersionTLS12, NextProtos: []string{"h2"}, ClientSessionCache: cache})
		if err != nil {
			t.Fatal(err)
		}
		if conn.ConnectionState().DidResume {
			t.Error("a session is resumed")
		}
		_ = conn.Close()
	}
	conn, err := tls.Dial("tcp", s.GRPC, &tls.Config{RootCAs: s.server.Pool(), NextProtos: []string{"h2"}})
	if err != nil {
		t.Fatal(err)
	}
	if got := conn.ConnectionState().Version; got != tls.VersionTLS13 {
		t.Errorf("who speaks all is answered in %s, want TLS 1.3", tls.VersionName(got))
	}
	_ = conn.Close()
}
