package limit_test

import (
	"strings"
	"testing"
	"time"

	"weir/limit"
)

func TestKeysAreReadableAndBounded(t *testing.T) {
	long := strings.Repeat("x", 65)
	bucket := limit.TokenBucket{Capacity: 1, Scale: 1, Refill: 1}
	day := limit.Window{Max: 1, Unit: limit.Day, Multiplier: 1}
	week := limit.Window{Max: 1, Unit: limit.Day, Multiplier: 7}
	slides := limit.Window{Max: 1, Unit: limit.Day, Multiplier: 7, Sliding: true}
	lane := limit.Concurrency{Max: 1, Lease: time.Second}
	for _, tt := range []struct {
		domain  string
		l       limit.Limit
		subject []limit.Entry
		want    string
	}{
		{"inference", bucket, []limit.Entry{{Key: "account", Value: "alice"}}, "weir:{inference}:b:account=alice"},
		{"inference", day, []limit.Entry{{Key: "account", Value: "alice"}, {Key: "plan", Value: "trial"}}, "weir:{inference}:w:day:account=alice,plan=trial"},
		{"inference", week, []limit.Entry{{Key: "a", Value: ""}}, "weir:{inference}:w:day*7:a="},
		{"inference", slides, []limit.Entry{{Key: "a", Value: ""}}, "weir:{inference}:s:day*7:a="},
		{"inference", lane, []limit.Entry{{Key: "pool", Value: "images"}}, "weir:{inference}:c:pool=images"},
		{"a}b{c:d", bucket, []limit.Entry{{Key: "k:,=#%", Value: "{} \x00\n\x7f"}}, "weir:{a%7Db%7Bc%3Ad}:b:k%3A%2C%3D%23%25=%7B%7D%20%00%0A%7F"},
		{"d", bucket, []limit.Entry{{Key: "k", Value: "grün"}}, "weir:{d}:b:k=grün"},
		{"d", bucket, []limit.Entry{{Key: "k", Value: long[:64]}}, "weir:{d}:b:k=" + long[:64]},
		{"d", bucket, []limit.Entry{limit.Hashed("k:", [16]byte{15: 1}), {Key: "l", Value: "v"}}, "weir:{d}:b:k%3A=#AAAAAAAAAAAAAAAAAAAAAQ,l=v"},
		{"d", bucket, []limit.Entry{{Key: "k", Value: "#AAAAAAAAAAAAAAAAAAAAAQ"}}, "weir:{d}:b:k=%23AAAAAAAAAAAAAAAAAAAAAQ"},
		{"d", bucket, []limit.Entry{{Key: "k", Value: long}}, "weir:{d}:b:k=#lTfF_fEgSC99WNJentWD9SwCtOME6oFNsWM61WWu1-k"},
	} {
		got := limit.Key(tt.domain, tt.l, tt.subject)
		if got != tt.want {
			t.Errorf("Key(%q, %v, %v) = %q, want %q", tt.domain, tt.l, tt.subject, got, tt.want)
		}
	}
}

// FuzzKey: two subjects have one key only if they are one subject.
func FuzzKey(f *testing.F) {
	f.Add("a", "b", "c", "d")
	f.Add("a=b", "", "a", "b=")
	f.Add("a", "b,c=d", "a", "b")
	f.Add("k", "#lTfF_fEgSC99WNJentWD9SwCtOME6oFNsWM61WWu1-k", "k", strings.Repeat("x", 65))
	bucket := limit.TokenBucket{Capacity: 1, Scale: 1, Refill: 1}
	f.Fuzz(func(t *testing.T, k1, v1, k2, v2 string) {
		one := []limit.Entry{{Key: k1, Value: v1}}
		for _, other := range [][]limit.Entry{{{Key: k2, Value: v2}}, {{Key: k1, Value: v1}, {Key: k2, Value: v2}}} {
			same := len(other) == 1 && one[0] == other[0]
			a, b := limit.Key("d", bucket, one), limit.Key("d", bucket, other)
			if (a == b) != same {
				t.Errorf("Key(%#v) = %q and Key(%#v) = %q", one, a, other, b)
			}
			var digest [16]byte
			copy(digest[:], v1)
			if hashed := limit.Key("d", bucket, []limit.Entry{limit.Hashed(k1, digest)}); hashed == a || hashed == b {
				t.Errorf("Key of a hashed entry = %q, which is that of %#v or %#v too", hashed, one, other)
			}
		}
		for _, c := range limit.Key(v1, bucket, one)[len("weir:{"):] {
			if c == '{' {
				t.Errorf("a brace that is not escaped in Key(%q, %#v)", v1, one)
			}
		}
	})
}

