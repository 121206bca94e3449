package server

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weir/limit"
	"weir/server/page"
)

// bucketed is a histogram of the times given, in milliseconds.
func bucketed(millis ...float64) []float64 {
	out := make([]float64, len(latencyBuckets)+1)
	for _, ms := range millis {
		i := 0
		for i < len(latencyBuckets) && ms/1000 > latencyBuckets[i] {
			i++
		}
		out[i]++
	}
	return out
}

func TestTheHistoryIsOf5Minutes(t *testing.T) {
	start := time.Unix(1_800_000_000, 0)
	h := &history{samples: []sample{{at: start}}}
	counted := 0
	count := func(now time.Time) sample {
		counted++
		return sample{at: now}
	}
	for s := range 3600 { // a look each second
		h.sample(start.Add(time.Duration(s)*time.Second+time.Duration(s%7)*time.Millisecond), count)
	}
	all := h.all()
	if len(all) != maxSamples || counted != 3600/5-1 {
		t.Errorf("in an hour %d samples were taken and %d kept, want %d and %d", counted, len(all), 3600/5-1, maxSamples)
	}
	if got := all[len(all)-1].at.Sub(all[0].at).Round(time.Second); got != 5*time.Minute {
		t.Errorf("they reach over %v, want 5m", got)
	}
	end := all[len(all)-1].at
	if got := end.Sub(before(all, end, rateOver).at).Round(time.Second); got != rateOver {
		t.Errorf("the rate is over %v, want %v", got, rateOver)
	}
	if got := before(all[:1], end, rateOver); got != &all[0] {
		t.Error("of one sample that one is before, however young")
	}
}

