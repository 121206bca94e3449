package e2e_test

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

const policy = `
domain: inference
descriptors:
  - {key: account, token_bucket: {capacity: 5, refill: 1/d}}
  - {key: plan, value: trial, token_bucket: {capacity: 2, refill: 1/d, name: trial}, shadow_mode: true}
  - {key: pool, value: images, concurrency: {max_in_flight: 4, lease: 10m, name: images}, reject_as: pool}
  - {key: pool, value: video, concurrency: {max_in_flight: 200, lease: 10m, name: video}, reject_as: pool}
`

// traffic is a weir with clients.
type traffic struct {
	*servertest.Process
	t      *testing.T
	envoy  rls.RateLimitServiceClient
	leases weirv1.LeaseServiceClient
}

// serve runs weir. Its store has time: a machine that is busy is no outage.
func serve(t *testing.T, flags ...string) *traffic {
	t.Helper()
	p := servertest.Start(t, policy, append([]string{"--store-timeout", "5s", "--max-wait", "0"}, flags...)...)
	conn := p.Dial(t)
	return &traffic{p, t, rls.NewRateLimitServiceClient(conn), weirv1.NewLeaseServiceClient(conn)}
}

// send asks n times about a descriptor, and returns how often it was admitted.
func (p *traffic) send(n int, key, value string) (admitted int) {
	p.t.Helper()
	for range n {
		r, err := p.envoy.ShouldRateLimit(storetest.Context(p.t), &rls.RateLimitRequest{
			Domain:      "inference",
			Descriptors: []*ratelimit.RateLimitDescriptor{{Entries: []*ratelimit.RateLimitDescriptor_Entry{{Key: key, Value: value}}}},
		})
		if err != nil {
			p.t.Fatal(err)
		}
		if r.GetOverallCode() == rls.RateLimitResponse_OK {
			admitted++
		}
	}
	return admitted
}

// hold takes slots of a pool, and returns the leases.
func (p *traffic) hold(n int, pool string) (leases []string) {
	p.t.Helper()
	for range n {
		r, err := p.leases.Acquire(storetest.Context(p.t), &weirv1.AcquireRequest{
			Domain: "inference", Descriptors: []*weirv1.Descriptor{{Entries: []*weirv1.Entry{{Key: "pool", Value: pool}}}},
		})
		if err != nil {
			p.t.Fatal(err)
		}
		leases = append(leases, r.GetLease().GetId())
	}
	return leases
}

func TestNumbersOnThePageEqualWhatWasSent(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	p := serve(t, "--redis", redis.URL)
	o := open(browser(t), t, p.Process, wide)
	o.expect("#headline", "Redis answers, no request passes unchecked, no pool is full")
	o.expect("#requests", "none yet")

	if got := p.send(12, "account", "alice"); got != 5 {
		t.Fatalf("%d of 12 were admitted, want the 5 of the bucket", got)
	}
	if got := p.send(6, "plan", "trial"); got != 6 {
		t.Fatalf("%d of 6 were admitted, want all: the limit is in shadow", got)
	}
	p.hold(3, "images")
	o.expect(`[data-limit="images"] [data-label="In flight"] .value`, "3 of 4")
	o.wait("the domain has all", func() bool {
		text := o.text("[data-domain=inference] .sub")
		return strings.HasPrefix(text, "14 admitted (") && strings.Contains(text, ", 7 refused (") && strings.HasSuffix(text, ", 3 leases held, 0 expired")
	})
	for _, want := range []struct{ limit, column, text string }{
		{"account", "Passed", "5"},
		{"account", "Refused", "7"},
		{"trial", "Passed", "2"},
		{"trial", "Refused", "0"},
		{"trial", "Would refuse", "4"},
		{"images", "Passed", "3"},
		{"images", "Without the store", "0"},
	} {
		if got := o.cell(want.limit, want.column); got != want.text {
			t.Errorf("%s of %s is %q, want %q", want.column, want.limit, got, want.text)
		}
	}
	if got := o.cell("account", "Retry-After"); got != "23 h 59 min" && got != "24 h 0 min" {
		t.Errorf("Retry-After of account is %q, want the day of the next token", got)
	}
	o.expect("#subjects tbody th", "account=alice")
	o.expect(`#subjects [data-label="Refused"]`, "7")
	if got := o.text("#latency-decisions .sum"); !strings.HasSuffix(got, "of 21") {
		t.Errorf("latency is %q, want that of 21 decisions", got)
	}
	if code, health := p.Get(t, "/healthz"); code != 200 || !strings.Contains(health, o.text("#version")) {
		t.Errorf("version %q is not that of /healthz: %s", o.text("#version"), health)
	}

	p.hold(1, "images")
	o.expect("#headline", "Pool images is full: 4 of 4")
	o.expect("#level", "✖ Problem")
	o.expect("#pools", "1 full")
	o.expectAccessible("a full pool")
	o.expectQuiet()
}

