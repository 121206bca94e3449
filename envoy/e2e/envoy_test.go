package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"weir/store/storetest"
)

// shipped is the configuration under test: what users start from.
const shipped = "../envoy.yaml"

// envoyBinary returns the Envoy that WEIR_ENVOY names, else the one on PATH.
// Without any the test is skipped, or fails if WEIR_REQUIRE_TOOLS is set, as make
// test does.
func envoyBinary(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("WEIR_ENVOY"); path != "" {
		return path
	}
	if os.Getenv("WEIR_REQUIRE_TOOLS") != "" {
		t.Fatal("WEIR_ENVOY must name an Envoy: run the tests by make test")
	}
	path, err := exec.LookPath("envoy")
	if err != nil {
		t.Skip("no Envoy: run make test, or set WEIR_ENVOY")
	}
	return path
}

// change is a piece of the shipped configuration and what a test has instead.
type change struct{ old, now string }

// weirEndpoint is where Envoy finds weir.
const weirEndpoint = "- endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 8081}}}"

// twice are the pieces that stand in two places.
var twice = []string{weirEndpoint} // to ask, and to release

// endpoint is where Envoy finds something else.
func endpoint(t *testing.T, address string) string {
	t.Helper()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("- endpoint: {address: {socket_address: {address: %s, port_value: %s}}}", host, port)
}

// configure returns the shipped configuration with changes. Each must find its
// place, and only that, so that the file can't move away from its test.
func configure(t *testing.T, changes ...change) string {
	t.Helper()
	b, err := os.ReadFile(shipped)
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	for _, c := range changes {
		want := 1
		if slices.Contains(twice, c.old) {
			want = 2
		}
		if n := strings.Count(text, c.old); n != want {
			t.Fatalf("%s has %q %d times, want %d", shipped, c.old, n, want)
		}
		text = strings.ReplaceAll(text, c.old, c.now)
	}
	return text
}

// port changes the port in an address.
func port(shipped, now string) change {
	return change{"port_value: " + shipped + "}", "port_value: " + now + "}"}
}

// envoy is a running Envoy.
type envoy struct {
	url   string // of its listener
	admin string // URL

	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd has ended

	mu     sync.Mutex // guards stdout and stderr
	stdout bytes.Buffer
	stderr bytes.Buffer
}

// startEnvoy runs Envoy on ports of its own, and waits until it listens. It ends
// with the test.
func startEnvoy(t *testing.T, config string) *envoy {
	t.Helper()
	dir := t.TempDir()
	file, address := filepath.Join(dir, "envoy.yaml"), filepath.Join(dir, "admin")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	e := &envoy{exited: make(chan struct{})}
	cmd := exec.Command(envoyBinary(t), "-c", file, "--concurrency", "2", "--disable-hot-restart",
		"--admin-address-path", address, "--log-level", "warning", "--file-flush-interval-msec", "10")
	cmd.Stdout, cmd.Stderr = locked{&e.mu, &e.stdout}, locked{&e.mu, &e.stderr}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	e.cmd = cmd
	go func() {
		_ = cmd.Wait()
		close(e.exited)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-e.exited:
		case <-time.After(storetest.Deadline):
			t.Error("Envoy does not end on SIGTERM")
			_ = cmd.Process.Kill()
			<-e.exited
		}
		if t.Failed() {
			t.Logf("Envoy's log:\n%s\nits access log:\n%s", e.stderr.String(), e.stdout.String())
		}
	})

	storetest.Eventually(t, "Envoy is ready", func() bool {
		select {
		case <-e.exited:
			t.Fatal("Envoy ended at once")
		default:
		}
		b, err := os.ReadFile(address)
		if err != nil || len(b) == 0 {
			return false
		}
		e.admin = "http://" + string(b)
		r, err := http.Get(e.admin + "/ready")
		if err != nil {
			return false
		}
		_ = r.Body.Close()
		return r.StatusCode == http.StatusOK
	})
	var listeners struct {
		Statuses []struct {
			Address struct {
				Socket struct {
					Host string `json:"address"`
					Port int    `json:"port_value"`
				} `json:"socket_address"`
			} `json:"local_address"`
		} `json:"listener_statuses"`
	}
	e.ask(t, "/listeners?format=json", &listeners)
	if len(listeners.Statuses) != 1 {
		t.Fatalf("Envoy has %d listeners, want 1", len(listeners.Statuses))
	}
	socket := listeners.Statuses[0].Address.Socket
	e.url = fmt.Sprintf("http://%s:%d", socket.Host, socket.Port)
	return e
}

