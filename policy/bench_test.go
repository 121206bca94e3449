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