func TestPercentilesAreThoseOfEachInterval(t *testing.T) {
	at := func(s int64) time.Time { return time.Unix(1_800_000_000+s, 0) }
	first := bucketed(0.15, 0.15, 0.15, 0.15)
	second := append([]float64(nil), first...)
	second[len(second)-1] += 2 // above a second
	all := []sample{{at: at(0)}, {at: at(5), store: first}, {at: at(10), store: first}, {at: at(15), store: second}}
	all[0].store = bucketed()
	now := sample{at: at(16), store: bucketed(7)} // it began anew
	got := percentiles(all, now, func(s *sample) []float64 { return s.store })
	f := func(v float64) *float64 { return &v }
	want := page.Percentiles{
		Times: []int64{at(5).Unix(), at(10).Unix(), at(15).Unix()},
		P50:   []*float64{f(0.15), nil, f(1000)}, P95: []*float64{f(0.195), nil, f(1000)}, P99: []*float64{f(0.199), nil, f(1000)},
		Count: 7, All: []float64{0.188, 1000, 1000},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	empty := percentiles([]sample{{at: at(0)}}, sample{at: at(1)}, func(s *sample) []float64 { return s.store })
	if empty.Count != 0 || len(empty.All) != 0 || len(empty.Times) != 0 {
		t.Errorf("of nothing %+v, want nothing", empty)
	}
}

func TestTodayBeginsAtMidnight(t *testing.T) {
	b := &bypasses{}
	open := limit.Decision{Admitted: true, Bypass: limit.ModeOpen, Results: []limit.Result{{Passed: true, Bypass: limit.ModeOpen}}}
	checks := []limit.Check{{Name: "a"}}
	midnight := time.Date(2026, 11, 30, 0, 0, 0, 0, time.UTC)
	for range 10 {
		b.count("d", &limitNames{}, checks, open, limit.Verdict{Admitted: true}, midnight.Add(-2*time.Second))
	}
	b.count("d", &limitNames{}, checks, open, limit.Verdict{Admitted: true}, midnight)
	for _, test := range []struct {
		at    time.Time
		today int64
		rate  float64
	}{
		{midnight, 1, 11. / 5},
		{midnight.Add(3 * time.Second), 1, 11. / 5},
		{midnight.Add(4 * time.Second), 1, 1. / 5},
		{midnight.Add(6 * time.Second), 1, 0},
		{midnight.Add(24 * time.Hour), 0, 0},
	} {
		got, outage := b.tell(test.at)
		if got.Today.Unchecked != test.today || got.Total.Unchecked != 11 || got.PerSecond != test.rate || outage != nil {
			t.Errorf("at %v: %+v, want %d today and %v a second", test.at, got, test.today, test.rate)
		}
	}
}

func TestAnOutageHasItsOwnCounts(t *testing.T) {
	b := &bypasses{}
	local := limit.Decision{Bypass: limit.ModeLocal, Results: []limit.Result{{Bypass: limit.ModeLocal}}}
	now := time.Unix(1_800_000_000, 0)
	count := func(n int) {
		for range n {
			b.count("d", &limitNames{}, []limit.Check{{}}, local, limit.Verdict{}, now)
		}
	}
	count(1)
	b.back(now) // of nothing
	b.away(now)
	b.away(now.Add(time.Second)) // goes on
	count(2)
	if _, o := b.tell(now); o == nil || o.Local != 2 || !o.To.IsZero() || !o.From.Equal(now) {
		t.Errorf("outage %+v, want one from %v with 2", o, now)
	}
	b.back(now.Add(2 * time.Second))
	count(4)
	if _, o := b.tell(now); o == nil || o.Local != 2 || !o.To.Equal(now.Add(2*time.Second)) {
		t.Errorf("outage %+v, want one of 2 s with 2", o)
	}
	b.away(now.Add(3 * time.Second))
	if _, o := b.tell(now); o.Local != 0 || !o.To.IsZero() {
		t.Errorf("outage %+v, want a new one with none", o)
	}
}

func TestOutagesOfTheLastHourAreSummed(t *testing.T) {
	b := &bypasses{}
	open := limit.Decision{Admitted: true, Bypass: limit.ModeOpen, Results: []limit.Result{{Passed: true, Bypass: limit.ModeOpen}}}
	now := time.Unix(1_800_000_000, 0)
	outage := func(silent bool, requests int, took time.Duration) {
		b.away(now)
		if silent {
			b.silent()
		}
		for range requests {
			b.count("d", &limitNames{}, []limit.Check{{}}, open, limit.Verdict{}, now)
		}
		now = now.Add(took)
		b.back(now)
	}
	outage(true, 452, 56*time.Second)
	first := now.UTC()
	for range 300 { // one that is late each 11 s
		now = now.Add(10 * time.Second)
		outage(false, 2, time.Second)
	}
	var got page.Store
	b.tellFailures(&got, now)
	if want := (&page.Outages{Number: 1, Seconds: 56, To: first, Counts: page.Counts{Unchecked: 452}}); !cmp.Equal(got.LastHour, want) {
		t.Errorf("last hour %+v, want %+v", got.LastHour, want)
	}
	if want := (&page.Outages{Number: 300, Seconds: 300, To: now.UTC(), Counts: page.Counts{Unchecked: 600}}); !cmp.Equal(got.LateLastHour, want) {
		t.Errorf("late in the last hour %+v, want %+v", got.LateLastHour, want)
	}
	outage(true, 4, 6*time.Second)
	b.tellFailures(&got, now)
	if want := (&page.Outages{Number: 2, Seconds: 62, To: now.UTC(), Counts: page.Counts{Unchecked: 456}}); !cmp.Equal(got.LastHour, want) {
		t.Errorf("last hour %+v, want %+v", got.LastHour, want)
	}
	b.tellFailures(&got, first.Add(time.Hour))
	if got.LastHour.Number != 1 {
		t.Errorf("an hour after the first %+v, want the other alone", got.LastHour)
	}
	b.tellFailures(&got, now.Add(time.Hour))
	if got.LastHour != nil || got.LateLastHour != nil {
		t.Errorf("an hour later %+v and %+v, want none", got.LastHour, got.LateLastHour)
	}
	for range 7200 {
		outage(false, 1, time.Second)
	}
	if n := len(b.past); n > 122 {
		t.Errorf("%d sums are kept, want 122 at most", n)
	}
}

func TestTheLastMinuteEnds(t *testing.T) {
	b := &bypasses{}
	open := limit.Decision{Admitted: true, Bypass: limit.ModeOpen, Results: []limit.Result{{Passed: true, Bypass: limit.ModeOpen}}}
	now := time.Unix(1_800_000_000, 0)
	for range 60 {
		b.count("d", &limitNames{}, []limit.Check{{}}, open, limit.Verdict{}, now)
		now = now.Add(time.Second)
	}
	for after, want := range map[time.Duration]int64{0: 60, time.Second: 59, 59 * time.Second: 1, time.Minute: 0} {
		c := &bypasses{recent: b.recent, second: b.second}
		if got, _ := c.tell(now.Add(after)); got.LastMinute.Unchecked != want {
			t.Errorf("%v later %d in the last minute, want %d", after, got.LastMinute.Unchecked, want)
		}
	}
}
