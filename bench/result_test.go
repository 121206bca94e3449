package main

import (
	"testing"
	"time"
)

func TestMedianOfOddAndEvenNumbers(t *testing.T) {
	for _, test := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{4}, 4},
		{[]float64{9, 1}, 5},
		{[]float64{9, 1, 2}, 2},
		{[]float64{4, 1, 9, 2}, 3},
	} {
		if got := median(test.values); got != test.want {
			t.Errorf("median(%v) = %v, want %v", test.values, got, test.want)
		}
	}
}

func TestMediansAreOfEachNumberByItself(t *testing.T) {
	m := medians([]result{{P50: 1, CPU: 30}, {P50: 2, CPU: 10}, {P50: 3, CPU: 20}})
	if m.P50 != 2 || m.CPU != 20 || m.P99 != 0 {
		t.Errorf("medians: %+v, want P50 2 and CPU 20", m)
	}
}

func TestAQuantileIsTheSmallestThatItsShareDoesNotExceed(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(i + 1)
	}
	for _, test := range []struct {
		q    float64
		want time.Duration
	}{{0, 1}, {.5, 50}, {.99, 99}, {.999, 100}, {1, 100}} {
		if got := quantile(hundred, test.q); got != test.want {
			t.Errorf("quantile(%v) of 1 to 100 = %d, want %d", test.q, got, test.want)
		}
	}
	if got := quantile([]time.Duration{7}, .5); got != 7 {
		t.Errorf("the median of one is %d, want 7", got)
	}
}

func TestASummaryIsOfWhatWasUsedBetweenTwoMoments(t *testing.T) {
	begin := usage{at: time.Unix(100, 0), cpu: time.Second, redisCPU: time.Second, generator: time.Second, machine: 10 * time.Second, commands: commands{10, 20}}
	end := usage{
		at: time.Unix(102, 0), cpu: 2 * time.Second, redisCPU: 1500 * time.Millisecond, generator: 1250 * time.Millisecond, machine: 12 * time.Second,
		commands: commands{60, 220},
	}
	d := decided{latencies: []time.Duration{4 * time.Millisecond, time.Millisecond, 2 * time.Millisecond, 3 * time.Millisecond}, ended: 100, bypassed: 1, unfinished: 2}
	got := summary(d, begin, end)
	want := result{
		PerSecond: 50, P50: 2000, P99: 4000, P999: 4000, CPU: 1000, RedisCPU: 500, GeneratorCPU: 250,
		Sent: .5, InScripts: 2, Bypassed: .25, Unfinished: .5, OtherCPUs: .125,
	}
	if got != want {
		t.Errorf("summary: %+v\nwant     %+v", got, want)
	}
}

func TestRatiosAreToTheFloorOfTheRound(t *testing.T) {
	r := result{PerSecond: 30, P99: 8, CPU: 3, RedisCPU: 1}
	r.besides(result{PerSecond: 60, P99: 4, CPU: 2})
	if r.OfFloor != .5 || r.P99OfFloor != 2 || r.CPUOfFloor != 1.5 || r.RedisCPUOfFloor != .5 {
		t.Errorf("ratios: %+v", r)
	}
	r.besides(result{}) // of which nothing is known
	if r.OfFloor != 0 || r.CPUOfFloor != 0 {
		t.Errorf("ratios to nothing: %+v, want 0", r)
	}
}
