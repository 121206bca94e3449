package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/term"

	"weir/server/page"
	"weir/store/storetest"
)

// fakeStatus is a service that tells what it is told to.
type fakeStatus struct {
	mu   sync.Mutex
	text string // the headline; "" answers 503
}

func (s *fakeStatus) say(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text = text
}

func (s *fakeStatus) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.text == "" {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	picture := page.Snapshot{
		At: time.Now(), Started: time.Now(), Status: "ok", Headline: page.Problem{Level: "ok", Text: s.text},
		Refused: []page.Subject{{Subject: "first=\x1b]0;owned\a"}, {Subject: "last=one"}},
	}
	for i := range 40 {
		picture.Domains = append(picture.Domains, page.Domain{Name: fmt.Sprintf("domain-%d", i)})
	}
	_ = json.NewEncoder(w).Encode(picture)
}

// terminal is weir in a terminal.
type terminal struct {
	t      *testing.T
	ptmx   *os.File
	tty    *os.File
	before *term.State
	cmd    *exec.Cmd

	mu     sync.Mutex
	text   []byte // since what was waited for last
	all    []byte
	more   chan struct{}
	silent chan struct{} // closed when nothing more comes
}

// inTerminal runs weir top in a terminal of 100×12.
func inTerminal(t *testing.T, addr string, env ...string) *terminal {
	t.Helper()
	return runInTerminal(t, []string{"top", "--http", addr}, env...)
}

// runInTerminal runs weir in a terminal of 100×12.
func runInTerminal(t *testing.T, args []string, env ...string) *terminal {
	t.Helper()
	ptmx, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	x := &terminal{t: t, ptmx: ptmx, tty: tty, more: make(chan struct{}, 1), silent: make(chan struct{})}
	x.resize(100, 12)
	if x.before, err = term.GetState(int(tty.Fd())); err != nil {
		t.Fatal(err)
	}
	x.cmd = exec.CommandContext(t.Context(), "weir", args...) //nolint:gosec // the tests' own
	x.cmd.Env = append(append(os.Environ(), "TERM=xterm", "NO_COLOR=", "GORACE=atexit_sleep_ms=0"), env...)
	x.cmd.Stdin, x.cmd.Stdout, x.cmd.Stderr = tty, tty, tty
	x.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go x.read()
	t.Cleanup(func() {
		_ = tty.Close()
		_ = ptmx.Close()
		<-x.silent
	})
	return x
}

func (x *terminal) read() {
	defer close(x.silent)
	buffer := make([]byte, 4096)
	for {
		n, err := x.ptmx.Read(buffer)
		x.mu.Lock()
		x.text, x.all = append(x.text, buffer[:n]...), append(x.all, buffer[:n]...)
		x.mu.Unlock()
		select {
		case x.more <- struct{}{}:
		default:
		}
		if err != nil {
			return
		}
	}
}

// shows waits until the text comes, and forgets all up to it.
func (x *terminal) shows(text string) {
	x.t.Helper()
	end := time.After(storetest.Deadline)
	for {
		x.mu.Lock()
		_, after, ok := bytes.Cut(x.text, []byte(text))
		if ok {
			x.text = after
		}
		seen := string(x.text)
		x.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-x.more:
		case <-end:
			x.t.Fatalf("the terminal does not show %q, but %q", text, seen[max(0, len(seen)-3000):])
		}
	}
}

func (x *terminal) press(keys string) {
	x.t.Helper()
	if _, err := x.ptmx.WriteString(keys); err != nil {
		x.t.Fatal(err)
	}
}

func (x *terminal) resize(width, height uint16) {
	x.t.Helper()
	if err := pty.Setsize(x.ptmx, &pty.Winsize{Cols: width, Rows: height}); err != nil {
		x.t.Fatal(err)
	}
}

// ended waits until weir has ended as it should, with the terminal as it was.
func (x *terminal) ended() {
	x.t.Helper()
	x.shows("\x1b[?7h\x1b[?25h\x1b[?1049l")
	if err := x.cmd.Wait(); err != nil {
		x.t.Errorf("weir top ends with %v, want 0", err)
	}
	after, err := term.GetState(int(x.tty.Fd()))
	if err != nil {
		x.t.Fatal(err)
	}
	if got, want := fmt.Sprintf("%+v", after), fmt.Sprintf("%+v", x.before); got != want {
		x.t.Errorf("the terminal is %s, and was %s", got, want)
	}
}

