package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"google.golang.org/grpc"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

// beMain has this binary be the program, so that the replicas have the race detector too.
const beMain = "AIAPI_BE_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(beMain) != "" {
		main()
		return
	}
	code := m.Run()
	servertest.Clean()
	os.Exit(code)
}

// fleet is replicas of the API, two of weir, a Redis, and a model.
type fleet struct {
	t        testing.TB
	redis    *storetest.Redis
	model    *fake
	modelAt  *httptest.Server
	keys     string // path
	policy   string // path
	secret   string // path
	weirs    [2]*weir
	services []*replica
}

// weir is one replica of weir, behind a network that can be cut.
type weir struct {
	*servertest.Process
	*toxiproxy.Proxy
	conn *grpc.ClientConn // that is never cut
}

// start runs a fleet with policy.yaml, in which each old text stands and is replaced by
// the new one after it. Nobody has a key before give.
func start(t testing.TB, replicas int, oldAndNew ...string) *fleet {
	t.Helper()
	dir := t.TempDir()
	f := &fleet{
		t: t, redis: storetest.StartRedis(t, storetest.AnyRedis(t)), model: new(fake),
		keys: filepath.Join(dir, "keys.json"), policy: filepath.Join(dir, "policy.yaml"), secret: filepath.Join(dir, "secret"),
	}
	f.modelAt = httptest.NewServer(f.model.routes())
	t.Cleanup(f.modelAt.Close)
	f.give()
	f.write(f.secret, "a secret that all replicas of weir share")
	f.setPolicy(oldAndNew...)
	var addresses []string
	for i := range f.weirs {
		p := f.startWeir()
		proxies := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(prometheus.NewRegistry()), zerolog.Nop())
		w := &weir{Process: p, Proxy: toxiproxy.NewProxy(proxies, "weir", "127.0.0.1:0", p.GRPC), conn: p.Dial(t)}
		if err := w.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.Stop)
		f.weirs[i] = w
		addresses = append(addresses, w.Listen)
	}
	for range replicas {
		f.services = append(f.services, startReplica(t, "-weir", strings.Join(addresses, ","), "-model", f.modelAt.URL, "-keys", f.keys,
			"-timeout", "5s", "-tries", "20")) // a busy machine must not look like a fault
	}
	return f
}

func (f *fleet) write(path, text string) {
	f.t.Helper()
	storetest.Replace(f.t, path, []byte(text))
}

// setPolicy is policy.yaml with other texts. weir reads it soon.
func (f *fleet) setPolicy(oldAndNew ...string) {
	f.t.Helper()
	text, err := os.ReadFile("policy.yaml")
	if err != nil {
		f.t.Fatal(err)
	}
	for i := 0; i < len(oldAndNew); i += 2 {
		if !strings.Contains(string(text), oldAndNew[i]) {
			f.t.Fatalf("policy.yaml has no %q any more", oldAndNew[i])
		}
	}
	f.write(f.policy, strings.NewReplacer(oldAndNew...).Replace(string(text)))
}

// give lets users in: pairs of a user, whose key is "sk-user", and a plan.
func (f *fleet) give(usersAndPlans ...string) {
	f.t.Helper()
	all := make(map[string]map[string]string)
	for i := 0; i < len(usersAndPlans); i += 2 {
		all["sk-"+usersAndPlans[i]] = map[string]string{"user": usersAndPlans[i], "plan": usersAndPlans[i+1]}
	}
	text, err := json.Marshal(all)
	if err != nil {
		f.t.Fatal(err)
	}
	f.write(f.keys, string(text))
}

// startWeir runs a replica of weir. Its own policy file is of another domain.
func (f *fleet) startWeir() *servertest.Process {
	f.t.Helper()
	return servertest.Start(f.t, "domain: none", "--policy", f.policy, "--redis", f.redis.URL, "--hash-key-file", f.secret,
		"--store-timeout", "20s") // a busy machine must not look like a fault
}

// replaceWeir starts another replica where a dead one was.
func (f *fleet) replaceWeir(i int) {
	f.t.Helper()
	w := f.weirs[i]
	w.Stop()
	w.Process = f.startWeir()
	w.Upstream, w.conn = w.GRPC, w.Dial(f.t)
	if err := w.Start(); err != nil {
		f.t.Fatal(err)
	}
}

// now is the time of Redis, which is that of all decisions.
func (f *fleet) now() time.Time {
	f.t.Helper()
	seconds, micros, _ := strings.Cut(strings.TrimSpace(f.redis.MustDo(f.t, "TIME")), "\n")
	s, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		f.t.Fatal(err)
	}
	us, err := strconv.ParseInt(strings.TrimSpace(micros), 10, 64)
	if err != nil {
		f.t.Fatal(err)
	}
	return time.Unix(s, us*1000)
}

