package storetest

import (
	"bytes"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// RedisBinaries returns the Redis servers to test with, by version: those that
// WEIR_REDIS7 and WEIR_REDIS8 name, else what is on PATH. Without any the test
// is skipped, or fails if WEIR_REQUIRE_TOOLS is set, as make test does.
func RedisBinaries(t testing.TB) map[string]string {
	t.Helper()
	found := make(map[string]string)
	for name, variable := range map[string]string{"redis7": "WEIR_REDIS7", "redis8": "WEIR_REDIS8"} {
		if path := os.Getenv(variable); path != "" {
			found[name] = path
		}
	}
	if os.Getenv("WEIR_REQUIRE_TOOLS") != "" && len(found) < 2 {
		t.Fatal("WEIR_REDIS7 and WEIR_REDIS8 must name Redis servers: run the tests by make test")
	}
	if path, err := exec.LookPath("redis-server"); err == nil && len(found) == 0 {
		found["redis"] = path
	}
	if len(found) == 0 {
		t.Skip("no Redis server: run make test, or set WEIR_REDIS7")
	}
	return found
}

// AnyRedis returns one of RedisBinaries: the oldest.
func AnyRedis(t testing.TB) string {
	t.Helper()
	found := RedisBinaries(t)
	for _, name := range []string{"redis7", "redis8", "redis"} {
		if found[name] != "" {
			return found[name]
		}
	}
	return ""
}

// Redis is a server of a test's own.
type Redis struct {
	URL    string // unix:// or redis://
	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd has ended
	bin    string
	flags  []string
	dir    string
	tcp    string // host:port, if it listens there
	tls    bool   // on tcp it speaks TLS

	password string // that Do must give
	loading  bool   // it is started when it says that it loads
	log      bytes.Buffer
}

// StartRedis starts a server that keeps nothing on disk and listens on a socket
// in a folder of its own, with further flags of redis-server. It ends with the
// test.
func StartRedis(t testing.TB, bin string, flags ...string) *Redis {
	t.Helper()
	dir, err := os.MkdirTemp("", "weir") //nolint:usetesting // short: the path of a socket has a bound
	if err != nil {
		t.Fatal(err)
	}
	r := &Redis{bin: bin, flags: flags, dir: dir, URL: "unix://" + filepath.Join(dir, "s")}
	r.Start(t)
	t.Cleanup(func() {
		r.Kill()
		_ = os.RemoveAll(dir)
	})
	return r
}

// StartRedisTCP is StartRedis of a server that also listens on a port of loopback.
func StartRedisTCP(t testing.TB, bin string, flags ...string) *Redis {
	t.Helper()
	return startOnPort(t, bin, func() []string { return flags })
}

// FreePort returns a port of loopback on which nothing listens now.
func FreePort(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	_, port, _ := net.SplitHostPort(l.Addr().String()) // a listener's address is well formed
	return port
}

// Start starts the server again after Kill.
func (r *Redis) Start(t testing.TB) {
	t.Helper()
	if err := r.start(); err != nil {
		t.Fatalf("%s did not start: %v\n%s", r.bin, err, r.log.String())
	}
}

// StartLoading starts the server again after Kill, with more flags, and does not wait
// until it has loaded what it had saved.
func (r *Redis) StartLoading(t testing.TB, flags ...string) {
	t.Helper()
	r.flags = append(r.flags, flags...)
	r.loading = true
	r.Start(t)
}

func (r *Redis) start() error {
	socket := filepath.Join(r.dir, "s")
	_ = os.Remove(socket)
	port := "0"
	if r.tcp != "" {
		_, port, _ = strings.Cut(r.tcp, ":")
	}
	var args []string
	flags := r.flags
	if len(flags) > 0 && flags[0] == "sentinel" { // its file is the first argument
		args, flags = []string{flags[1], "--sentinel"}, flags[2:]
	} else {
		args = []string{"--save", "", "--appendonly", "no"}
	}
	if r.tls {
		args, port = append(args, "--tls-port", port), "0"
	}
	args = append(args, "--port", port, "--bind", "127.0.0.1", "--unixsocket", socket, "--dir", r.dir, "--daemonize", "no")
	args = append(args, flags...)
	cmd := exec.Command(r.bin, args...)
	cmd.Stdout, cmd.Stderr = &r.log, &r.log
	if err := cmd.Start(); err != nil {
		return err
	}
	r.cmd = cmd
	exited := make(chan struct{})
	r.exited = exited
	go func() {
		_ = cmd.Wait()
		close(exited)
	}()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(Deadline)
	for {
		if (r.answers(socket) || r.loading && r.loads()) && (r.tcp == "" || r.tls || r.answersTCP()) {
			return nil
		}
		select {
		case <-exited:
			return errors.New("it exited")
		case <-deadline:
			return os.ErrDeadlineExceeded
		case <-tick.C:
		}
	}
}

func (r *Redis) answers(socket string) bool { return ping("unix", socket) }

func (r *Redis) loads() bool {
	_, err := r.Do("PING")
	return err != nil && strings.HasPrefix(err.Error(), "LOADING")
}

func (r *Redis) answersTCP() bool { return ping("tcp", r.tcp) }

func ping(network, address string) bool {
	c, err := net.DialTimeout(network, address, time.Second)
	if err != nil {
		return false
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if _, err := c.Write([]byte("PING\r\n")); err != nil {
		return false
	}
	answer := make([]byte, 7)
	n, err := c.Read(answer)
	return err == nil && (strings.HasPrefix(string(answer[:n]), "+PONG") || strings.HasPrefix(string(answer[:n]), "-NOAUTH"))
}

// Kill ends the server at once, as a crash would, and waits for its end.
func (r *Redis) Kill() {
	if r.cmd == nil {
		return
	}
	_ = r.cmd.Process.Kill()
	<-r.exited
	r.cmd = nil
}

// PID is the server's process, while it runs.
func (r *Redis) PID() int { return r.cmd.Process.Pid }
