package policy

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"weir/limit"
)

// FuzzManyPatterns: of many patterns that stand beside each other the first in file order is
// found that a look at each finds. Lines are policies, key=value, and the last is the entry.
func FuzzManyPatterns(f *testing.F) {
	f.Add("k=a*\nk=*a\nk=*aa*\nk=a*a\nk*=aa\nk*\n*=*\nk=aaa")
	var many strings.Builder
	for i := range manyInner + 10 {
		fmt.Fprintf(&many, "k=*%d*\n*%d*=v\nk=x*%d*y\nk=*%d\n", i, i, i, i)
	}
	f.Add(many.String() + "k=x3917y")
	f.Add(many.String() + "3917=v")
	f.Add(strings.Repeat("k=a*\n", 20) + "k=" + strings.Repeat("a", 300))
	f.Fuzz(func(t *testing.T, text string) {
		lines := strings.Split(text, "\n")
		if len(lines) > 1000 || len(text) > 10_000 {
			return
		}
		var parent node
		for _, line := range lines[:len(lines)-1] {
			key, value, _ := strings.Cut(line, "=")
			if n := (&node{key: key, value: value}); n.isPattern() {
				parent.add(n)
			}
		}
		key, value, _ := strings.Cut(lines[len(lines)-1], "=")
		e := limit.Entry{Key: key, Value: value}
		if len(parent.wild) == 0 {
			return
		}
		want := parent.wildcard(e) // one after the other
		parent.index = newWildcards(parent.wild)
		if got := parent.wildcard(e); got != want {
			t.Errorf("%+v leads to %+v, want %+v", e, got, want)
		}
	})
}

// compared is how many patterns a search for text compares with it, and how many texts it
// looks for on the way.
func (g *globs) compared(text string) (patterns, steps int) {
	for h := g.heads.longest(text); h >= 0; h = g.heads.shorter[h] {
		tails := &g.tails[h]
		rest := text[len(g.heads.texts[h]):]
		for e := tails.ends.longest(rest); e >= 0; e = tails.ends.shorter[e] {
			steps++
			in := &tails.inner[e]
			patterns += len(in.list)
			if in.index == nil {
				continue
			}
			middle := rest[:len(rest)-len(tails.ends.texts[e])]
			for i := range len(middle) {
				if !in.index.begins[middle[i]] {
					continue
				}
				steps++
				for p := in.index.texts.longest(middle[i:]); p >= 0; p = in.index.texts.shorter[p] {
					patterns += len(in.index.lists[p])
				}
			}
		}
	}
	return patterns, steps
}

// Patterns with one head and one tail are told apart by what is between.
func TestManyPatternsThatBeginAndEndAlikeAreToldApart(t *testing.T) {
	found := 0
	for seed := range uint64(10) {
		r := rand.New(rand.NewPCG(seed, 3))
		var parent node
		for range 2 * manyInner {
			parent.add(&node{key: "k", value: "*" + randomText(r, "abcd*", 8) + "*"})
		}
		parent.indexed()
		for range 100 {
			e := limit.Entry{Key: "k", Value: randomText(r, "abcd", 10)}
			want := plainWildcard(&parent, e)
			if got := parent.wildcard(e); got != want {
				t.Fatalf("%+v leads to %+v, want %+v", e, got, want)
			}
			if want != nil {
				found++
			}
		}
	}
	if found < 100 {
		t.Errorf("%d texts had a pattern, want many", found)
	}
}

// A request is compared with as few patterns among 10,000 as among 1,000, whatever they look
// like.
func TestARequestIsComparedWithFewOfManyPatterns(t *testing.T) {
	for _, tt := range []struct{ pattern, value string }{
		{"customer-%d-*", "customer-77-blue"},
		{"*@customer-%d.example", "alice@customer-77.example"},
		{"/v1/customers/%d/*/orders", "/v1/customers/77/eu/orders"},
		{"*/customer-%d/*", "GET /customer-77/orders"},
		{"a*/customer-%d/*b*c", "a b /customer-77/ b c"},
		{"*", "x"},
	} {
		for _, n := range []int{1000, 10_000} {
			var parent node
			for i := range n {
				value := tt.pattern
				if strings.Contains(value, "%d") {
					value = fmt.Sprintf(value, i)
				}
				parent.add(&node{key: "k", value: value})
				parent.add(&node{key: fmt.Sprintf("k%d", i), value: value})
				parent.add(&node{key: value, value: "v"})
			}
			parent.indexed()
			if parent.index == nil {
				t.Fatalf("%d policies like %s have no index", n, tt.pattern)
			}
			for _, e := range []limit.Entry{{Key: "k", Value: tt.value}, {Key: "k77", Value: tt.value}, {Key: tt.value, Value: "v"}} {
				if got := parent.wildcard(e); got == nil || !glob(got.key, e.Key) || !glob(got.value, e.Value) {
					t.Errorf("%+v of %d leads to %+v, want a policy that it matches", e, n, got)
				}
			}
			for _, g := range []*globs{&parent.index.keys["k"].globbed, &parent.index.keys["k77"].globbed, &parent.index.globbed} {
				if patterns, steps := g.compared(tt.value); patterns > 3 || steps > 3 {
					t.Errorf("%s is compared with %d patterns in %d steps, of %d like %s, want at most 3", tt.value, patterns, steps, n, tt.pattern)
				}
			}
		}
	}
}

// To match among 10,000 policies takes as many pieces of memory as to match the only one.
func TestAMatchTakesNoMoreMemoryOfManyPolicies(t *testing.T) {
	shapes := []struct{ policy, key, value string }{
		{"key: account, value: customer-%d", "account", "customer-%d"},
		{"key: account-%d", "account-%d", "x"},
		{"key: path, value: '/customer-%d/*'", "path", "/customer-%d/orders"},
	}
	for i, tt := range shapes {
		taken := func(n int) float64 {
			var b strings.Builder
			b.WriteString("domain: d\ndescriptors:\n")
			for j := i; j < i+n; j++ {
				fmt.Fprintf(&b, "  - {"+shapes[j%len(shapes)].policy+", token_bucket: {capacity: 5, refill: 1/s}}\n", j)
			}
			s := mustParse(t, b.String())
			r := request(strings.Replace(tt.key, "%d", strconv.Itoa(i), 1), strings.Replace(tt.value, "%d", strconv.Itoa(i), 1))
			if m := s.Match(r); len(m.Checks) != 1 {
				t.Fatalf("%+v of %d meets %+v, want one check", r, n, m.Checks)
			}
			return testing.AllocsPerRun(100, func() { s.Match(r) })
		}
		if one, many := taken(1), taken(10_000); one != many || one > 2 {
			t.Errorf("a match of %s takes %v pieces of memory of one policy and %v of 10,000, want 2 at most of both", tt.policy, one, many)
		}
	}
}