func TestThePageSaysThatRedisIsDownAndHowManyPassed(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	p := serve(t, "--redis", redis.URL)
	o := open(browser(t), t, p.Process, wide)
	p.send(8, "account", "alice")
	leases := p.hold(4, "images")
	p.hold(31, "video")
	if os.Getenv("WEIR_SCREENSHOTS") != "" {
		busy(p)
		p.release(leases[:2])
		o.expect(`[data-limit="images"] [data-label="In flight"] .value`, "2 of 4")
		o.shot("well-light", wide)
		o.shot("well-dark", night)
		o.shot("well-phone", phone)
		o.look(wide)
		p.hold(2, "images")
	}
	o.expect("#headline", "Pool images is full: 4 of 4")

	down := time.Now()
	redis.Kill() // returns when it has ended, which weir may see before
	if passed := p.send(40, "account", "bob"); passed != 40 {
		t.Errorf("%d of 40 passed without Redis, want all", passed)
	}
	o.wait("the page says that Redis is down", func() bool { return strings.HasPrefix(o.text("#headline"), "Redis does not answer since ") })
	expectSince(t, o.text("#headline"), down)
	o.wait("it counts all", func() bool { return strings.HasSuffix(o.text("#headline"), ": 40 requests passed unchecked") })
	p.send(1207, "account", "bob")
	o.wait("and those of later", func() bool { return strings.HasSuffix(o.text("#headline"), ": 1,247 requests passed unchecked") })
	o.expect("#total-unchecked", "1,247")
	o.expect("#store", "Redis does not answer")
	if got := o.text("#breaker"); !strings.HasPrefix(got, "open: the store is not asked for inference since ") {
		t.Errorf("breaker %q, want open for inference", got)
	}
	if got := o.text("#problems"); !strings.Contains(got, "Pool images is full: 4 of 4, when Redis last told at ") {
		t.Errorf("problems %q, want the full pool, as Redis told it last", got)
	}
	o.expectAccessible("Redis is down")
	o.shot("down-light", wide)
	o.shot("down-dark", night)
	o.shot("down-phone", phone)
	o.look(wide)

	redis.Start(t)
	o.wait("the page says that it is over", func() bool {
		text := o.text("#problems") // after what the headline says for a minute
		return strings.HasPrefix(text, "Redis answers again since ") && strings.Contains(text, "It was away for ") && strings.HasSuffix(text, ": 1,247 requests passed unchecked")
	})
	if got := o.text("#headline"); !strings.HasPrefix(got, "1,247 requests passed unchecked in the last minute: Redis was away until ") {
		t.Errorf("headline %q, want a warning for a minute", got)
	}
	o.expect("#store", "Redis answers")
	if got := o.text("#store-address"); !strings.Contains(redis.URL, "://"+got) {
		t.Errorf("the address is %q, want that of %s", got, redis.URL)
	}
	if !strings.HasSuffix(o.text("#outage"), "; 1,247 passed unchecked") {
		t.Errorf("the last outage is %q, want 1,247 that passed", o.text("#outage"))
	}
	o.expectAccessible("it is over")
	o.expectQuiet()
}

