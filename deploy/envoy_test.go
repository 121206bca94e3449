package deploy

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"weir/store/storetest"
)

// startEnvoy runs envoy/envoy.yaml in front of a service, with no weir where it looks for it. It
// returns the URL of its listener and the address of its admin port. It ends with the test.
func startEnvoy(t testing.TB) (url, admin string) {
	t.Helper()
	service := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(service.Close)
	config := read(t, "../envoy/envoy.yaml")
	_, port, _ := strings.Cut(service.Listener.Addr().String(), ":")
	for shipped, now := range map[string]string{"9901": "0", "10000": "0", "9000": port, "8081": storetest.FreePort(t)} {
		if !strings.Contains(config, "port_value: "+shipped+"}") {
			t.Fatalf("envoy.yaml has no port %s", shipped)
		}
		config = strings.ReplaceAll(config, "port_value: "+shipped+"}", "port_value: "+now+"}")
	}
	dir := t.TempDir()
	file, address := filepath.Join(dir, "envoy.yaml"), filepath.Join(dir, "admin")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(tool(t, "WEIR_ENVOY", "envoy"), "-c", file, "--concurrency", "1", "--disable-hot-restart", "--admin-address-path", address, "--log-level", "warning")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(exited)
	}()
	t.Cleanup(func() {
		stop(t, "Envoy", cmd, exited)
		_ = log.Close()
		if t.Failed() {
			t.Logf("Envoy's log:\n%s", read(t, log.Name()))
		}
	})
	get := func(page string) (*http.Response, error) { return http.Get("http://" + admin + page) }
	storetest.Eventually(t, "Envoy is ready", func() bool {
		select {
		case <-exited:
			t.Fatal("Envoy ended at once")
		default:
		}
		b, err := os.ReadFile(address)
		if err != nil || len(b) == 0 {
			return false
		}
		admin = string(b)
		r, err := get("/ready")
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
	r, err := get("/listeners?format=json")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	if err := json.NewDecoder(r.Body).Decode(&listeners); err != nil || len(listeners.Statuses) != 1 {
		t.Fatalf("Envoy has the listeners %+v (%v), want one", listeners, err)
	}
	socket := listeners.Statuses[0].Address.Socket
	return fmt.Sprintf("http://%s:%d", socket.Host, socket.Port), admin
}

// stop ends a process, and waits until it has ended.
func stop(t testing.TB, name string, cmd *exec.Cmd, exited <-chan struct{}) {
	t.Helper()
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-exited:
	case <-time.After(storetest.Deadline):
		t.Errorf("%s does not end on SIGTERM", name)
		_ = cmd.Process.Kill()
		<-exited
	}
}
