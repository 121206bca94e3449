package limit

import (
	"cmp"
	"slices"
	"time"
)

// Reason says why a check did not pass.
type Reason string

// The reasons, as they stand on the wire.
const (
	NoReason            Reason = ""
	BucketEmpty         Reason = "bucket_empty"
	WindowFull          Reason = "window_full"
	LaneFull            Reason = "lane_full"
	PoolFull            Reason = "pool_full"
	CostExceedsCapacity Reason = "cost_exceeds_capacity" // can never pass
	Banned              Reason = "banned"                // can never pass
	StreamEnded         Reason = "stream_ended"          // whoever asked has gone
	StoreUnavailable    Reason = "store_unavailable"     // nobody knows whether it would pass
)

// Violation is a check that refused, or in shadow would have.
type Violation struct {
	Limit  string // its name
	Class  Class
	Reason Reason
	// RetryAfter is the wait after which it may pass; 0 unless Retryable.
	RetryAfter time.Duration
	Estimated  bool // RetryAfter is a guess
	Retryable  bool
}

// Verdict is a decision for a whole request, as callers are told it.
type Verdict struct {
	Admitted bool
	// Of a refused request: the class is Lane if any lane limit refused; Limit
	// and Reason are those of the violation that the request waits for, which is
	// the longest (of quota limits, the soonest: one that is free is enough);
	// RetryAfter is 0 unless Retryable. Of a stream that had ended there is a Reason
	// alone.
	Class      Class
	Limit      string
	Reason     Reason
	RetryAfter time.Duration
	Estimated  bool
	Retryable  bool
	// Violations are all that refused, the one that waits longest first. Their
	// order does not depend on the order of the request's descriptors.
	Violations []Violation
	// Shadowed are those that would have refused had they been enforced; only of
	// an admitted request.
	Shadowed []Violation
	// QuotaExhausted says that the quota limits refused: all of them are over.
	QuotaExhausted bool
}

// Refuses reports whether c, which did not pass, is one of those that refused.
func (v Verdict) Refuses(c Check) bool {
	return !v.Admitted && !c.Shadow && (c.Quota == 0 || v.QuotaExhausted)
}

// Judge sums up a decision over its checks. estimate returns the wait to tell
// for a full concurrency limit, which no store can know.
func Judge(checks []Check, d Decision, estimate func(Check) time.Duration) Verdict {
	v := Verdict{Admitted: d.Admitted}
	if d.Admitted {
		for i, c := range checks {
			if c.Shadow && !d.Results[i].Passed {
				v.Shadowed = append(v.Shadowed, violation(c, d.Results[i], estimate))
			}
		}
		sortViolations(v.Shadowed)
		return v
	}
	if d.StreamEnded {
		v.Reason = StreamEnded
		return v
	}
	v.QuotaExhausted = QuotaExhausted(checks, d.Results)
	v.Class = Pool
	n := 0
	for i, c := range checks {
		if !d.Results[i].Passed && v.Refuses(c) {
			n++
		}
	}
	if n > 0 {
		v.Violations = make([]Violation, 0, n)
	}
	var wait *Violation            // the longest of those that must all have passed
	var quotas map[int][]Violation // by group, of which one is enough; most requests have none
	for i, c := range checks {
		if d.Results[i].Passed || !v.Refuses(c) {
			continue
		}
		v.Violations = append(v.Violations, violation(c, d.Results[i], estimate))
		w := &v.Violations[len(v.Violations)-1]
		if w.Class == Lane {
			v.Class = Lane
		}
		switch {
		case c.Quota != 0:
			if quotas == nil {
				quotas = make(map[int][]Violation)
			}
			quotas[c.Quota] = append(quotas[c.Quota], *w)
		case wait == nil || compareViolations(*w, *wait) < 0:
			wait = w
		}
	}
	if soonest := soonestQuota(quotas); soonest != nil && (wait == nil || compareViolations(*soonest, *wait) < 0) {
		wait = soonest
	}
	if wait != nil {
		v.Limit, v.Reason, v.Retryable = wait.Limit, wait.Reason, wait.Retryable
		v.RetryAfter, v.Estimated = wait.RetryAfter, wait.Estimated
	}
	sortViolations(v.Violations) // only now: wait is one of them, where it was
	return v
}

// soonestQuota is what a request waits for whose quota groups are all over: the
// group that is free again first, and in it the limit that waits longest. nil without groups.
func soonestQuota(groups map[int][]Violation) *Violation {
	var soonest *Violation
	for _, g := range groups {
		first := slices.MinFunc(g, compareViolations)
		if soonest == nil || cmp.Or(
			compareBool(soonest.Retryable, first.Retryable),
			cmp.Compare(first.RetryAfter, soonest.RetryAfter),
			cmp.Compare(first.Limit, soonest.Limit),
			cmp.Compare(first.Reason, soonest.Reason),
		) < 0 {
			soonest = &first
		}
	}
	return soonest
}

func violation(c Check, r Result, estimate func(Check) time.Duration) Violation {
	v := Violation{Limit: c.Name, Class: c.Class, Retryable: true, RetryAfter: r.RetryAfter}
	if reason := c.Impossible(); reason != NoReason {
		v.Reason, v.Retryable, v.RetryAfter = reason, false, 0
		return v
	}
	if r.Bypass == ModeClosed { // it is not the caller's fault
		v.Class, v.Reason, v.Estimated = Pool, StoreUnavailable, true
		return v
	}
	v.Estimated = r.Bypass == ModeLocal // it is the share's wait, and the store may be back before
	switch c.Limit.(type) {
	case TokenBucket:
		v.Reason = BucketEmpty
	case Window:
		v.Reason = WindowFull
	case Concurrency:
		v.Reason = LaneFull
		if c.Class == Pool {
			v.Reason = PoolFull
		}
		v.RetryAfter, v.Estimated = estimate(c), true
	}
	return v
}

func sortViolations(vs []Violation) { slices.SortFunc(vs, compareViolations) }

// compareViolations puts what can never pass first, then the longest wait, an exact
// one before an estimate; ties are broken by what they are, never by position.
func compareViolations(a, b Violation) int {
	return cmp.Or(
		compareBool(a.Retryable, b.Retryable),
		cmp.Compare(b.RetryAfter, a.RetryAfter),
		compareBool(a.Estimated, b.Estimated),
		cmp.Compare(a.Limit, b.Limit),
		cmp.Compare(a.Reason, b.Reason),
	)
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
