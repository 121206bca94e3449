package server_test

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	als "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
)

// calls makes one call of everything that weir serves, and returns what is answered.
func (s *secured) calls(t *testing.T, as *tls.Config) map[string]error {
	t.Helper()
	conn := s.dial(t, as)
	ctx := storetest.Context(t)
	answers := make(map[string]error)
	leases := weirv1.NewLeaseServiceClient(conn)
	_, answers["Acquire"] = leases.Acquire(ctx, &weirv1.AcquireRequest{Domain: "d", Descriptors: []*weirv1.Descriptor{typed("a", "x")}})
	_, answers["Release"] = leases.Release(ctx, &weirv1.ReleaseRequest{LeaseIds: []string{"x"}})
	_, answers["Renew"] = leases.Renew(ctx, &weirv1.RenewRequest{LeaseIds: []string{"x"}})
	_, answers["Reconcile"] = leases.Reconcile(ctx, &weirv1.ReconcileRequest{Usage: []*weirv1.LeaseUsage{{LeaseId: "x", Limits: []*weirv1.LimitUsage{{}}}}})
	_, answers["Inspect"] = leases.Inspect(ctx, &weirv1.InspectRequest{Domain: "d", Entries: []*weirv1.Entry{{Key: "a", Value: "x"}}})
	_, answers["ShouldRateLimit"] = rls.NewRateLimitServiceClient(conn).ShouldRateLimit(ctx, &rls.RateLimitRequest{Domain: "d", Descriptors: descriptorsOf(t, "[a=x]")})
	log, err := als.NewAccessLogServiceClient(conn).StreamAccessLogs(ctx)
	if err == nil {
		_, err = log.CloseAndRecv()
	}
	if status.Code(err) == codes.Internal { // the log ends without an answer, as Envoy expects it
		err = nil
	}
	answers["StreamAccessLogs"] = err
	_, answers["Check"] = healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
	list, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
	if err == nil {
		err = list.Send(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}})
	}
	if err == nil {
		_, err = list.Recv()
	}
	answers["reflection"] = err
	for _, page := range []string{"/healthz", "/healthcheck", "/metrics", "/json", "/", "/status.json"} {
		answers[page] = s.page(t, as, s.HTTP, page)
	}
	return answers
}

// page asks a page, and returns what it says if it is not 200.
func (s *secured) page(t *testing.T, as *tls.Config, host, path string) error {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: as, DisableKeepAlives: true}
	client := &http.Client{Transport: transport, Timeout: storetest.Deadline}
	var r *http.Response
	var err error
	if path == "/json" {
		r, err = client.Post("https://"+host+path, "application/json", strings.NewReader(`{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"x"}]}]}`))
	} else {
		r, err = client.Get("https://" + host + path)
	}
	if err != nil {
		return err
	}
	defer func() { _ = r.Body.Close() }()
	body, err := io.ReadAll(r.Body)
	switch {
	case err != nil:
		return err
	case r.StatusCode == http.StatusForbidden:
		return status.Error(codes.PermissionDenied, strings.TrimSpace(string(body)))
	case r.StatusCode != http.StatusOK:
		return fmt.Errorf("%d %s", r.StatusCode, body)
	}
	return nil
}

