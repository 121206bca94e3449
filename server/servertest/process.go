// Package servertest runs weir as a process of its own, for tests.
package servertest

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"weir/store/storetest"
)

var (
	buildOnce sync.Once
	binary    string
	buildErr  error
)

// Binary builds the command once a test process and returns its path.
func Binary(t testing.TB) string {
	t.Helper()
	buildOnce.Do(func() {
		dir, err := os.MkdirTemp("", "weir") //nolint:usetesting // it outlives the test
		if err != nil {
			buildErr = err
			return
		}
		binary = filepath.Join(dir, "weir")
		build := exec.Command("go", "build", "-o", binary, "weir/cmd/weir")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			buildErr = fmt.Errorf("%w\n%s", err, out)
		}
	})
	if buildErr != nil {
		t.Fatal(buildErr)
	}
	return binary
}

// Clean removes what Binary built: call it at the end of TestMain.
func Clean() {
	if binary != "" {
		_ = os.RemoveAll(filepath.Dir(binary))
	}
}

// Process is a running weir serve.
type Process struct {
	GRPC, HTTP, Admin string // host:port
	// TLS is how Dial and Get connect; nil: in clear text.
	TLS    *tls.Config
	cmd    *exec.Cmd
	exited chan struct{}

	mu  sync.Mutex // guards log
	log bytes.Buffer
}

var listening = regexp.MustCompile(`msg=listening grpc=(\S+) http=(\S+) admin=(\S+)`)

// LoopbackAddr is an address of loopback that nobody else gets, but for more than 254 calls in a
// process, and processes whose ids differ by a multiple of 65,024. A service that is restarted
// there finds its port free, and no other test's client, whose own service has gone, finds it.
// On systems other than Linux it is 127.0.0.1, since they have no other.
func LoopbackAddr() string {
	if runtime.GOOS != "linux" {
		return "127.0.0.1"
	}
	n := loopbacks.Add(1)
	pid := os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d", 1+pid>>8%254, pid%256, 1+n%254)
}

var loopbacks atomic.Int32

// Start runs weir serve with the policy text and further flags, on ports of its
// own, and waits until it listens. It ends with the test.
func Start(t testing.TB, policy string, flags ...string) *Process {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(policy), 0o600); err != nil {
		t.Fatal(err)
	}
	args := append([]string{
		"serve", "--policy", file,
		"--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0",
	}, flags...)
	p := &Process{cmd: exec.Command(Binary(t), args...), exited: make(chan struct{})}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	found := make(chan []string, 1)
	go func() {
		lines := bufio.NewScanner(stderr)
		for lines.Scan() {
			p.mu.Lock()
			p.log.WriteString(lines.Text() + "\n")
			p.mu.Unlock()
			if m := listening.FindStringSubmatch(lines.Text()); m != nil {
				found <- m
			}
		}
		_ = p.cmd.Wait()
		close(p.exited)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.exited
		if t.Failed() {
			t.Logf("weir's log:\n%s", p.Log())
		}
	})
	select {
	case m := <-found:
		p.GRPC, p.HTTP, p.Admin = m[1], m[2], m[3]
	case <-p.exited:
		t.Fatalf("weir serve ended at once:\n%s", p.Log())
	case <-time.After(storetest.Deadline):
		t.Fatalf("weir serve does not listen:\n%s", p.Log())
	}
	return p
}

// Dial connects to the gRPC services. The connection is closed with the test.
func (p *Process) Dial(t testing.TB) *grpc.ClientConn {
	t.Helper()
	creds := insecure.NewCredentials()
	if p.TLS != nil {
		creds = credentials.NewTLS(p.TLS)
	}
	conn, err := grpc.NewClient("passthrough:///"+p.GRPC, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// Log is what the process has written so far.
func (p *Process) Log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

// Terminate sends SIGTERM.
func (p *Process) Terminate(t testing.TB) {
	t.Helper()
	p.Signal(t, syscall.SIGTERM)
}

// Signal sends a signal.
func (p *Process) Signal(t testing.TB, signal syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(signal); err != nil {
		t.Fatal(err)
	}
}

// Pause stops the process until SIGCONT, and waits until every thread of it stands: a
// signal takes effect later than it is sent.
func (p *Process) Pause(t testing.TB) {
	t.Helper()
	p.Signal(t, syscall.SIGSTOP)
	storetest.Eventually(t, "weir stands", func() bool {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid))
		if err != nil {
			return false
		}
		for _, task := range tasks { // none where there is no such folder
			stat, err := os.ReadFile(task)
			// The state stands behind the name, which is in parentheses.
			if i := bytes.LastIndexByte(stat, ')'); err == nil && !bytes.HasPrefix(stat[i+1:], []byte(" T")) {
				return false
			}
		}
		return true
	})
}

// Wait returns the exit code when the process has ended.
func (p *Process) Wait(t testing.TB) int {
	t.Helper()
	select {
	case <-p.exited:
	case <-time.After(storetest.Deadline):
		t.Fatalf("weir serve does not end:\n%s", p.Log())
	}
	return p.cmd.ProcessState.ExitCode()
}

// PID is the process's id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Get asks an HTTP page and returns its code and body.
func (p *Process) Get(t testing.TB, path string) (int, string) {
	t.Helper()
	client, scheme := http.DefaultClient, "http://"
	if p.TLS != nil {
		transport := &http.Transport{TLSClientConfig: p.TLS}
		defer transport.CloseIdleConnections()
		client, scheme = &http.Client{Transport: transport}, "https://"
	}
	r, err := client.Get(scheme + p.HTTP + path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	var b strings.Builder
	if _, err := bufio.NewReader(r.Body).WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, b.String()
}
