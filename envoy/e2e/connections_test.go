package e2e

import (
	"net/http"
	"strconv"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"weir/store/storetest"
)

const brokenLogs = "weir_access_logs_broken_total"

// Envoy is asked to make new connections again and again, under load. Each of its
// requests is decided all the same, every slot is given back, and no access log is
// called broken.
func TestNoDecisionFailsByTheAgeOfAConnection(t *testing.T) {
	t.Parallel()
	// A full pool waits, however long releases take on a busy machine.
	s := start(t, []string{"--max-connection-age", "1s", "--max-wait", "10s"})
	const connections = "cluster.weir.upstream_cx_total"
	first := s.envoy.counter(t, connections)
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for i := range 4 { // the pool has five slots
		account := "a" + strconv.Itoa(i)
		clients.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				a, err := s.send(t.Context(), account, "/ok")
				if err != nil || a.code != http.StatusOK {
					t.Errorf("%s: %d %q %v, want 200", account, a.code, a.body, err)
					return
				}
			}
		})
	}
	storetest.Eventually(t, "Envoy's workers have made new connections several times", func() bool {
		return s.envoy.counter(t, connections) >= first+8
	})
	close(stop)
	clients.Wait()
	asked := int(s.asked.Load())
	t.Logf("%d requests on %d connections", asked, s.envoy.counter(t, connections))
	if d := cmp.Diff(map[string]int{"ok": asked}, s.envoy.counters(t)); d != "" {
		t.Errorf("Envoy's counters (-want +got):\n%s", d)
	}
	s.wantReleased(t, asked)
	if got := s.metric(t, brokenLogs); got != 0 {
		t.Errorf("%d access logs are called broken, want 0", got)
	}
}
