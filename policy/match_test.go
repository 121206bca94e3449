package policy

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/datadriven"

	"weir/limit"
)

// It runs the files of testdata/match. In them, `policy` loads a file
// (`policy lenient` too) and `match` matches a request: one line for each
// descriptor, as in cases.md, and before them a line hits=N for the request's
// own hits. The output is the checks, then what each descriptor met.
func TestARequestMeetsTheChecksOfTheScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata/match", func(t *testing.T, path string) {
		set := &Set{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "policy":
				s, err := Parse("d.yaml", []byte(d.Input), Options{Lenient: d.HasArg("lenient"), HashKey: []byte("a key of tests")})
				if err != nil {
					return err.Error()
				}
				set = s
				return strings.Join(append(s.Warnings(), "ok"), "\n")
			case "match":
				r := parseRequest(t, d.Input)
				if d.HasArg("domain") {
					d.ScanArgs(t, "domain", &r.Domain)
				}
				return formatMatch(r, set.Match(r))
			}
			t.Fatalf("unknown command %s", d.Cmd)
			return ""
		})
	})
}

func parseRequest(t *testing.T, input string) Request {
	r := Request{Domain: "d"}
	for line := range strings.Lines(input) {
		line = strings.TrimSpace(line)
		if hits, ok := strings.CutPrefix(line, "hits="); ok {
			r.Hits = number(t, hits)
			continue
		}
		body, options, ok := strings.Cut(strings.TrimPrefix(line, "["), "]")
		if !ok {
			t.Fatalf("descriptor %q has no ]", line)
		}
		var d Descriptor
		for _, entry := range strings.Split(body, ", ") {
			key, value, _ := strings.Cut(entry, "=")
			d.Entries = append(d.Entries, limit.Entry{Key: key, Value: value})
		}
		for _, o := range strings.Fields(options) {
			if h, ok := strings.CutPrefix(o, "h="); ok {
				d.Hits, d.HasHits = number(t, h), true
			} else if l, ok := strings.CutPrefix(o, "limit="); ok {
				count, unit, _ := strings.Cut(l, "/")
				w, err := limit.NewWindow(int64(number(t, count)), limit.ParseUnit(unit), 1)
				if err != nil {
					t.Fatalf("%s: %v", line, err)
				}
				d.Override = &w
			} else if o == "neg" {
				d.Negative = true
			} else {
				t.Fatalf("unknown option %q in %q", o, line)
			}
		}
		r.Descriptors = append(r.Descriptors, d)
	}
	return r
}

