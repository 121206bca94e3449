package policy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"weir/limit"
)

// folder is a folder of policy files that a test changes.
type folder struct {
	t   *testing.T
	dir string
	*Files
}

func newFolder(t *testing.T, texts map[string]string) *folder {
	dir := writeFiles(t, texts)
	return &folder{t, dir, NewFiles([]string{dir}, Options{})}
}

// write writes a file with a name in the folder; without text it removes it.
func (f *folder) write(name, text string) {
	f.t.Helper()
	path := filepath.Join(f.dir, name)
	err := os.WriteFile(path, []byte(text), 0o644)
	if text == "" {
		err = os.Remove(path)
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

// expect reads the folder and compares what is in force, as "a=1 b=2": the
// domains, with the capacity of their buckets, and how much is wrong. A second
// reading must tell the same.
func (f *folder) expect(when, want string, wrong int) Reading {
	f.t.Helper()
	r := f.Read()
	got := "nothing"
	if r.Set != nil {
		var parts []string
		for _, name := range r.Set.Domains() {
			m := r.Set.Match(Request{Domain: name, Descriptors: []Descriptor{{Entries: []limit.Entry{{Key: "k"}}}}})
			bucket, _ := m.Checks[0].Limit.(limit.TokenBucket)
			parts = append(parts, fmt.Sprintf("%s=%d", name, bucket.Capacity))
		}
		got = strings.Join(parts, " ")
	}
	if got != want || r.Wrong != wrong || (r.Err != nil) != (wrong > 0) {
		f.t.Errorf("%s: %s is in force, %d wrong (%v), want %s, %d wrong", when, got, r.Wrong, r.Err, want, wrong)
	}
	again := f.Read()
	if again.Changed || again.Set != r.Set || fmt.Sprint(again.Err) != fmt.Sprint(r.Err) {
		f.t.Errorf("%s: read again without a change: Changed = %v, Err:\n%v\nwant false and:\n%v", when, again.Changed, again.Err, r.Err)
	}
	return r
}

func bucketOf(domain string, capacity int) string {
	return fmt.Sprintf("domain: %s\ndescriptors: [{key: k, token_bucket: {capacity: %d, refill: 1/s}}]\n", domain, capacity)
}

func TestABrokenFileStaysInForceAsItWas(t *testing.T) {
	f := newFolder(t, map[string]string{"a.yaml": bucketOf("a", 1), "b.yaml": bucketOf("b", 1)})
	first := f.expect("at first", "a=1 b=1", 0)
	if !first.Changed {
		t.Error("Changed = false in the first reading")
	}
	f.write("a.yaml", "domain: a\nno: such\n")
	f.write("b.yaml", bucketOf("b", 2))
	broken := f.expect("one broken", "a=1 b=2", 1)
	if !strings.Contains(broken.Err.Error(), "a.yaml:2: unknown key no") {
		t.Errorf("the error is %v, want one that names the line", broken.Err)
	}
	if broken.Set.Version() == first.Set.Version() {
		t.Errorf("the version is %s before and after a change", first.Set.Version())
	}
	f.write("a.yaml", bucketOf("a", 3))
	f.expect("mended", "a=3 b=2", 0)
	f.write("a.yaml", bucketOf("a", 1))
	f.write("b.yaml", bucketOf("b", 1))
	if back := f.expect("as it was", "a=1 b=1", 0); back.Set.Version() != first.Set.Version() {
		t.Errorf("the version is %s, and was %s with the same contents", back.Set.Version(), first.Set.Version())
	}
}

func TestNothingIsInForceUntilEveryFileHasBeenGood(t *testing.T) {
	f := newFolder(t, map[string]string{"a.yaml": bucketOf("a", 1), "b.yaml": "domain: b\nunit: bogus\n"})
	f.expect("at first", "nothing", 1)
	f.write("b.yaml", bucketOf("b", 1))
	f.expect("mended", "a=1 b=1", 0)
	// A file that comes later has never been in force: without it is as before.
	f.write("c.yaml", "domain: c\nunit: bogus\n")
	f.expect("a broken one more", "a=1 b=1", 1)
	f.write("c.yaml", bucketOf("c", 1))
	f.expect("mended too", "a=1 b=1 c=1", 0)
}

func TestAFileThatIsTakenAwayTakesItsDomain(t *testing.T) {
	f := newFolder(t, map[string]string{"a.yaml": bucketOf("a", 1), "b.yaml": bucketOf("b", 1)})
	f.expect("at first", "a=1 b=1", 0)
	f.write("b.yaml", "")
	f.expect("one gone", "a=1", 0)
	f.write("b.yaml", "domain: b\nbroken")
	f.expect("back, and broken", "a=1", 1)
}

// Only a folder tells that a file is meant to be gone.
func TestAFileThatIsNamedItselfStaysInForceWhenItIsTakenAway(t *testing.T) {
	f := newFolder(t, map[string]string{"a.yaml": bucketOf("a", 1)})
	f.Files = NewFiles([]string{filepath.Join(f.dir, "a.yaml")}, Options{})
	f.expect("at first", "a=1", 0)
	f.write("a.yaml", "")
	f.expect("gone", "a=1", 1)
	f.write("a.yaml", bucketOf("a", 2))
	f.expect("back", "a=2", 0)
}

func TestARenamedFileIsToldByItsNewName(t *testing.T) {
	f := newFolder(t, map[string]string{"a.yaml": bucketOf("a", 1)})
	first := f.expect("at first", "a=1", 0)
	if err := os.Rename(filepath.Join(f.dir, "a.yaml"), filepath.Join(f.dir, "b.yaml")); err != nil {
		t.Fatal(err)
	}
	second := f.Read()
	var told strings.Builder
	if err := second.Set.Describe(&told); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(told.String(), "b.yaml") || second.Set.Version() != first.Set.Version() {
		t.Errorf("after a rename: version %s, was %s; %s", second.Set.Version(), first.Set.Version(), told.String())
	}
}

// A file that is renamed, and is wrong at once, is not seen to go: else its domain
// would be without limits until it is mended.
func TestAFileThatIsGoneStaysWhileANewOneIsWrong(t *testing.T) {
	f := newFolder(t, map[string]string{"a.yaml": bucketOf("a", 1), "b.yaml": bucketOf("b", 1)})
	f.expect("at first", "a=1 b=1", 0)
	f.write("a.yaml", "")
	f.write("limits.yaml", "domain: a\nno: such\n")
	f.expect("renamed and broken", "a=1 b=1", 1)
	f.write("b.yaml", bucketOf("b", 2))
	f.expect("another changes", "a=1 b=2", 1)
	f.write("limits.yaml", bucketOf("a", 3))
	f.expect("mended", "a=3 b=2", 0)
	f.write("limits.yaml", "")
	f.expect("taken away", "b=2", 0)
	f.write("b.yaml", "")
	f.write("new.yaml", "domain: c\nno: such\n")
	f.expect("the last one gone, and a new one wrong", "b=2", 1)
	f.write("new.yaml", "")
	f.expect("an empty folder", "b=2", 1)
}

func TestAFolderThatCannotBeReadStaysInForce(t *testing.T) {
	f := newFolder(t, map[string]string{"a.yaml": bucketOf("a", 1), "b.yaml": bucketOf("b", 1)})
	f.expect("at first", "a=1 b=1", 0)
	away := f.dir + ".away"
	if err := os.Rename(f.dir, away); err != nil {
		t.Fatal(err)
	}
	f.expect("the folder is gone", "a=1 b=1", 1)
	if err := os.Mkdir(f.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	f.expect("the folder is empty", "a=1 b=1", 1)
	f.write("a.yaml", bucketOf("a", 2))
	f.expect("one is back", "a=2", 0)
}

func TestAFileThatCannotBeReadStaysInForce(t *testing.T) {
	f := newFolder(t, map[string]string{"a.yaml": bucketOf("a", 1), "b.yaml": bucketOf("b", 1)})
	f.expect("at first", "a=1 b=1", 0)
	f.write("a.yaml", "")
	if err := os.Symlink("nowhere", filepath.Join(f.dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	f.write("b.yaml", bucketOf("b", 2))
	f.expect("a link to nowhere", "a=1 b=2", 1)
	f.write("a.yaml", "")
	if err := syscall.Mkfifo(filepath.Join(f.dir, "a.yaml"), 0o600); err != nil {
		t.Fatal(err)
	}
	f.expect("a pipe", "a=1 b=2", 1) // and it does not wait for a writer
}

func TestEachDomainIsInOneFile(t *testing.T) {
	for _, c := range []struct {
		name, then, want string
		wrong            int
	}{
		{"a copy", "d=" + bucketOf("a", 9), "a=1 b=2 c=3", 1},
		{"a copy that comes first", "0=" + bucketOf("a", 9), "a=1 b=2 c=3", 1},
		{"another's domain", "a=" + bucketOf("b", 9), "a=1 b=2 c=3", 1},
		{"an exchange", "a=" + bucketOf("b", 8) + "|b=" + bucketOf("a", 9), "a=9 b=8 c=3", 0},
		{"a move to a new file", "a=|d=" + bucketOf("a", 9), "a=9 b=2 c=3", 0},
		{"a file that falls back to a domain which another took", "a=" + bucketOf("b", 8) + "|c=" + bucketOf("a", 9), "a=1 b=2 c=3", 2},
		{"a copy that comes first, and a change", "0=" + bucketOf("a", 9) + "|a=" + bucketOf("a", 5), "a=5 b=2 c=3", 1},
		{"a copy with other errors", "d=" + bucketOf("a", 9) + "other: 1\n", "a=1 b=2 c=3", 1},
		{"a copy with other errors that comes first", "0=" + bucketOf("a", 9) + "other: 1\n", "a=1 b=2 c=3", 1},
		{"another's domain, with other errors", "a=" + bucketOf("b", 9) + "other: 1\n", "a=1 b=2 c=3", 1},
		{"two want a new one", "a=" + bucketOf("d", 8) + "|b=" + bucketOf("d", 9), "b=2 c=3 d=8", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFolder(t, map[string]string{"a.yaml": bucketOf("a", 1), "b.yaml": bucketOf("b", 2), "c.yaml": bucketOf("c", 3)})
			f.expect("at first", "a=1 b=2 c=3", 0)
			for _, change := range strings.Split(c.then, "|") {
				name, text, _ := strings.Cut(change, "=")
				f.write(name+".yaml", text)
			}
			r := f.expect("then", c.want, c.wrong)
			if c.wrong > 0 && !strings.Contains(r.Err.Error(), "already; merge the two files or rename one") {
				t.Errorf("the error is %v, want that the domain is there already", r.Err)
			}
		})
	}
}

// R23, with the swap: a ConfigMap is a folder of links to files in a hidden one.
func TestAConfigMapIsSwapped(t *testing.T) {
	f := newFolder(t, map[string]string{"..1/c.yaml": bucketOf("d", 5), "..2/c.yaml": bucketOf("d", 50)})
	for link, to := range map[string]string{"..data": "..1", "c.yaml": "..data/c.yaml", "..new": "..2"} {
		if err := os.Symlink(to, filepath.Join(f.dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	f.expect("at first", "d=5", 0)
	if err := os.Rename(filepath.Join(f.dir, "..new"), filepath.Join(f.dir, "..data")); err != nil {
		t.Fatal(err)
	}
	f.expect("swapped", "d=50", 0)
	if err := os.RemoveAll(filepath.Join(f.dir, "..1")); err != nil {
		t.Fatal(err)
	}
	f.expect("the old one removed", "d=50", 0)
}

// To open a pipe would wait for somebody who writes to it.
func TestWhatIsNoRegularFileIsRefusedAtOnce(t *testing.T) {
	dir := t.TempDir()
	pipe, link := filepath.Join(dir, "pipe"), filepath.Join(dir, "link")
	if err := errors.Join(syscall.Mkfifo(pipe, 0o600), os.Symlink(pipe, link)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{pipe, link, os.DevNull} {
		_, err := Load([]string{path}, Options{})
		if want := "policy: " + path + ": it is not a regular file; put a regular file in its place"; err == nil || err.Error() != want {
			t.Errorf("Load(%s) said %v, want %s", path, err, want)
		}
	}
	// In the place of a file that was good, it leaves that one in force.
	file := filepath.Join(dir, "file")
	f := &folder{t, dir, NewFiles([]string{file}, Options{})}
	f.write("file", bucketOf("d", 5))
	f.expect("at first", "d=5", 0)
	if err := os.Rename(pipe, file); err != nil {
		t.Fatal(err)
	}
	f.expect("then", "d=5", 1)
}

// What is told changes with the files alone, not with what is known of them.
func TestAFileWithTwoThingsWrongIsToldBothEachTime(t *testing.T) {
	f := newFolder(t, map[string]string{"a.yaml": bucketOf("a", 1), "b.yaml": "domain: a\nno: such\n"})
	r := f.expect("at first", "nothing", 1)
	for _, want := range []string{"b.yaml:2: unknown key no", "b.yaml:1: domain a is in "} {
		if !strings.Contains(fmt.Sprint(r.Err), want) {
			t.Errorf("the error is %v, want %s", r.Err, want)
		}
	}
}

// A large file takes long to parse, and is looked at every few seconds.
func TestAFileIsParsedOnceAsLongAsItIsTheSame(t *testing.T) {
	f := newFolder(t, map[string]string{"a.yaml": bucketOf("a", 1), "b.yaml": bucketOf("a", 2), "c.yaml": "domain: c\nno: such\n"})
	f.Read()
	for name, before := range f.known {
		if f.Read(); f.known[name].now != before.now || before.now == nil {
			t.Errorf("%s was parsed again", name)
		}
	}
	// Back in its last good version, it need not be parsed either.
	good := f.known[filepath.Join(f.dir, "a.yaml")].now
	f.write("a.yaml", "domain: a\nno: such\n")
	f.Read()
	f.write("a.yaml", bucketOf("a", 1))
	f.Read()
	if f.known[filepath.Join(f.dir, "a.yaml")].now != good {
		t.Error("the last good version was parsed again")
	}
}
