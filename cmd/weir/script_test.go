package main

import (
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"weir/store/storetest"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"weir": main})
}

// start is the command serve of the scripts: it runs the service on ports of its
// own, and writes its log to the file log, from which listening reads them, and
// its process id to pid.
const start = `#!/bin/sh
echo $$ >pid
exec weir serve --grpc-listen 127.0.0.1:0 --http-listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 "$@" 2>log
`

// TestScripts runs the command as a shell would. Besides testscript's own
// commands there are:
//
//	exec serve FLAG… &weir&  starts the service in the background
//	terminate, hangup        sends it SIGTERM, SIGHUP
//	listening                waits until it listens; sets $ADDR, $HTTP and $ADMIN
//	logged REGEXP            waits until its log matches
//	exits N COMMAND…         runs a command that must exit with N
//	get CODE URL             asks a page, which must answer with CODE
//	put CODE URL             changes something, and must be answered with CODE
//	certificate DIR NAME…    makes tls.crt and tls.key in a folder, with these names,
//	                         and ca.crt, the one authority of the script
//	redis                    starts a Redis of the script's own; sets $REDIS
//	first NAME REGEXP        sets $NAME to the first group of REGEXP in stdout
//	post CODE URL FILE       sends a file to a page, which must answer with CODE;
//	                         its headers are stderr
func TestScripts(t *testing.T) {
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "serve"), []byte(start), 0o700); err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			// The race detector would wait a second at the end of every command.
			env.Setenv("GORACE", "atexit_sleep_ms=0")
			env.Values["authority"] = storetest.NewAuthority(t)
			env.Setenv("PATH", bin+string(os.PathListSeparator)+env.Getenv("PATH"))
			return nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"terminate": func(ts *testscript.TestScript, _ bool, _ []string) { send(ts, syscall.SIGTERM) },
			"hangup":    func(ts *testscript.TestScript, _ bool, _ []string) { send(ts, syscall.SIGHUP) },
			"listening": listening,
			"logged":    logged,
			"exits":     exits,
			"get":       get,
			"put":       put,
			"post":      post,
			"first":     first,
			"redis": func(ts *testscript.TestScript, _ bool, _ []string) {
				ts.Setenv("REDIS", storetest.StartRedis(t, storetest.AnyRedis(t)).URL)
			},
			"certificate": func(ts *testscript.TestScript, _ bool, args []string) {
				authority, ok := ts.Value("authority").(*storetest.Authority)
				if !ok || len(args) == 0 {
					ts.Fatalf("usage: certificate DIR NAME…")
				}
				dir := ts.MkAbs(args[0])
				ts.Check(os.MkdirAll(dir, 0o700))
				authority.Issue(t, args[1:]).Write(t, dir)
				authority.Write(t, dir)
			},
		},
	})
}

var addresses = regexp.MustCompile(`msg"?[=:]"?listening"?[ ,]"?grpc"?[=:]"?([\d.:]+)"?[ ,]"?http"?[=:]"?([\d.:]+)(?:"?[ ,]"?admin"?[=:]"?([\d.:]+))?`)

func listening(ts *testscript.TestScript, _ bool, _ []string) {
	found := waitForLog(ts, addresses)
	ts.Setenv("ADDR", found[1])
	ts.Setenv("HTTP", found[2])
	ts.Setenv("ADMIN", found[3])
}

func send(ts *testscript.TestScript, signal syscall.Signal) {
	pid, err := strconv.Atoi(strings.TrimSpace(ts.ReadFile("pid")))
	ts.Check(err)
	ts.Check(syscall.Kill(pid, signal))
}

func logged(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 1 {
		ts.Fatalf("usage: logged REGEXP")
	}
	waitForLog(ts, regexp.MustCompile(args[0]))
}

func waitForLog(ts *testscript.TestScript, line *regexp.Regexp) []string {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	end := time.After(storetest.Deadline)
	for {
		text, err := os.ReadFile(ts.MkAbs("log"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			ts.Fatalf("%v", err)
		}
		if found := line.FindStringSubmatch(string(text)); found != nil {
			return found
		}
		select {
		case <-tick.C:
		case <-end:
			ts.Fatalf("the log does not match %v:\n%s", line, text)
		}
	}
}

func exits(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: exits N COMMAND…")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	var e *exec.ExitError
	switch err := ts.Exec(args[1], args[2:]...); {
	case errors.As(err, &e):
		got = e.ExitCode()
	case err != nil:
		ts.Fatalf("%v", err)
	}
	if got != want {
		ts.Fatalf("%q exits with %d, want %d", args[1:], got, want)
	}
}

func first(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("usage: first NAME REGEXP")
	}
	found := regexp.MustCompile(args[1]).FindStringSubmatch(ts.ReadFile("stdout"))
	if len(found) < 2 {
		ts.Fatalf("%s is not in stdout", args[1])
	}
	ts.Setenv(args[0], found[1])
}

func get(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("usage: get CODE URL")
	}
	r, err := http.Get(args[1])
	ts.Check(err)
	answers(ts, r, args[0])
}

func put(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("usage: put CODE URL")
	}
	request, err := http.NewRequest(http.MethodPut, args[1], nil)
	ts.Check(err)
	r, err := http.DefaultClient.Do(request)
	ts.Check(err)
	answers(ts, r, args[0])
}

func post(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 3 {
		ts.Fatalf("usage: post CODE URL FILE")
	}
	r, err := http.Post(args[1], "application/json", strings.NewReader(ts.ReadFile(args[2])))
	ts.Check(err)
	ts.Check(r.Header.Write(ts.Stderr()))
	answers(ts, r, args[0])
}

func answers(ts *testscript.TestScript, r *http.Response, code string) {
	defer func() { _ = r.Body.Close() }()
	_, err := io.Copy(ts.Stdout(), r.Body)
	ts.Check(err)
	if got := strconv.Itoa(r.StatusCode); got != code {
		ts.Fatalf("%s answers %s, want %s", r.Request.URL, got, code)
	}
}