func number(t *testing.T, s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func formatMatch(r Request, m Match) string {
	var b strings.Builder
	for i, c := range m.Checks {
		fmt.Fprintf(&b, "check %d: %s %s hits=%d name=%s", i, c.Key, formatLimit(c.Limit), c.Hits, c.Name)
		if c.Class == limit.Pool {
			b.WriteString(" pool")
		}
		if c.Shadow {
			b.WriteString(" shadow")
		}
		if c.Quota != 0 {
			fmt.Fprintf(&b, " quota=%d", c.Quota)
		}
		if c.FailureMode != limit.DefaultMode {
			fmt.Fprintf(&b, " failure=%v", c.FailureMode)
		}
		if c.Fraction != limit.Whole {
			fmt.Fprintf(&b, " fraction=%d", c.Fraction)
		}
		b.WriteByte('\n')
	}
	for i, d := range m.Descriptors {
		var entries []string
		for _, e := range r.Descriptors[i].Entries {
			entries = append(entries, "{"+e.Key+" "+e.Value+"}")
		}
		fmt.Fprintf(&b, "%v ->", entries)
		for _, c := range d.Checks {
			fmt.Fprintf(&b, " %d", c)
		}
		if d.Unlimited {
			b.WriteString(" unlimited")
		}
		if len(d.Checks) == 0 && !d.Unlimited {
			b.WriteString(" nothing")
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func formatLimit(l limit.Limit) string {
	switch l := l.(type) {
	case limit.TokenBucket:
		return fmt.Sprintf("%d tokens", l.Capacity)
	case limit.Window:
		words := fmt.Sprintf("%d/%s", l.Max, l.Unit)
		if l.Sliding {
			words += " sliding"
		}
		if l.ChargeOver {
			words += " charge"
		}
		return words
	case limit.Concurrency:
		return fmt.Sprintf("%d slots", l.Max)
	}
	return "?"
}

// R08, R10: the order and the shape of a lookup, with the limit that must win.
func TestLookupPrefersExactThenFirstWildcardThenBareKey(t *testing.T) {
	set := mustParse(t, `
domain: d
descriptors:
  - {key: p, value: "foo*", rate_limit: {unit: hour, requests_per_unit: 10}}
  - {key: p, value: "foobar*", rate_limit: {unit: hour, requests_per_unit: 20}}
  - {key: p, value: "*", rate_limit: {unit: hour, requests_per_unit: 30}}
  - {key: p, rate_limit: {unit: hour, requests_per_unit: 40}}
  - {key: m, value: "x*yz*z", rate_limit: {unit: hour, requests_per_unit: 70}}
  - {key: a, value: "b*", rate_limit: {unit: hour, requests_per_unit: 80}}
  - {key: foo_bar, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: "ke*", rate_limit: {unit: hour, requests_per_unit: 3}}
  - {key: "q*", value: "v", rate_limit: {unit: hour, requests_per_unit: 4}}
  - {key: e, value: x, rate_limit: {unit: hour, requests_per_unit: 5}}
  - {key: e, rate_limit: {unit: hour, requests_per_unit: 6}}
`)
	for _, c := range []struct {
		key, value string
		want       int64 // -1: no limit
	}{
		{"p", "foobarbaz", 10},
		{"p", "other", 30},
		{"p", "foo*", 10}, // its exact text
		{"p", "foobar*", 20},
		{"p", "", 30}, // * is zero characters too
		{"m", "xyzz", 70},
		{"m", "xyzyzz", 70},
		{"m", "xyz", -1},
		{"a_b", "x", -1}, // a pattern does not straddle key and value
		{"a", "b", 80},
		{"foo", "bar", -1}, // R08
		{"foo_bar", "x", 2},
		{"ke", "v", 3},
		{"key", "v", 3},
		{"k", "v", -1},
		{"qq", "v", 4},
		{"qq", "w", -1},
		{"e", "x", 5},
		{"e", "y", 6},
		{"e", "", 6},
	} {
		got := int64(-1)
		m := set.Match(request(c.key, c.value))
		if len(m.Checks) > 0 {
			w, ok := m.Checks[0].Limit.(limit.Window)
			if !ok {
				t.Fatalf("Match([%s=%s]) met %v, want a window", c.key, c.value, m.Checks[0].Limit)
			}
			got = w.Max
		}
		if got != c.want {
			t.Errorf("Match([%s=%s]) met the limit %d, want %d", c.key, c.value, got, c.want)
		}
	}
}

// The sums must not depend on how many descriptors there are: a scan merges a
// few, a map many.
func TestManyDescriptorsAreMergedAsFewAre(t *testing.T) {
	set := mustParse(t, `
domain: d
descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 100}, concurrency: {max_in_flight: 3, lease: 1m}}
`)
	for _, n := range []int{1, 7, 8, 9, 16, 17, 40, 1000} {
		var r Request
		r.Domain = "d"
		override := limit.Window{Max: 5, Unit: limit.Hour, Multiplier: 1}
		for i := range n {
			d := Descriptor{Entries: []limit.Entry{{Key: "a", Value: strconv.Itoa(i / 2)}}, Hits: uint64(i + 1), HasHits: true}
			if i%4 == 3 {
				d.Override = &override
			}
			r.Descriptors = append(r.Descriptors, d)
		}
		m := set.Match(r)
		for i, d := range m.Descriptors {
			if len(d.Checks) != 2 {
				t.Fatalf("of %d: descriptor %d has the checks %v, want 2", n, i, d.Checks)
			}
			sum, most := int64(0), int64(0)
			for j := range n {
				if j/2 == i/2 {
					sum += int64(j + 1)
					most = int64(j + 1)
				}
			}
			for _, c := range d.Checks {
				want := sum
				if _, ok := m.Checks[c].Limit.(limit.Concurrency); ok {
					want = most
				}
				if got := m.Checks[c]; got.Hits != want || !strings.HasSuffix(got.Key, ":a="+strconv.Itoa(i/2)) {
					t.Errorf("of %d: descriptor %d has the check %+v, want hits %d of a=%d", n, i, got, want, i/2)
				}
			}
			if got, want := m.Checks[d.Checks[0]].Name == OverrideName, i%4 == 3; got != want {
				t.Errorf("of %d: descriptor %d met an override: %v, want %v", n, i, got, want)
			}
		}
	}
}

// R14: none of the replaced limits is left, all others are.
func TestManyNamesAreReplacedAsFewAre(t *testing.T) {
	const n = 40
	var b strings.Builder
	r := Request{Domain: "d"}
	b.WriteString("domain: d\ndescriptors:\n")
	for i := range n {
		fmt.Fprintf(&b, "  - {key: a%d, token_bucket: {capacity: 1, refill: 1/s, name: A%d}}\n", i, i)
		fmt.Fprintf(&b, "  - {key: b%d, token_bucket: {capacity: 1, refill: 1/s, replaces: [{name: A%d}]}}\n", i, i)
		for _, key := range []string{"a", "b"} {
			r.Descriptors = append(r.Descriptors, Descriptor{Entries: []limit.Entry{{Key: key + strconv.Itoa(i), Value: "x"}}})
		}
	}
	m := mustParse(t, b.String()).Match(r)
	for i, d := range m.Descriptors {
		if got, want := len(d.Checks), i%2; got != want {
			t.Errorf("%v has %d checks, want %d", r.Descriptors[i].Entries, got, want)
		}
	}
}

// T29's sense, for matching: the order of the descriptors changes nothing.
func TestOrderOfDescriptorsDoesNotMatter(t *testing.T) {
	set := mustParse(t, `
domain: d
descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 100}}
  - {key: b, token_bucket: {capacity: 5, refill: 1/s, replaces: [{name: C}]}}
  - {key: c, rate_limit: {unit: day, requests_per_unit: 7, name: C}}
`)
	override := limit.Window{Max: 100, Unit: limit.Hour, Multiplier: 1}
	a := []limit.Entry{{Key: "a", Value: "1"}}
	r := Request{Domain: "d", Descriptors: []Descriptor{
		{Entries: a, Hits: 1 << 60, HasHits: true},
		{Entries: a, Hits: 1 << 60, HasHits: true, Negative: true},
		{Entries: a, Hits: 1 << 60, HasHits: true, Override: &override},
		{Entries: []limit.Entry{{Key: "b", Value: "1"}}},
		{Entries: []limit.Entry{{Key: "c", Value: "1"}}},
	}}
	var want []limit.Check
	for range len(r.Descriptors) {
		r.Descriptors = append(r.Descriptors[1:], r.Descriptors[0])
		got := set.Match(r).Checks
		slices.SortFunc(got, func(a, b limit.Check) int { return strings.Compare(a.Key, b.Key) })
		if want == nil {
			want = got
		}
		if !slices.Equal(got, want) {
			t.Errorf("Match(%v).Checks = %v, want %v", r, got, want)
		}
	}
	if len(want) != 2 || want[1].Hits != limit.MaxExact {
		t.Errorf("the checks are %v, want a bucket and one window of %d hits", want, int64(limit.MaxExact))
	}
}

func TestSetMayBeUsedByMany(t *testing.T) {
	set := mustParse(t, "domain: d\ndescriptors: [{key: 'a*', share_threshold: true, token_bucket: {capacity: 1, refill: 1/s}}]")
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 100 {
				m := set.Match(request("abc", "x"))
				if got, want := m.Checks[0].Key, "weir:{d}:b:a*=x"; got != want {
					t.Errorf("key is %s, want %s", got, want)
				}
			}
		})
	}
	all.Wait()
}

func request(key, value string) Request {
	return Request{Domain: "d", Descriptors: []Descriptor{{Entries: []limit.Entry{{Key: key, Value: value}}}}}
}

func mustParse(t testing.TB, text string) *Set {
	t.Helper()
	s, err := Parse("d.yaml", []byte(text), Options{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}
