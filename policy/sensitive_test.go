package policy

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.yaml.in/yaml/v3"

	"weir/limit"
)

// plainDigest is digest, as the standard library has it.
func plainDigest(key []byte, domain, name, value string) []byte {
	m := hmac.New(sha256.New, key)
	for _, text := range []string{domain, name} {
		_ = binary.Write(m, binary.BigEndian, uint64(len(text)))
	}
	_, _ = m.Write([]byte(domain + name + value))
	return m.Sum(nil)[:16]
}

func TestDigestIsHMAC(t *testing.T) {
	secret := []byte("a key of tests, 32 bytes at least")
	h := newHasher(secret)
	for _, value := range []string{"", "x", "\x00", strings.Repeat("é", 127), strings.Repeat("v", 255), strings.Repeat("v", 256), strings.Repeat("v", 257), strings.Repeat("long", 1<<16)} {
		got := h.digest("d", "k", value)
		if want := plainDigest(secret, "d", "k", value); !bytes.Equal(got[:], want) {
			t.Errorf("digest of %d bytes = %x, want %x", len(value), got, want)
		}
	}
}

func TestDigestTellsDomainKeyAndValueApart(t *testing.T) {
	one, other := newHasher([]byte("one")), newHasher([]byte("other"))
	seen := make(map[[16]byte]string)
	for _, h := range []*hasher{one, other, newHasher(nil), newHasher(nil)} {
		for _, texts := range [][3]string{{"a", "b", "c"}, {"ab", "", "c"}, {"", "ab", "c"}, {"a", "", "bc"}, {"", "", "abc"}, {"a", "bc", ""}, {"a", "c", "b"}} {
			d := h.digest(texts[0], texts[1], texts[2])
			if before, twice := seen[d]; twice {
				t.Errorf("the digest of %q is that of %s too", texts, before)
			}
			seen[d] = fmt.Sprintf("%q", texts)
		}
	}
}

func TestManyMayHashAtOnce(t *testing.T) {
	h := newHasher([]byte("key"))
	want := make([][16]byte, 100)
	for i := range want {
		want[i] = h.digest("d", "k", fmt.Sprint(i))
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for i := range want {
				if got := h.digest("d", "k", fmt.Sprint(i)); got != want[i] {
					t.Errorf("digest of %d = %x, want %x", i, got, want[i])
				}
			}
		})
	}
	all.Wait()
}

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
			sensitive = sensitive || !isOff(v)
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
