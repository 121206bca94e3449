package page_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"weir/server/page"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// site is a page with its handlers. What it shows is how often it was asked.
type site struct {
	*page.Page
	mux  *http.ServeMux
	end  context.CancelFunc
	took int // read it where nothing runs
}

func newSite(guard func(http.Handler) http.Handler) *site {
	s := &site{mux: http.NewServeMux()}
	ctx, end := context.WithCancel(context.Background())
	s.end = end
	s.Page = page.New(ctx, func() *page.Snapshot {
		s.took++
		return &page.Snapshot{MoreLimits: s.took}
	})
	s.Register(s.mux, guard)
	return s
}

func open(h http.Handler) http.Handler { return h }

func (s *site) get(path string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	s.mux.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
	return w
}

// viewer is somebody who watches, in a goroutine of its own.
type viewer struct {
	leave  context.CancelFunc
	gone   chan struct{}
	header http.Header

	mu    sync.Mutex
	code  int
	text  bytes.Buffer
	stuck chan struct{} // nil: it reads
}

func (s *site) watch() *viewer {
	ctx, leave := context.WithCancel(context.Background())
	v := &viewer{leave: leave, gone: make(chan struct{}), header: make(http.Header), code: http.StatusOK}
	go func() {
		defer close(v.gone)
		s.mux.ServeHTTP(v, httptest.NewRequest("GET", "/status/events", nil).WithContext(ctx))
	}()
	return v
}

func (v *viewer) Header() http.Header { return v.header }

func (v *viewer) WriteHeader(code int) { v.code = code }

func (v *viewer) Flush() {}

func (v *viewer) Write(b []byte) (int, error) {
	if v.stuck != nil {
		<-v.stuck
		return 0, io.ErrClosedPipe
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.text.Write(b)
}

// seen returns the numbers of the snapshots that came.
func (v *viewer) seen(t *testing.T) (numbers []int) {
	t.Helper()
	v.mu.Lock()
	defer v.mu.Unlock()
	for event := range strings.SplitSeq(v.text.String(), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok {
			continue
		}
		var s page.Snapshot
		if err := json.Unmarshal([]byte(data), &s); err != nil {
			t.Fatalf("event %q: %v", event, err)
		}
		numbers = append(numbers, s.MoreLimits)
	}
	return numbers
}

func TestViewersGetASnapshotEachSecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(open)
		a := s.watch()
		synctest.Wait()
		b := s.watch()
		time.Sleep(3*time.Second + time.Millisecond)
		if got := a.seen(t); len(got) != 4 || got[0] != 1 || got[3] != 4 {
			t.Errorf("in 3 s the first viewer saw %v, want 1 to 4", got)
		}
		if got := b.seen(t); len(got) != 3 || got[0] != 2 {
			t.Errorf("in 3 s the second saw %v, want 2 to 4, with the first viewer's", got)
		}
		a.leave()
		b.leave()
		<-a.gone
		<-b.gone
		s.end()
		s.Close()
	})
}

func TestWhatWakesThePageIsSeenAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(open)
		v := s.watch()
		synctest.Wait()
		for range 10 { // together they are one
			s.Wake()
		}
		time.Sleep(100 * time.Millisecond)
		if got := v.seen(t); len(got) != 2 {
			t.Errorf("100 ms after the wake, it saw %v, want 2 snapshots", got)
		}
		v.leave()
		<-v.gone
		s.end()
		s.Close()
	})
}

func TestNothingIsAskedWhileNobodyWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(open)
		time.Sleep(time.Minute)
		if s.took != 0 {
			t.Errorf("%d snapshots before anybody came, want none", s.took)
		}
		v := s.watch()
		time.Sleep(time.Second / 2)
		v.leave()
		<-v.gone
		synctest.Wait()
		took := s.took
		s.Wake()
		time.Sleep(time.Minute)
		if s.took != took {
			t.Errorf("%d snapshots after the last had gone, want none", s.took-took)
		}
		if n := s.Viewers(); n != 0 {
			t.Errorf("%d viewers, want none", n)
		}
		s.end()
		s.Close()
	})
}

func TestTheSnapshotIsTakenTwiceASecondAtMost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(open)
		var last *httptest.ResponseRecorder
		for range 100 {
			last = s.get("/status.json")
			time.Sleep(10 * time.Millisecond)
		}
		if s.took != 2 {
			t.Errorf("100 asks in a second took %d snapshots, want 2", s.took)
		}
		if got := last.Header().Get("Content-Type"); got != "application/json" {
			t.Errorf("content type %q, want application/json", got)
		}
		var shown page.Snapshot
		if err := json.Unmarshal(last.Body.Bytes(), &shown); err != nil || shown.MoreLimits != 2 {
			t.Errorf("the last was %+v, %v; want the second snapshot", shown, err)
		}
		s.end()
		s.Close()
	})
}