func TestALeaseIDNamesItsDomainAndIsReadStrictly(t *testing.T) {
	for _, domain := range []string{"inference", "d}:{x", "grün", "a.b", "100%"} {
		id := limit.NewLeaseID(domain, [16]byte{1, 2, 3})
		parsed, err := limit.ParseLeaseID(string(id))
		if err != nil || parsed != id {
			t.Errorf("ParseLeaseID(%q) = %v, %v", id, parsed, err)
		}
		if got := id.Domain(); got != domain {
			t.Errorf("%q.Domain() = %q, want %q", id, got, domain)
		}
		if len(id.Token()) != 22 {
			t.Errorf("token %q", id.Token())
		}
		// Record and sets share a slot of Redis Cluster.
		tag := limit.LeasesKey(domain)
		tag = tag[:strings.Index(tag, "}")+1]
		if key := limit.LeaseKey(id); !strings.HasPrefix(key, tag) {
			t.Errorf("LeaseKey(%q) = %q, want prefix %q", id, key, tag)
		}
		// A release by the stream finds the record so.
		if got, want := limit.LeasePrefix(domain)+id.Token(), limit.LeaseKey(id); got != want {
			t.Errorf("LeasePrefix(%q) and the token are %q, want %q", domain, got, want)
		}
	}
	for _, bad := range []string{
		"", "zzz", ".d", "AAAAAAAAAAAAAAAAAAAAAA", "AAAAAAAAAAAAAAAAAAAAAA.", "AAAAAAAAAAAAAAAAAAAAA.d", "AAAAAAAAAAAAAAAAAAAAA!.d",
		"AAAAAAAAAAAAAAAAAAAAAA.d}", "AAAAAAAAAAAAAAAAAAAAAA.a b", "AAAAAAAAAAAAAAAAAAAAAA.\x00",
		"AAAAAAAAAAAAAAAAAAAAAB.d", // bits that no 128-bit number has
		"AAAAAAAAAAAAAAAAAAAA\r\n.d",
		// Not as NewLeaseID escapes: such a lease would be in another slot than its domain.
		"AAAAAAAAAAAAAAAAAAAAAA.%41", "AAAAAAAAAAAAAAAAAAAAAA.%2", "AAAAAAAAAAAAAAAAAAAAAA.a%7b", "AAAAAAAAAAAAAAAAAAAAAA.%",
		"AAAAAAAAAAAAAAAAAAAAAA." + strings.Repeat("d", 500),
	} {
		if id, err := limit.ParseLeaseID(bad); err == nil {
			t.Errorf("ParseLeaseID(%q) = %q, want an error", bad, id)
		}
	}
}

func TestALeaseIDTellsWhereItsLeaseIs(t *testing.T) {
	for first := range 256 {
		random := [16]byte{byte(first), 15: 4}
		inStore, local := limit.NewLeaseID("d", random), limit.NewLocalLeaseID("d", 0xfedc_ba98, random)
		for _, id := range []limit.LeaseID{inStore, local} {
			if id[0] == '-' {
				t.Errorf("an id of %d is %q, which looks like a flag", first, id)
			}
			if parsed, err := limit.ParseLeaseID(string(id)); err != nil || parsed.Domain() != "d" {
				t.Errorf("ParseLeaseID(%q) = %v, %v", id, parsed, err)
			}
		}
		if process, ok := inStore.Local(); ok {
			t.Errorf("%q is of process %d, want it in the store", inStore, process)
		}
		if process, ok := local.Local(); !ok || process != 0xfedc_ba98 {
			t.Errorf("%q.Local() = %x, %t, want fedcba98", local, process, ok)
		}
	}
	if _, ok := limit.LeaseID("").Local(); ok {
		t.Error("no id is of a process")
	}
}
