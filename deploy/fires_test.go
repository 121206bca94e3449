package deploy

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

// The alerts that each test has fire; together they are all.
var (
	ofRedis = []string{"WeirBypassed", "WeirStoreDown", "WeirBreakerOpen"}
	ofWork  = []string{
		"WeirLeasesExpiring", "WeirPoolSaturated", "WeirDecisionsSlow", "WeirDecisionsNearStockTimeout", "WeirPolicyFilesWrong",
		"WeirPolicyVersionsDiffer", "WeirUnknownDomain", "WeirCertificateEnds", "WeirTLSFileWrong", "WeirDenied", "WeirSettlementsLate",
		"EnvoyPassedUnasked", "WeirShadowReady", "WeirNotReady",
	}
	// constant are of a replica that has not found its Redis, and of certificates that live for an hour.
	constant = []string{"WeirNotReady", "WeirStoreDown", "WeirCertificateEnds"}
)

func TestEachAlertIsMadeToFire(t *testing.T) {
	var want []string
	for _, r := range rules(t) {
		want = append(want, r.Alert)
	}
	got := append(slices.Concat(ofRedis, ofWork), "WeirNotScraped")
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("the tests have %v fire, want %v", got, want)
	}
}

const policyText = `
domain: inference
descriptors:
  - {key: account, token_bucket: {capacity: 3, refill: 1/d}, concurrency: {max_in_flight: 100, lease: 2m, name: lane}}
  - {key: pool, value: images, concurrency: {max_in_flight: 2, lease: 2m, max_wait: 0s}, reject_as: pool}
  - {key: brief, concurrency: {max_in_flight: 1, lease: 200ms}}
  - {key: trial, token_bucket: {capacity: 1, refill: 1/d}, shadow_mode: true}
  - {key: tokens, rate_limit: {unit: day, requests_per_unit: 1000, reserve: 10m}}
`

// waitsText has requests that wait longer than Envoy does without a timeout of its own.
const waitsText = `
domain: waits
descriptors:
  - {key: slow, concurrency: {max_in_flight: 1, lease: 2m, max_wait: 150ms}}
`

