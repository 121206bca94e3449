package top

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/cockroachdb/datadriven"

	"weir/server/page"
)

var noon = time.Date(2026, 3, 4, 12, 0, 0, 0, time.UTC)

func ref[T any](v T) *T { return &v }

// sample is a bad night.
func sample() *page.Snapshot {
	return &page.Snapshot{
		At: noon, Started: noon.Add(-26*time.Hour - 5*time.Minute), Status: "degraded", Host: "weir-7f9c", Version: "1.2.0",
		Headline: page.Problem{Level: "bad", Text: "Redis does not answer since 11:58:00 UTC (2 min): 1,234 requests passed unchecked"},
		Problems: []page.Problem{
			{Level: "bad", Text: "Redis does not answer since 11:58:00 UTC (2 min): 1,234 requests passed unchecked"},
			{Level: "bad", Text: "Pool images is full: 200 of 200, when Redis last told at 11:57:59 UTC"},
			{Level: "warn", Text: "A policy file is wrong: what was right before stays in force"},
			{Level: "note", Text: "to be known"},
		},
		Store:    page.Store{Kind: "redis", Address: "redis.example.org:6379", LastError: &page.StoreError{At: noon.Add(-time.Minute), Reason: "store_timeout"}, State: "away", Since: noon.Add(-2 * time.Minute), Silent: true, Breakers: []page.Breaker{{Domain: "inference", Since: noon.Add(-time.Minute)}}},
		Bypassed: page.Bypassed{PerSecond: 12.34, Today: page.Counts{Unchecked: 1234, Local: 5, Refused: 6}},
		Domains: []page.Domain{
			{
				Name: "inference", AdmittedPerSecond: 1234.5, RefusedPerSecond: 0.25, LeasesHeld: ref(int64(214)), LeasesExpired: 3, ExpiredLately: 1,
				Limits: []page.Limit{
					{Name: "account", Kind: "token_bucket", Capacity: 10, Passed: 9, Refused: 1500, PassedPerSecond: 99.96, RefusedPerSecond: 0.2, Bypassed: 7, RetryAfter: &page.RetryAfter{Last: 0.5}},
					{Name: "images", Kind: "concurrency", Capacity: 200, Pool: &page.Pool{InFlight: ref(int64(200)), Capacity: 200, At: noon.Add(-2 * time.Minute), Old: true}},
					{Name: "chat", Kind: "concurrency", Capacity: 20, Pool: &page.Pool{InFlight: ref(int64(18)), Capacity: 20}},
					{Name: "video", Kind: "concurrency", Capacity: 1000000, Pool: &page.Pool{InFlight: ref(int64(300000)), Capacity: 1000000}},
					{Name: "pool", Kind: "concurrency", Capacity: 20, Pools: []page.Pool{{Subject: "pool=images", InFlight: ref(int64(16)), Capacity: 20}, {Subject: "pool=a-video-of-a-longer-name", InFlight: ref(int64(5)), Capacity: 5}}},
					{Name: "unknown", Kind: "concurrency", Capacity: 5, Pool: &page.Pool{Capacity: 5}},
					{Name: "lane", Kind: "concurrency", Capacity: 3},
					{Name: "trial.of.a.name.that.is.much.longer.than.its.column", Kind: "rate_limit", Capacity: 100, Shadow: true, WouldRefuse: 42},
					{Name: "override"},
				},
			},
			{Name: "empty"},
		},
		MoreLimits: 7,
		Unknown:    page.Unknown{Lately: 4},
		Latency:    page.Latency{Decisions: page.Percentiles{All: []float64{0.1234, 1.5, 12}}, Store: page.Percentiles{All: []float64{99.96, 999.7, 2500}}},
		Policies:   page.Policies{Version: "0123456789ab", LoadedAt: noon.Add(-time.Hour), Wrong: 1, Errors: []string{"policy: a.yaml:3: what is wrong; what to do"}},
		Refused: []page.Subject{
			{Domain: "inference", Limit: "account", Subject: "account=alice", Count: 1200, Last: noon.Add(-time.Second)},
			{Domain: "inference", Limit: "account", Subject: "account=\x1b[2J\x1b]0;owned\a\r\n\u202e\xff", Count: 7, Over: 2, Last: noon.Add(-time.Minute)},
		},
	}
}

