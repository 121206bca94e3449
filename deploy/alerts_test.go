package deploy

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

func TestTheRulesAndTheirTestsPass(t *testing.T) {
	promtool(t, "check", "rules", "alerts.yaml")
	promtool(t, "check", "config", "scrape.yaml")
	promtool(t, "test", "rules", "alerts_test.yaml", "alerts_week_test.yaml")
}

// rule is an alert of alerts.yaml.
type rule struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

func rules(t testing.TB) (all []rule) {
	t.Helper()
	var file struct{ Groups []struct{ Rules []rule } }
	if err := yaml.Unmarshal([]byte(read(t, "prometheus/alerts.yaml")), &file); err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) == 0 {
		t.Fatal("alerts.yaml has no alerts")
	}
	return all
}

func read(t testing.TB, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Each alert says what it means and what to do, and its tests show that it fires, and that it does not.
func TestEachAlertIsExplainedAndTested(t *testing.T) {
	tested := make(map[string]map[bool]bool) // by alert: fires
	for _, file := range []string{"prometheus/alerts_test.yaml", "prometheus/alerts_week_test.yaml"} {
		var tests struct {
			Tests []struct {
				PromQL []struct {
					Expr    string
					Samples []any `yaml:"exp_samples"`
				} `yaml:"promql_expr_test"`
			}
		}
		if err := yaml.Unmarshal([]byte(read(t, file)), &tests); err != nil {
			t.Fatal(err)
		}
		name := regexp.MustCompile(`alertname="(\w+)"`)
		for _, test := range tests.Tests {
			for _, p := range test.PromQL {
				alert := name.FindStringSubmatch(p.Expr)[1]
				if tested[alert] == nil {
					tested[alert] = make(map[bool]bool)
				}
				tested[alert][len(p.Samples) > 0] = true
			}
		}
	}
	entries := make(map[string]string) // of the runbook, by anchor
	for _, entry := range strings.Split(read(t, "../docs/runbook.md"), "\n## ")[1:] {
		title, text, _ := strings.Cut(entry, "\n")
		entries["docs/runbook.md#"+strings.ToLower(title)] = text
	}
	for _, r := range rules(t) {
		if r.For == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("%s lacks for, summary or description", r.Alert)
		}
		if !slices.Contains([]string{"critical", "warning", "info"}, r.Labels["severity"]) {
			t.Errorf("%s has the severity %q", r.Alert, r.Labels["severity"])
		}
		runbook := r.Annotations["runbook_url"]
		if runbook != "docs/runbook.md#"+strings.ToLower(r.Alert) {
			t.Errorf("%s has the runbook %q, which is not its own", r.Alert, runbook)
		}
		for _, part := range []string{"**Means:**", "**Look:**", "**Do:**"} {
			if !strings.Contains(entries[runbook], part) {
				t.Errorf("%s has no %s", runbook, part)
			}
		}
		delete(entries, runbook)
		if !tested[r.Alert][true] || !tested[r.Alert][false] {
			t.Errorf("%s is tested to fire: %v, and not to: %v; want both", r.Alert, tested[r.Alert][true], tested[r.Alert][false])
		}
	}
	if len(entries) > 0 {
		t.Errorf("the runbook explains what is no alert: %v", slices.Sorted(maps.Keys(entries)))
	}
}

const policyText = `
domain: inference
descriptors:
  - {key: account, token_bucket: {capacity: 3, refill: 1/d}, concurrency: {max_in_flight: 100, lease: 2m, name: lane}}
  - {key: pool, value: images, concurrency: {max_in_flight: 2, lease: 2m}, reject_as: pool}
  - {key: trial, token_bucket: {capacity: 1, refill: 1/d}, shadow_mode: true}
  - {key: tokens, rate_limit: {unit: day, requests_per_unit: 1000, reserve: 10m}}
`

// acquire asks for these descriptors, each KEY=VALUE, at a cost.
func acquire(t testing.TB, client weirv1.LeaseServiceClient, cost uint64, descriptors ...string) *weirv1.AcquireResponse {
	t.Helper()
	r := &weirv1.AcquireRequest{Domain: "inference"}
	for _, d := range descriptors {
		key, value, _ := strings.Cut(d, "=")
		r.Descriptors = append(r.Descriptors, &weirv1.Descriptor{Entries: []*weirv1.Entry{{Key: key, Value: value}}, Hits: &cost})
	}
	answer, err := client.Acquire(storetest.Context(t), r)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

// startWeir runs a replica on a Redis, and waits until that has answered.
func startWeir(t testing.TB, r *storetest.Redis, flags ...string) *servertest.Process {
	t.Helper()
	p := servertest.Start(t, policyText, append([]string{"--redis", r.URL, "--store-timeout", "1s"}, flags...)...)
	storetest.Eventually(t, "weir is ready", func() bool {
		code, _ := p.Get(t, "/healthz")
		return code == 200
	})
	return p
}

// shortened are the rules with times that a test can wait for.
func shortened(t testing.TB) string {
	t.Helper()
	text := read(t, "prometheus/alerts.yaml")
	text = regexp.MustCompile(`for: \d+[smh]`).ReplaceAllString(text, "for: 400ms")
	text = regexp.MustCompile(`(\[|offset )(5m|10m|15m|1h)`).ReplaceAllString(text, "${1}3s")
	return strings.ReplaceAll(text, "interval: 5m", "interval: 1s")
}

func TestAlertsFireWhileRedisIsAwayAndThenEnd(t *testing.T) {
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	weir := startWeir(t, redis)
	leases := weirv1.NewLeaseServiceClient(weir.Dial(t))
	p := startPrometheus(t, shortened(t), weir)
	storetest.Eventually(t, "weir is scraped", func() bool {
		n, err := p.series(t, `weir_store_up{job="weir"} == 1`)
		return err == nil && n == 1
	})
	acquire(t, leases, 1, "account=a")
	// The rules are evaluated; WeirNotScraped may have been active before the first scrape.
	storetest.Eventually(t, "no alert is active", func() bool { return len(p.alerts(t)) == 0 })

	redis.Kill()
	var told map[string][]activeAlert
	fires := func(name string) bool { return len(told[name]) == 1 && told[name][0].State == "firing" }
	storetest.Eventually(t, "the alerts fire", func() bool {
		acquire(t, leases, 1, "account=a")
		told = p.alerts(t)
		return fires("WeirBypassed") && fires("WeirStoreDown")
	})
	for name, labels := range map[string]map[string]string{"WeirBypassed": {"domain": "inference", "mode": "open"}, "WeirStoreDown": {"job": "weir"}} {
		a := told[name][0]
		for label, value := range labels {
			if a.Labels[label] != value {
				t.Errorf("%s has the labels %v, want %s=%s", name, a.Labels, label, value)
			}
		}
		for annotation, text := range a.Annotations {
			if strings.Contains(text, "{{") || strings.Contains(text, "error expanding") || strings.Contains(text, "<no value>") {
				t.Errorf("%s says in its %s: %s", name, annotation, text)
			}
		}
	}

	redis.Start(t)
	start := time.Now()
	storetest.Eventually(t, "the alerts end", func() bool {
		active := p.alerts(t)
		return len(active["WeirBypassed"])+len(active["WeirStoreDown"]) == 0
	})
	t.Logf("the alerts ended %v after Redis was back", time.Since(start).Round(time.Millisecond))
	if d := acquire(t, leases, 1, "account=b"); !d.GetAdmitted() || d.GetLease().GetId() == "" {
		t.Errorf("after it all: %v, want a lease of the store", d)
	}
}