// ask asks a domain for these descriptors, each KEY=VALUE, under an operation id if it is not empty.
func ask(t testing.TB, client weirv1.LeaseServiceClient, domain, operation string, descriptors ...string) *weirv1.AcquireResponse {
	t.Helper()
	r := &weirv1.AcquireRequest{Domain: domain, OperationId: operation}
	for _, d := range descriptors {
		key, value, _ := strings.Cut(d, "=")
		r.Descriptors = append(r.Descriptors, &weirv1.Descriptor{Entries: []*weirv1.Entry{{Key: key, Value: value}}})
	}
	answer, err := client.Acquire(storetest.Context(t), r)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

// settle tells that a lease has used 5 tokens.
func settle(t testing.TB, client weirv1.LeaseServiceClient, lease string) {
	t.Helper()
	usage := &weirv1.LeaseUsage{LeaseId: lease, Limits: []*weirv1.LimitUsage{{Limit: "tokens", Hits: 5}}}
	if _, err := client.Reconcile(storetest.Context(t), &weirv1.ReconcileRequest{Usage: []*weirv1.LeaseUsage{usage}}); err != nil {
		t.Fatal(err)
	}
}

// startWeir runs a replica on a Redis, and waits until that has answered.
func startWeir(t testing.TB, r *storetest.Redis, flags ...string) *servertest.Process {
	t.Helper()
	p := servertest.Start(t, policyText, append([]string{"--redis", r.URL, "--store-timeout", storetest.Deadline.String()}, flags...)...)
	storetest.Eventually(t, "weir is ready", func() bool {
		code, _ := p.Get(t, "/healthz")
		return code == 200
	})
	return p
}

// shortened are the rules with times that a test can wait for.
func shortened(t testing.TB) string {
	t.Helper()
	text := read(t, "prometheus/alerts.yaml")
	text = regexp.MustCompile(`for: [1-9]\d*[smh]`).ReplaceAllString(text, "for: 400ms")
	text = regexp.MustCompile(`(\[|offset )(5m|10m|15m|1h|7d)`).ReplaceAllString(text, "${1}3s")
	return strings.ReplaceAll(text, "interval: 5m", "interval: 1s")
}

// waitFiring waits until each of these alerts has fired, doing something again and again, and returns them.
func (p *prometheus) waitFiring(t testing.TB, names []string, do func()) map[string]activeAlert {
	t.Helper()
	fired := make(map[string]activeAlert)
	missing := func() []string {
		return slices.DeleteFunc(slices.Clone(names), func(n string) bool { _, ok := fired[n]; return ok })
	}
	defer func() {
		if m := missing(); len(m) > 0 {
			t.Errorf("these alerts did not fire: %v", m)
		}
	}()
	storetest.Eventually(t, "the alerts fire", func() bool {
		do()
		for name, all := range p.alerts(t) {
			for _, a := range all {
				if a.State == "firing" {
					fired[name] = a
				}
			}
		}
		return len(missing()) == 0
	})
	for _, name := range names {
		for annotation, text := range fired[name].Annotations {
			if strings.Contains(text, "{{") || strings.Contains(text, "error expanding") || strings.Contains(text, "<no value>") {
				t.Errorf("%s says in its %s: %s", name, annotation, text)
			}
		}
	}
	return fired
}

// waitQuiet waits until no alert is active but these.
func (p *prometheus) waitQuiet(t testing.TB, but ...string) {
	t.Helper()
	var active map[string][]activeAlert
	quiet := false
	defer func() {
		if !quiet {
			t.Errorf("these alerts are active: %v", active)
		}
	}()
	storetest.Eventually(t, "no other alert is active", func() bool {
		active = p.alerts(t)
		for name := range active {
			if !slices.Contains(but, name) {
				return false
			}
		}
		return true
	})
	quiet = true
}

// wantLabels checks the labels of an alert, given as name, value and so on.
func wantLabels(t testing.TB, name string, a activeAlert, labels ...string) {
	t.Helper()
	for pair := range slices.Chunk(labels, 2) {
		if a.Labels[pair[0]] != pair[1] {
			t.Errorf("%s has the labels %v, want %s=%s", name, a.Labels, pair[0], pair[1])
		}
	}
}

func TestAlertsFireWhileRedisIsAwayAndThenEnd(t *testing.T) {
	t.Parallel()
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	weir := startWeir(t, redis)
	leases := weirv1.NewLeaseServiceClient(weir.Dial(t))
	p := startPrometheus(t, job("weir", "", weir.HTTP))
	storetest.Eventually(t, "weir is scraped", func() bool { return p.has(t, `weir_store_up{job="weir"} == 1`, 1) })
	ask(t, leases, "inference", "", "account=a")
	p.waitQuiet(t)

	redis.Kill()
	fired := p.waitFiring(t, ofRedis, func() { ask(t, leases, "inference", "", "account=a") })
	wantLabels(t, "WeirBypassed", fired["WeirBypassed"], "domain", "inference", "mode", "open")
	wantLabels(t, "WeirStoreDown", fired["WeirStoreDown"], "job", "weir")
	wantLabels(t, "WeirBreakerOpen", fired["WeirBreakerOpen"], "domain", "inference")

	// The dashboard says so, in its first row.
	for title, is := range map[string]func(value string) bool{
		"Redis answers":         func(v string) bool { return v == "0" },
		"Bypassed now":          func(v string) bool { return v != "0" },
		"Bypassed in this time": func(v string) bool { return v != "0" },
		"Redis, by replica":     func(v string) bool { return v == "0" },
		"Errors of Redis":       func(v string) bool { return v != "0" },
	} {
		got := p.panel(t, title)
		if len(got) == 0 || !is(got[0].value()) {
			t.Errorf("while Redis is away the panel %q shows %v", title, got)
		}
	}

	redis.Start(t)
	start := time.Now()
	p.waitQuiet(t)
	t.Logf("the alerts ended %v after Redis was back", time.Since(start).Round(time.Millisecond))
	if d := ask(t, leases, "inference", "", "account=b"); !d.GetAdmitted() || d.GetLease().GetId() == "" || d.GetBypassReason() != "" {
		t.Errorf("after it all: %v, want a lease of the store", d)
	}
}

// secured is a replica in memory that speaks TLS, and lets nobody but jobs.example.org call
// LeaseService.
type secured struct {
	*servertest.Process
	server, clients *storetest.Authority
	dir             string
}

func startSecured(t testing.TB) *secured {
	t.Helper()
	s := &secured{server: storetest.NewAuthority(t), clients: storetest.NewAuthority(t), dir: t.TempDir()}
	cert, key := s.server.Issue(t, []string{"127.0.0.1"}).Write(t, s.dir)
	s.Process = servertest.Start(t, policyText, "--tls-cert-file", cert, "--tls-key-file", key,
		"--tls-client-ca-file", s.clients.Write(t, s.dir), "--lease-clients", "jobs.example.org")
	return s
}

// job has it scraped by a client with a certificate.
func (s *secured) job(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	cert, key := s.clients.Issue(t, []string{"prometheus.example.org"}).Write(t, dir)
	return job("weir-tls", ", scheme: https, tls_config: {ca_file: "+s.server.Write(t, dir)+", cert_file: "+cert+", key_file: "+key+"}", s.HTTP)
}

// denied calls what the caller may not.
func (s *secured) denied(t testing.TB) {
	t.Helper()
	config := &tls.Config{RootCAs: s.server.Pool(), Certificates: []tls.Certificate{s.clients.Issue(t, []string{"edge.example.org"}).TLS()}}
	conn, err := grpc.NewClient("passthrough:///"+s.GRPC, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_, err = weirv1.NewLeaseServiceClient(conn).Acquire(storetest.Context(t), &weirv1.AcquireRequest{Domain: "inference"})
	if status.Code(err) != codes.PermissionDenied {
		t.Fatalf("a stranger is told %v, want PermissionDenied", err)
	}
}

// Alerts that have nothing to do with Redis: what they are for is done, they fire, it is
// undone, they end. Meanwhile every panel of the dashboard has something to show.
func TestAlertsFireForWhatIsDone(t *testing.T) {
	t.Parallel()
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	ofA, ofB := filepath.Join(t.TempDir(), "waits.yaml"), filepath.Join(t.TempDir(), "waits.yaml")
	storetest.Replace(t, ofA, []byte(waitsText))
	storetest.Replace(t, ofB, []byte(waitsText))
	a, b := startWeir(t, redis, "--policy", ofA), startWeir(t, redis, "--policy", ofB)
	private := startSecured(t)
	missing := storetest.StartRedis(t, storetest.AnyRedis(t))
	missing.Kill()
	late := servertest.Start(t, policyText, "--redis", missing.URL) // it has never found its Redis
	url, admin := startEnvoy(t)
	p := startPrometheus(t, job("weir", "", a.HTTP, b.HTTP), private.job(t), job("weir-new", "", late.HTTP), job("envoy", ", metrics_path: /stats/prometheus", admin))
	storetest.Eventually(t, "all are scraped", func() bool { return p.has(t, `up == 1`, 5) })
	leases := weirv1.NewLeaseServiceClient(a.Dial(t))
	ask(t, leases, "inference", "", "trial=a")
	ask(t, leases, "inference", "", "trial=a") // would be refused: the series of a shadow limit begins
	p.waitQuiet(t, constant...)

	// Done: all at once.
	held := []string{
		ask(t, leases, "inference", "again", "pool=images").GetLease().GetId(),
		ask(t, leases, "inference", "", "pool=images").GetLease().GetId(),
	}
	if d := ask(t, leases, "inference", "again", "pool=images"); !d.GetReplayed() {
		t.Fatalf("an operation that asks again is told %v, want its lease", d)
	}
	if d := ask(t, leases, "inference", "", "pool=images"); d.GetAdmitted() {
		t.Fatalf("of 2 slots a third was granted: %v", d)
	}
	held = append(held, ask(t, leases, "waits", "", "slow=s").GetLease().GetId())
	storetest.Replace(t, ofA, []byte("domain: waits\ndescriptors: [{}]\n"))
	storetest.Replace(t, ofB, []byte(strings.Replace(waitsText, "150ms", "160ms", 1)))
	storetest.Replace(t, filepath.Join(private.dir, "tls.crt"), []byte("no certificate"))
	private.Signal(t, syscall.SIGHUP)
	estimated := ask(t, leases, "inference", "", "brief=x", "tokens=x").GetLease().GetId()
	expired := false
	fired := p.waitFiring(t, ofWork, func() {
		if !expired && ask(t, leases, "inference", "", "brief=x").GetAdmitted() { // so that lease has expired
			expired = true
			settle(t, leases, estimated)
		}
		ask(t, leases, "inference", "", "brief=y")
		settle(t, leases, ask(t, leases, "inference", "", "tokens="+time.Now().String()).GetLease().GetId())
		ask(t, leases, "inference", "", "trial="+time.Now().String()) // passes
		ask(t, leases, "waits", "", "slow=s")                         // waits, and is refused
		ask(t, leases, "elsewhere", "", "account=a")
		private.denied(t)
		r, err := http.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		_ = r.Body.Close()
		if r.StatusCode != http.StatusOK {
			t.Fatalf("Envoy without weir answers %s, want 200", r.Status)
		}
	})
	wantLabels(t, "WeirPoolSaturated", fired["WeirPoolSaturated"], "domain", "inference", "limit", "pool", "subject", "pool=images")
	wantLabels(t, "WeirLeasesExpiring", fired["WeirLeasesExpiring"], "domain", "inference")
	wantLabels(t, "WeirDecisionsSlow", fired["WeirDecisionsSlow"], "domain", "waits")
	wantLabels(t, "WeirTLSFileWrong", fired["WeirTLSFileWrong"], "file", "certificate")
	wantLabels(t, "WeirDenied", fired["WeirDenied"], "area", "lease")
	wantLabels(t, "WeirSettlementsLate", fired["WeirSettlementsLate"], "domain", "inference", "limit", "tokens")
	wantLabels(t, "WeirShadowReady", fired["WeirShadowReady"], "domain", "inference", "limit", "trial")
	wantLabels(t, "EnvoyPassedUnasked", fired["EnvoyPassedUnasked"], "envoy_cluster_name", "upstream")
	wantLabels(t, "WeirNotReady", fired["WeirNotReady"], "job", "weir-new")
	p.checkDashboard(t)

	// Undone.
	if _, err := leases.Release(storetest.Context(t), &weirv1.ReleaseRequest{LeaseIds: held}); err != nil {
		t.Fatal(err)
	}
	storetest.Replace(t, ofA, []byte(waitsText))
	storetest.Replace(t, ofB, []byte(waitsText))
	private.server.Issue(t, []string{"127.0.0.1"}, func(c *x509.Certificate) { c.NotAfter = time.Now().AddDate(0, 1, 0) }).Write(t, private.dir)
	private.Signal(t, syscall.SIGHUP)
	p.waitQuiet(t, constant...)
	storetest.Eventually(t, "of the certificates only that of the authority ends soon", func() bool {
		ends := p.alerts(t)["WeirCertificateEnds"]
		return len(ends) == 1 && ends[0].Labels["file"] == "client_ca"
	})

	// The Redis of the new replica comes, and another replica goes.
	missing.Start(t)
	p.waitQuiet(t, "WeirCertificateEnds")
	b.Terminate(t)
	if code := b.Wait(t); code != 0 {
		t.Errorf("the replica ended with %d, want 0", code)
	}
	gone := p.waitFiring(t, []string{"WeirNotScraped"}, func() {})["WeirNotScraped"]
	wantLabels(t, "WeirNotScraped", gone, "job", "weir", "instance", b.HTTP)
}
