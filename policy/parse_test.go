package policy

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// It runs testdata/errors.txt: `parse` of a file, also `parse lenient` and `parse
// need-hash-key`.
func TestErrorsSayWhereWhatAndWhatToDo(t *testing.T) {
	runParse(t, "testdata/errors.txt")
}

// It runs testdata/lint.txt, in the same form.
func TestWhatIsProbablyNotMeantIsAWarning(t *testing.T) {
	runParse(t, "testdata/lint.txt")
}

// It runs testdata/describe.txt, in the same form.
func TestDescribeSaysWhatWasUnderstood(t *testing.T) {
	runParse(t, "testdata/describe.txt")
}

func runParse(t *testing.T, file string) {
	datadriven.RunTest(t, file, func(t *testing.T, d *datadriven.TestData) string {
		s, err := Parse("api.yaml", []byte(d.Input+"\n"), Options{Lenient: d.HasArg("lenient"), NeedHashKey: d.HasArg("need-hash-key")})
		if err != nil {
			for line := range strings.Lines(err.Error()) {
				if !strings.HasPrefix(line, "policy: api.yaml:") || !strings.Contains(line, "; ") {
					t.Errorf("the error %q lacks its file or what to do", line)
				}
			}
			return err.Error()
		}
		var b strings.Builder
		for _, w := range s.Warnings() {
			b.WriteString("warning: " + w + "\n")
		}
		if err := s.Describe(&b); err != nil {
			t.Fatal(err)
		}
		return b.String()
	})
}

// R30, row by row: what is accepted, also with one warning, what is rejected with
// one line, and what only lenient reading lets pass, with one warning.
func TestWhatIsAcceptedStrictlyAndLeniently(t *testing.T) {
	const (
		accept = iota
		warn
		reject
		lenient
	)
	window := func(s string) string { return "domain: d\ndescriptors:\n  - {key: a, rate_limit: {" + s + "}}\n" }
	list := func(s string) string { return "domain: d\ndescriptors:\n" + s }
	for _, c := range []struct {
		name string
		text string
		want int
	}{
		{"unit in capitals", window("unit: MINUTE, requests_per_unit: 5"), accept},
		{"week", window("unit: week, requests_per_unit: 5"), accept},
		{"month", window("unit: month, requests_per_unit: 5"), accept},
		{"year", window("unit: year, requests_per_unit: 5"), accept},
		{"value 5", list("  - {key: a, value: 5}"), accept},
		{"value true", list("  - {key: a, value: true}"), accept},
		{"value 007", list("  - {key: a, value: 007}"), accept},
		{"anchors", list("  - {key: a, rate_limit: &x {unit: day, requests_per_unit: 5}}\n  - {key: b, rate_limit: *x}"), accept},
		{"unlimited with requests_per_unit", window("unlimited: true, requests_per_unit: 5"), accept},
		{"unlimited alone", window("unlimited: true"), accept},
		{"replaces an unknown name", window("unit: day, requests_per_unit: 5, replaces: [{name: other}]"), warn},
		{"empty value", list("  - {key: a, value: ''}"), accept},
		{"a ban", window("unit: day, requests_per_unit: 0"), accept},
		{"the largest count", window("unit: day, requests_per_unit: 4294967295"), accept},

		{"unknown key", "domain: d\nother: 5\n", reject},
		{"empty domain", "domain: ''\n", reject},
		{"no domain", "descriptors: []\n", reject},
		{"empty key", list("  - {key: ''}"), reject},
		{"no key", list("  - {value: x}"), reject},
		{"duplicate key and value", list("  - {key: a, value: x}\n  - {key: a, value: x}"), reject},
		{"duplicate key", list("  - {key: a}\n  - {key: a}"), reject},
		{"unit missing", window("requests_per_unit: 5"), reject},
		{"unit bogus", window("unit: bogus, requests_per_unit: 5"), reject},
		{"negative count", window("unit: day, requests_per_unit: -5"), reject},
		{"count over uint32", window("unit: day, requests_per_unit: 4294967296"), reject},
		{"quoted count", window("unit: day, requests_per_unit: '5'"), reject},
		{"fraction", window("unit: day, requests_per_unit: 1.5"), reject},
		{"unlimited with a unit", window("unlimited: true, unit: day"), reject},
		{"replaces itself", window("unit: day, requests_per_unit: 5, name: A, replaces: [{name: A}]"), reject},
		{"replaces the empty name", window("unit: day, requests_per_unit: 5, replaces: [{name: ''}]"), reject},
		{"share_threshold without *", list("  - {key: a, value: x, share_threshold: true}"), reject},
		{"item that is no map", list("  - a"), reject},
		{"unparsable", "domain: [d", reject},
		{"empty file", "", reject},
		{"unquoted float value", list("  - {key: a, value: 5.5}"), reject},

		{"requests_per_unit missing", window("unit: day"), lenient},
		{"shadow_mode inside rate_limit", window("unit: day, requests_per_unit: 5, shadow_mode: true"), lenient},
		{"requests_per_unit on a descriptor", list("  - {key: a, requests_per_unit: 5}"), lenient},
		{"second document", "domain: d\ndescriptors: [{key: a}]\n---\ndomain: e\n", lenient},
		{"duplicate map key", window("unit: day, unit: hour, requests_per_unit: 5"), lenient},
		{"mutual replaces", list("  - {key: a, rate_limit: {unit: day, requests_per_unit: 5, name: A, replaces: [{name: B}]}}\n" +
			"  - {key: b, rate_limit: {unit: day, requests_per_unit: 5, name: B, replaces: [{name: A}]}}"), lenient},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Parse("d.yaml", []byte(c.text), Options{})
			if got, want := err == nil, c.want == accept || c.want == warn; got != want {
				t.Errorf("Parse(%q) accepted: %v (%v), want %v", c.text, got, err, want)
			}
			if err != nil && (!strings.HasPrefix(err.Error(), "policy: d.yaml:") || strings.Contains(err.Error(), "\n")) {
				t.Errorf("Parse(%q) said %q, want one line with file and line", c.text, err)
			}
			s, err := Parse("d.yaml", []byte(c.text), Options{Lenient: true})
			if got, want := err == nil, c.want != reject; got != want {
				t.Errorf("lenient Parse(%q) accepted: %v (%v), want %v", c.text, got, err, want)
			}
			if want := c.want == lenient || c.want == warn; err == nil && (len(s.Warnings()) == 1) != want {
				t.Errorf("lenient Parse(%q) warned %q, want one warning: %v", c.text, s.Warnings(), want)
			}
		})
	}
}

