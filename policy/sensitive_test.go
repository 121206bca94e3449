package policy

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"weir/limit"
)

const sensitivePolicy = `
domain: d
descriptors:
  - {key: api_key, sensitive: true, token_bucket: {capacity: 1, refill: 1/s}}
  - {key: account, token_bucket: {capacity: 1, refill: 1/s}}
`

func TestReplicasWithOneHashKeyHaveOneSubject(t *testing.T) {
	key := func(hashKey string) string {
		s, err := Parse("d.yaml", []byte(sensitivePolicy), Options{HashKey: []byte(hashKey)})
		if err != nil {
			t.Fatal(err)
		}
		return s.Match(request("api_key", "s3cret")).Checks[0].Key
	}
	if a, b := key("one"), key("one"); a != b {
		t.Errorf("under one key the state is %s and %s, want one", a, b)
	}
	if a, b := key("one"), key("other"); a == b {
		t.Errorf("under two keys the state is %s, want two", a)
	}
	if a, b := key(""), key(""); a == b {
		t.Errorf("without a key the state is %s each time, want a random one", a)
	}
}

// In memory the key is a random one, and counters must outlive a change of the file.
func TestAReloadKeepsTheRandomHashKey(t *testing.T) {
	f := newFolder(t, map[string]string{"d.yaml": sensitivePolicy})
	key := func() string { return f.Read().Set.Match(request("api_key", "s3cret")).Checks[0].Key }
	before := key()
	f.write("d.yaml", strings.ReplaceAll(sensitivePolicy, "capacity: 1", "capacity: 2"))
	if after := key(); after != before {
		t.Errorf("the state is %s after a change, and was %s", after, before)
	}
}

// A value of hostile text stands in no key, wherever its entry stands.
func TestNoKeyHasASensitiveValue(t *testing.T) {
	s := mustParse(t, sensitivePolicy)
	override := limit.Window{Max: 1, Unit: limit.Day, Multiplier: 1}
	for _, value := range []string{"s3cret", "s3cret\n", "{s3cret}", "%s3cret#", "\x00s3cret", "\u202es3cret", strings.Repeat("s3cret", 1000), "#s3cretAAAAAAAAAAAAAAAA", "s3cret,account=x", "*s3cret"} {
		for _, entries := range [][]limit.Entry{
			{{Key: "api_key", Value: value}},
			{{Key: "account", Value: "a"}, {Key: "api_key", Value: value}},
			{{Key: "api_key", Value: value}, {Key: "api_key", Value: value}, {Key: "other", Value: "x"}},
		} {
			before := slices.Clone(entries)
			m := s.Match(Request{Domain: "d", Descriptors: []Descriptor{{Entries: entries}, {Entries: entries, Override: &override}}})
			if len(m.Checks) == 0 {
				t.Errorf("Match(%v) has no check, want the override", entries)
			}
			for _, c := range m.Checks {
				if strings.Contains(c.Key+c.Name, "s3cret") || len(c.Key) > 200 {
					t.Errorf("Match(%q) has the key %.300q of %q, want a digest", value, c.Key, c.Name)
				}
			}
			if !slices.Equal(entries, before) {
				t.Errorf("Match changed the entries to %v", entries)
			}
		}
	}
}

func TestTooManySensitivePatternsAreRefused(t *testing.T) {
	var b strings.Builder
	b.WriteString("domain: d\ndescriptors:\n")
	for i := range maxPatterns + 1 {
		fmt.Fprintf(&b, "  - {key: 'k%d*', sensitive: true}\n  - {key: 'k%d*', value: x, sensitive: true}\n", i, i)
	}
	_, err := Parse("d.yaml", []byte(b.String()), Options{})
	want := fmt.Sprintf("policy: d.yaml:%d: k%d*: more than 1000 patterns are sensitive; use fewer", 2*maxPatterns+3, maxPatterns)
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("Parse said %.200v, want %s", err, want)
	}
}

// FuzzNothingShowsASensitiveValue: neither errors, warnings nor Describe show the
// value of a sensitive policy, whatever else is in the file.
func FuzzNothingShowsASensitiveValue(f *testing.F) {
	const marker = "Vq7" // in the values that must not be seen
	for _, text := range []string{
		"domain: d\ndescriptors:\n  - {key: a, sensitive: true, value: Vq7, token_bucket: {capacity: 1, refill: 1/s}}\n  - {key: a, sensitive: true, value: Vq7, reject_as: pond}",
		"domain: d\ndescriptors:\n  - {key: a, sensitive: true, value: 'xVq7*', share_threshold: true, metadata: {x: y}, descriptors: [{key: b, unit: day}]}",
		"domain: d\ndescriptors:\n  - {value: !Vq7 x, sensitive: yes, key: a}\n  - {value: \"Vq7\\n\", sensitive: 1, key: a}",
		"domain: d\ndescriptors:\n  - &x {sensitive: true, key: a, value: Vq7}\n  - {<<: *x, failure_mode: closed}\n  - {<<: [*x], key: b}",
		"domain: d\ndescriptors:\n  - {sensitive: true, key: &k [a], value: *Vq7}",
		"domain: d\ndescriptors:\n  - {sensitive: true, key: api_key, value: Vq7.5e3, sensitive: off}\n  - {key: 'a*'}\n  - {key: '*', value: Vq7*, sensitive: true}",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var doc yaml.Node
		if err := yaml.Unmarshal(data, &doc); err == nil && strings.Count(string(data), marker) != inSensitiveValues(&doc, marker) {
			return // it stands somewhere else too, where it may be shown
		}
		for _, o := range []Options{{}, {Lenient: true}, {NeedHashKey: true}} {
			s, err := Parse("f.yaml", data, o)
			var shown strings.Builder
			if err != nil {
				shown.WriteString(err.Error())
			} else {
				shown.WriteString(strings.Join(s.Warnings(), "\n"))
				if err := s.Describe(&shown); err != nil {
					t.Error(err)
				}
			}
			if strings.Contains(shown.String(), marker) {
				t.Errorf("the value of a sensitive policy is shown:\n%s", shown.String())
			}
		}
	})
}

// inSensitiveValues counts how often a text stands in the values, and their tags, of
// maps that say sensitive in so many letters.
func inSensitiveValues(n *yaml.Node, text string) int {
	count := 0
	for _, c := range n.Content {
		count += inSensitiveValues(c, text)
	}
	if n.Kind != yaml.MappingNode {
		return count
	}
	sensitive, named := false, false
	for i := 0; i+1 < len(n.Content); i += 2 {
		switch k, v := n.Content[i], n.Content[i+1]; k.Value {
		case "sensitive":
			sensitive = sensitive || !plainlyOff(v)
		case "key":
			named = true
		}
	}
	for i := 0; sensitive && named && i+1 < len(n.Content); i += 2 {
		if v := n.Content[i+1]; n.Content[i].Value == "value" && v.Kind == yaml.ScalarNode {
			count += strings.Count(v.Value, text) + strings.Count(v.Tag, text)
		}
	}
	return count
}

func plainlyOff(n *yaml.Node) bool {
	on, ok := asFlag(n)
	return ok && !on
}
