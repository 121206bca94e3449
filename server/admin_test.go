package server_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"

	"weir/limit"
	weirv1 "weir/proto/weir/v1"
	"weir/server"
	"weir/store"
	"weir/store/memory"
	"weir/store/standby"
	"weir/store/storetest"
)

// admin calls the admin port of a service, by an address, and returns the code and the answer.
func admin(s *server.Server, method, path, body string, header ...string) (int, string) {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Host = "127.0.0.1:6070"
	if method != http.MethodGet {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			r.Host = header[i+1]
		}
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	s.Admin().ServeHTTP(w, r)
	answer, _ := io.ReadAll(w.Result().Body)
	return w.Code, strings.TrimSpace(string(answer))
}

// adminOK has the answer read into out; it must be 200.
func adminOK(t testing.TB, s *server.Server, method, path, body string, out any) {
	t.Helper()
	code, text := admin(s, method, path, body)
	if code != http.StatusOK {
		t.Fatalf("%s %s %s = %d %s", method, path, body, code, text)
	}
	in := json.NewDecoder(strings.NewReader(text))
	in.DisallowUnknownFields()
	if err := in.Decode(out); err != nil {
		t.Fatalf("%s %s: %v in %s", method, path, err, text)
	}
}

// listed are the leases of a page, in short.
func listed(page server.AdminLeases) (out []string) {
	for _, l := range page.Leases {
		text := fmt.Sprintf("%s %d %d", l.Lease[:8], l.HeldFor, l.ExpiresAfter)
		for _, s := range l.Slots {
			text += " " + s.Limit + ":" + s.Subject
		}
		for _, r := range l.Reserved {
			text += fmt.Sprintf(" %s:%s=%d", r.Limit, r.Subject, r.Hits)
		}
		out = append(out, text)
	}
	return out
}

const adminPolicy = lanePolicy + `
  - {key: tokens, token_bucket: {capacity: 100, refill: 1/s, reserve: 3m}}
  - {key: secret, sensitive: true, concurrency: {max_in_flight: 1, lease: 1m}}
`

