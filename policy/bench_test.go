package policy

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"weir/limit"
)

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

// How long a start with, and a reload of, many files takes: all are new, or one is.
func BenchmarkRead10000Files(b *testing.B) {
	dir := b.TempDir()
	for i := range 10_000 {
		text := fmt.Sprintf("domain: d%d\ndescriptors:\n  - key: account\n    token_bucket: {capacity: %d, refill: 1/s}\n    concurrency: {max_in_flight: 3, lease: 2m}\n", i, i+1)
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("d%d.yaml", i)), []byte(text), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("new", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if r := NewFiles([]string{dir}, Options{}).Read(); r.Err != nil {
				b.Fatal(r.Err)
			}
		}
	})
	b.Run("one is changed", func(b *testing.B) {
		files := NewFiles([]string{dir}, Options{})
		files.Read()
		for i := 0; b.Loop(); i++ {
			text := fmt.Sprintf("domain: d0\ndescriptors: [{key: k, token_bucket: {capacity: %d, refill: 1/s}}]\n", i+1)
			if err := os.WriteFile(filepath.Join(dir, "d0.yaml"), []byte(text), 0o644); err != nil {
				b.Fatal(err)
			}
			if r := files.Read(); r.Err != nil || !r.Changed {
				b.Fatal(r.Err)
			}
		}
	})
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

// What a request costs by how many policies there are, of each look.
func BenchmarkMatchAmong(b *testing.B) {
	for _, tt := range []struct{ name, policy, key, value string }{
		{"values", "key: account, value: customer-%d", "account", "customer-%d"},
		{"keys", "key: account-%d", "account-%d", "x"},
		{"prefixes", "key: path, value: '/customer-%d/*'", "path", "/customer-%d/orders"},
		{"suffixes", "key: user, value: '*@customer-%d.example'", "user", "alice@customer-%d.example"},
		{"parts", "key: path, value: '*/customer-%d/*'", "path", "GET /customer-%d/orders"},
		{"patterns of keys", "key: 'customer-%d-*', value: v", "customer-%d-x", "v"},
	} {
		for _, n := range []int{1, 100, 10_000} {
			var text strings.Builder
			text.WriteString("domain: d\ndescriptors:\n")
			for i := range n {
				fmt.Fprintf(&text, "  - {"+tt.policy+", token_bucket: {capacity: 5, refill: 1/s}}\n", i)
			}
			s := mustParse(b, text.String())
			middle := fmt.Sprint(n / 2)
			r := request(strings.ReplaceAll(tt.key, "%d", middle), strings.ReplaceAll(tt.value, "%d", middle))
			if m := s.Match(r); len(m.Checks) != 1 {
				b.Fatalf("%+v meets %+v, want one check", r, m.Checks)
			}
			b.Run(fmt.Sprintf("%s/%d", tt.name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					s.Match(r)
				}
			})
		}
	}
}