// R30: a value keeps its spelling.
func TestValuesKeepTheirSpelling(t *testing.T) {
	for _, value := range []string{"5", "0x10", "007", "true", "yes", "on", "2024-01-02", "1.2.3.4", "1_000", "0o7", "+5"} {
		s := mustParse(t, fmt.Sprintf("domain: d\ndescriptors: [{key: a, value: %s, token_bucket: {capacity: 1, refill: 1/s}}]", value))
		if got := s.Match(request("a", value)); len(got.Checks) != 1 {
			t.Errorf("value: %s does not match %q", value, value)
		}
	}
}

// What lenient reading lets pass means what envoyproxy/ratelimit makes of it.
func TestLenientMeansWhatTheOtherOneMakesOfIt(t *testing.T) {
	s, err := Parse("d.yaml", []byte(`
domain: first
domain: d
descriptors:
  - key: ban
    rate_limit: {unit: day}
  - key: plain
    requests_per_unit: 99
    rate_limit: {unit: hour, unit: day, requests_per_unit: 5, shadow_mode: true}
---
domain: e
`), Options{Lenient: true})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(s.Domains(), " "), "d"; got != want {
		t.Errorf("Domains() = %s, want %s", got, want)
	}
	for key, want := range map[string]string{"ban": "0/day", "plain": "5/day"} {
		m := s.Match(request(key, "x"))
		if len(m.Checks) != 1 || formatLimit(m.Checks[0].Limit) != want || m.Checks[0].Shadow {
			t.Errorf("Match([%s=x]).Checks = %+v, want %s, enforced", key, m.Checks, want)
		}
	}
}

func TestDomainFitsALeaseID(t *testing.T) {
	for _, c := range []struct {
		domain string
		want   bool
	}{
		{strings.Repeat("a", 256), true},
		{strings.Repeat("a", 257), false},
		{strings.Repeat("{", 85), true}, // %7B
		{strings.Repeat("{", 86), false},
	} {
		_, err := Parse("d.yaml", []byte("domain: '"+c.domain+"'"), Options{})
		if got := err == nil; got != c.want {
			t.Errorf("a domain of %d times %c was accepted: %v (%v), want %v", len(c.domain), c.domain[0], got, err, c.want)
		}
	}
}