// A machine that is busy with other tests may be late by itself, so one of three will do.
func TestRedisDownIsShownWithin2Seconds(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	p := serve(t, "--redis", redis.URL)
	o := open(browser(t), t, p.Process, wide)
	// The page's own clock, which is that of this machine, says when it changed.
	o.do(chromedp.Evaluate[chromedp.Void](`new MutationObserver(() => {
		if (document.getElementById("headline").textContent.startsWith("Redis does not answer since ")) window.shownAt ??= Date.now();
	}).observe(document.getElementById("headline"), {childList: true, characterData: true, subtree: true})`))
	var took []time.Duration
	for range 3 {
		o.expect("#store", "Redis answers")
		o.do(chromedp.Evaluate[chromedp.Void]("window.shownAt = undefined"))
		down := time.Now()
		redis.Kill() // nobody asks: the look that weir takes each second finds it out
		o.wait("it is shown", func() bool { return o.is("window.shownAt !== undefined") })
		shown := time.UnixMilli(run(o, chromedp.Evaluate[int64]("window.shownAt")))
		took = append(took, shown.Sub(down))
		redis.Start(t)
		if shown.Sub(down) <= 2*time.Second {
			t.Logf("shown after %v", took)
			return
		}
	}
	t.Errorf("shown after %v, want 2 s at most", took)
}

// expectSince looks for the time in a headline: that of the first call that failed.
func expectSince(t *testing.T, headline string, down time.Time) {
	t.Helper()
	_, rest, _ := strings.Cut(headline, "since ")
	clock, _, _ := strings.Cut(rest, " UTC")
	for at := down.Add(-time.Second); at.Before(time.Now().Add(time.Second)); at = at.Add(time.Second) {
		if at.UTC().Format("15:04:05") == clock {
			return
		}
	}
	t.Errorf("%q is since %s, want since %s or a little later", headline, clock, down.UTC().Format("15:04:05"))
}

func (p *traffic) release(leases []string) {
	p.t.Helper()
	if _, err := p.leases.Release(storetest.Context(p.t), &weirv1.ReleaseRequest{LeaseIds: leases}); err != nil {
		p.t.Fatal(err)
	}
}

// busy is half a minute of traffic for screenshots, so that the charts have something to show.
func busy(p *traffic) {
	p.t.Helper()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for i := range 300 {
		p.send(1+i%7, "account", fmt.Sprintf("account-%d", i%40))
		p.send(1, "plan", "trial")
		p.send(1, "account", "alice")
		<-tick.C
	}
}

func TestThePageSaysThatRedisAnswersWithErrors(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	p := serve(t, "--redis", redis.URL)
	o := open(browser(t), t, p.Process, wide)
	p.send(1, "account", "alice")
	redis.MustDo(t, "CONFIG", "SET", "maxmemory", "1mb")
	if passed := p.send(20, "account", "bob"); passed != 20 {
		t.Errorf("%d of 20 passed without memory, want all", passed)
	}
	o.wait("the page says so", func() bool {
		text := o.text("#headline")
		return strings.HasPrefix(text, "Redis answers with errors since ") && strings.HasSuffix(text, ": 20 requests passed unchecked; the last error is OOM")
	})
	o.expect("#level", "✖ Problem")
	o.expect("#store", "Redis answers with errors")
	if got := o.text("#store-error"); !strings.HasSuffix(got, ": OOM") {
		t.Errorf("the last error is %q, want OOM", got)
	}
	redis.MustDo(t, "CONFIG", "SET", "maxmemory", "0")
	p.send(1, "account", "bob")
	o.expect("#store", "Redis answers")
	o.expect("#level", "⚠ Warning")
	o.expectAccessible("Redis answers with errors")
	o.expectQuiet()
}

