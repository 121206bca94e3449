package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

// asProgram in the environment has the test's binary be the program itself, so that its
// processes look for races too.
const asProgram = "IMAGESERVICE_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		servertest.Clean()
		os.Exit(code)
	}), goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2/toxics.(*ToxicStub).Run")) // it leaves some behind when it cuts
}

// patience is how long an answer may take: a slow machine must not look like a fault.
const patience = 2 * time.Minute

// policyWith is policy.yaml with replacements, each of an old text that must be there.
func policyWith(t testing.TB, oldnew ...string) string {
	t.Helper()
	text, err := os.ReadFile("policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	policy := string(text)
	for pair := range slices.Chunk(oldnew, 2) {
		if !strings.Contains(policy, pair[0]) {
			t.Fatalf("policy.yaml has no %q", pair[0])
		}
		policy = strings.ReplaceAll(policy, pair[0], pair[1])
	}
	return policy
}

// What tests replace of policy.yaml.
const (
	bucket = "{capacity: 10, refill: 1/s}"
	// still gains nothing to speak of while a test runs.
	still = "{capacity: 10, refill: 1/d}"
	slots = "concurrency: {max_in_flight: 3, lease: 2m}"
	// ledger is a second limit of each account, which counts all that is admitted.
	ledger = "rate_limit: {unit: year, requests_per_unit: 1000000}\n    " + slots
)

// world is a Redis, two replicas of weir on it, and two instances of the service.
type world struct {
	t         *testing.T
	policy    string
	redis     *storetest.Redis
	weirs     []*replica
	instances []*instance
	http      *http.Client
}

// replica is a process of weir, and the network before it.
type replica struct {
	*servertest.Process
	proxy *toxiproxy.Proxy
}

func newWorld(t *testing.T, policy string, flags ...string) *world {
	t.Helper()
	w := &world{t: t, policy: policy, redis: storetest.StartRedis(t, storetest.AnyRedis(t))}
	for range 2 {
		weir := w.startWeir(flags...)
		p := toxiproxy.NewProxy(toxiproxy.NewServer(toxiproxy.NewMetricsContainer(prometheus.NewRegistry()), zerolog.Nop()), "weir", "127.0.0.1:0", weir.GRPC)
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Stop)
		w.weirs = append(w.weirs, &replica{weir, p})
	}
	for range 2 {
		w.instances = append(w.instances, w.startInstance())
	}
	transport := &http.Transport{MaxIdleConnsPerHost: 100}
	w.http = &http.Client{Transport: transport}
	t.Cleanup(transport.CloseIdleConnections)
	return w
}

// startWeir starts a replica that waits for its store, however slow the machine is: it
// fails open only if Redis is gone.
func (w *world) startWeir(flags ...string) *servertest.Process {
	w.t.Helper()
	return servertest.Start(w.t, w.policy, append([]string{"--redis", w.redis.URL, "--store-timeout", patience.String()}, flags...)...)
}

// restart kills a replica, and has another at its address.
func (r *replica) restart(w *world) {
	w.t.Helper()
	next := w.startWeir()
	r.Signal(w.t, syscall.SIGKILL)
	r.Wait(w.t)
	r.proxy.Stop()
	r.Process, r.proxy.Upstream = next, next.GRPC
	if err := r.proxy.Start(); err != nil {
		w.t.Fatal(err)
	}
}

// cut has the network end each connection after so many bytes of replies.
func (r *replica) cut(t testing.TB, after int) {
	t.Helper()
	toxic := fmt.Sprintf(`{"type":"limit_data","stream":"downstream","attributes":{"bytes":%d}}`, after)
	if _, err := r.proxy.Toxics.AddToxicJson(strings.NewReader(toxic)); err != nil {
		t.Fatal(err)
	}
}

func (r *replica) metrics(t testing.TB) map[string]float64 {
	t.Helper()
	_, text := r.Get(t, "/metrics")
	return series(t, text)
}

// series are the values of all series of a text, by their names and labels.
func series(t testing.TB, text string) map[string]float64 {
	t.Helper()
	all := make(map[string]float64)
	for line := range strings.Lines(text) {
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			value, err := strconv.ParseFloat(strings.TrimSpace(line[i:]), 64)
			if err != nil {
				t.Fatalf("/metrics: %q: %v", line, err)
			}
			all[line[:i]] = value
		}
	}
	return all
}

// total is a series of all replicas together.
func (w *world) total(name string) (n int) {
	w.t.Helper()
	for _, r := range w.weirs {
		n += int(r.metrics(w.t)[name])
	}
	return n
}

// instance is a process of the service.
type instance struct {
	*process
	url string
}

