// Package e2e_test looks at the status page with a real Chromium, of a real weir with a
// real Redis.
package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"weir/server/servertest"
	"weir/store/storetest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	servertest.Clean()
	os.Exit(code)
}

// chromium is the browser: the one that WEIR_CHROMIUM names, else one on PATH. Without
// any the test is skipped, or fails if WEIR_REQUIRE_TOOLS is set, as make test does.
func chromium(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("WEIR_CHROMIUM"); path != "" {
		return path
	}
	if os.Getenv("WEIR_REQUIRE_TOOLS") != "" {
		t.Fatal("WEIR_CHROMIUM must name a Chromium: run the tests by make test")
	}
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("no Chromium: run make test, or set WEIR_CHROMIUM")
	}
	return path
}

// browser starts one, which ends with the test.
func browser(t *testing.T) context.Context {
	t.Helper()
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(chromium(t)),
		chromedp.UserDataDir(t.TempDir()),
		chromedp.NoSandbox, // root has none, nor do containers; it looks at our own page alone
		chromedp.Flag("disable-dev-shm-usage", true),
		chromedp.Flag("font-render-hinting", "none"),
	)
	allocator, end := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, cancel := chromedp.NewContext(allocator, chromedp.WithErrorf(t.Logf))
	if err := chromedp.Do(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = chromedp.Cancel(ctx) // waits for its end
		cancel()
		end()
	})
	return ctx
}

// patience is for one action of the browser: a whole check of axe-core, on a busy machine.
const patience = 3 * storetest.Deadline

// look is how the page is looked at.
type look struct {
	scheme        string // light or dark
	width, height int64
}

var (
	wide  = look{"light", 1280, 900}
	night = look{"dark", 1280, 900}
	phone = look{"light", 375, 812}
	late  = look{"dark", 375, 812}
)

// tab is a page that is open.
type tab struct {
	t    *testing.T
	ctx  context.Context
	host string

	mu    sync.Mutex
	wrong []string // what a page must not do
}

// open opens weir's page, and waits for the first picture.
func open(browser context.Context, t *testing.T, p *servertest.Process, l look) *tab {
	t.Helper()
	ctx, cancel := chromedp.NewContext(browser)
	t.Cleanup(cancel)
	o := &tab{t: t, ctx: ctx, host: p.HTTP}
	if err := chromedp.Listen(ctx, o.listen); err != nil {
		t.Fatal(err)
	}
	o.do(command(network.Enable, network.EnableParams{}), command(log.Enable, cdp.Empty{}), command(runtime.Enable, cdp.Empty{}))
	o.look(l)
	o.do(chromedp.Navigate("http://" + p.HTTP + "/"))
	o.wait("the first picture", func() bool { return !o.is("document.getElementById('picture').hidden") })
	return o
}

// listen notes errors, and requests to other hosts.
func (o *tab) listen(event any) {
	var wrong string
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		wrong = "exception: " + e.ExceptionDetails.Text
		if e.ExceptionDetails.Exception != nil {
			wrong += " " + e.ExceptionDetails.Exception.Description
		}
	case *runtime.EventConsoleAPICalled:
		if e.Type == runtime.ConsoleAPICalledTypeError || e.Type == runtime.ConsoleAPICalledTypeWarning {
			text, _ := json.Marshal(e.Args) // for a person
			wrong = "console: " + string(text)
		}
	case *log.EventEntryAdded:
		if e.Entry.Level == log.EntryLevelError || e.Entry.Level == log.EntryLevelWarning {
			wrong = fmt.Sprintf("log: %s %s", e.Entry.Text, e.Entry.URL)
		}
	case *network.EventRequestWillBeSent:
		if u, err := url.Parse(e.Request.URL); err != nil || u.Host != o.host {
			wrong = "request to " + e.Request.URL
		}
	}
	if wrong != "" {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.wrong = append(o.wrong, wrong)
	}
}

// expectQuiet fails the test if the page did what it must not.
func (o *tab) expectQuiet() {
	o.t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, w := range o.wrong {
		o.t.Errorf("the page: %s", w)
	}
}

// command is a command of the protocol as an action.
func command[P, R any](c cdp.Command[P, R], params P) chromedp.Action[chromedp.Void] {
	return chromedp.Func(func(ctx context.Context, _ *chromedp.Target) error {
		_, err := chromedp.Call(ctx, c, params)
		return err
	})
}

