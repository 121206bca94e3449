package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
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

	"weir/server/servertest"
	"weir/store/storetest"
)

// beMain has this binary be the program, so that the workers have the race detector too.
const beMain = "VENDOR_BE_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(beMain) != "" {
		main()
		return
	}
	code := m.Run()
	servertest.Clean()
	os.Exit(code)
}

// What the workers of this test have, in place of 100 calls a minute and 30 s.
const (
	perSecond = 50
	claimLife = "3s"
	depth     = 5
)

// arrival is a call that reached the vendor.
type arrival struct {
	worker string
	at     time.Time
}

func TestWorkersShareAQuotaAndDoEachJobOnce(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	text, err := os.ReadFile("policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	policy := string(text)
	for old, scaled := range map[string]string{"refill: 100/m": fmt.Sprintf("refill: %d/s", perSecond), "lease: 30s": "lease: " + claimLife} {
		if !strings.Contains(policy, old) {
			t.Fatalf("policy.yaml has no %q any more", old)
		}
		policy = strings.ReplaceAll(policy, old, scaled)
	}
	weir := servertest.Start(t, policy, "--redis", redis.URL, "--store-timeout", "20s") // a busy machine must not look like a fault

	// Of the jobs that the vendor holds, one comes when the busy one is called for again, and
	// one when the first is.
	jobs := filepath.Join(t.TempDir(), "jobs")
	if err := os.Mkdir(jobs, 0o700); err != nil {
		t.Fatal(err)
	}
	names := []string{"busy"}
	for i := range 80 {
		names = append(names, fmt.Sprint("job", i))
	}
	for _, name := range names {
		add(t, jobs, name)
	}
	var mu sync.Mutex
	of := make(map[string][]arrival) // job
	calls := 0
	began := now(t, redis)
	held := make(chan string, 1)
	vendor := &fake{arrived: func(r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		job, worker := r.Header.Get("Idempotency-Key"), r.UserAgent()
		of[job] = append(of[job], arrival{worker: worker, at: time.Now()})
		// Never more than the quota, from the beginning to this call: by the clock of
		// Redis, which is that of all decisions, it was admitted no later than now.
		calls++
		passed := now(t, redis).Sub(began)
		if most := 1 + int(passed.Milliseconds()*perSecond/1000); calls > most {
			t.Errorf("call %d comes %v after the beginning, when there may be %d", calls, passed, most)
		}
		switch n := len(of[job]); {
		case job == "busy" && n == 2:
			add(t, jobs, "hold")
		case job == "hold" && n == 2:
			add(t, jobs, "hold again")
		case strings.HasPrefix(job, "hold") && n == 1:
			held <- worker
		}
	}}
	server := httptest.NewServer(vendor)
	t.Cleanup(server.Close)
	var all []*process
	for range 3 {
		all = append(all, startWorker(t, "-weir", weir.GRPC, "-vendor", server.URL, "-jobs", jobs, "-depth", strconv.Itoa(depth),
			"-per-minute", strconv.Itoa(60*perSecond), "-jitter", "20ms"))
	}
	deepest, full := 0.0, 0.0
	eventually := func(what string, ok func() bool) {
		t.Helper()
		storetest.Eventually(t, what, func() bool {
			for _, p := range all {
				vars := p.vars()
				deepest, full = max(deepest, vars["queue_depth"]), max(full, vars["gave_up queue_full"])
			}
			return ok()
		})
	}

	// The worker whose call the vendor holds is killed. What it has is anybody's then.
	killed := make(map[string]time.Time)
	kill := func(worker string) {
		t.Helper()
		i := slices.IndexFunc(all, func(p *process) bool { return worker == fmt.Sprintf("worker %d", p.cmd.Process.Pid) })
		if i < 0 {
			t.Fatalf("%s is none of the workers that live", worker)
		}
		killed[worker] = time.Now()
		if err := all[i].cmd.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		all = slices.Delete(all, i, i+1)
	}
	next := func() (worker string) {
		t.Helper()
		eventually("the job comes that the vendor holds", func() bool {
			select {
			case worker = <-held:
				return true
			default:
				return false
			}
		})
		return worker
	}
	kill(next())
	// While a worker lives, nobody else gets its job, though there is no other.
	second := next()
	eventually("there is no other job", func() bool {
		left, err := os.ReadDir(jobs)
		return err == nil && len(left) == 1
	})
	refused := func() (n float64) {
		for _, p := range all {
			n += p.vars()["acquires lane"]
		}
		return n
	}
	before := refused()
	eventually("another asks for it", func() bool { return refused() > before+1 })
	kill(second)
	for _, p := range all {
		eventually("the worker ends, since there are no jobs", func() bool {
			select {
			case <-p.exited:
				return true
			default:
				return false
			}
		})
		if code := p.cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("a worker ended with %d, want 0", code)
		}
	}
	server.Close()
	if deepest != depth || full == 0 {
		t.Errorf("at most %v jobs waited in a queue, and %v found no room; want %d, and some", deepest, full, depth)
	}

	// Each job is done, and once.
	names = append(names, "hold", "hold again")
	if left, _ := filepath.Glob(filepath.Join(jobs, "*")); len(left) > 0 {
		t.Errorf("%v are not done", left)
	}
	slices.Sort(names)
	if got := slices.Sorted(maps.Keys(vendor.done)); !slices.Equal(got, names) {
		t.Errorf("the vendor did %v, want %v", got, names)
	}
	for name, n := range vendor.done {
		if n != 1 {
			t.Errorf("the vendor did %s %d times, want once", name, n)
		}
	}
	// It was called for again only if its worker had died, or the vendor had asked for that,
	// and then not before it had said.
	for job, calls := range of {
		for i, call := range calls[1:] {
			died, dead := killed[calls[i].worker]
			switch {
			case job == "busy" && i == 0:
				if wait := call.at.Sub(calls[0].at); wait < 2*time.Second {
					t.Errorf("the vendor asked to wait for 2s, and is called again after %v", wait)
				}
			case !dead:
				t.Errorf("%s is called for %d times, by workers that live", job, len(calls))
			case call.at.Before(died):
				t.Errorf("%s is called for again %v before its worker dies", job, died.Sub(call.at))
			}
		}
		if strings.HasPrefix(job, "hold") && len(calls) != 2 {
			t.Errorf("%s is called for %d times, want 2: by a worker who dies, and another", job, len(calls))
		}
	}
	t.Logf("%d calls for %d jobs in %v", calls, len(names), now(t, redis).Sub(began).Round(time.Millisecond))
}