func (w *world) startInstance() *instance {
	t := w.t
	t.Helper()
	var addresses []string
	for _, r := range w.weirs {
		addresses = append(addresses, r.proxy.Listen)
	}
	p := start(t, "serve", "--listen", "127.0.0.1:0", "--weir", strings.Join(addresses, ","), "--timeout", patience.String(), "--log-level", "debug")
	i := &instance{process: p}
	storetest.Eventually(t, "an instance listens", func() bool {
		for _, e := range p.events() {
			if e.Message == "listening" {
				i.url = "http://" + e.HTTP
			}
		}
		return i.url != ""
	})
	t.Cleanup(func() {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		if code := p.wait(t); code != 0 && !p.killed {
			t.Errorf("an instance ended with %d, as after a race, want 0", code)
		}
	})
	return i
}

func (i *instance) metrics(t testing.TB) map[string]float64 {
	t.Helper()
	r, err := http.Get(i.url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer http.DefaultClient.CloseIdleConnections()
	defer func() { _ = r.Body.Close() }()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return series(t, string(text))
}

// counted is a counter of the clients of weir in all instances.
func (w *world) counted(event, result string) (n int) {
	w.t.Helper()
	for _, i := range w.instances {
		n += int(i.metrics(w.t)[fmt.Sprintf("weir_client_events_total{event=%q,result=%q}", event, result)])
	}
	return n
}

// process is one of this program.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{}
	killed bool

	mu  sync.Mutex // guards those below
	log bytes.Buffer
	all []event
}

// event is a line of an instance's log.
type event struct {
	Time    time.Time `json:"time"`
	Message string    `json:"msg"`
	HTTP    string    `json:"http"`
	Account string    `json:"account"`
	Bypass  string    `json:"bypass"`
}

// start starts the program. It ends with the test at the latest.
func start(t testing.TB, args ...string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command(self, args...), exited: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), asProgram+"=1", "GORACE=atexit_sleep_ms=0") // not a second each
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.exited)
		lines := bufio.NewScanner(stderr)
		for lines.Scan() {
			p.read(lines.Bytes())
		}
		_ = p.cmd.Wait() // the exit code tells
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.exited
		if t.Failed() {
			t.Logf("%s:\n%s", args[0], p.text())
		}
	})
	return p
}

func (p *process) read(line []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var e event
	if json.Unmarshal(line, &e) == nil && (strings.HasPrefix(e.Message, "work ") || e.HTTP != "") {
		p.all = append(p.all, e)
		return
	}
	p.log.Write(append(line, '\n'))
}

// text is what it has written, but for events.
func (p *process) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

func (p *process) events() []event {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.all)
}

// kill ends it as a crash does, by its id.
func (p *process) kill(t testing.TB) {
	t.Helper()
	p.killed = true
	if err := syscall.Kill(p.cmd.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-p.exited
}

// wait returns the exit code when it has ended.
func (p *process) wait(t testing.TB) int {
	t.Helper()
	select {
	case <-p.exited:
	case <-time.After(storetest.Deadline):
		t.Fatalf("%s does not end", p.cmd.Args[1])
	}
	return p.cmd.ProcessState.ExitCode()
}

// state is how the limits of an account stand.
type state struct {
	tokens int // left in its bucket
	taken  int // counted by the ledger; 0 without one
	held   int // slots
}

func (w *world) state(account string) (s state) {
	w.t.Helper()
	m, err := w.leases().Inspect(storetest.Context(w.t), &weirv1.InspectRequest{
		Domain: "images", Entries: []*weirv1.Entry{{Key: "account", Value: account}},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, l := range m.GetLimits() {
		switch l.GetKind() {
		case weirv1.LimitKind_LIMIT_KIND_TOKEN_BUCKET:
			s.tokens = int(l.GetLevel())
		case weirv1.LimitKind_LIMIT_KIND_WINDOW:
			s.taken = int(l.GetCount())
		case weirv1.LimitKind_LIMIT_KIND_CONCURRENCY:
			s.held = int(l.GetCount())
		case weirv1.LimitKind_LIMIT_KIND_UNSPECIFIED:
		}
	}
	return s
}

// leases asks weir itself, and not through the proxy.
func (w *world) leases() weirv1.LeaseServiceClient {
	w.t.Helper()
	return weirv1.NewLeaseServiceClient(w.weirs[1].Dial(w.t))
}

// now is the store's clock.
func (w *world) now() time.Time {
	w.t.Helper()
	seconds, micros, _ := strings.Cut(w.redis.MustDo(w.t, "TIME"), "\n")
	s, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		w.t.Fatal(err)
	}
	us, err := strconv.ParseInt(micros, 10, 64)
	if err != nil {
		w.t.Fatal(err)
	}
	return time.Unix(s, 1000*us)
}

// write puts a file in its place, by rename.
func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func expect[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}