// end sends a signal that ends Envoy, and waits until it has.
func (e *envoy) end(t *testing.T, by syscall.Signal) {
	t.Helper()
	if err := e.cmd.Process.Signal(by); err != nil {
		t.Fatal(err)
	}
	select {
	case <-e.exited:
	case <-time.After(storetest.Deadline):
		t.Fatalf("Envoy does not end on %v", by)
	}
}

// locked is a writer that others may read under mu.
type locked struct {
	mu *sync.Mutex
	to *bytes.Buffer
}

func (l locked) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.to.Write(b)
}

// ask reads a JSON page of Envoy's admin interface.
func (e *envoy) ask(t *testing.T, page string, into any) {
	t.Helper()
	r, err := http.Get(e.admin + page)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	if err := json.NewDecoder(r.Body).Decode(into); err != nil {
		t.Fatalf("%s: %v", page, err)
	}
}

// counters are what Envoy's ratelimit filter has counted, by name: ok,
// over_limit, error, failure_mode_allowed.
func (e *envoy) counters(t *testing.T) map[string]int {
	t.Helper()
	const prefix = "cluster.upstream.ratelimit."
	var stats struct {
		Stats []struct {
			Name  string `json:"name"`
			Value int    `json:"value"`
		} `json:"stats"`
	}
	e.ask(t, "/stats?format=json&usedonly&filter=^"+prefix, &stats)
	counters := make(map[string]int)
	for _, s := range stats.Stats {
		counters[strings.TrimPrefix(s.Name, prefix)] = s.Value
	}
	return counters
}

// counter is one of Envoy's counters.
func (e *envoy) counter(t *testing.T, name string) int {
	t.Helper()
	var stats struct {
		Stats []struct {
			Name  string `json:"name"`
			Value int    `json:"value"`
		} `json:"stats"`
	}
	e.ask(t, "/stats?format=json&filter=^"+name+"$", &stats)
	for _, s := range stats.Stats {
		if s.Name == name {
			return s.Value
		}
	}
	return 0
}

// logEntry is a line of the access log. What is null there is zero here.
type logEntry struct {
	Path    string
	Status  int
	Details string
	Verdict string
	Reason  string
	Limits  []string
	Bypass  string
}

// logged waits for the access log entry of a path, which must be asked for once.
func (e *envoy) logged(t *testing.T, path string) logEntry {
	t.Helper()
	var found logEntry
	storetest.Eventually(t, "the access log has "+path, func() bool {
		e.mu.Lock()
		lines := bytes.Split(bytes.Clone(e.stdout.Bytes()), []byte("\n"))
		e.mu.Unlock()
		for _, line := range lines[:len(lines)-1] { // the last is not whole yet
			var entry logEntry
			if err := json.Unmarshal(line, &entry); err != nil {
				t.Fatalf("access log: %v: %s", err, line)
			}
			if entry.Path == path {
				found = entry
				return true
			}
		}
		return false
	})
	return found
}

// The file as it is; and Envoy finds nothing in it that will go away.
func TestEnvoyAcceptsTheShippedConfiguration(t *testing.T) {
	t.Parallel()
	validate(t, shipped)
}

// validate lets Envoy read a configuration.
func validate(t *testing.T, file string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), envoyBinary(t), "--mode", "validate", "--disable-hot-restart", "-c", file).CombinedOutput()
	if err != nil || bytes.Contains(bytes.ToLower(out), []byte("deprecated")) {
		t.Errorf("envoy --mode validate -c %s: %v\n%s", file, err, out)
	}
}
