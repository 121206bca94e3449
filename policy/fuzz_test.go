package policy

import (
	"os"
	"strings"
	"testing"

	"weir/limit"
)

// FuzzParse: any text gives errors or a set that can be used, and what is
// accepted strictly is accepted leniently.
func FuzzParse(f *testing.F) {
	for _, file := range []string{"testdata/errors.txt", "testdata/describe.txt", "testdata/lint.txt", "testdata/match/replaces.txt"} {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		for _, test := range strings.Split(string(data), "\n\n") {
			text, _, _ := strings.Cut(test, "\n----")
			_, text, _ = strings.Cut(text, "\n")
			f.Add([]byte(text))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		strict, err := Parse("f.yaml", data, Options{})
		lenient, lenientErr := Parse("f.yaml", data, Options{Lenient: true})
		if err == nil && lenientErr != nil {
			t.Errorf("accepted, but not leniently: %v", lenientErr)
		}
		for _, s := range []*Set{strict, lenient} {
			if s == nil {
				continue
			}
			use(t, s)
		}
	})
}

// use does all that can be done with a set.
func use(t *testing.T, s *Set) {
	if err := s.Describe(&strings.Builder{}); err != nil {
		t.Error(err)
	}
	for _, d := range s.domains {
		for n := range d.policies() {
			for _, r := range n.rules {
				if name := r.check.Name; name == "" || len(name) > MaxName || !printable(name) {
					t.Errorf("a limit has the name %q, want it fit for a label", name)
				}
			}
		}
	}
	override := limit.Window{Max: 1, Unit: limit.Day, Multiplier: 1}
	for _, name := range s.Domains() {
		r := Request{Domain: name}
		// Every policy must be reached by its own texts.
		var walk func(n *node, entries []limit.Entry)
		walk = func(n *node, entries []limit.Entry) {
			for _, c := range n.children {
				entries := append(entries[:len(entries):len(entries)], limit.Entry{Key: c.key, Value: c.value})
				if c.value != "" {
					if got := s.domains[name].find(entries).node; got != c && len(entries) == 1 {
						t.Errorf("find(%v) = %v, want the policy itself", entries, got)
					}
				}
				if len(r.Descriptors) < 100 {
					r.Descriptors = append(r.Descriptors, Descriptor{Entries: entries}, Descriptor{Entries: entries, Override: &override, Negative: true})
				}
				walk(c, entries)
			}
		}
		walk(&s.domains[name].root, nil)
		m := s.Match(r)
		keys := make(map[string]int64)
		for _, c := range m.Checks {
			if before, ok := keys[c.Key]; ok && before != c.Hits {
				t.Errorf("key %s has checks with the hits %d and %d, want one sum", c.Key, before, c.Hits)
			}
			keys[c.Key] = c.Hits
		}
	}
}

// FuzzGlob compares glob with the plain definition of a pattern.
func FuzzGlob(f *testing.F) {
	for _, s := range [][2]string{
		{"x*yz*z", "xyzz"}, {"x*yz*z", "xyz"}, {"*", ""}, {"**", "a"}, {"a*a", "a"}, {"*a*a*a*b", "aaaaaaaa"}, {"", ""}, {"a", "b"}, {"*ab", "aab"},
	} {
		f.Add(s[0], s[1])
	}
	f.Fuzz(func(t *testing.T, pattern, text string) {
		if len(pattern)*len(text) > 1_000_000 {
			return
		}
		if got, want := glob(pattern, text), slowGlob(pattern, text); got != want {
			t.Errorf("glob(%q, %q) = %v, want %v", pattern, text, got, want)
		}
	})
}

// slowGlob keeps all lengths of text that the pattern so far can match.
func slowGlob(pattern, text string) bool {
	matched := make([]bool, len(text)+1)
	matched[0] = true
	for i := range len(pattern) {
		next := make([]bool, len(text)+1)
		for j := range matched {
			switch {
			case pattern[i] == '*':
				next[j] = matched[j] || j > 0 && next[j-1]
			case j > 0:
				next[j] = matched[j-1] && text[j-1] == pattern[i]
			}
		}
		matched = next
	}
	return matched[len(text)]
}
