package deploy

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

func TestTheRulesAndTheirTestsPass(t *testing.T) {
	t.Parallel()
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
