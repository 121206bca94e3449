// Package docs runs what its pages show.
package docs

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	servertest.Clean()
	os.Exit(code)
}

// policy has a lane of one slot for each account. The leases of bob are short, and
// mallory is banned.
const policy = `
domain: inference
descriptors:
  - key: account
    concurrency: {max_in_flight: 1, lease: 2m}
  - key: account
    value: bob
    concurrency: {max_in_flight: 1, lease: 6s}
  - key: account
    value: mallory
    rate_limit: {unit: day, requests_per_unit: 0}
  - key: lines
    rate_limit: {unit: year, requests_per_unit: 1000, reserve: 10m}
  - key: pool
    value: images
    concurrency: {max_in_flight: 200, lease: 2m}
    reject_as: pool
`

// A program is one that the page shows.
type program struct {
	file        string // from the root of the repository
	interpreter string // the variable that names it
	lease       bool   // it speaks LeaseService alone: renews, repeats, settles
}

var programs = []program{
	{file: "examples/python/ratelimit.py", interpreter: "WEIR_PYTHON"},
	{file: "examples/python/lease.py", interpreter: "WEIR_PYTHON", lease: true},
	{file: "examples/node/ratelimit.mjs", interpreter: "WEIR_NODE"},
	{file: "examples/node/lease.mjs", interpreter: "WEIR_NODE", lease: true},
}

// each runs a test of every program that is chosen, in a folder that has all of
// them with what the page has one install and generate.
func each(t *testing.T, chosen func(program) bool, test func(t *testing.T, p prepared)) {
	t.Helper()
	for _, name := range []string{"WEIR_PYTHON", "WEIR_NODE", "WEIR_NODE_MODULES"} {
		if os.Getenv(name) != "" {
			continue
		}
		if os.Getenv("WEIR_REQUIRE_TOOLS") != "" {
			t.Fatalf("%s is not set: run the tests by make test", name)
		}
		t.Skipf("%s is not set: run make servers, then source .cache/tools/env.sh", name)
	}
	dir := t.TempDir()
	for _, p := range programs {
		copyTo(t, dir, p.file, filepath.Base(p.file))
	}
	copyTo(t, dir, "proto/weir/v1/lease.proto", "weir/v1/lease.proto")
	if err := os.Symlink(os.Getenv("WEIR_NODE_MODULES"), filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	run(t, dir, nil, os.Getenv("WEIR_PYTHON"),
		"-m", "grpc_tools.protoc", "-I", ".", "--python_out=.", "--grpc_python_out=.", "weir/v1/lease.proto")
	for _, p := range programs {
		if chosen(p) {
			t.Run(filepath.Base(p.file), func(t *testing.T) {
				t.Parallel() // they wait, more than they work
				test(t, prepared{p, dir})
			})
		}
	}
}

func all(program) bool     { return true }
func lease(p program) bool { return p.lease }

// A prepared program can be run.
type prepared struct {
	program
	dir string
}

// A process is a program that runs. It ends with the test.
type process struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout bytes.Buffer // read it after wait

	mu     sync.Mutex // guards stderr
	stderr bytes.Buffer
}

// start runs the program for an account and a command.
func (p prepared) start(t *testing.T, environment []string, address, account string, command ...string) *process {
	t.Helper()
	args := append([]string{filepath.Base(p.file), address, account}, command...)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	r := &process{cmd: exec.CommandContext(ctx, os.Getenv(p.interpreter), args...)}
	r.cmd.Dir = p.dir
	r.cmd.WaitDelay = storetest.Deadline                                        // for a command that outlives its program
	r.cmd.Env = append(append(os.Environ(), "WEIR_TIMEOUT=20"), environment...) // of a busy machine
	r.cmd.Stdout, r.cmd.Stderr = &r.stdout, writer(r.write)
	var err error
	if r.stdin, err = r.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = r.stdin.Close()
		_ = r.cmd.Process.Kill()
	})
	return r
}

// patience is how long a program may take, and what is waited for of one: to start an
// interpreter takes a busy machine long.
const patience = 3 * storetest.Deadline

// eventually asks again and again until ok, which what describes.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	end := time.After(patience)
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("not in %v: %s", patience, what)
		}
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }

func (r *process) write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stderr.Write(b)
}

// said is what the program has told on stderr so far.
func (r *process) said() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stderr.String()
}

// ends waits for the end, and says whether the exit code is 0.
func (r *process) ends(t *testing.T) bool {
	t.Helper()
	if err := r.cmd.Wait(); err != nil && r.cmd.ProcessState.ExitCode() < 0 {
		t.Fatalf("%v: %v\n%s", r.cmd, err, r.said())
	}
	return r.cmd.ProcessState.ExitCode() == 0
}

