package deploy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"weir/server/servertest"
	"weir/store/storetest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		servertest.Clean()
		os.Exit(code)
	}))
}

// tool returns the program that a variable names, else the one on PATH. Without any the test
// is skipped, or fails if WEIR_REQUIRE_TOOLS is set, as make test does.
func tool(t testing.TB, variable, name string) string {
	t.Helper()
	if path := os.Getenv(variable); path != "" {
		return path
	}
	if os.Getenv("WEIR_REQUIRE_TOOLS") != "" {
		t.Fatalf("%s must name a %s: run the tests by make test", variable, name)
	}
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("no %s: run make test, or set %s", name, variable)
	}
	return path
}

// promtool runs it in the folder of the rules.
func promtool(t testing.TB, args ...string) {
	t.Helper()
	c := exec.Command(tool(t, "WEIR_PROMTOOL", "promtool"), args...)
	c.Dir = "prometheus"
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// prometheus is a Prometheus of a test's own.
type prometheus struct {
	url    string // http://host:port
	client http.Client

	mu  sync.Mutex // guards log
	log bytes.Buffer
}

// Write takes its log.
func (p *prometheus) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(b)
}

func (p *prometheus) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

var listening = regexp.MustCompile(`msg="Listening on" address=(127\.0\.0\.1:\d+)`)

// job is a part of scrape_configs: a job that scrapes these addresses, and what else it is told.
func job(name, more string, addresses ...string) string {
	return fmt.Sprintf("  - {job_name: %s, static_configs: [{targets: ['%s']}]%s}\n", name, strings.Join(addresses, "','"), more)
}

// startPrometheus runs one that scrapes these jobs five times a second, with the rules of
// [shortened], and waits until it answers. It ends with the test.
func startPrometheus(t testing.TB, jobs ...string) *prometheus {
	t.Helper()
	bin := tool(t, "WEIR_PROMETHEUS", "prometheus")
	dir := t.TempDir()
	rules := shortened(t)
	config := `
global: {scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}
rule_files: [rules.yaml]
scrape_configs:
` + strings.Join(jobs, "")
	for name, text := range map[string]string{"prometheus.yaml": config, "rules.yaml": rules} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p := &prometheus{}
	cmd := exec.Command(bin, "--config.file="+filepath.Join(dir, "prometheus.yaml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address=127.0.0.1:0")
	cmd.Stdout, cmd.Stderr = p, p
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(exited)
	}()
	t.Cleanup(func() {
		p.client.CloseIdleConnections()
		stop(t, "Prometheus", cmd, exited)
		if t.Failed() {
			t.Logf("Prometheus' log:\n%s", p.text())
		}
	})
	storetest.Eventually(t, "Prometheus is ready", func() bool {
		select {
		case <-exited:
			t.Fatalf("Prometheus ended at once:\n%s", p.text())
		default:
		}
		m := listening.FindStringSubmatch(p.text())
		if m == nil {
			return false
		}
		p.url = "http://" + m[1]
		r, err := p.client.Get(p.url + "/-/ready")
		if err != nil {
			return false
		}
		_ = r.Body.Close()
		return r.StatusCode == http.StatusOK
	})
	return p
}

// get asks the API and decodes the data of the answer into it. An error is what Prometheus says.
func (p *prometheus) get(t testing.TB, path string, query url.Values, data any) error {
	t.Helper()
	r, err := p.client.Get(p.url + path + "?" + query.Encode())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	var answer struct {
		Status, Error string
		Data          json.RawMessage
	}
	if err := json.NewDecoder(r.Body).Decode(&answer); err != nil {
		t.Fatal(err)
	}
	if answer.Status != "success" {
		return fmt.Errorf("prometheus: %s", answer.Error)
	}
	return json.Unmarshal(answer.Data, data)
}

// sample is a series and its value now.
type sample struct {
	Metric map[string]string
	Value  [2]any // its time, and the value as text
}

func (s sample) value() string { return fmt.Sprint(s.Value[1]) }

// query asks an expression.
func (p *prometheus) query(t testing.TB, expr string) ([]sample, error) {
	t.Helper()
	var data struct{ Result []sample }
	err := p.get(t, "/api/v1/query", url.Values{"query": {expr}}, &data)
	return data.Result, err
}

// has reports whether an expression has this many series now.
func (p *prometheus) has(t testing.TB, expr string, want int) bool {
	t.Helper()
	got, err := p.query(t, expr)
	if err != nil {
		t.Fatal(err)
	}
	return len(got) == want
}

// activeAlert is one that is pending or firing.
type activeAlert struct {
	State               string
	Labels, Annotations map[string]string
}

// alerts are the active ones by name.
func (p *prometheus) alerts(t testing.TB) map[string][]activeAlert {
	t.Helper()
	var data struct{ Alerts []activeAlert }
	if err := p.get(t, "/api/v1/alerts", nil, &data); err != nil {
		t.Fatal(err)
	}
	all := make(map[string][]activeAlert)
	for _, a := range data.Alerts {
		all[a.Labels["alertname"]] = append(all[a.Labels["alertname"]], a)
	}
	return all
}
