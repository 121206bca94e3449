package server_test

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cockroachdb/datadriven"
	logpb "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	"github.com/prometheus/client_golang/prometheus"

	"weir/store/storetest"
)

// namesPolicy has every kind of limit.
const namesPolicy = metricsPolicy + `
  - {key: tokens, rate_limit: {unit: day, requests_per_unit: 1000, reserve: 1m}}
  - {key: pool, value: p, concurrency: {max_in_flight: 1, lease: 1m, max_wait: 1ms}, reject_as: pool}
`

// family is a metric, as /metrics tells it.
type family struct {
	kind, help string
	labels     []string // sorted, without le
}

var sampleLabel = regexp.MustCompile(`([a-z_]+)="(?:[^"\\]|\\.)*"`)

// familiesIn parses the text format.
func familiesIn(text string) map[string]*family {
	all := make(map[string]*family)
	var now *family // lines of a metric follow its HELP and TYPE
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if rest, ok := strings.CutPrefix(line, "# HELP "); ok {
			name, help, _ := strings.Cut(rest, " ")
			now = &family{help: help}
			all[name] = now
			continue
		}
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			_, now.kind, _ = strings.Cut(rest, " ")
			continue
		}
		for _, m := range sampleLabel.FindAllStringSubmatch(line, -1) {
			if m[1] != "le" && !slices.Contains(now.labels, m[1]) {
				now.labels = append(now.labels, m[1])
			}
		}
		if now != nil {
			slices.Sort(now.labels)
		}
	}
	return all
}

// allFamilies are the metrics of weir, after each of them was counted at least once; without those
// of the Go runtime and of the process.
func allFamilies(t *testing.T) map[string]*family {
	t.Helper()
	s := serve(t, namesPolicy)
	everything(t, s)
	lease := acquire(t, s.leases, costing(400, typed("tokens", "a")), typed("pool", "p")).GetLease().GetId()
	acquire(t, s.leases, typed("pool", "p")) // waits, and is refused
	reconcile(t, s.leases, used(lease, "tokens=100"))
	operate(t, s.leases, "A", 0, typed("account", "a"))
	operate(t, s.leases, "A", 0, typed("account", "a"))
	operate(t, s.leases, "A", 0, typed("account", "b"))
	logOf(t, s, "d").send(entry(logpb.AccessLogType_DownstreamEnd, "", "", nil))
	storetest.Eventually(t, "the entry is read", func() bool { return s.metric(t, `weir_access_log_entries_total{domain="d",kind="ignored"}`) == 1 })
	_, text := s.page("/metrics")
	all := familiesIn(text)
	for _, name := range registered(s.registry) {
		if all[name] == nil {
			t.Errorf("%s was not counted: have this test do what counts it", name)
		}
	}

	// The command's own: of the build, and of TLS, whose files are found changed.
	p := startTLS(t, true, []string{"prometheus.example.org"})
	p.server.Issue(t, []string{"127.0.0.1"}).Write(t, p.dir)
	p.Signal(t, syscall.SIGHUP)
	storetest.Eventually(t, "the certificate is read again", func() bool {
		return metricOf(t, p.Process, `weir_tls_loads_total{file="certificate",result="loaded"}`) > 0
	})
	_, text = p.Get(t, "/metrics")
	for name, f := range familiesIn(text) {
		if all[name] == nil && !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
			all[name] = f
		}
	}
	return all
}

// registered are the names of all metrics of a registry, counted or not.
func registered(r *prometheus.Registry) (names []string) {
	c := make(chan *prometheus.Desc)
	go func() {
		defer close(c)
		r.Describe(c)
	}()
	name := regexp.MustCompile(`fqName: "([^"]+)"`)
	for d := range c {
		names = append(names, name.FindStringSubmatch(d.String())[1])
	}
	return names
}

// Dashboards and alerts of others are built on these names: what is renamed or taken away here
// breaks them without a word.
func TestTheMetricsAreTheseAndTheDocsHaveThem(t *testing.T) {
	all := allFamilies(t)
	var golden, table strings.Builder
	for _, name := range slices.Sorted(maps.Keys(all)) {
		f := all[name]
		labels := strings.Join(f.labels, ", ")
		fmt.Fprintf(&golden, "%s %s {%s}\n    %s\n", name, f.kind, labels, f.help)
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s |\n", name, f.kind, labels, strings.ReplaceAll(f.help, "|", `\|`))
	}
	datadriven.RunTest(t, "testdata/metrics.txt", func(*testing.T, *datadriven.TestData) string { return golden.String() })

	const docs, head = "../docs/metrics.md", "| metric | type | labels | |\n|---|---|---|---|\n"
	text, err := os.ReadFile(docs)
	if err != nil {
		t.Fatal(err)
	}
	before, after, found := strings.Cut(string(text), head)
	if !found {
		t.Fatalf("%s has no table that begins with\n%s", docs, head)
	}
	rows, after, _ := strings.Cut(after, "\n\n") // the table ends with the file, or an empty line
	if after != "" {
		after = "\n" + after
	}
	if strings.TrimSpace(rows) == strings.TrimSpace(table.String()) {
		return
	}
	if rewrite := flag.Lookup("rewrite"); rewrite == nil || rewrite.Value.String() != "true" {
		t.Errorf("the table of %s is not what weir counts: run this test with -rewrite, and read the difference. It should be:\n%s", docs, table.String())
		return
	}
	if err := os.WriteFile(docs, []byte(before+head+table.String()+after), 0o644); err != nil { //nolint:gosec // a document
		t.Fatal(err)
	}
}