// A request's own limit can be asked too, in a domain without any policy as well.
func TestNamesAreOfAllThatCanBeAsked(t *testing.T) {
	dir := writeFiles(t, map[string]string{
		"a.yaml": "domain: a",
		"b.yaml": "domain: b\ndescriptors:\n" +
			"  - {key: k, token_bucket: {capacity: 1, refill: 1/s, name: N}, descriptors: [{key: l, rate_limit: {unit: day, requests_per_unit: 1}}]}\n" +
			"  - {key: u, rate_limit: {unlimited: true}}\n",
	})
	s, err := Load([]string{dir}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for domain, c := range s.Limits() {
		got = append(got, domain+" "+c.Name)
	}
	if want := []string{"a override", "b override", "b N", "b k.l"}; !slices.Equal(got, want) {
		t.Errorf("Limits() = %q, want %q", got, want)
	}
}

func TestDefaultNamesAreFitForLabels(t *testing.T) {
	long := strings.Repeat("k", 100)
	a, b := defaultName(long+"."+long+"a"), defaultName(long+"."+long+"b")
	if len(a) > MaxName || len(b) > MaxName || a == b {
		t.Errorf("long names are %q and %q, want two of at most %d bytes", a, b, MaxName)
	}
	for keys, want := range map[string]string{"a.b": "a.b", "a\nb\xff": "a_b_", "é": "é"} {
		if got := defaultName(keys); got != want {
			t.Errorf("defaultName(%q) = %q, want %q", keys, got, want)
		}
	}
	if got := defaultName(strings.Repeat("é", 100)); len(got) > MaxName || !printable(got) {
		t.Errorf("defaultName(é…) = %q, want whole letters, at most %d bytes", got, MaxName)
	}
}

// A hostile file ends in an error, soon, and with few errors.
func TestHostileFilesEnd(t *testing.T) {
	deep := strings.Repeat("[{key: a, descriptors: ", 100) + "[]" + strings.Repeat("}]", 100)
	for _, c := range []struct{ name, text, want string }{
		{"an alias in itself", "domain: d\ndescriptors: &x [{key: a, descriptors: *x}, {key: b, descriptors: *x}]", "nested more than 64 deep"},
		{"a map that is its own key", "domain: d\ndescriptors: [&x {*x : 1, sensitive: true}]", "a key must be a word"},
		{"a list that is merged into its own map", "domain: d\ndescriptors: &x [{<<: *x, sensitive: true, key: a}]", "merged into each other"},
		{"a bomb of merged lists", "domain: d\nx: &x [" + strings.Repeat("{},", 100_000) + "]\ndescriptors:\n" + strings.Repeat("  - {<<: *x, key: a, sensitive: true}\n", 100_000), "keys and merges once its aliases are followed"},
		{"a merge of itself", "domain: d\ndescriptors: [&x {<<: [*x, *x, *x], key: a}]", "merged into each other"},
		{"nested descriptors", "domain: d\ndescriptors: " + deep, "nested more than 64 deep"},
		{"nested lists", "domain: d\ndescriptors: " + strings.Repeat("[", 100_000), "max depth"},
		{"a bomb of merges", "domain: d\ndescriptors:\n  - &x0 {key: a}\n" + func() string {
			var b strings.Builder
			for i := range 30 {
				fmt.Fprintf(&b, "  - &x%d {<<: [*x%d, *x%d, *x%d], value: v%d}\n", i+1, i, i, i, i)
			}
			return b.String()
		}(), "once its aliases are followed"},
		{"a bomb of merged empty maps", "domain: d\nx: &x [" + strings.Repeat("{},", 2000) + "]\ndescriptors:\n" + strings.Repeat("  - {<<: *x, key: a}\n", 600), "keys and merges once its aliases are followed"},
		{"a bomb of descriptors", "domain: d\ndescriptors:\n" + func() string {
			var b strings.Builder
			b.WriteString("  - {key: k0, descriptors: &x0 [{key: a}]}\n")
			for i := range 30 {
				fmt.Fprintf(&b, "  - {key: k%d, descriptors: &x%d [{key: a, descriptors: *x%d}, {key: b, descriptors: *x%d}]}\n", i+1, i+1, i, i)
			}
			return b.String()
		}(), "more than 200000 descriptors"},
		{"too many errors", "domain: d\ndescriptors:\n" + strings.Repeat("  - {kex: a}\n", 5_000), "more than these 1000 were found"},
		{"long keys", "domain: d\ndescriptors: [{key: " + strings.Repeat("k", 5000) + ", token_bucket: {capacity: 1, refill: 1/s}}]", "more than 4096 bytes"},
		{"too large", strings.Repeat("#", maxFile+1), "larger than 16 MiB"},
		{"a binary", "\x00\x01\x02", "not valid YAML"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Parse("d.yaml", []byte(c.text), Options{})
			if err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 1_000_000 {
				t.Errorf("Parse said %.300v, want %q", err, c.want)
			}
		})
	}
}

func TestTheDocsHaveEveryKey(t *testing.T) {
	text, err := os.ReadFile("../docs/semantics.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range levels {
		for _, key := range l.keys {
			found := false
			for line := range strings.Lines(string(text)) {
				found = found || strings.HasPrefix(line, "| `") && strings.Contains(line, "`"+key+"`")
			}
			if !found {
				t.Errorf("docs/semantics.md has no row of %s", key)
			}
		}
	}
}
