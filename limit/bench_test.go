package limit_test

import (
	"testing"
	"time"

	"weir/limit"
)

// What the arithmetic of one limit costs: its state as it is now, whether the hits pass, the
// charge, and what is told of it.
func BenchmarkState(b *testing.B) {
	bucket, err := limit.NewTokenBucket(1_000_000, 1000, time.Second)
	if err != nil {
		b.Fatal(err)
	}
	window, err := limit.NewWindow(1_000_000_000, limit.Minute, 1)
	if err != nil {
		b.Fatal(err)
	}
	sliding, err := limit.NewSlidingWindow(1_000_000_000, limit.Minute, 1)
	if err != nil {
		b.Fatal(err)
	}
	var told int64
	b.Run("token bucket", func(b *testing.B) {
		b.ReportAllocs()
		var s limit.BucketState
		for now := int64(1); b.Loop(); now++ {
			if s = s.At(bucket, now); s.Passes(1) {
				s = s.Charge(1)
			}
			told += s.Remaining() + s.FullAfterMillis() + s.RetryAfterMillis(1)
		}
	})
	for _, tt := range []struct {
		name string
		w    limit.Window
	}{{"window", window}, {"sliding window", sliding}} {
		b.Run(tt.name, func(b *testing.B) {
			b.ReportAllocs()
			var s limit.WindowState
			for now := int64(1); b.Loop(); now++ {
				if s = s.At(tt.w, now); s.Passes(tt.w, 1, now) {
					s = s.Charge(1)
				}
				told += s.Remaining(tt.w, now) + s.ResetAfterMillis(tt.w, now)
			}
		})
	}
}

// What the name of a subject's state costs, by its shape.
func BenchmarkKey(b *testing.B) {
	l, err := limit.NewWindow(60, limit.Minute, 1)
	if err != nil {
		b.Fatal(err)
	}
	prefix := limit.KeyPrefix("inference", l)
	for _, tt := range []struct {
		name    string
		subject []limit.Entry
	}{
		{"one entry", []limit.Entry{{Key: "account", Value: "customer-4711"}}},
		{"two entries, escaped", []limit.Entry{{Key: "account", Value: "customer-4711"}, {Key: "path", Value: "/v1/images?size=small, large"}}},
		{"a long value", []limit.Entry{{Key: "api_key", Value: "sk-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"}}},
	} {
		b.Run(tt.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				limit.KeyOf(prefix, tt.subject)
			}
		})
	}
}

// What a verdict costs: usual ones, and a wide one that all limits refuse.
func BenchmarkJudge(b *testing.B) {
	bucket, err := limit.NewTokenBucket(10, 1, time.Second)
	if err != nil {
		b.Fatal(err)
	}
	lane, err := limit.NewConcurrency(3, time.Minute)
	if err != nil {
		b.Fatal(err)
	}
	three := []limit.Check{
		{Key: "a", Limit: bucket, Hits: 1, Name: "account"},
		{Key: "b", Limit: lane, Hits: 1, Name: "account"},
		{Key: "c", Limit: lane, Hits: 1, Name: "pool", Class: limit.Pool},
	}
	var quotas, wide []limit.Check
	for i := range 1000 {
		wide = append(wide, three[i%3])
		if i < 3 {
			c := three[0]
			c.Quota = i + 1
			quotas = append(quotas, c)
		}
	}
	passed := func(n int) []limit.Result {
		r := make([]limit.Result, n)
		for i := range r {
			r[i].Passed = true
		}
		return r
	}
	oneRefuses := passed(3)
	oneRefuses[0] = limit.Result{RetryAfter: time.Second}
	estimate := func(limit.Check) time.Duration { return time.Second }
	for _, tt := range []struct {
		name   string
		checks []limit.Check
		d      limit.Decision
	}{
		{"three admit", three, limit.Decision{Admitted: true, Results: passed(3)}},
		{"one of three refuses", three, limit.Decision{Results: oneRefuses}},
		{"three refuse", three, limit.Decision{Results: make([]limit.Result, 3)}},
		{"three quotas refuse", quotas, limit.Decision{Results: make([]limit.Result, 3)}},
		{"1000 refuse", wide, limit.Decision{Results: make([]limit.Result, 1000)}},
	} {
		b.Run(tt.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				limit.Judge(tt.checks, tt.d, estimate)
			}
		})
	}
}

// What a lease id costs: to make one, and to check one from outside.
func BenchmarkLeaseID(b *testing.B) {
	id := limit.NewLeaseID("inference", [16]byte{1})
	b.Run("new", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			limit.NewLeaseID("inference", [16]byte{1})
		}
	})
	b.Run("parse", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := limit.ParseLeaseID(string(id)); err != nil {
				b.Fatal(err)
			}
		}
	})
}