// It runs testdata/picture.txt: what is drawn of a bad night on a screen of width×height,
// or, with once, what is printed of it. ESC is the byte.
func TestThePictureIsAsItIsWritten(t *testing.T) {
	datadriven.RunTest(t, "testdata/picture.txt", func(t *testing.T, d *datadriven.TestData) string {
		seen := sample()
		if d.HasArg("well") {
			seen = &page.Snapshot{
				At: noon, Started: noon.Add(-200 * time.Hour), Status: "ok", Headline: page.Problem{Level: "ok", Text: "All is well"},
				Store: page.Store{Kind: "memory", State: "up", Since: noon.Add(-200 * time.Hour)},
			}
		}
		if d.Cmd == "once" {
			var b strings.Builder
			err := Once(t.Context(), &b, Options{Addr: "host:8080", Ask: func(context.Context) (*page.Snapshot, error) { return seen, nil }})
			if err != nil {
				t.Fatal(err)
			}
			wellFormed(t, b.String(), 0)
			return b.String()
		}
		var width, height int
		d.ScanArgs(t, "width", &width)
		d.ScanArgs(t, "height", &height)
		s := screen{options: Options{Colours: d.HasArg("colours")}, v: view{addr: "host:8080", now: noon}}
		if !d.HasArg("first") {
			s.take(answer{seen: seen}, noon)
		}
		if d.HasArg("away") {
			s.take(answer{err: errors.New("refused; is it right?")}, noon.Add(time.Second))
			s.take(answer{err: errors.New("refused again; is it right?")}, noon.Add(4*time.Second))
		}
		if d.HasArg("back") {
			s.take(answer{seen: seen}, noon.Add(5*time.Second))
		}
		_ = s.picture(width, height)
		for _, b := range []byte(strings.ReplaceAll(strings.TrimSpace(d.Input), "ESC", "\x1b")) {
			s.press(sequences[string(b)])
		}
		text := s.picture(width, height)
		if !s.options.Colours {
			wellFormed(t, strings.NewReplacer(endLine, "", end, "", "\r\n", "\n").Replace(text), width)
		}
		if n := strings.Count(text, "\r\n") + 1; n != height {
			t.Errorf("the picture has %d lines, want %d", n, height)
		}
		text = strings.NewReplacer(endLine, "", end, "", "\r\n", "\n", "\x1b", "ESC").Replace(text)
		var b strings.Builder
		for l := range strings.Lines(text) {
			b.WriteString(strings.TrimRight(l, " \n") + "|\n")
		}
		return b.String()
	})
}

// wellFormed checks that nothing but lines of text is there, none wider than width.
func wellFormed(t *testing.T, text string, width int) {
	t.Helper()
	for l := range strings.Lines(text) {
		l = strings.TrimSuffix(l, "\n")
		if clean(l) != l {
			t.Errorf("the line %q has what a terminal obeys", l)
		}
		if n := utf8.RuneCountInString(l); width > 0 && n > width {
			t.Errorf("the line %q has %d characters, want %d at most", l, n, width)
		}
	}
}

func TestWhatCannotBeAskedIsAnErrorOnce(t *testing.T) {
	want := errors.New("away")
	var b strings.Builder
	err := Once(t.Context(), &b, Options{Ask: func(context.Context) (*page.Snapshot, error) { return nil, want }})
	if !errors.Is(err, want) || b.Len() > 0 {
		t.Errorf("Once = %v and %q, want %v and nothing", err, b.String(), want)
	}
}

func TestKeysAreFoundInWhatATerminalSends(t *testing.T) {
	for in, want := range map[string][]key{
		"q":                {keyQuit},
		"\x03":             {keyQuit},
		"xyzp":             {keyPause},
		"\x1b[A\x1b[B":     {keyUp, keyDown},
		"\x1bOA":           {keyUp},
		"\x1b[5~\x1b[6~":   {keyPageUp, keyPageDown},
		"\x1b[1;5Aq":       {keyQuit}, // with Ctrl: not known
		"\x1bq":            {keyQuit}, // Escape, then q
		"\x1b\x1b[B":       {keyDown}, // Escape, then an arrow
		"\x1b[200~p\x1b[F": {keyPause, keyEnd},
		"é":                nil,
		"\x1b[" + strings.Repeat("1", 100) + "~q": {keyQuit},
	} {
		var r keyReader
		var got []key
		for _, b := range []byte(in) {
			if k := r.next(b); k != keyNone {
				got = append(got, k)
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("keys of %q = %v, want %v", in, got, want)
		}
	}
}

// Whatever is drawn fits the screen, and is what a terminal shows.
func FuzzPicture(f *testing.F) {
	f.Add("account=\x1b[2J", 80, 24, 3)
	f.Add("\xff\u202e", 1, 1, -5)
	f.Fuzz(func(t *testing.T, text string, width, height, from int) {
		width, height = 1+(width&0xff), 1+(height&0xff)
		seen := sample()
		seen.Status, seen.Headline.Text, seen.Domains[0].Name, seen.Domains[0].Limits[0].Name = text, text, text, text
		seen.Policies.Version, seen.Policies.Errors, seen.Refused[0].Subject, seen.Store.Kind = text, []string{text}, text, text
		s := screen{v: view{addr: text, now: noon, seen: seen, err: errors.New(text)}, from: from}
		picture := s.picture(width, height)
		if n := strings.Count(picture, "\r\n") + 1; n != height {
			t.Errorf("the picture has %d lines, want %d", n, height)
		}
		wellFormed(t, strings.NewReplacer(endLine, "", end, "", "\r\n", "\n").Replace(picture), width)
	})
}