func TestAdminListsAndReleasesLeases(t *testing.T) {
	var log bytes.Buffer
	clock := storetest.NewClock()
	s := serviceWith(t, memory.New(memory.Options{Now: clock.Now}), clock, func(o *server.Options) {
		o.Logger = slog.New(slog.NewTextHandler(&log, nil))
	})
	s.setPolicy(t, adminPolicy)
	first := acquire(t, s.leases, typed("account", "alice"), typed("pool", "images")).GetLease().GetId()
	s.clock.Advance(1500 * time.Millisecond)
	second := acquire(t, s.leases, costing(7, typed("tokens", "t"))).GetLease().GetId()
	secret := acquire(t, s.leases, typed("secret", "hunter2")).GetLease().GetId()
	want := []string{
		secret[:8] + " 0 60000 secret:secret=#",
		first[:8] + " 1500 88500 account:account=alice pool:pool=images",
		second[:8] + " 0 180000 tokens:tokens=t=7",
	}
	expect := func(query string, want ...string) {
		t.Helper()
		var page server.AdminLeases
		adminOK(t, s.Server, "GET", "/leases?domain=d"+query, "", &page)
		got := listed(page)
		for i := range got { // a digest is of a random key
			if at := strings.IndexByte(got[i], '#'); at >= 0 {
				got[i] = got[i][:at+1]
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("/leases?domain=d%s (-want +got):\n%s", query, diff)
		}
	}
	expect("", want...)
	expect("&limit=pool", want[1])
	expect("&subject=account%3Dalice", want[1])
	expect("&subject=account%3Dbob")
	expect("&subject=secret%3Dhunter2", want[0])
	expect("&subject=tokens%3Dt&limit=tokens", want[2])
	expect("&subject=tokens%3Dt&limit=pool")

	// Page by page.
	var got []string
	for after := ""; ; {
		var page server.AdminLeases
		adminOK(t, s.Server, "GET", "/leases?domain=d&n=1&after="+after, "", &page)
		if len(page.Leases) > 1 {
			t.Fatalf("a page of %d leases, want 1", len(page.Leases))
		}
		got = append(got, listed(page)...)
		if after = page.Next; after == "" {
			break
		}
	}
	if len(got) != len(want) {
		t.Errorf("by pages: %v", got)
	}

	var done server.AdminReleased
	adminOK(t, s.Server, "POST", "/leases/release", `{"leases":["`+first+`","AAAAAAAAAAAAAAAAAAAAAA.d"]}`, &done)
	results := []server.AdminResult{{Lease: first, Result: "RELEASED"}, {Lease: "AAAAAAAAAAAAAAAAAAAAAA.d", Result: "NOT_HELD"}}
	if diff := cmp.Diff(results, done.Results); diff != "" {
		t.Errorf("release (-want +got):\n%s", diff)
	}
	expect("", want[0], want[2])
	s.expectMetrics(t, "afterwards", map[string]float64{
		`weir_leases_ended_total{by="admin",domain="d"}`: 1,
	})
	if text := log.String(); !strings.Contains(text, `level=WARN msg="an operator released leases" domain=d leases=1 limits="[account pool]"`) || strings.Contains(text, first) {
		t.Errorf("the log is %s", text)
	}
}

func TestAdminResetsASubject(t *testing.T) {
	var log bytes.Buffer
	clock := storetest.NewClock()
	s := serviceWith(t, memory.New(memory.Options{Now: clock.Now}), clock, func(o *server.Options) {
		o.Logger = slog.New(slog.NewTextHandler(&log, nil))
	})
	s.setPolicy(t, adminPolicy)
	a := acquire(t, s.leases, costing(9, typed("account", "alice")))
	acquire(t, s.leases, typed("account", "bob"))
	const body = `{"domain":"d","descriptors":[{"entries":[{"key":"account","value":"alice"}]}]`
	want := []server.AdminLimit{
		{
			Name: "account", Kind: "token_bucket", Class: "lane", Subject: "account=alice", Key: "weir:{d}:b:account=alice", Capacity: 10,
			Remaining: 1, Level: 1, ResetAfter: 9000,
		},
		{Name: "account", Kind: "concurrency", Class: "lane", Subject: "account=alice", Key: "weir:{d}:c:account=alice", Capacity: 2, Remaining: 1, Count: 1},
	}
	for _, dry := range []bool{true, true, false} {
		var done server.AdminResetDone
		adminOK(t, s.Server, "POST", "/reset", fmt.Sprintf(`%s,"dry_run":%v}`, body, dry), &done)
		if diff := cmp.Diff(server.AdminResetDone{Limits: want, Reset: !dry}, done); diff != "" {
			t.Errorf("reset, dry_run %v (-want +got):\n%s", dry, diff)
		}
	}
	if got := inspect(t, s.leases, "d", "account", "alice"); got.GetLimits()[0].GetRemaining() != 10 || got.GetLimits()[1].GetCount() != 0 {
		t.Errorf("afterwards alice stands at %v", got)
	}
	if got := inspect(t, s.leases, "d", "account", "bob"); got.GetLimits()[0].GetRemaining() != 9 || got.GetLimits()[1].GetCount() != 1 {
		t.Errorf("afterwards bob stands at %v", got)
	}
	if got := renew(t, s.leases, a.GetLease().GetId()); got != "LOST" {
		t.Errorf("renewal of a lease whose slot was reset = %s, want LOST", got)
	}
	if got := release(t, s.leases, a.GetLease().GetId()); got != "RELEASED" {
		t.Errorf("its release = %s, want RELEASED", got)
	}
	s.expectMetrics(t, "afterwards", map[string]float64{`weir_resets_total{domain="d"}`: 1})
	if text := log.String(); !strings.Contains(text, `level=WARN msg="an operator had the state of a subject forgotten" domain=d limits=[account]`) || strings.Contains(text, "alice") {
		t.Errorf("the log is %s", text)
	}

	// What meets no limit resets nothing.
	var done server.AdminResetDone
	adminOK(t, s.Server, "POST", "/reset", `{"domain":"d","descriptors":[{"entries":[{"key":"nobody","value":"x"}]}]}`, &done)
	if done.Reset || len(done.Limits) != 0 {
		t.Errorf("reset of what meets no limit = %+v", done)
	}
}

// Somebody who waits for a slot gets it when it is reset.
func TestAResetWakesWhoWaits(t *testing.T) {
	s := serve(t, `
domain: d
descriptors:
  - {key: pool, value: p, concurrency: {max_in_flight: 1, lease: 1m, max_wait: 1m}, reject_as: pool}
`)
	acquire(t, s.leases, typed("pool", "p"))
	got := make(chan *weirv1.AcquireResponse)
	go func() { got <- acquire(t, s.leases, typed("pool", "p")) }()
	storetest.Eventually(t, "somebody waits", func() bool { return s.metric(t, "weir_waiting") == 1 })
	var done server.AdminResetDone
	adminOK(t, s.Server, "POST", "/reset", `{"domain":"d","descriptors":[{"entries":[{"key":"pool","value":"p"}]}]}`, &done)
	if a := <-got; !a.GetAdmitted() {
		t.Errorf("who waited got %v", a)
	}
}

// What is wrong with a request is said, and nothing is done.
func TestAdminRefusesWhatItDoesNotUnderstand(t *testing.T) {
	s := serve(t, adminPolicy)
	long := strings.Repeat("x", 2<<20)
	ids := strings.Repeat(`"AAAAAAAAAAAAAAAAAAAAAA.d",`, 1001)
	entries := `[{"key":"account","value":"alice"}]`
	for _, tt := range []struct {
		method, path, body string
		code               int
		text               string
	}{
		{"GET", "/leases", "", 400, "domain is empty"},
		{"GET", "/leases?domain=d&n=1001", "", 400, `n must be 1..1000, got "1001"`},
		{"GET", "/leases?domain=d&n=0", "", 400, `n must be 1..1000, got "0"`},
		{"GET", "/leases?domain=d&after=x", "", 400, "after must be the next of a page before"},
		{"GET", "/leases?domain=d&after=there.1.x", "", 400, "after must be the next of a page before"},
		{"GET", "/leases?domain=d&limits=x", "", 400, `"limits" is no parameter of /leases`},
		{"GET", "/leases?domain=d&subject=x", "", 400, `subject "x" is not key=value`},
		{"GET", "/leases?domain=d&subject=x%3D1", "", 400, "the subject meets no limit of the domain"},
		{"GET", "/leases?domain=e&subject=x%3D1", "", 400, `no policy has the domain "e"; there are: d`},
		{"POST", "/leases", "{}", 405, ""},
		{"GET", "/reset", "", 405, ""},
		{"POST", "/leases/release", "{}", 400, "no lease ids"},
		{"POST", "/leases/release", `{"leases":["x"]}`, 400, "leases[0]: lease id must be 22 base64url characters"},
		{"POST", "/leases/release", `{"leases":[` + ids[:len(ids)-1] + `]}`, 400, "1001 lease ids, at most 1000"},
		{"POST", "/leases/release", `{"lease":["x"]}`, 400, `unknown field "lease"`},
		{"POST", "/leases/release", `{"leases":["` + long + `"]}`, 413, "the body has more than 1048576 bytes"},
		{"POST", "/reset", ``, 400, "the body is not what this page reads: EOF"},
		{"POST", "/reset", `{} {}`, 400, "something stands behind the object"},
		{"POST", "/reset", `{"domain":7}`, 400, "cannot unmarshal number"},
		{"POST", "/reset", `{"domain":"d"}`, 400, "descriptors is empty"},
		{"POST", "/reset", `{"domain":"","descriptors":[{"entries":` + entries + `}]}`, 400, "domain is empty"},
		{"POST", "/reset", `{"domain":"d","descriptors":[{}]}`, 400, "descriptors[0].entries is empty"},
		{"POST", "/reset", `{"domain":"d","descriptors":[{"entries":[{"value":"x"}]}]}`, 400, "descriptors[0].entries[0].key is empty"},
		{"POST", "/reset", `{"domain":"e","descriptors":[{"entries":` + entries + `}]}`, 400, `no policy has the domain "e"; there are: d`},
		{"POST", "/reset", `{"domain":"d","descriptors":[` + strings.Repeat(`{"entries":`+entries+`},`, 1024) + `{}]}`, 400, "descriptors has 1025 elements"},
	} {
		code, text := admin(s.Server, tt.method, tt.path, tt.body)
		if code != tt.code || !strings.Contains(text, tt.text) {
			t.Errorf("%s %s %.80s = %d %.200s, want %d %s", tt.method, tt.path, tt.body, code, text, tt.code, tt.text)
		}
	}
	s.expectMetrics(t, "afterwards", map[string]float64{`weir_resets_total{domain="d"}`: 0})
}

// A web page that an operator's browser shows can change nothing, by whatever name it was
// loaded.
func TestAPageOfAnotherSiteChangesNothing(t *testing.T) {
	s := serve(t, adminPolicy)
	id := acquire(t, s.leases, typed("account", "alice")).GetLease().GetId()
	reset := `{"domain":"d","descriptors":[{"entries":[{"key":"account","value":"alice"}]}]}`
	release := `{"leases":["` + id + `"]}`
	for _, tt := range []struct {
		name   string
		header []string
		code   int
	}{
		{"another site", []string{"Sec-Fetch-Site", "cross-site", "Origin", "https://evil.example"}, 403},
		{"another port of this machine", []string{"Sec-Fetch-Site", "same-site", "Origin", "http://127.0.0.1:8080"}, 403},
		{"an old browser", []string{"Origin", "https://evil.example"}, 403},
		{"a name that was made to mean this machine", []string{"Host", "evil.example:6070", "Origin", "http://evil.example:6070"}, 403},
		{"a form", []string{"Content-Type", "text/plain"}, 415},
		{"a form, of a browser that says nothing", []string{"Content-Type", "application/x-www-form-urlencoded"}, 415},
		{"no type", []string{"Content-Type", ""}, 415},
	} {
		for path, body := range map[string]string{"/reset": reset, "/leases/release": release} {
			if code, text := admin(s.Server, "POST", path, body, tt.header...); code != tt.code {
				t.Errorf("%s: POST %s = %d %s, want %d", tt.name, path, code, text, tt.code)
			}
		}
	}
	if code, _ := admin(s.Server, "GET", "/leases?domain=d", "", "Host", "evil.example:6070"); code != 403 {
		t.Errorf("leases by another name = %d, want 403", code)
	}
	if got := inspect(t, s.leases, "d", "account", "alice").GetLimits()[1].GetCount(); got != 1 {
		t.Fatalf("alice holds %d slots, want 1", got)
	}
	for _, host := range []string{"localhost:6070", "[::1]:6070", "10.0.0.1", "[::1]", "LOCALHOST"} {
		if code, text := admin(s.Server, "GET", "/leases?domain=d", "", "Host", host); code != 200 {
			t.Errorf("leases by %s = %d %s, want 200", host, code, text)
		}
	}
	if code, text := admin(s.Server, "POST", "/reset", reset, "Content-Type", "application/json; charset=utf-8", "Sec-Fetch-Site", "same-origin"); code != 200 {
		t.Errorf("reset by a page of its own = %d %s, want 200", code, text)
	}
}

// What this replica granted without the store is listed too, and the store's when it is back.
func TestAdminListsWhatWasGrantedWithoutTheStore(t *testing.T) {
	clock := storetest.NewClock()
	st := &absent{Store: memory.New(memory.Options{Now: clock.Now})}
	s := serviceWith(t, st, clock, func(o *server.Options) {
		o.Standby = standby.Options{Mode: limit.ModeLocal, Now: clock.Now}
	})
	s.setPolicy(t, adminPolicy)
	kept := acquire(t, s.leases, typed("account", "alice")).GetLease().GetId()
	st.away.Store(true)
	local := acquire(t, s.leases, typed("pool", "images")).GetLease().GetId()
	var page server.AdminLeases
	adminOK(t, s.Server, "GET", "/leases?domain=d", "", &page)
	if len(page.Leases) != 1 || page.Leases[0].Lease != local || !page.Leases[0].Here || page.Next == "" {
		t.Fatalf("without the store there are %+v", page)
	}
	if code, text := admin(s.Server, "GET", "/leases?domain=d&after="+page.Next, ""); code != 503 {
		t.Errorf("the store's = %d %s, want 503", code, text)
	}
	if code, text := admin(s.Server, "POST", "/reset", `{"domain":"d","descriptors":[{"entries":[{"key":"pool","value":"images"}]}]}`); code != 503 {
		t.Errorf("reset without the store = %d %s, want 503", code, text)
	}
	st.away.Store(false)
	var rest server.AdminLeases
	adminOK(t, s.Server, "GET", "/leases?domain=d&after="+page.Next, "", &rest)
	if ids := []string{kept}; len(rest.Leases) != 1 || !slices.Contains(ids, rest.Leases[0].Lease) || rest.Leases[0].Here {
		t.Errorf("the store has %+v", rest)
	}
}

// absent is a store that does not answer what this test asks while it is away.
type absent struct {
	store.Store
	away atomic.Bool
}

func (a *absent) Decide(ctx context.Context, r limit.Request) (limit.Decision, error) {
	if a.away.Load() {
		return limit.Decision{}, store.ErrUnavailable
	}
	return a.Store.Decide(ctx, r)
}

func (a *absent) Leases(ctx context.Context, domain string, after limit.Slot, n int) (limit.Listing, error) {
	if a.away.Load() {
		return limit.Listing{}, store.ErrUnavailable
	}
	return a.Store.Leases(ctx, domain, after, n)
}

func (a *absent) Inspect(ctx context.Context, checks []limit.Check) ([]limit.State, error) {
	if a.away.Load() {
		return nil, store.ErrUnavailable
	}
	return a.Store.Inspect(ctx, checks)
}

// While the admin port is open to all who reach it, nothing of it is reached by another name
// (docs/decisions/0017).
func TestNoPageOfTheAdminPortIsReachedByAnotherName(t *testing.T) {
	level := new(slog.LevelVar)
	clock := storetest.NewClock()
	s := serviceWith(t, memory.New(memory.Options{Now: clock.Now}), clock, func(o *server.Options) { o.LogLevel = level })
	s.setPolicy(t, adminPolicy)
	for _, p := range [][2]string{{"PUT", "/loglevel?level=debug"}, {"GET", "/rlconfig"}, {"GET", "/debug/pprof/goroutine?debug=1"}, {"GET", "/leases?domain=d"}} {
		if code, _ := admin(s.Server, p[0], p[1], "", "Host", "evil.example:6070", "Origin", "http://evil.example:6070", "Sec-Fetch-Site", "same-origin"); code != 403 {
			t.Errorf("%s %s by another name = %d, want 403", p[0], p[1], code)
		}
	}
	if level.Level() != slog.LevelInfo {
		t.Errorf("the log level is %v now", level.Level())
	}
}

// What a request's sender chose does not rule the terminal of an operator: C1 controls are
// obeyed by terminals, and bidi overrides turn a line around.
func TestASubjectInAListHasNoControls(t *testing.T) {
	s := serve(t, adminPolicy)
	acquire(t, s.leases, typed("account", "\u009b2J\u202ex"))
	var page server.AdminLeases
	adminOK(t, s.Server, "GET", "/leases?domain=d", "", &page)
	for _, r := range page.Leases[0].Slots[0].Subject {
		if !unicode.IsPrint(r) {
			t.Errorf("the subject has %U", r)
		}
	}
}