// add adds a job that says its name.
func add(t testing.TB, jobs, name string) {
	t.Helper()
	next := filepath.Join(filepath.Dir(jobs), name)
	err := os.WriteFile(next, []byte(name), 0o600)
	if err == nil {
		err = os.Rename(next, filepath.Join(jobs, name))
	}
	if err != nil {
		t.Error(err)
	}
}

// now is the time of Redis, which is that of all decisions.
func now(t testing.TB, r *storetest.Redis) time.Time {
	t.Helper()
	var seconds, micros int64
	text, err := r.Do("TIME")
	if err == nil {
		_, err = fmt.Sscan(text, &seconds, &micros)
	}
	if err != nil {
		t.Error(err)
	}
	return time.Unix(seconds, micros*1000)
}

// process is a worker.
type process struct {
	url    string
	cmd    *exec.Cmd
	log    bytes.Buffer // after exited
	exited chan struct{}
}

func startWorker(t testing.TB, flags ...string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command(self, flags...), exited: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), beMain+"=1")
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	listening := make(chan string, 1)
	go func() {
		defer close(p.exited)
		lines := bufio.NewScanner(stderr)
		for lines.Scan() {
			p.log.WriteString(lines.Text() + "\n")
			if _, address, ok := strings.Cut(lines.Text(), "msg=listening http="); ok {
				listening <- address
			}
		}
		_ = p.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.exited
		if t.Failed() {
			t.Logf("a worker's log:\n%s", p.log.String())
		}
	})
	select {
	case address := <-listening:
		p.url = "http://" + address
	case <-p.exited:
		t.Fatal("a worker ended at once")
	case <-time.After(storetest.Deadline):
		t.Fatal("a worker does not listen")
	}
	return p
}

// vars is what the worker's client of weir has counted; nothing once it has ended.
func (p *process) vars() map[string]float64 {
	answer, err := http.Get(p.url + "/debug/vars")
	if err != nil {
		return nil
	}
	defer func() { _ = answer.Body.Close() }()
	var all struct{ Weir map[string]float64 }
	if err := json.NewDecoder(answer.Body).Decode(&all); err != nil {
		return nil
	}
	return all.Weir
}