func TestViewersBeyondTheBoundAreTurnedAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(open)
		var all []*viewer
		for range page.MaxViewers {
			all = append(all, s.watch())
		}
		synctest.Wait()
		one := s.watch()
		<-one.gone
		if one.code != http.StatusServiceUnavailable || one.header.Get("Retry-After") == "" {
			t.Errorf("one more got %d with Retry-After %q, want 503 with one", one.code, one.header.Get("Retry-After"))
		}
		all[0].leave()
		<-all[0].gone
		next := s.watch()
		time.Sleep(2 * time.Second)
		if got := next.seen(t); len(got) == 0 {
			t.Error("when one had left, the next saw nothing")
		}
		s.end()
		for _, v := range append(all[1:], next) {
			<-v.gone
		}
		s.Close()
	})
}

func TestAViewerWhoDoesNotReadHoldsUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(open)
		ctx, leave := context.WithCancel(context.Background())
		slow := &viewer{gone: make(chan struct{}), header: make(http.Header), stuck: make(chan struct{})}
		go func() {
			defer close(slow.gone)
			s.mux.ServeHTTP(slow, httptest.NewRequest("GET", "/status/events", nil).WithContext(ctx))
		}()
		synctest.Wait()
		v := s.watch()
		time.Sleep(10*time.Second + time.Millisecond)
		if got := v.seen(t); len(got) < 10 {
			t.Errorf("in 10 s beside one who does not read it saw %v, want 10 snapshots", got)
		}
		close(slow.stuck) // as when the deadline of its write passes
		<-slow.gone
		v.leave()
		<-v.gone
		leave()
		s.end()
		s.Close()
	})
}

// A real connection has deadlines, which a recorder has not.
func TestAConnectionThatDoesNotReadIsDropped(t *testing.T) {
	ctx, end := context.WithCancel(context.Background())
	p := page.New(ctx, func() *page.Snapshot {
		return &page.Snapshot{Policies: page.Policies{Errors: []string{strings.Repeat("x", 16<<20)}}} // more than sockets hold
	})
	mux := http.NewServeMux()
	p.Register(mux, open)
	s := httptest.NewServer(mux)
	defer s.Close()
	defer p.Close()
	defer end()
	r, err := s.Client().Get(s.URL + "/status/events")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for p.Viewers() > 0 {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("who does not read is a viewer after a minute; want dropped after 5 s")
		}
	}
}

func TestStreamsEndWithTheServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSite(open)
		v := s.watch()
		time.Sleep(time.Second)
		s.end()
		<-v.gone
		s.Close()
		late := s.watch()
		<-late.gone
		if late.code != http.StatusServiceUnavailable {
			t.Errorf("who comes after the end got %d, want 503", late.code)
		}
	})
}

func TestEveryPartOfThePageIsGuarded(t *testing.T) {
	s := newSite(func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) })
	})
	defer s.end()
	for _, path := range []string{"/", "/status.json", "/status/events", "/assets/app.js"} {
		if got := s.get(path).Code; got != http.StatusForbidden {
			t.Errorf("%s told %d, want 403", path, got)
		}
	}
	if s.took != 0 {
		t.Errorf("%d snapshots were taken for who may not see them", s.took)
	}
}

func TestThePageNeedsNothingFromElsewhere(t *testing.T) {
	s := newSite(open)
	defer s.end()
	index := s.get("/")
	if index.Code != http.StatusOK || !strings.HasPrefix(index.Header().Get("Content-Type"), "text/html") {
		t.Fatalf("/ told %d, %q; want the page", index.Code, index.Header().Get("Content-Type"))
	}
	want := "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
	if got := index.Header().Get("Content-Security-Policy"); got != want {
		t.Errorf("Content-Security-Policy %q, want %q", got, want)
	}
	refers := regexp.MustCompile(`(?:href|src)="([^"]+)"`).FindAllStringSubmatch(index.Body.String(), -1)
	assets := 0
	for _, m := range refers {
		switch path := m[1]; path {
		case "#main", "status.json", "metrics", "healthz":
		default:
			assets++
			if w := s.get("/" + path); w.Code != http.StatusOK || w.Body.Len() == 0 {
				t.Errorf("%s told %d with %d bytes", path, w.Code, w.Body.Len())
			}
		}
	}
	if assets < 5 {
		t.Errorf("the page refers to %d assets, want its 5: %q", assets, refers)
	}
	if regexp.MustCompile(`(?i)<style|<script>|\sstyle=|\son[a-z]+=`).MatchString(index.Body.String()) {
		t.Error("the page has styles or scripts within, which its policy forbids")
	}
	for _, path := range []string{"/", "/assets/app.js", "/assets/style.css"} {
		if text := s.get(path).Body.String(); strings.Contains(text, "//www") || regexp.MustCompile(`https?://`).MatchString(text) {
			t.Errorf("%s names another host", path)
		}
	}
	if strings.Contains(s.get("/assets/app.js").Body.String(), "innerHTML") {
		t.Error("app.js sets innerHTML")
	}
}

// All who ask at once have the same picture.
func TestManyMayAskForTheSnapshotAtOnce(t *testing.T) {
	s := newSite(open)
	defer s.Close()
	defer s.end()
	want := s.get("/status.json").Body.String()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if got := s.get("/status.json").Body.String(); !strings.HasSuffix(got, "}\n") || len(got) < len(want)-2 {
				t.Errorf("one was told %q", got)
			}
		})
	}
	all.Wait()
}
