package policy

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// It runs testdata/envoylint.txt: what is told of the reference configuration and its
// policy, each broken in one place, and of files of other shapes.
//
//	broken   each line changes envoy/envoy.yaml, or after "policy:" examples/policy.yaml:
//	         OLD => NEW (\n is a line's end), or OLD .. NEXT, which takes away the lines from that with OLD
//	         up to that with NEXT. What is old must be there once.
//	lint     an Envoy file as it is, beside examples/policy.yaml; with more of them if
//	         a line says --- again
func TestWhatDoesNotGoWithEnvoyIsAWarning(t *testing.T) {
	datadriven.RunTest(t, "testdata/envoylint.txt", func(t *testing.T, d *datadriven.TestData) string {
		reference, policies := read(t, "../envoy/envoy.yaml"), read(t, "../examples/policy.yaml")
		texts, names := [][]byte{nil}, []string{"envoy.yaml"}
		switch d.Cmd {
		case "broken":
			for line := range strings.Lines(d.Input) {
				line = strings.TrimSuffix(line, "\n")
				if change, ok := strings.CutPrefix(line, "policy: "); ok {
					policies = changed(t, policies, change)
				} else {
					reference = changed(t, reference, line)
				}
			}
			texts[0] = []byte(reference)
		case "lint":
			for i, text := range strings.Split(d.Input+"\n", "---\n") {
				if i > 0 {
					texts, names = append(texts, nil), append(names, fmt.Sprintf("more%d.yaml", i))
				}
				texts[i] = []byte(text)
			}
		default:
			t.Fatalf("%s: no such command", d.Cmd)
		}
		set, err := Parse("policy.yaml", []byte(policies), Options{})
		if err != nil {
			t.Fatal(err)
		}
		lines, err := set.lintEnvoy(names, texts, EnvoyOptions{MaxWait: 2 * time.Millisecond, StoreTimeout: 10 * time.Millisecond})
		if err != nil {
			return err.Error() + "\n"
		}
		for _, line := range lines {
			if !strings.HasPrefix(line, "envoy: ") || !strings.Contains(line, "; ") {
				t.Errorf("the warning %q lacks its file or what to do", line)
			}
		}
		if len(lines) == 0 {
			return "nothing\n"
		}
		return strings.Join(lines, "\n") + "\n"
	})
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// changed is the text after a change: OLD => NEW or OLD .. NEXT.
func changed(t *testing.T, text, change string) string {
	t.Helper()
	old, with, ok := strings.Cut(strings.ReplaceAll(change, `\n`, "\n"), " => ")
	next := ""
	if !ok {
		if old, next, ok = strings.Cut(change, " .. "); !ok {
			t.Fatalf("%q is no change", change)
		}
	}
	if n := strings.Count(text, old); n != 1 {
		t.Fatalf("%q is there %d times", old, n)
	}
	if next == "" {
		return strings.Replace(text, old, with, 1)
	}
	before, after, _ := strings.Cut(text, old)
	before = before[:strings.LastIndexByte(before, '\n')+1]
	i := strings.Index(after, next)
	if i < 0 {
		t.Fatalf("%q is not after %q", next, old)
	}
	i = strings.LastIndexByte(after[:i], '\n') + 1
	return before + after[i:]
}

// The reference, also with any of its variants, is as it should be.
func TestTheReferenceGoesWithItsPolicies(t *testing.T) {
	reference := read(t, "../envoy/envoy.yaml")
	texts := map[string]string{"envoy.yaml": reference}
	variants, err := filepath.Glob("../envoy/variants/*.yaml")
	if err != nil || len(variants) < 10 {
		t.Fatalf("there are %d variants, %v", len(variants), err)
	}
	for _, v := range variants {
		if filepath.Base(v) != "policy.yaml" {
			texts[filepath.Base(v)] = variant(t, reference, read(t, v))
		}
	}
	set, err := Load([]string{"../envoy/variants/policy.yaml"}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range texts {
		got, err := set.lintEnvoy([]string{name}, [][]byte{[]byte(text)}, EnvoyOptions{MaxWait: 2 * time.Millisecond, StoreTimeout: 10 * time.Millisecond})
		if err != nil || len(got) > 0 {
			t.Errorf("lintEnvoy = %q, %v, want nothing", got, err)
		}
	}
}

var pieces = regexp.MustCompile(`(?m)^# (Before|After|Instead of) "(.+)"\n`)

// variant is the reference with the pieces of a variant at the lines that it names.
func variant(t *testing.T, reference, text string) string {
	t.Helper()
	places := pieces.FindAllStringSubmatchIndex(text, -1)
	for i, m := range places {
		end := len(text)
		if i+1 < len(places) {
			end = places[i+1][0]
		}
		at := regexp.MustCompile(`(?m)^( *)` + regexp.QuoteMeta(text[m[4]:m[5]]) + `.*\n`).FindStringSubmatchIndex(reference)
		if at == nil {
			t.Fatalf("the reference has no line %q", text[m[4]:m[5]])
		}
		piece := strings.ReplaceAll("\n"+text[m[1]:end], "\n", "\n"+reference[at[2]:at[3]])
		piece = strings.TrimPrefix(piece, "\n") + "\n"
		switch text[m[2]:m[3]] {
		case "Before":
			reference = reference[:at[0]] + piece + reference[at[0]:]
		case "After":
			reference = reference[:at[1]] + piece + reference[at[1]:]
		default:
			reference = reference[:at[0]] + piece + reference[at[1]:]
		}
	}
	return reference
}

func TestAnEnvoyFileThatCannotBeReadIsAnError(t *testing.T) {
	set, err := Load([]string{"../examples/policy.yaml"}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{filepath.Join(t.TempDir(), "nowhere.yaml"), t.TempDir()} {
		if lines, err := set.LintEnvoy([]string{path}, EnvoyOptions{}); err == nil || !strings.Contains(err.Error(), "; give") {
			t.Errorf("LintEnvoy(%s) = %q, %v, want what to give", path, lines, err)
		}
	}
}

// Aliases of aliases, what names itself, and many routes of many rules end soon.
func TestHostileEnvoyFilesEnd(t *testing.T) {
	set, err := Parse("policy.yaml", []byte("domain: d\ndescriptors:\n  - {key: a, concurrency: {max_in_flight: 1, lease: 1s}}\n"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	var bomb strings.Builder
	bomb.WriteString("l0: &l0 [x, x]\n")
	for i := 1; i < 60; i++ {
		fmt.Fprintf(&bomb, "l%d: &l%d [*l%d, *l%d]\n", i, i, i-1, i-1)
	}
	many := "rules: &rules\n" + strings.Repeat("- actions: [{generic_key: {descriptor_key: a, descriptor_value: x}}]\n", 5000) +
		"listener:\n  \"@type\": x.http_connection_manager.v3.HttpConnectionManager\n  http_filters:\n" +
		"  - name: rl\n    typed_config: {\"@type\": x.http.ratelimit.v3.RateLimit, domain: d, rate_limits: *rules}\n" +
		"  route_config:\n    virtual_hosts:\n    - routes:\n" + strings.Repeat("      - {match: {prefix: /}, route: {cluster: c}}\n", 20000)
	for name, text := range map[string]string{
		"aliases of aliases":  bomb.String(),
		"what names itself":   "a: &a [*a, *a, {b: *a}]\n",
		"a merge of itself":   "virtual_hosts: &a\n  <<: *a\n",
		"deep":                strings.Repeat("[", 9000) + strings.Repeat("]", 9000),
		"many rules × routes": many,
	} {
		t.Run(name, func(t *testing.T) {
			lines, err := set.lintEnvoy([]string{"envoy.yaml"}, [][]byte{[]byte(text)}, EnvoyOptions{})
			if len(lines) > maxProblems+1 {
				t.Errorf("lintEnvoy = %d lines, %v, want %d at most", len(lines), err, maxProblems+1)
			}
		})
	}
}

func FuzzLintEnvoy(f *testing.F) {
	for _, file := range []string{"../envoy/envoy.yaml", "../envoy/variants/routes.yaml"} {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	set, err := Load([]string{"../examples/policy.yaml"}, Options{})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text string) {
		lines, err := set.lintEnvoy([]string{"envoy.yaml"}, [][]byte{[]byte(text)}, EnvoyOptions{})
		if err == nil && strings.Contains(strings.Join(lines, ""), "\n") {
			t.Errorf("a warning has a line break: %q", lines)
		}
	})
}
