package envoy

import (
	"fmt"
	"testing"
	"time"

	"weir/limit"
)

// find returns the value of a header; "" if it is not there.
func find(t decision, o Options, key string) string {
	for _, h := range t.encode(o).GetResponseHeadersToAdd() {
		if h.GetKey() == key {
			return h.GetValue()
		}
	}
	return ""
}

func TestRateLimitHeadersTellEachLimitOnce(t *testing.T) {
	subject := func(c limit.Check, key string) limit.Check {
		c.Key = key
		return c
	}
	daysOf := func(n int64) limit.Check {
		return subject(check("o", limit.Window{Max: 9, Unit: limit.Day, Multiplier: n}), fmt.Sprint(n))
	}
	for _, tt := range []struct {
		name              string
		in                decision
		current, policies string
	}{
		{name: "no limits", in: decide(nil, []decided{unlimited}, []decided{{shadow(hourly("s", 1)), passed(0, time.Hour)}})},
		{
			name:     "each kind",
			in:       decide([]decided{{hourly("w", 100), passed(40, 1500*time.Millisecond)}, {aBucket("b", 10), passed(41, 60*time.Second)}, {lane("c", 50), passed(42, 0)}}),
			current:  `"w";r=40;t=2, "b";r=41;t=60, "c";r=42`,
			policies: `"b";q=10;w=100, "c";q=50;qu="concurrent-requests", "w";q=100;w=3600`,
		},
		{
			name:     "one name for a bucket and a concurrency",
			in:       decide([]decided{{lane("account", 3), passed(2, 0)}, {aBucket("account", 10), passed(9, 10*time.Second)}}),
			current:  `"account-concurrency";r=2, "account";r=9;t=10`,
			policies: `"account";q=10;w=100, "account-concurrency";q=3;qu="concurrent-requests"`,
		},
		{
			name: "one name for two windows and a concurrency",
			in: decide([]decided{
				{lane("o", 3), passed(3, 0)},
				{daysOf(7), passed(2, time.Hour)},
				{hourly("o", 8), passed(1, time.Minute)},
				{daysOf(1), passed(4, time.Hour)},
			}),
			current:  `"o";r=1;t=60, "o-7day";r=2;t=3600, "o-concurrency";r=3, "o-day";r=4;t=3600`,
			policies: `"o";q=8;w=3600, "o-day";q=9;w=86400, "o-7day";q=9;w=604800, "o-concurrency";q=3;qu="concurrent-requests"`,
		},
		{
			name: "subjects of one limit share an item, the tightest",
			in: decide(
				[]decided{{subject(hourly("a", 9), "a=1"), passed(5, time.Hour)}},
				[]decided{{subject(hourly("a", 9), "a=2"), passed(3, time.Hour)}},
				[]decided{{subject(hourly("a", 9), "a=3"), passed(7, time.Hour)}},
			),
			current:  `"a";r=3;t=3600`,
			policies: `"a";q=9;w=3600`,
		},
		{
			name:     "names are escaped",
			in:       decide([]decided{{hourly("say \"hi\\\"\n\x7f é~", 9), passed(3, time.Hour)}}),
			current:  `"say \"hi\\\"%0a%7f %c3%a9~";r=3;t=3600`,
			policies: `"say \"hi\\\"%0a%7f %c3%a9~";q=9;w=3600`,
		},
		{
			name:     "integers have at most 15 digits",
			in:       decide([]decided{{check("b", limit.TokenBucket{Capacity: limit.MaxExact - 1, Scale: 1, Refill: 1}), passed(limit.MaxExact-1, time.Second)}}),
			current:  `"b";r=999999999999999;t=1`,
			policies: `"b";q=999999999999999;w=9223372037`,
		},
		{
			name:     "what can never pass has no effective window",
			in:       decide([]decided{{costing(hourly("a", 9), 10), failed(9, 0, time.Hour)}, {lane("c", 1), passed(1, 0)}}),
			current:  `"a";r=0, "c";r=1`,
			policies: `"a";q=9;w=3600, "c";q=1;qu="concurrent-requests"`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			on := Options{RateLimitHeaders: true}
			if got := find(tt.in, on, "ratelimit"); got != tt.current {
				t.Errorf("ratelimit = %s, want %s", got, tt.current)
			}
			if got := find(tt.in, on, "ratelimit-policy"); got != tt.policies {
				t.Errorf("ratelimit-policy = %s, want %s", got, tt.policies)
			}
			if got := find(tt.in, Options{}, "ratelimit") + find(tt.in, Options{}, "ratelimit-policy"); got != "" {
				t.Errorf("switched off, the headers are %s, want none", got)
			}
		})
	}
}