func TestThePageShowsEachPoolOfALimit(t *testing.T) {
	p := servertest.Start(t, `
domain: inference
descriptors:
  - {key: pool, value: images, concurrency: {max_in_flight: 20, lease: 10m}, reject_as: pool}
  - {key: pool, value: video, concurrency: {max_in_flight: 5, lease: 10m}, reject_as: pool}
`)
	c := &traffic{p, t, nil, weirv1.NewLeaseServiceClient(p.Dial(t))}
	o := open(browser(t), t, p, wide)
	c.hold(16, "images")
	c.hold(5, "video")
	o.expect("#headline", "Pool pool=video is full: 5 of 5")
	o.expect(`[data-limit="pool"] [data-subject="pool=images"] .value`, "pool=images: 16 of 20")
	o.expect(`[data-limit="pool"] [data-subject="pool=video"] .value`, "pool=video: 5 of 5, full")
	o.expect("#pools", "1 full")
	if host, err := os.Hostname(); err != nil || !strings.HasPrefix(o.text("#replica"), host+" · weir ") {
		t.Errorf("the header says %q, want the host %q and the version (%v)", o.text("#replica"), host, err)
	}
	o.expectAccessible("several pools of a limit")
	o.expectQuiet()
}

func TestThePageStandsStillWhilePaused(t *testing.T) {
	p := serve(t)
	chrome := browser(t)
	o, other := open(chrome, t, p.Process, wide), open(chrome, t, p.Process, wide)
	p.send(2, "account", "alice")
	o.wait("both show 2", func() bool { return o.cell("account", "Passed") == "2" && other.cell("account", "Passed") == "2" })

	o.do(chromedp.KeyEvent("p"))
	o.wait("it says so", func() bool {
		return strings.HasPrefix(o.text("#paused"), "Paused since ") && o.is("!document.getElementById('paused').hidden")
	})
	p.send(1, "account", "alice")
	other.wait("the other page goes on", func() bool { return other.cell("account", "Passed") == "3" })
	if got := o.cell("account", "Passed"); got != "2" {
		t.Errorf("while it is paused it shows %s, want 2", got)
	}
	o.do(chromedp.KeyEvent("p"))
	o.wait("it goes on", func() bool { return o.cell("account", "Passed") == "3" })

	// The button, by keyboard: the second stop, after the link to the main part.
	o.do(chromedp.KeyEvent(kb.Tab), chromedp.KeyEvent(kb.Tab))
	if !o.is("document.activeElement.id === 'pause'") {
		t.Error("the second Tab does not reach the button")
	}
	o.do(chromedp.KeyEvent(kb.Enter))
	o.expect("#pause", "Continue p")
	o.expectAccessible("paused")
	o.do(chromedp.KeyEvent(kb.Enter))
	o.expect("#pause", "Pause p")
	o.expectQuiet()
	other.expectQuiet()
}

func TestThePageSaysThatWeirItselfIsSilent(t *testing.T) {
	p := serve(t)
	o := open(browser(t), t, p.Process, wide)
	p.send(2, "account", "alice")
	o.expect("#store", "memory (this process only)")
	o.wait("it shows 2", func() bool { return o.cell("account", "Passed") == "2" })
	p.Pause(t)
	o.wait("it says that weir is silent", func() bool {
		text := o.text("#headline")
		return strings.HasPrefix(text, "weir itself does not answer since ") && strings.HasSuffix(text, "; what is below is old")
	})
	o.expectAccessible("weir is silent")
	p.Signal(t, syscall.SIGCONT)
	o.expect("#headline", "The state is in memory (this process only), no request passes unchecked, no pool is full")
	o.expectQuiet()
}

func TestStoppingDoesNotWaitForWhoWatches(t *testing.T) {
	p := serve(t)
	o := open(browser(t), t, p.Process, wide)
	p.Terminate(t)
	if code := p.Wait(t); code != 0 {
		t.Errorf("weir ended with %d, want 0", code)
	}
	o.wait("the page says that weir is gone", func() bool { return strings.HasPrefix(o.text("#headline"), "weir itself does not answer since ") })
}