func (o *tab) do(actions ...chromedp.Action[chromedp.Void]) {
	o.t.Helper()
	ctx, cancel := context.WithTimeout(o.ctx, patience)
	defer cancel()
	if err := chromedp.Do(ctx, actions...); err != nil {
		o.t.Fatal(err)
	}
}

// run runs an action that has a value.
func run[T any](o *tab, action chromedp.Action[T]) T {
	o.t.Helper()
	ctx, cancel := context.WithTimeout(o.ctx, patience)
	defer cancel()
	value, err := chromedp.Run(ctx, action)
	if err != nil {
		o.t.Fatal(err)
	}
	return value
}

func (o *tab) look(l look) {
	o.t.Helper()
	o.do(
		command(emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{Width: l.width, Height: l.height, DeviceScaleFactor: 1, Mobile: l.width < 500}),
		command(emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
			{Name: "prefers-color-scheme", Value: l.scheme}, {Name: "prefers-reduced-motion", Value: "reduce"},
		}}),
	)
}

// is evaluates a condition.
func (o *tab) is(js string) bool {
	o.t.Helper()
	return run(o, chromedp.Evaluate[bool](js))
}

// text is what stands at a place; "" if there is none.
func (o *tab) text(selector string) string {
	o.t.Helper()
	quoted, err := json.Marshal(selector)
	if err != nil {
		o.t.Fatal(err)
	}
	text := run(o, chromedp.Evaluate[string](fmt.Sprintf("(document.querySelector(%s) || {textContent: ''}).textContent", quoted)))
	return strings.TrimSpace(strings.ReplaceAll(text, "\u00a0", " ")) // that holds a number and its unit together
}

// cell is what stands in a column of a limit.
func (o *tab) cell(limit, column string) string {
	o.t.Helper()
	return o.text(fmt.Sprintf("[data-limit=%q] [data-label=%q] .value", limit, column))
}

func (o *tab) wait(what string, ok func() bool) {
	o.t.Helper()
	storetest.Eventually(o.t, what, ok)
}

// expect waits until the text stands at a place.
func (o *tab) expect(selector, want string) {
	o.t.Helper()
	got, found := "", false
	defer func() {
		if !found {
			o.t.Logf("%s has %q, want %q", selector, got, want)
		}
	}()
	o.wait(selector+" says "+want, func() bool {
		got = o.text(selector)
		return got == want
	})
	found = true
}

// shot takes a picture, if WEIR_SCREENSHOTS names a folder for them.
func (o *tab) shot(name string, l look) {
	o.t.Helper()
	dir := os.Getenv("WEIR_SCREENSHOTS")
	if dir == "" {
		return
	}
	o.look(l)
	o.wait("the chart fits", func() bool {
		return o.is("[...document.querySelectorAll('.chart canvas')].every((c) => c.parentElement.clientWidth <= document.documentElement.clientWidth)")
	})
	if err := os.WriteFile(filepath.Join(dir, name+".png"), run(o, chromedp.CaptureScreenshot()), 0o600); err != nil {
		o.t.Fatal(err)
	}
}

// expectAccessible asks axe-core, in each look.
func (o *tab) expectAccessible(when string) {
	o.t.Helper()
	axe, err := os.ReadFile(filepath.Join("..", "testdata", "axe.min.js"))
	if err != nil {
		o.t.Fatal(err)
	}
	o.do(chromedp.Evaluate[chromedp.Void](string(axe)))
	for _, l := range []look{wide, night, phone, late} {
		o.look(l)
		found := run(o, chromedp.Evaluate[struct {
			Passes     int
			Violations []string
		}](`axe.run(document).then((r) => ({Passes: r.passes.length, Violations: r.violations.map((v) =>
			v.id + ": " + v.help + "\n" + v.nodes.map((n) => "  " + n.html + "\n  " + n.failureSummary).join("\n"))}))`, chromedp.EvalAwaitPromise))
		for _, v := range found.Violations {
			o.t.Errorf("%s, %s, %d px: %s", when, l.scheme, l.width, v)
		}
		if found.Passes < 20 {
			o.t.Errorf("%s: axe has found %d rules to check, want 20 or more", when, found.Passes)
		}
		if o.is("document.documentElement.scrollWidth > document.documentElement.clientWidth") {
			o.t.Errorf("%s, %d px: the page scrolls to the side", when, l.width)
		}
	}
	o.look(wide)
}