func TestTopGoesOnWhileSomebodyLooks(t *testing.T) {
	s := &fakeStatus{text: "the first headline"}
	server := httptest.NewServer(s)
	defer server.Close()
	x := inTerminal(t, strings.TrimPrefix(server.URL, "http://"))
	x.shows("\x1b[?1049h\x1b[?25l\x1b[?7l")
	x.shows("\x1b[32m✔ the first headline\x1b[0m")
	s.say("the second headline")
	x.shows("the second headline")

	// Gone, and back.
	s.say("")
	x.shows("weir does not answer since ")
	x.shows("503 service unavailable")
	x.shows("What follows was so at ")
	x.shows("the second headline")
	s.say("the third headline")
	x.shows("the third headline")

	x.press("p")
	x.shows("PAUSED")
	s.say("the fourth headline")
	x.press("p")
	x.shows("the fourth headline")

	// To the end, and back by a page and a line.
	x.shows("0 lines above")
	x.press("G")
	x.shows("last=one")
	x.shows(", 0 below")
	x.press("\x1b[5~")
	x.shows(", 9 below")
	x.press("\x1b[A")
	x.shows(", 10 below")
	x.press("\x1b[B")
	x.shows(", 9 below")
	x.resize(100, 13)
	x.shows(", 8 below")

	x.press("q")
	x.ended()
}

func TestTopLeavesTheTerminalAsItWas(t *testing.T) {
	server := httptest.NewServer(&fakeStatus{text: "the headline"})
	defer server.Close()
	for name, end := range map[string]func(x *terminal){
		"Ctrl-C":  func(x *terminal) { x.press("\x03") },
		"SIGINT":  func(x *terminal) { _ = x.cmd.Process.Signal(syscall.SIGINT) },
		"SIGTERM": func(x *terminal) { _ = x.cmd.Process.Signal(syscall.SIGTERM) },
		"SIGHUP":  func(x *terminal) { _ = x.cmd.Process.Signal(syscall.SIGHUP) },
		"SIGQUIT": func(x *terminal) { _ = x.cmd.Process.Signal(syscall.SIGQUIT) },
	} {
		t.Run(name, func(t *testing.T) {
			x := inTerminal(t, strings.TrimPrefix(server.URL, "http://"))
			x.shows("the headline")
			end(x)
			x.ended()
		})
	}
}

// What a subject has in it reaches no terminal, and with NO_COLOR there are none.
func TestTopShowsNothingThatTheServerHasATerminalDo(t *testing.T) {
	server := httptest.NewServer(&fakeStatus{text: "the headline"})
	defer server.Close()
	x := inTerminal(t, strings.TrimPrefix(server.URL, "http://"), "NO_COLOR=1")
	x.resize(120, 200)
	x.shows("first=\uFFFD]0;owned\uFFFD")
	x.press("q")
	x.ended()
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, not := range []string{"\x1b]", "\a", "\x1b[0m", "\x1b[1m"} {
		if bytes.Contains(x.all, []byte(not)) {
			t.Errorf("the terminal was sent %q", not)
		}
	}
}

// Who is asked whether to do it, and presses Ctrl-C, has done nothing.
func TestAQuestionEndsWithCtrlC(t *testing.T) {
	var resets atomic.Int64
	admin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			DryRun bool `json:"dry_run"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || !body.DryRun {
			resets.Add(1)
		}
		_, _ = io.WriteString(w, `{"limits": [{"name": "account", "subject": "account=alice"}]}`)
	}))
	defer admin.Close()
	x := runInTerminal(t, []string{"reset", "--domain", "d", "-d", "account=alice", "--admin", strings.TrimPrefix(admin.URL, "http://")})
	x.shows("[y/N]")
	x.press("\x03")
	x.shows("interrupted: nothing was done")
	if err := x.cmd.Wait(); x.cmd.ProcessState.ExitCode() != exitError {
		t.Errorf("weir reset ends with %v, want %d", err, exitError)
	}
	if n := resets.Load(); n != 0 {
		t.Errorf("%d resets were asked for, want none", n)
	}
}
