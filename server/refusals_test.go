package server

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"weir/limit"
)

func TestWhoIsRefusedOftenIsAmongTheTopForSure(t *testing.T) {
	r := newRefusals()
	random := rand.New(rand.NewPCG(1, 2))
	now := time.Unix(1_800_000_000, 0)
	truth := make(map[string]int64)
	const refusals = 50_000
	for range refusals {
		key := fmt.Sprintf("weir:{d}:b:account=%d", random.IntN(10_000)) // far more than there is room for
		if n := random.IntN(10); n < 3 {                                 // and three who are refused often
			key = fmt.Sprintf("weir:{d}:b:account=often%d", n)
		}
		truth[subjectOf(key)]++
		r.count(refusedID{limitName{"d", "account"}, key}, now)
		now = now.Add(time.Millisecond)
	}
	top := r.top(now)
	if len(top) != maxRefused {
		t.Fatalf("%d subjects are kept, want %d", len(top), maxRefused)
	}
	told := make(map[string]bool)
	for i, s := range top {
		told[s.Subject] = true
		if real := truth[s.Subject]; s.Count < real || s.Count-s.Over > real {
			t.Errorf("%s has %d, of which %d may be another's; in truth %d", s.Subject, s.Count, s.Over, real)
		}
		if i < 3 && !strings.HasPrefix(s.Subject, "account=often") {
			t.Errorf("place %d is %s, want one that is refused often", i, s.Subject)
		}
	}
	for subject, n := range truth {
		if n > refusals/maxRefused && !told[subject] {
			t.Errorf("%s was refused %d times of %d, and is not told", subject, n, refusals)
		}
	}
}

func TestWhoIsNotRefusedAnyMoreIsForgotten(t *testing.T) {
	r := newRefusals()
	now := time.Unix(1_800_000_000, 0)
	id := func(i int) refusedID {
		return refusedID{limitName{"d", "account"}, fmt.Sprintf("weir:{d}:b:account=%d", i)}
	}
	for i := range maxRefused {
		r.count(id(i), now)
		r.count(id(i), now)
	}
	later := now.Add(forgetAfter + time.Second)
	if got := r.top(later); len(got) != 0 {
		t.Errorf("after %v without a refusal %d subjects are told, want none", forgetAfter, len(got))
	}
	r.count(id(0), later)
	r.count(id(1000), later)
	for _, s := range r.top(later) {
		if s.Count != 1 || s.Over != 0 {
			t.Errorf("%s has %d (%d over), want 1: what was before is forgotten", s.Subject, s.Count, s.Over)
		}
	}
	if got := r.top(later); len(got) != 2 {
		t.Errorf("%d subjects are told, want 2", len(got))
	}
}

func TestTheSubjectIsReadFromTheKey(t *testing.T) {
	hashed := limit.Hashed("api_key", [16]byte{1, 2, 3})
	entry := func(k, v string) limit.Entry { return limit.Entry{Key: k, Value: v} }
	day := limit.Window{Max: 1, Unit: limit.Day, Multiplier: 7}
	sliding := day
	sliding.Sliding = true
	for _, test := range []struct {
		limit   limit.Limit
		subject []limit.Entry
		want    string
	}{
		{limit.TokenBucket{}, []limit.Entry{entry("account", "alice")}, "account=alice"},
		{day, []limit.Entry{entry("account", "alice"), entry("plan", "trial")}, "account=alice,plan=trial"},
		{sliding, []limit.Entry{entry("vendor", "maps")}, "vendor=maps"},
		{limit.Concurrency{}, []limit.Entry{entry("pool", "a:b")}, "pool=a%3Ab"},
		{limit.TokenBucket{}, []limit.Entry{hashed}, "api_key=" + "#" + hashed.Value},
		{limit.TokenBucket{}, []limit.Entry{entry("k", "\x1b[2J\u202e\u0085\xff")}, "k=%1B[2J\uFFFD\uFFFD\uFFFD"},
	} {
		key := limit.Key("d:{}", test.limit, test.subject)
		if got := subjectOf(key); got != test.want {
			t.Errorf("subjectOf(%q) = %q, want %q", key, got, test.want)
		}
	}
	long := limit.Key("d", limit.TokenBucket{}, []limit.Entry{entry("a", strings.Repeat("%", 64)), entry("b", strings.Repeat("x", 64)), entry(strings.Repeat("c", 64), "1"), entry("d", strings.Repeat("y", 64)), entry("e", strings.Repeat("z", 64))})
	if got := len([]rune(subjectOf(long))); got > maxSubject {
		t.Errorf("a subject has %d characters, want %d at most", got, maxSubject)
	}
}

func BenchmarkRefusals(b *testing.B) { // a flood of subjects: the slowest case
	r := newRefusals()
	now := time.Unix(1_800_000_000, 0)
	ids := make([]refusedID, 4096)
	for i := range ids {
		ids[i] = refusedID{limitName{"d", "account"}, fmt.Sprintf("weir:{d}:b:account=%d", i)}
	}
	i := 0
	for b.Loop() {
		r.count(ids[i%len(ids)], now)
		i++
	}
}