// state is how a user's limit stands: what names it is "api_key" or "api_key_tokens".
func (f *fleet) state(on *weir, plan, what, user string) *weirv1.LimitState {
	f.t.Helper()
	m, err := weirv1.NewLeaseServiceClient(on.conn).Inspect(storetest.Context(f.t), &weirv1.InspectRequest{
		Domain: "api", Entries: []*weirv1.Entry{{Key: "plan", Value: plan}, {Key: what, Value: "sk-" + user}},
	})
	if err != nil || len(m.GetLimits()) != 1 {
		f.t.Fatalf("the state of %s: %v, %v", what, m, err)
	}
	return m.GetLimits()[0]
}

// charged is what weir has counted of a user in the plan free: requests, if their bucket
// gains nothing, and tokens.
func (f *fleet) charged(user string) (requests, tokens uint64) {
	f.t.Helper()
	r, t := f.state(f.weirs[1], "free", "api_key", user), f.state(f.weirs[1], "free", "api_key_tokens", user)
	return uint64(int64(r.GetCapacity()) - r.GetLevel()), t.GetCount() //nolint:gosec // both are small
}

// asked is what the model was asked by a user, and what that has cost: what it told, and
// of what it told nothing the estimate.
func (f *fleet) asked(user string) (requests, tokens uint64) {
	for _, c := range f.model.all() {
		switch {
		case c.User != user:
			continue
		case c.Told:
			tokens += c.Used
		default:
			tokens += c.estimate()
		}
		requests++
	}
	return requests, tokens
}

// expectCharged compares charged and asked.
func (f *fleet) expectCharged(user string) {
	f.t.Helper()
	requests, tokens := f.charged(user)
	wantRequests, wantTokens := f.asked(user)
	if requests != wantRequests || tokens != wantTokens {
		f.t.Errorf("%s is charged for %d requests and %d tokens, want %d and %d, as the model says", user, requests, tokens, wantRequests, wantTokens)
	}
}

// settled waits until weir has heard of all that the replica has to tell.
func (r *replica) settled(t testing.TB) {
	t.Helper()
	storetest.Eventually(t, "weir has heard of all that was used", func() bool {
		vars := r.vars(t)
		return vars["leases_held"] == 0 && vars["releases_pending"] == 0
	})
}

// vars is what the replica's client of weir has counted.
func (r *replica) vars(t testing.TB) map[string]float64 {
	t.Helper()
	answer, err := http.Get(r.url + "/debug/vars")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	var all struct{ Weir map[string]float64 }
	if err := json.NewDecoder(answer.Body).Decode(&all); err != nil {
		t.Fatal(err)
	}
	return all.Weir
}

// replica is one process of the API.
type replica struct {
	url    string
	cmd    *exec.Cmd
	log    bytes.Buffer // after exited
	exited chan struct{}
}

func startReplica(t testing.TB, flags ...string) *replica {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := &replica{cmd: exec.Command(self, flags...), exited: make(chan struct{})}
	r.cmd.Env = append(os.Environ(), beMain+"=1")
	stderr, err := r.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	listening := make(chan string, 1)
	go func() {
		defer close(r.exited)
		lines := bufio.NewScanner(stderr)
		for lines.Scan() {
			r.log.WriteString(lines.Text() + "\n")
			if _, address, ok := strings.Cut(lines.Text(), "msg=listening http="); ok {
				listening <- address
			}
		}
		_ = r.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		<-r.exited
		if t.Failed() {
			t.Logf("a replica's log:\n%s", r.log.String())
		}
	})
	select {
	case address := <-listening:
		r.url = "http://" + address
	case <-r.exited:
		t.Fatal("a replica ended at once")
	case <-time.After(storetest.Deadline):
		t.Fatal("a replica does not listen")
	}
	return r
}

// end ends the replica, as Kubernetes would, and waits until it has.
func (r *replica) end(t testing.TB) {
	t.Helper()
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case <-r.exited:
	case <-time.After(storetest.Deadline):
		t.Fatal("a replica does not end")
	}
	if code := r.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("a replica ended with %d, want 0", code)
	}
}

// answer is what a caller got.
type answer struct {
	code   int // 0: the replica died
	header http.Header
	text   string
	broken bool // it has no proper end
}

// ask sends a prompt with a user's key. The caller leaves when the answer to a slow
// prompt begins.
func (r *replica) ask(t testing.TB, user, prompt string, maxTokens int) answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*storetest.Deadline)
	defer cancel()
	body := fmt.Sprintf(`{"prompt": %q, "max_tokens": %d}`, prompt, maxTokens)
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+"/v1/complete", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	q.Header.Set("Authorization", "Bearer sk-"+user)
	got, err := http.DefaultClient.Do(q)
	if err != nil {
		return answer{}
	}
	defer func() { _ = got.Body.Close() }()
	a := answer{code: got.StatusCode, header: got.Header}
	if strings.HasPrefix(prompt, "slow") && a.code == http.StatusOK {
		return a
	}
	text, err := io.ReadAll(got.Body)
	a.text, a.broken = string(text), err != nil
	return a
}
