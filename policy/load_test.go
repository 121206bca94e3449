package policy

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
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
