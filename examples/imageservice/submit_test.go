package main

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weir/store/storetest"
)

// script is a service that answers each request by the next of its answers, and then by
// the last, and notes when.
type script struct {
	answers []reply
	asked   []time.Duration
	begin   time.Time
}

// reply is a status with a Retry-After and a body; 0: the connection breaks.
type reply struct {
	code       int
	retryAfter string
	body       string
}

func (s *script) RoundTrip(r *http.Request) (*http.Response, error) {
	s.asked = append(s.asked, time.Since(s.begin))
	a := s.answers[min(len(s.asked), len(s.answers))-1]
	if a.code == 0 {
		return nil, io.ErrUnexpectedEOF
	}
	response := &http.Response{StatusCode: a.code, Status: fmt.Sprint(a.code), Header: make(http.Header), Body: io.NopCloser(strings.NewReader(a.body)), Request: r}
	if a.retryAfter != "" {
		response.Header.Set("Retry-After", a.retryAfter)
	}
	return response, nil
}

func TestTheClientAsksAgainAsTheContractSays(t *testing.T) {
	ok := reply{code: 200, body: "an image"}
	for _, c := range []struct {
		name    string
		answers []reply
		waits   []time.Duration // least, before each further ask
		err     string
	}{
		{"at once", []reply{ok}, nil, ""},
		{"when Retry-After is over", []reply{{code: 429, retryAfter: "7"}, {code: 503, retryAfter: "2"}, ok}, []time.Duration{7 * time.Second, 2 * time.Second}, ""},
		{"after a second without one", []reply{{code: 429}, {code: 503, retryAfter: "soon"}, {code: 0}, ok}, []time.Duration{time.Second, time.Second, time.Second}, ""},
		{"not if it can't help", []reply{{code: 429, body: `{"retryable": false, "detail": "It costs too much."}`}}, nil, "429:  It costs too much."},
		{"not after an error", []reply{{code: 500}}, nil, "500"},
		{"at most four times", []reply{{code: 429, retryAfter: "1"}}, []time.Duration{time.Second, time.Second, time.Second}, "429:  "},
		{"not after its deadline", []reply{{code: 503, retryAfter: "50"}}, []time.Duration{50 * time.Second}, "503:  "},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &script{answers: c.answers, begin: time.Now()}
				program := submit{Services: []string{"http://one", "http://two"}, Attempts: 4, Deadline: time.Minute}
				image, err := program.ask(t.Context(), &http.Client{Transport: s}, "alice", "work=1s")
				if got := fmt.Sprint(err); got != c.err && (err != nil || c.err != "") {
					t.Errorf("error %q, want %q", got, c.err)
				}
				if err == nil {
					expect(t, "image", string(image), ok.body)
				}
				if len(s.asked) != len(c.waits)+1 {
					t.Fatalf("asked at %v, want %d times", s.asked, len(c.waits)+1)
				}
				for i, least := range c.waits {
					if waited := s.asked[i+1] - s.asked[i]; waited < least || waited > least+maxJitter {
						t.Errorf("waited %v, want %v and up to %v more", waited, least, maxJitter)
					}
				}
			})
		})
	}
}

func TestTheJitterIsSpread(t *testing.T) {
	var early, late bool
	for range 1000 { // that one is missing: 2 × (4/5)^1000
		jitter := wait("3") - 3*time.Second
		early, late = early || jitter < maxJitter/5, late || jitter > 4*maxJitter/5
	}
	if !early || !late {
		t.Error("want jitter up to 250 ms")
	}
}

func TestNoJobIsLostWhenItsClientGivesUpOrDies(t *testing.T) {
	w := newWorld(t, policyWith(t, bucket, "{capacity: 10, refill: 10/s}", slots, ledger))
	folder := t.TempDir()
	const alices, bobs = 24, 3
	for n := range alices {
		write(t, filepath.Join(folder, "alice", fmt.Sprintf("%02d.job", n)), "work=20ms\n")
	}
	for n := range bobs {
		write(t, filepath.Join(folder, "bob", fmt.Sprintf("%02d.job", n)), "")
	}
	count := func(pattern string) int {
		names, err := filepath.Glob(filepath.Join(folder, "*", pattern))
		if err != nil {
			t.Fatal(err)
		}
		return len(names)
	}
	args := []string{"submit", folder, "--service", w.instances[0].url + "," + w.instances[1].url}

	impatient := start(t, append(args, "--attempts", "1")...)
	expect(t, "the exit code of who gives up", impatient.wait(t), 1)
	if made := count("*.image"); made < 10+bobs || made == alices+bobs {
		t.Errorf("%d images, want the burst, and not all", made)
	}
	expect(t, "images and jobs", count("*.image")+count("*.job"), alices+bobs)

	before := count("*.image")
	dies := start(t, args...)
	storetest.Eventually(t, "some more are made", func() bool { return count("*.image") > before })
	dies.kill(t)
	if count("*.job") == 0 {
		t.Error("it died when all was done: this tells nothing")
	}

	last := start(t, args...)
	expect(t, "the exit code", last.wait(t), 0)
	if t.Failed() {
		t.Log(last.text())
	}
	expect(t, "images", count("*.image"), alices+bobs)
	expect(t, "jobs", count("*.job"), 0)
	w.nothingHeld(t)
	// A client that is killed in the instant in which its job is admitted: the instance gives
	// the slot back, and the ledger has no reserve, so that its hit stays. One a worker.
	if lost := w.state("alice").taken - w.begun("alice"); lost < 0 || lost > 3 {
		t.Errorf("weir has counted %d more than were begun, want 0 to 3", lost)
	}
	if got := w.most("alice"); got > 3 {
		t.Errorf("%d jobs at once, want at most 3", got)
	}
}
