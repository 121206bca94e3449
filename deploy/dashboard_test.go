package deploy

import (
	"encoding/json"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const dashboardFile = "grafana/weir.json"

func TestTheDashboardIsMadeOfItsPanels(t *testing.T) {
	made, err := Dashboard()
	if err != nil {
		t.Fatal(err)
	}
	if rewrite := flag.Lookup("rewrite"); rewrite != nil && rewrite.Value.String() == "true" {
		if err := os.WriteFile(dashboardFile, made, 0o644); err != nil { //nolint:gosec // a document
			t.Fatal(err)
		}
	}
	if read(t, dashboardFile) != string(made) {
		t.Errorf("%s is not what panels.go says: run this test with -rewrite, and read the difference", dashboardFile)
	}
}

// grafana is what the tests read of the dashboard, as Grafana would.
type grafana struct {
	UID, Title    string
	SchemaVersion int
	Panels        []grafanaPanel
	Templating    struct {
		List []struct {
			Name, Type, Definition string
			Query                  json.RawMessage
		}
	}
}

type grafanaPanel struct {
	ID                       int
	Type, Title, Description string
	Datasource               struct{ Type, UID string }
	GridPos                  struct{ X, Y, W, H int }
	Targets                  []struct {
		RefID, Expr, LegendFormat string
		Datasource                struct{ Type, UID string }
	}
	Options     map[string]any
	FieldConfig struct{ Defaults struct{ Unit string } }
}

func dashboard(t testing.TB) (g grafana) {
	t.Helper()
	if err := json.Unmarshal([]byte(read(t, dashboardFile)), &g); err != nil {
		t.Fatal(err)
	}
	if len(g.Panels) == 0 {
		t.Fatal("the dashboard has no panels")
	}
	return g
}

func TestTheDashboardIsWellFormed(t *testing.T) {
	g := dashboard(t)
	if g.UID == "" || g.Title == "" || g.SchemaVersion == 0 {
		t.Errorf("the dashboard has uid %q, title %q, schema %d; want all", g.UID, g.Title, g.SchemaVersion)
	}
	variables := map[string]bool{"__rate_interval": true, "__range": true} // Grafana's own
	for _, v := range g.Templating.List {
		variables[v.Name] = true
	}
	used := make(map[string]bool)
	uses := func(in, text string) {
		for _, m := range regexp.MustCompile(`\$\{?(\w+)`).FindAllStringSubmatch(text, -1) {
			used[m[1]] = true
			if !variables[m[1]] {
				t.Errorf("%s uses the variable %s, which there is not", in, m[1])
			}
		}
	}
	ids, titles := make(map[int]bool), make(map[string]bool)
	taken := make(map[[2]int]string) // by place in the grid: title
	for _, p := range g.Panels {
		if ids[p.ID] || p.ID == 0 {
			t.Errorf("%s has the id %d, which is 0 or another's", p.Title, p.ID)
		}
		if titles[p.Title] || p.Title == "" {
			t.Errorf("the title %q is empty or another's", p.Title)
		}
		ids[p.ID], titles[p.Title] = true, true
		at := p.GridPos
		if at.W < 1 || at.H < 1 || at.X < 0 || at.Y < 0 || at.X+at.W > gridWidth {
			t.Errorf("%s lies at %+v, outside the grid", p.Title, at)
		}
		for x := at.X; x < at.X+at.W; x++ {
			for y := at.Y; y < at.Y+at.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" {
					t.Fatalf("%s lies upon %s", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if len(p.Description) < 10 || p.FieldConfig.Defaults.Unit == "" || len(p.Options) == 0 || len(p.Targets) == 0 {
			t.Errorf("%s lacks a description, a unit, options or queries", p.Title)
		}
		if p.Datasource.UID != "${datasource}" || p.Datasource.Type != "prometheus" {
			t.Errorf("%s asks %+v, want the Prometheus that is chosen", p.Title, p.Datasource)
		}
		refs := make(map[string]bool)
		for _, q := range p.Targets {
			if refs[q.RefID] || q.RefID == "" || q.LegendFormat == "" || q.Datasource != p.Datasource {
				t.Errorf("%s: the query %+v lacks a name of its own, a legend, or the data source", p.Title, q)
			}
			refs[q.RefID] = true
			uses(p.Title, q.Expr)
			uses(p.Title, q.Datasource.UID)
		}
	}
	for _, v := range g.Templating.List {
		uses("variable "+v.Name, v.Definition)
		if !used[v.Name] {
			t.Errorf("no query uses the variable %s", v.Name)
		}
	}
}

// checkDashboardFile runs tools/dashboard on a file, and returns what it says and how it ended.
func checkDashboardFile(t testing.TB, file string) (string, error) {
	t.Helper()
	file, err := filepath.Abs(file)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("go", "-C", "../tools/dashboard", "run", ".", file).CombinedOutput()
	return string(out), err
}

func TestTheDashboardIsWhatGrafanaKnows(t *testing.T) {
	t.Parallel()
	if out, err := checkDashboardFile(t, dashboardFile); err != nil {
		t.Fatalf("tools/dashboard: %v\n%s", err, out)
	}

	// It finds what is wrong, or else it would say nothing here.
	for name, change := range map[string]struct{ old, now, want string }{
		"a field that there is not":   {`"schemaVersion"`, `"schemaversion"`, "unexpected field 'schemaversion'"},
		"an option that there is not": {`"showUnfilled"`, `"showEmpty"`, "unexpected field 'showEmpty'"},
		"a query's field":             {`"legendFormat"`, `"legend"`, "unexpected field 'legend'"},
		"a wrong type":                {`"w": 8,`, `"w": "8",`, "cannot unmarshal string"},
		"a panel that there is not":   {`"type": "stat"`, `"type": "number"`, `a panel of type "number"`},
	} {
		text := read(t, dashboardFile)
		changed := strings.ReplaceAll(text, change.old, change.now)
		file := filepath.Join(t.TempDir(), "weir.json")
		if err := os.WriteFile(file, []byte(changed), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := checkDashboardFile(t, file); err == nil || !strings.Contains(out, change.want) {
			t.Errorf("with %s tools/dashboard ends with %v and says\n%s\nwant %s", name, err, out, change.want)
		}
	}
}

// labelsOf are the labels of each series, by the name that Prometheus has for it.
func labelsOf(t testing.TB) map[string][]string {
	t.Helper()
	all := make(map[string][]string)
	family := regexp.MustCompile(`(?m)^(\w+) (counter|gauge|histogram) \{([^}]*)\}$`)
	for _, m := range family.FindAllStringSubmatch(read(t, "../server/testdata/metrics.txt"), -1) {
		labels := []string{"job", "instance"} // Prometheus' own
		if m[3] != "" {
			labels = append(labels, strings.Split(m[3], ", ")...)
		}
		if m[2] == "histogram" {
			all[m[1]+"_sum"], all[m[1]+"_count"] = labels, labels
			all[m[1]+"_bucket"] = append(slices.Clone(labels), "le")
			continue
		}
		all[m[1]] = labels
	}
	if len(all) < 40 {
		t.Fatalf("only %d metrics were read", len(all))
	}
	return all
}

// Series of others. The real Prometheus of TestAlertsFireForWhatIsDone has them, so that a
// wrong name there has no data.
var (
	foreign = map[string][]string{
		"ALERTS":                        {"alertname", "alertstate", "domain", "limit"},
		"go_goroutines":                 {"job", "instance"},
		"up":                            {"job", "instance"},
		"process_open_fds":              {"job", "instance"},
		"go_gc_duration_seconds":        {"job", "instance", "quantile"},
		"process_cpu_seconds_total":     {"job", "instance"},
		"go_memstats_heap_inuse_bytes":  {"job", "instance"},
		"process_start_time_seconds":    {"job", "instance"},
		"process_resident_memory_bytes": {"job", "instance"},
		"envoy_cluster_ratelimit_failure_mode_allowed": {"envoy_cluster_name"},
	}
	quoted    = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)
	selector  = regexp.MustCompile(`\b([a-zA-Z_]\w*)\s*(?:\{([^}]*)\})?`)
	grouping  = regexp.MustCompile(`\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)`)
	matcher   = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)`)
	templated = regexp.MustCompile(`\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}`)
)

// namesIn are the series that an expression names, the labels that they have, and what is wrong
// with the names.
func namesIn(expr string, all map[string][]string) (series, labels, wrong []string) {
	grouped := grouping.FindAllStringSubmatch(expr, -1)
	text := grouping.ReplaceAllString(quoted.ReplaceAllString(expr, ""), "")
	text = regexp.MustCompile(`\[[^\]]*\]|\boffset \w+`).ReplaceAllString(text, "")
	for _, m := range selector.FindAllStringSubmatchIndex(text, -1) {
		name := text[m[2]:m[3]]
		if slices.Contains([]string{"or", "and", "unless", "bool"}, name) || strings.HasPrefix(strings.TrimSpace(text[m[1]:]), "(") {
			continue // an operator, or a function
		}
		has := all[name]
		if has == nil {
			if slices.Contains([]string{"sum", "max", "min", "count", "topk"}, name) {
				continue // an aggregation, whose grouping stood behind it
			}
			wrong = append(wrong, "there is no metric "+name)
			continue
		}
		if m[4] >= 0 {
			for _, l := range matcher.FindAllStringSubmatch(text[m[4]:m[5]], -1) {
				if !slices.Contains(has, l[1]) {
					wrong = append(wrong, name+" has no label "+l[1])
				}
			}
		}
		series = append(series, name)
		labels = append(labels, has...)
	}
	for _, g := range grouped {
		for l := range strings.SplitSeq(g[1], ",") {
			if l = strings.TrimSpace(l); !slices.Contains(labels, l) {
				wrong = append(wrong, "nothing has the label "+l)
			}
		}
	}
	if len(series) == 0 {
		wrong = append(wrong, "it names nothing")
	}
	return series, labels, wrong
}

// A name that weir has not is no error to Prometheus: the alert would never fire, and the graph be empty.
func TestRulesAndDashboardNameWhatThereIs(t *testing.T) {
	all := labelsOf(t)
	maps.Copy(all, foreign)
	shown := make(map[string]bool)
	check := func(where, expr string, templates ...string) {
		series, labels, wrong := namesIn(expr, all)
		for _, w := range wrong {
			t.Errorf("%s: %s", where, w)
		}
		for _, s := range series {
			shown[strings.TrimSuffix(s, "_bucket")] = true
		}
		for _, text := range templates {
			for _, m := range templated.FindAllStringSubmatch(text, -1) {
				if !slices.Contains(labels, m[1]) {
					t.Errorf("%s: %q has no label %s", where, text, m[1])
				}
			}
		}
	}
	for _, r := range rules(t) {
		check(r.Alert, r.Expr, slices.Collect(maps.Values(r.Annotations))...)
	}
	for _, p := range dashboard(t).Panels {
		for _, q := range p.Targets {
			check(p.Title, q.Expr, q.LegendFormat)
		}
	}

	// What weir counts is looked at, but for these: messages of streams tell no more than calls.
	unshown := []string{"grpc_server_msg_received_total", "grpc_server_msg_sent_total"}
	for name := range labelsOf(t) {
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			name = strings.TrimSuffix(name, suffix)
		}
		if !shown[name] && !slices.Contains(unshown, name) {
			t.Errorf("neither an alert nor a panel shows %s", name)
		}
	}
}

func TestWrongNamesAreFound(t *testing.T) {
	all := labelsOf(t)
	for expr, want := range map[string]string{
		`sum by (domain) (rate(weir_decision_total[5m]))`:            "there is no metric weir_decision_total",
		`sum by (domain) (rate(weir_decisions_total{mode="a"}[1m]))`: "weir_decisions_total has no label mode",
		`sum by (mode) (rate(weir_decisions_total[5m]))`:             "nothing has the label mode",
		`max(weir_store_up) / on (job, op) weir_ready`:               "nothing has the label op",
	} {
		if _, _, wrong := namesIn(expr, all); !slices.Contains(wrong, want) {
			t.Errorf("of %s it is said %q, want %q", expr, wrong, want)
		}
	}
}

// ask runs an expression of the dashboard, with these jobs and all that they have chosen.
func (p *prometheus) ask(t testing.TB, where, expr string) []sample {
	t.Helper()
	expr = strings.NewReplacer("$job", "weir(-tls)?", "$instance", ".+", "$domain", ".*", "$__rate_interval", "5s", "$__range", "1m").Replace(expr)
	got, err := p.query(t, expr)
	if err != nil {
		t.Errorf("%s: %v\n%s", where, err, expr)
	}
	return got
}

// panel is what a panel shows now.
func (p *prometheus) panel(t testing.TB, title string) (all []sample) {
	t.Helper()
	for _, panel := range dashboard(t).Panels {
		if panel.Title == title {
			for _, q := range panel.Targets {
				all = append(all, p.ask(t, title, q.Expr)...)
			}
			return all
		}
	}
	t.Fatalf("there is no panel %q", title)
	return nil
}

// checkDashboard runs every expression of the dashboard: each panel has data, but of errors, of
// which there were none.
func (p *prometheus) checkDashboard(t testing.TB) {
	t.Helper()
	asked := 0
	for _, panel := range dashboard(t).Panels {
		series := 0
		for _, q := range panel.Targets {
			asked++
			series += len(p.ask(t, panel.Title, q.Expr))
		}
		if panel.Type != "row" && series == 0 && panel.Title != "Errors of Redis" {
			t.Errorf("the panel %q shows nothing", panel.Title)
		}
	}
	t.Logf("%d expressions were run", asked)
	for title, want := range map[string]string{"Redis answers": "1", "Bypassed now": "0", "Fullest pools": "1", "Not ready": "0"} {
		if got := p.panel(t, title); len(got) == 0 || got[0].value() != want {
			t.Errorf("the panel %q shows %v, want %s", title, got, want)
		}
	}
	for _, title := range []string{"Refused now", "Decided now"} {
		if got := p.panel(t, title); len(got) != 1 || got[0].value() == "0" {
			t.Errorf("the panel %q shows %v, want more than 0", title, got)
		}
	}
}
