package policy

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"weir/limit"
)

// writeFiles writes a folder of files, by their names.
func writeFiles(t testing.TB, texts map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range texts {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestLoadReadsFilesAndFolders(t *testing.T) {
	dir := writeFiles(t, map[string]string{
		"b.yaml": "domain: b", "a.yml": "domain: a", "c.yaml.bak": "no", ".hidden.yaml": "no", "deeper/x.yaml": "no", "README": "no", "folder.yaml/y.yaml": "no",
	})
	other := filepath.Join(writeFiles(t, map[string]string{"policy.txt": "domain: c"}), "policy.txt")
	s, err := Load([]string{dir, other, other, filepath.Join(dir, "..", filepath.Base(dir), "b.yaml")}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := s.Domains(), []string{"a", "b", "c"}; !slices.Equal(got, want) {
		t.Errorf("Domains() = %q, want %q", got, want)
	}
	if !s.Has("a") || s.Has("x") || s.Has("") {
		t.Errorf("Has(a), Has(x), Has() = %v, %v, %v, want true, false, false", s.Has("a"), s.Has("x"), s.Has(""))
	}
}

// R30: also a domain that is there twice.
func TestLoadTellsAllErrorsOfAllFiles(t *testing.T) {
	dir := writeFiles(t, map[string]string{
		"a.yaml": "domain: d\ndescriptors: [{key: a, unit: day}, {key: ''}]",
		"b.yaml": "\n\ndomain: d\nother: 1",
		"c.yaml": "[",
	})
	_, err := Load([]string{dir, filepath.Join(dir, "none.yaml")}, Options{})
	want := strings.ReplaceAll(`policy: DIR/a.yaml:2: a: unit means nothing in a descriptor; move it to rate_limit
policy: DIR/a.yaml:2: descriptors[1]: key is empty; give the descriptor a key
policy: DIR/b.yaml:4: unknown key other; allowed in the root of the file: domain, descriptors, shadow_mode, failure_mode, local_fraction
policy: DIR/b.yaml:3: domain d is in DIR/a.yaml:1 already; merge the two files or rename one
policy: DIR/c.yaml:1: not valid YAML: did not find expected node content; look at this line and those after it
policy: stat DIR/none.yaml: no such file or directory; give a file or folder that can be read`, "DIR", dir)
	if err == nil || err.Error() != want {
		t.Errorf("Load said:\n%v\nwant:\n%s", err, want)
	}
}

func TestLoadSaysWhatToDoWithoutFiles(t *testing.T) {
	for _, c := range []struct {
		paths []string
		want  string
	}{
		{nil, "no policy file is given; name"},
		{[]string{writeFiles(t, map[string]string{"README": ""})}, "the folder has no policy file; add one"},
		{[]string{filepath.Join(t.TempDir(), "none")}, "no such file or directory; give"},
	} {
		_, err := Load(c.paths, Options{})
		if err == nil || !strings.HasPrefix(err.Error(), "policy: ") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("Load(%q) said %v, want policy: … %s", c.paths, err, c.want)
		}
	}
	dangling := t.TempDir()
	if err := os.Symlink("nowhere", filepath.Join(dangling, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	if _, err := Load([]string{dangling}, Options{}); err == nil || !strings.Contains(err.Error(), "a.yaml") {
		t.Errorf("Load of a folder with a broken link said %v, want an error that names it", err)
	}
}

func TestTheExamplesLoad(t *testing.T) {
	s, err := Load([]string{"../examples"}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if w := s.Warnings(); len(w) > 0 {
		t.Errorf("the examples have warnings: %q", w)
	}
	var got []string
	for _, name := range s.Domains() {
		for n := range s.domains[name].policies() {
			for _, r := range n.rules {
				got = append(got, fmt.Sprintf("%s %s %T %v %v", name, r.check.Name, r.check.Limit, r.check.Class, r.check.Shadow))
			}
		}
	}
	want := []string{
		"api api_key limit.TokenBucket lane false",
		"api api_key_tokens limit.Window lane false",
		"inference account limit.TokenBucket lane false",
		"inference account limit.Concurrency lane false",
		"inference account.plan limit.TokenBucket lane true",
		"inference pool limit.Concurrency pool false",
		"vendor vendor limit.Window pool false",
		"vendor vendor limit.Concurrency pool false",
		"vendor payments limit.Window pool false",
	}
	if !slices.Equal(got, want) {
		t.Errorf("the examples have %q, want %q", got, want)
	}
}

// many is a file of n policies like those of the example.
func many(n int) []byte {
	var b strings.Builder
	b.WriteString("domain: d\ndescriptors:\n")
	for i := range n {
		fmt.Fprintf(&b, "  - key: account\n    value: customer-%d\n    token_bucket: {capacity: %d, refill: 1/s}\n    concurrency: {max_in_flight: 3, lease: 2m}\n", i, i+1)
	}
	return []byte(b.String())
}

// How long a reload of a large file takes.
func BenchmarkParse10000Policies(b *testing.B) {
	data := many(10_000)
	for b.Loop() {
		if _, err := Parse("d.yaml", data, Options{}); err != nil {
			b.Fatal(err)
		}
	}
}

// What one request costs, by its shape.
func BenchmarkMatch(b *testing.B) {
	s, err := Load([]string{"../examples/policy.yaml"}, Options{})
	if err != nil {
		b.Fatal(err)
	}
	large, err := Parse("d.yaml", many(10_000), Options{})
	if err != nil {
		b.Fatal(err)
	}
	sensitive := mustParse(b, sensitivePolicy)
	entry := func(kv ...string) Descriptor {
		var d Descriptor
		for i := 0; i < len(kv); i += 2 {
			d.Entries = append(d.Entries, limit.Entry{Key: kv[i], Value: kv[i+1]})
		}
		return d
	}
	wide := Request{Domain: "d"}
	same := Request{Domain: "d"}
	for i := range 1000 {
		wide.Descriptors = append(wide.Descriptors, entry("account", fmt.Sprintf("customer-%d", i)))
		d := entry("account", "customer-1")
		d.Override = &limit.Window{Max: int64(i), Unit: limit.Day, Multiplier: 1}
		same.Descriptors = append(same.Descriptors, d)
	}
	for _, c := range []struct {
		name string
		set  *Set
		r    Request
	}{
		{"one bucket", sensitive, Request{Domain: "d", Descriptors: []Descriptor{entry("account", "k1")}}},
		{"one sensitive bucket", sensitive, Request{Domain: "d", Descriptors: []Descriptor{entry("api_key", "k1")}}},
		{"one sensitive bucket of a long value", sensitive, Request{Domain: "d", Descriptors: []Descriptor{entry("api_key", strings.Repeat("k", 1000))}}},
		{"three descriptors four checks", s, Request{Domain: "inference", Descriptors: []Descriptor{
			entry("account", "alice"), entry("account", "alice", "plan", "trial"), entry("pool", "images"),
		}}},
		{"no match", s, Request{Domain: "inference", Descriptors: []Descriptor{entry("other", "x")}}},
		{"one of 10000", large, Request{Domain: "d", Descriptors: []Descriptor{entry("account", "customer-5000")}}},
		{"1000 descriptors", large, wide},
		{"1000 own limits of one state", large, same},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				c.set.Match(c.r)
			}
		})
	}
}