// What each client may do is what the lists say, and nothing else.
func TestEachClientMayDoWhatTheListsSay(t *testing.T) {
	const (
		lease     = "Acquire Release Renew Reconcile Inspect"
		ratelimit = "ShouldRateLimit StreamAccessLogs /json"
		everybody = "Check reflection /healthz /healthcheck /metrics / /status.json"
		probe     = "/healthz /healthcheck"
	)
	lists := []string{"--ratelimit-clients", "spiffe://example.org/edge/*,10.9.8.7", "--lease-clients", "jobs.example.org", "--lease-clients", "*.workers.example.org"}
	for _, tt := range []struct {
		name  string
		flags []string
		as    []string // names
		may   string
		text  string // of a refusal
	}{
		{"no lists", nil, []string{"anybody.example.org"}, lease + " " + ratelimit + " " + everybody, ""},
		{"an Envoy", lists, []string{"spiffe://example.org/edge/envoy"}, ratelimit + " " + everybody, "no name of your certificate (spiffe://example.org/edge/envoy) is in --lease-clients"},
		{"an Envoy by its address", lists, []string{"10.9.8.7"}, ratelimit + " " + everybody, "no name of your certificate (10.9.8.7) is in --lease-clients"},
		{"a job", lists, []string{"jobs.example.org"}, lease + " " + everybody, "no name of your certificate (jobs.example.org) is in --ratelimit-clients"},
		{"a worker", lists, []string{"w7.workers.example.org"}, lease + " " + everybody, "is in --ratelimit-clients"},
		{"both", lists, []string{"jobs.example.org", "spiffe://example.org/edge/envoy"}, lease + " " + ratelimit + " " + everybody, ""},
		{"somebody else", lists, []string{"scraper.example.org"}, everybody, "no name of your certificate (scraper.example.org) is in --"},
		{"one list", lists[2:4], []string{"scraper.example.org"}, ratelimit + " " + everybody, "is in --lease-clients"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := startTLS(t, true, []string{"tests.example.org"}, tt.flags...)
			storetest.Eventually(t, "weir is ready", func() bool { return metricOf(t, s.Process, "weir_ready") == 1 })
			denied := 0
			for call, err := range s.calls(t, s.as(t, tt.as...)) {
				allowed := contains(tt.may, call)
				switch {
				case allowed && err != nil:
					t.Errorf("%s: %v, want that it may", call, err)
				case !allowed && (status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), tt.text)):
					t.Errorf("%s: %v, want PERMISSION_DENIED: %s", call, err, tt.text)
				}
				if !allowed {
					denied++
				}
			}
			if got := metricOf(t, s.Process, `weir_denied_total{area="lease"}`) + metricOf(t, s.Process, `weir_denied_total{area="ratelimit"}`); got != float64(denied) {
				t.Errorf("%v calls are counted as denied, want %d", got, denied)
			}
			if denied > 0 && !strings.Contains(s.Log(), `msg="callers are denied; at most one a second is told"`) {
				t.Errorf("the log does not tell of it:\n%s", s.Log())
			}
		})
	}

	// Without a certificate, or with one that is not good, only probes get in.
	t.Run("nobody", func(t *testing.T) {
		t.Parallel()
		s := startTLS(t, true, []string{"tests.example.org"})
		other := storetest.NewAuthority(t)
		issue := func(by *storetest.Authority, change func(*x509.Certificate)) *tls.Config {
			c := s.as(t)
			pair := by.Issue(t, []string{"jobs.example.org"}, change).TLS()
			c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
			return c
		}
		good := func(*x509.Certificate) {}
		for name, as := range map[string]*tls.Config{
			"no certificate":             s.as(t),
			"another authority":          issue(other, good),
			"the server's own authority": issue(s.server, good),
			"expired": issue(s.clients, func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
			}),
			"not yet valid": issue(s.clients, func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = time.Now().Add(time.Hour), time.Now().Add(2*time.Hour)
			}),
			"of a server": issue(s.clients, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }),
		} {
			for call, err := range s.calls(t, as) {
				want := codes.Unavailable // the handshake fails
				switch {
				case name == "no certificate" && contains(probe, call):
					want = codes.OK
				case name == "no certificate" && call[0] == '/':
					want = codes.PermissionDenied
				case call[0] == '/':
					want = codes.Unknown // no status: the handshake fails
				}
				if got := status.Code(err); got != want {
					t.Errorf("%s: %s: %v, want %v", name, call, err, want)
				}
			}
		}
		if got := metricOf(t, s.Process, `weir_denied_total{area="metrics"}`); got != 3 {
			t.Errorf("%v scrapes and looks at the page are counted as denied, want 3", got)
		}
		if grpc, http := metricOf(t, s.Process, `weir_tls_handshake_errors_total{port="grpc"}`), metricOf(t, s.Process, `weir_tls_handshake_errors_total{port="http"}`); grpc < 6 || http < 5 {
			t.Errorf("%v and %v handshakes are counted as failed, want 6 or more, and 5 or more", grpc, http)
		}
		for _, want := range []string{`msg="TLS handshakes fail; at most one a second is told" port=`} {
			if !strings.Contains(s.Log(), want) {
				t.Errorf("the log does not have %q:\n%s", want, s.Log())
			}
		}
	})
}

func contains(list, word string) bool {
	return strings.Contains(" "+list+" ", " "+word+" ")
}

// Who may not is turned away before the message is read, however wrong it is.
func TestWhoMayNotIsTurnedAwayFirst(t *testing.T) {
	s := startTLS(t, true, []string{"tests.example.org"}, "--ratelimit-clients", "edge.example.org")
	_, err := send(storetest.Context(t), s.dial(t, s.TLS), shouldRateLimit, []byte{0xff})
	if status.Code(err) != codes.PermissionDenied {
		t.Errorf("a message that cannot be decoded: %v, want PERMISSION_DENIED", err)
	}
	_, err = send(storetest.Context(t), s.dial(t, s.as(t, "edge.example.org")), shouldRateLimit, []byte{0xff})
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("the same of somebody who may: %v, want INVALID_ARGUMENT", err)
	}
}

// The admin port is in clear text on loopback; with --admin-clients it is for them alone.
func TestTheAdminPortIsForOperators(t *testing.T) {
	s := startTLS(t, true, []string{"tests.example.org"}, "--admin-clients", "spiffe://example.org/people/*")
	for _, page := range []string{"/rlconfig", "/debug/pprof/", "/debug/pprof/goroutine", "/debug/pprof/symbol"} {
		if err := s.page(t, s.as(t, "spiffe://example.org/people/ann"), s.Admin, page); err != nil {
			t.Errorf("%s of an operator: %v", page, err)
		}
		if err := s.page(t, s.TLS, s.Admin, page); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s of somebody else: %v, want PERMISSION_DENIED", page, err)
		}
		if err := s.page(t, s.as(t), s.Admin, page); err == nil || status.Code(err) == codes.PermissionDenied {
			t.Errorf("%s of nobody: %v, want that the handshake fails", page, err)
		}
	}
	if got := metricOf(t, s.Process, `weir_denied_total{area="admin"}`); got != 4 {
		t.Errorf("%v calls are counted as denied, want 4", got)
	}
	plain, err := http.Get("http://" + s.Admin + "/rlconfig")
	if err != nil {
		t.Fatal(err)
	}
	_ = plain.Body.Close()
	if plain.StatusCode != http.StatusBadRequest {
		t.Errorf("clear text is answered %d, want 400", plain.StatusCode)
	}
}

func TestAnAdminPortThatIsOpenIsWarnedOf(t *testing.T) {
	const warning = "the admin port is open to other machines"
	if p := startTLS(t, false, nil, "--admin-listen", "0.0.0.0:0"); !strings.Contains(p.Log(), warning) {
		t.Errorf("no warning of an open admin port:\n%s", p.Log())
	}
	if p := startTLS(t, false, nil); strings.Contains(p.Log(), warning) {
		t.Errorf("a warning of an admin port on loopback:\n%s", p.Log())
	}
}