// want ends the test unless the program ended with this success, after it had
// printed and told this. Told is a part of it; none: it told nothing.
func (r *process) want(t *testing.T, ok bool, printed, told string) {
	t.Helper()
	got := r.ends(t)
	said := r.said()
	if got != ok || r.stdout.String() != printed || !strings.Contains(said, told) || told == "" && said != "" {
		t.Fatalf("%v: ok %t, printed %q, told %q, want %t, %q, %q", r.cmd, got, r.stdout.String(), said, ok, printed, told)
	}
}

// weir is a service that answers the programs.
type weir struct {
	*servertest.Process
	leases weirv1.LeaseServiceClient
}

func startWeir(t *testing.T, flags ...string) weir {
	t.Helper()
	p := servertest.Start(t, policy, append(flags, "--grpc-listen", servertest.LoopbackAddr()+":0")...)
	return weir{p, weirv1.NewLeaseServiceClient(p.Dial(t))}
}

// held is the state of an account's lane.
func (w weir) held(t *testing.T, account string) *weirv1.LimitState {
	t.Helper()
	return w.inspect(t, "account", account)
}

func (w weir) inspect(t *testing.T, key, value string) *weirv1.LimitState {
	t.Helper()
	r, err := w.leases.Inspect(storetest.Context(t), &weirv1.InspectRequest{
		Domain: "inference", Entries: []*weirv1.Entry{{Key: key, Value: value}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return r.GetLimits()[0]
}

// holds waits until the account holds its slot.
func (w weir) holds(t *testing.T, account string) {
	t.Helper()
	eventually(t, account+" holds a slot", func() bool { return w.held(t, account).GetCount() == 1 })
}

// counts fails the test unless a counter has this value.
func (w weir) counts(t *testing.T, counter, want string) {
	t.Helper()
	_, page := w.Get(t, "/metrics")
	_, after, _ := strings.Cut(page, "\n"+counter+" ")
	if got, _, _ := strings.Cut(after, "\n"); got != want {
		t.Errorf("%s is %q, want %q; of:\n%s", counter, got, want, strings.Join(leaseCounters.FindAllString(page, -1), "\n"))
	}
}

// leaseCounters are the lines of the counters of leases, and of requests.
var leaseCounters = regexp.MustCompile(`(?m)^(weir_lease|weir_decisions|grpc_server_handled).* [1-9].*$`)

const (
	granted  = `weir_leases_granted_total{domain="inference"}`
	released = `weir_leases_released_total{domain="inference",result="RELEASED"}`
	refused  = `weir_decisions_total{domain="inference",verdict="refused"}`
)

func TestProgramsHoldASlotWhileTheyWork(t *testing.T) {
	each(t, all, func(t *testing.T, p prepared) {
		w := startWeir(t)
		r := p.start(t, nil, w.GRPC, "alice", "cat")
		w.holds(t, "alice")
		if _, err := io.WriteString(r.stdin, "done\n"); err != nil {
			t.Fatal(err)
		}
		if err := r.stdin.Close(); err != nil {
			t.Fatal(err)
		}
		r.want(t, true, "done\n", "")
		w.counts(t, released, "1")
		if n := w.held(t, "alice").GetCount(); n != 0 {
			t.Errorf("%d leases are left", n)
		}
	})
}

func TestProgramsReleaseWhenTheWorkFails(t *testing.T) {
	each(t, all, func(t *testing.T, p prepared) {
		w := startWeir(t)
		p.start(t, nil, w.GRPC, "alice", "false").want(t, false, "", "")
		r := p.start(t, nil, w.GRPC, "alice", "./no-such-command")
		if r.ends(t) {
			t.Error("it succeeded")
		}
		w.counts(t, released, "2")
	})
}

func TestProgramsAskAgainWhenWeirSaysThatItHelps(t *testing.T) {
	each(t, all, func(t *testing.T, p prepared) {
		w := startWeir(t)
		ctx := storetest.Context(t)
		first, err := w.leases.Acquire(ctx, &weirv1.AcquireRequest{
			Domain:      "inference",
			Descriptors: []*weirv1.Descriptor{{Entries: []*weirv1.Entry{{Key: "account", Value: "alice"}}}},
		})
		if err != nil || !first.GetAdmitted() {
			t.Fatalf("Acquire = %v, %v", first, err)
		}
		r := p.start(t, nil, w.GRPC, "alice", "echo", "done")
		const told = "refused: lane_full, class lane; again in 1."
		eventually(t, told, func() bool { return strings.Contains(r.said(), told) })
		if _, err := w.leases.Release(ctx, &weirv1.ReleaseRequest{LeaseIds: []string{first.GetLease().GetId()}}); err != nil {
			t.Fatal(err)
		}
		r.want(t, true, "done\n", told)
		w.counts(t, released, "2")
	})
}

func TestProgramsDoNotAskAgainInVain(t *testing.T) {
	each(t, all, func(t *testing.T, p prepared) {
		w := startWeir(t)
		p.start(t, nil, w.GRPC, "mallory", "echo", "done").want(t, false, "", "refused: banned, class lane")
		w.counts(t, refused, "1")
	})
}

func TestProgramsWorkWhileWeirIsStopped(t *testing.T) {
	each(t, all, func(t *testing.T, p prepared) {
		w := startWeir(t)
		w.Terminate(t)
		w.Wait(t)
		p.start(t, nil, w.GRPC, "alice", "echo", "done").want(t, true, "done\n", "weir is away, UNAVAILABLE: unchecked 1")
	})
}

func TestProgramsWorkWhileWeirHangs(t *testing.T) {
	each(t, all, func(t *testing.T, p prepared) {
		w := startWeir(t)
		w.Pause(t)
		r := p.start(t, []string{"WEIR_TIMEOUT=0.3"}, w.GRPC, "alice", "echo", "done")
		r.want(t, true, "done\n", "weir is away, DEADLINE_EXCEEDED: unchecked 1")
	})
}

func TestProgramsEndThoughTheirReleaseFails(t *testing.T) {
	each(t, all, func(t *testing.T, p prepared) {
		w := startWeir(t)
		r := p.start(t, nil, w.GRPC, "alice", "cat")
		w.holds(t, "alice")
		w.Terminate(t)
		w.Wait(t)
		if err := r.stdin.Close(); err != nil {
			t.Fatal(err)
		}
		r.want(t, true, "", "not released: the slot is free when its lease expires")
	})
}

func TestProgramsRenewTheirLeaseWhileTheyWork(t *testing.T) {
	each(t, lease, func(t *testing.T, p prepared) {
		w := startWeir(t)
		r := p.start(t, nil, w.GRPC, "bob", "cat")
		w.holds(t, "bob")
		left := w.held(t, "bob").GetHolders()[0].GetExpiresAfter().AsDuration()
		eventually(t, "the lease has more to live than before", func() bool {
			holders := w.held(t, "bob").GetHolders()
			if len(holders) != 1 {
				t.Fatalf("bob has %d leases, want 1", len(holders))
			}
			before := left
			left = holders[0].GetExpiresAfter().AsDuration()
			return left > before
		})
		if err := r.stdin.Close(); err != nil {
			t.Fatal(err)
		}
		r.want(t, true, "", "")
		w.counts(t, released, "1")
	})
}

func TestProgramsStopTheWorkWhenTheirLeaseIsLost(t *testing.T) {
	each(t, lease, func(t *testing.T, p prepared) {
		redis := storetest.StartRedis(t, storetest.AnyRedis(t))
		w := startWeir(t, "--redis", redis.URL, "--store-timeout", "10s") // of a busy machine: without its store, weir would grant a lease of its own
		r := p.start(t, nil, w.GRPC, "bob", "cat")
		w.holds(t, "bob")
		redis.Kill() // it keeps nothing
		redis.Start(t)
		r.want(t, false, "", "the lease is lost: stopping")
	})
}

func TestProgramsAskAgainWhenTheAnswerIsLost(t *testing.T) {
	each(t, lease, func(t *testing.T, p prepared) {
		w := startWeir(t)
		l := &lossy{weir: w.leases}
		p.start(t, nil, l.serve(t), "alice", "echo", "done").want(t, true, "done\n", "no answer, UNAVAILABLE: asking again")
		if !l.replayed.Load() {
			t.Error("the second answer was no replay")
		}
		w.counts(t, granted, "1")
		w.counts(t, released, "1")
	})
}

// lossy is a weir whose first Acquire is decided, and its answer lost.
type lossy struct {
	weirv1.UnimplementedLeaseServiceServer
	weir           weirv1.LeaseServiceClient
	lost, replayed atomic.Bool
}

// serve returns where it listens, for as long as the test.
func (l *lossy) serve(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	weirv1.RegisterLeaseServiceServer(s, l)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = s.Serve(listener) // until Stop
	}()
	t.Cleanup(func() {
		s.Stop()
		<-ended
	})
	return listener.Addr().String()
}

func (l *lossy) Acquire(ctx context.Context, m *weirv1.AcquireRequest) (*weirv1.AcquireResponse, error) {
	r, err := l.weir.Acquire(ctx, m)
	if !l.lost.Swap(true) {
		return nil, status.Error(codes.Unavailable, "the answer is lost")
	}
	l.replayed.Store(r.GetReplayed())
	return r, err
}

func (l *lossy) Release(ctx context.Context, m *weirv1.ReleaseRequest) (*weirv1.ReleaseResponse, error) {
	return l.weir.Release(ctx, m)
}

func TestProgramsSettleWhatTheyUsed(t *testing.T) {
	each(t, lease, func(t *testing.T, p prepared) {
		w := startWeir(t)
		r := p.start(t, nil, w.GRPC, "alice", "cat")
		w.holds(t, "alice")
		if n := w.inspect(t, "lines", "alice").GetCount(); n != 10 {
			t.Errorf("%d are reserved, want 10", n)
		}
		if _, err := io.WriteString(r.stdin, "one\ntwo\n"); err != nil {
			t.Fatal(err)
		}
		if err := r.stdin.Close(); err != nil {
			t.Fatal(err)
		}
		r.want(t, true, "one\ntwo\n", "")
		if n := w.inspect(t, "lines", "alice").GetCount(); n != 2 {
			t.Errorf("%d are charged, want 2", n)
		}
	})
}

// A timer of Node's that is longer than 24.8 days fires at once.
func TestProgramsDoNotRenewALongLeaseWithoutAPause(t *testing.T) {
	each(t, lease, func(t *testing.T, p prepared) {
		s := servertest.Start(t, strings.ReplaceAll(strings.ReplaceAll(policy, "2m", "2400h"), "10m", "2400h"))
		p.start(t, nil, s.GRPC, "alice", "sleep", "1").want(t, true, "", "")
		_, page := s.Get(t, "/metrics")
		_, after, found := strings.Cut(page, "\n"+`weir_renewals_total{domain="inference",result="renewed"} `)
		if n, _, _ := strings.Cut(after, "\n"); found && n != "0" {
			t.Errorf("a lease of 100 days was renewed %s times in a second", n)
		}
	})
}

func TestProgramsHoldTheirSlotWhateverTheCommandPrints(t *testing.T) {
	each(t, all, func(t *testing.T, p prepared) {
		w := startWeir(t)
		r := p.start(t, nil, w.GRPC, "alice", "sh", "-c", `printf '\377\n'; cat; printf 'no end'`)
		w.holds(t, "alice")
		if err := r.stdin.Close(); err != nil {
			t.Fatal(err)
		}
		r.want(t, true, "\xff\nno end", "")
		w.counts(t, released, "1")
	})
}

var block = regexp.MustCompile("(?s)```(?:python|js)\n(.*?)```\n")

func TestThePageShowsTheProgramsAsTheyAre(t *testing.T) {
	shown := make(map[string]bool)
	for _, found := range block.FindAllStringSubmatch(read(t, "docs/clients.md"), -1) {
		known := false
		for _, p := range programs {
			text := read(t, p.file)
			shown[p.file] = shown[p.file] || found[1] == text || p.lease && strings.Contains(text, found[1])
			known = known || strings.Contains(text, found[1])
		}
		if !known {
			t.Errorf("no program has this:\n%s", found[1])
		}
	}
	for _, p := range programs {
		if !shown[p.file] { // whole, or in parts where the rest is the same
			t.Errorf("docs/clients.md does not show %s", p.file)
		}
	}
}

func TestAModuleWithoutAPublicPathIsReplaced(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "main.go"), `package main

import (
	"fmt"

	weirv1 "weir/proto/weir/v1"
)

func main() { fmt.Println(weirv1.LeaseService_Acquire_FullMethodName) }
`)
	offline := []string{"GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off"} // with what this test was built of
	copyTo(t, dir, "go.sum", "go.sum")
	run(t, dir, offline, "go", "mod", "init", "example.org/yours")
	run(t, dir, offline, "go", "mod", "edit", "-require=weir@v0.0.0", "-replace=weir="+root(t))
	if got := run(t, dir, offline, "go", "run", "."); got != "/weir.v1.LeaseService/Acquire\n" {
		t.Errorf("it prints %q", got)
	}
}

// root is the root of the repository.
func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// read returns the text of a file of the repository.
func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root(t), file))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// copyTo copies a file of the repository into a folder.
func copyTo(t *testing.T, dir, file, name string) {
	t.Helper()
	write(t, filepath.Join(dir, name), read(t, file))
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// run runs a command that must succeed and returns what it printed.
func run(t *testing.T, dir string, environment []string, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), environment...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
	return string(out)
}
