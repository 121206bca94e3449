package e2e

import (
	"crypto/tls"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"weir/server/servertest"
	"weir/store/storetest"
)

const (
	tlsVariant = "tls.yaml"
	tlsFolder  = "/etc/envoy/tls" // in the variant
)

// secretFiles makes a folder of what the variant's /etc/envoy/tls should hold, for an
// Envoy of this name, and returns the changes of the variant with this folder. The
// authority is that of weir and of Envoy.
func secretFiles(t *testing.T, authority *storetest.Authority, name string) (dir string, changes []change) {
	t.Helper()
	dir = t.TempDir()
	authority.Issue(t, []string{name}).Write(t, dir)
	authority.Write(t, dir)
	for _, file := range []string{"certificate.yaml", "authorities.yaml"} {
		text, err := os.ReadFile(variants + "tls/" + file)
		if err != nil {
			t.Fatal(err)
		}
		storetest.Replace(t, filepath.Join(dir, file), []byte(strings.ReplaceAll(string(text), tlsFolder, dir)))
	}
	for _, c := range variant(t, tlsVariant) {
		changes = append(changes, change{c.old, strings.ReplaceAll(c.now, tlsFolder, dir)})
	}
	return dir, changes
}

const edge = "spiffe://example.org/edge/envoy"

// securedStack is a stack whose weir speaks TLS, and knows who may ask it.
type securedStack struct {
	*stack
	authority *storetest.Authority
	weirDir   string // files of weir
	envoyDir  string // files of Envoy
}

func startSecured(t *testing.T, envoyName string, flags ...string) securedStack {
	t.Helper()
	s := securedStack{authority: storetest.NewAuthority(t), weirDir: t.TempDir()}
	cert, key := s.weirNames(t)
	weir := startWeir(t, "testdata/policy.yaml", append([]string{
		"--tls-cert-file", cert, "--tls-key-file", key, "--tls-client-ca-file", s.authority.Write(t, s.weirDir),
		"--ratelimit-clients", "spiffe://example.org/edge/*", "--lease-clients", "tests.example.org",
	}, flags...)...)
	weir.TLS = &tls.Config{RootCAs: s.authority.Pool(), Certificates: []tls.Certificate{s.authority.Issue(t, []string{"tests.example.org"}).TLS()}}
	dir, changes := secretFiles(t, s.authority, envoyName)
	s.envoyDir = dir
	s.stack = startOn(t, []*servertest.Process{weir}, changes...)
	return s
}

// weirNames gives weir a new certificate.
func (s securedStack) weirNames(t *testing.T) (cert, key string) {
	t.Helper()
	return s.authority.Issue(t, []string{"weir.example.org", "127.0.0.1"}).Write(t, s.weirDir)
}

// Envoy asks and releases by TLS, and while both get new certificates no request
// passes unasked.
func TestEnvoyAsksByTLS(t *testing.T) {
	t.Parallel()
	s := startSecured(t, edge, "--max-connection-age", "1s")
	t.Run("a full lane refuses", s.fullLane)
	t.Run("a slot is free when its response has ended", s.freeAtOnce)
	const loads = `weir_tls_loads_total{file="certificate",result="loaded"}`
	const updates = "cluster.weir.client_ssl_socket_factory.ssl_context_update_by_sds"
	stop := make(chan struct{})
	var client sync.WaitGroup
	client.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				a, err := s.send(t.Context(), "renewed", "/ok")
				// On a busy machine a release may come later than the next request waits.
				refused := a.code == http.StatusTooManyRequests && a.header.Get("retry-after") != ""
				if err != nil || a.code != http.StatusOK && !refused {
					t.Errorf("%d %q %v, want 200 or a refusal", a.code, a.body, err)
					return
				}
			}
		}
	})
	for i := range 2 {
		updated, connected := s.envoy.counter(t, updates), 0
		s.weirNames(t)
		s.authority.Issue(t, []string{edge}).Write(t, s.envoyDir)
		storetest.Eventually(t, "weir has its new certificate", func() bool { return s.metric(t, loads) >= 2+i })
		storetest.Eventually(t, "Envoy has its new certificate", func() bool {
			connected = s.envoy.counter(t, "cluster.weir.ssl.handshake")
			return s.envoy.counter(t, updates) > updated
		})
		storetest.Eventually(t, "they have connected by them", func() bool { return s.envoy.counter(t, "cluster.weir.ssl.handshake") >= connected+2 })
	}
	close(stop)
	client.Wait()
	s.idle(t)
	counters := s.envoy.counters(t)
	t.Logf("%d requests: %v", s.asked.Load(), counters)
	if counters["ok"]+counters["over_limit"] != int(s.asked.Load()) || counters["error"]+counters["failure_mode_allowed"] != 0 {
		t.Errorf("of %d requests Envoy counts %v, want all to be decided", s.asked.Load(), counters)
	}
	if got := s.metric(t, `weir_tls_handshake_errors_total{port="grpc"}`) + s.metric(t, `weir_denied_total{area="ratelimit"}`); got != 0 {
		t.Errorf("%d handshakes failed or calls were denied, want 0", got)
	}
}

// An Envoy whose name is not in the list is denied, and lets all pass: both count it.
func TestAnEnvoyThatMayNotAskIsSeen(t *testing.T) {
	t.Parallel()
	s := startSecured(t, "spiffe://example.org/other/envoy")
	for range 7 { // there are five slots
		s.get(t, "alice", "/ok").want(t, http.StatusOK)
	}
	if d := cmp.Diff(map[string]int{"error": 7, "failure_mode_allowed": 7}, s.envoy.counters(t)); d != "" {
		t.Errorf("Envoy's counters (-want +got):\n%s", d)
	}
	if got := s.metric(t, `weir_denied_total{area="ratelimit"}`); got < 7 {
		t.Errorf("%d calls are counted as denied, want 7 or more", got)
	}
	if !strings.Contains(s.weir.Log(), "names=[spiffe://example.org/other/envoy]") {
		t.Errorf("weir's log does not name it:\n%s", s.weir.Log())
	}
}
