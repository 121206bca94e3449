package limit

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestADetailIsTrueOfAnyVerdict(t *testing.T) {
	for _, tt := range []struct {
		in   Verdict
		want string
	}{
		{Verdict{Limit: "a", Reason: "something_new", Retryable: true, RetryAfter: time.Second}, `Limit "a" refused the request (something_new); retry after 1s.`},
		{Verdict{Reason: StreamEnded}, "The end of the stream that asks was told before; retrying does not help."},
		{Verdict{}, "The request was refused; retrying does not help."},
	} {
		if got := string(tt.in.appendDetail(nil)); got != tt.want {
			t.Errorf("appendDetail(%+v) = %q, want %q", tt.in, got, tt.want)
		}
	}
}

// awkward are names that JSON, HTML, JavaScript or UTF-8 has something against.
var awkward = []string{
	"", "account", `say "no" \ never`, "<b>&amp;</b>", "a\b\f\n\r\t\x00\x1f\x7f", "\u2028\u2029", "größe 大 😀", "\xff\xc3", "\ufffd", "a\xf0\x9f\x98", "\u200e\u00ad", strings.Repeat("é", 300),
}

func TestAProblemIsAsEncodingJSONWritesIt(t *testing.T) {
	reasons := []Reason{NoReason, BucketEmpty, WindowFull, LaneFull, PoolFull, CostExceedsCapacity, Banned, StreamEnded, StoreUnavailable}
	for _, s := range awkward {
		reasons = append(reasons, Reason(s))
	}
	waits := []time.Duration{0, time.Nanosecond, 999_999, time.Millisecond, 1500 * time.Millisecond, time.Hour, 1<<63 - 1, -time.Second, -1 << 63}
	for _, reason := range reasons {
		for i, name := range awkward {
			for j, wait := range waits {
				for flags := range 8 {
					checkProblem(t, name, awkward[(i+j)%len(awkward)], string(reason), int64(wait), uint8(flags), uint8(i*j))
				}
			}
		}
	}
}

func FuzzProblem(f *testing.F) {
	for i, s := range awkward {
		f.Add(s, awkward[len(awkward)-1-i], string(PoolFull), int64(time.Second), uint8(i), uint8(i*20))
	}
	f.Fuzz(func(t *testing.T, name, other, reason string, wait int64, flags, names uint8) {
		checkProblem(t, name, other, reason, wait, flags, names)
	})
}

// checkProblem compares the problem of a verdict that names up to n limits more with
// encoding/json's.
func checkProblem(t *testing.T, name, other, reason string, wait int64, flags, n uint8) {
	t.Helper()
	v := Verdict{
		Limit: name, Reason: Reason(reason), RetryAfter: time.Duration(wait),
		Class: Class(flags & 1), Estimated: flags&2 != 0, Retryable: flags&4 != 0,
	}
	for i := range int(n) {
		v.Violations = append(v.Violations, Violation{Limit: []string{name, other, name + other, fmt.Sprint(other, i)}[i%4]})
	}
	want := string(problemOf(v))
	if got := string(v.AppendProblem([]byte("before "))); got != "before "+want {
		t.Errorf("AppendProblem of %+v\n got %s\nwant before %s", v, got, want)
	}
	if got := string(v.Problem()); got != want {
		t.Errorf("Problem of %+v\n got %s\nwant %s", v, got, want)
	}
}

func TestAProblemOfAFewLimitsTakesNoMemoryOfItsOwn(t *testing.T) {
	v := Verdict{Class: Lane, Limit: "account", Reason: BucketEmpty, RetryAfter: 86399 * time.Second, Retryable: true, Violations: []Violation{{Limit: "account"}, {Limit: "tenant"}}}
	b := v.AppendProblem(nil)
	if n := testing.AllocsPerRun(100, func() { b = v.AppendProblem(b[:0]) }); n != 0 {
		t.Errorf("AppendProblem allocates %v times, want never", n)
	}
}

// What follows is a problem as encoding/json and fmt write it.

type problemDetails struct {
	Type       string   `json:"type"`
	Title      string   `json:"title"`
	Status     int      `json:"status"`
	Detail     string   `json:"detail"`
	RetryAfter *int64   `json:"retry_after_ms,omitempty"`
	Violated   []string `json:"violated-policies"`
	Retryable  bool     `json:"retryable"`
}

func problemOf(v Verdict) []byte {
	p := problemDetails{
		Type:      "https://iana.org/assignments/http-problem-types#quota-exceeded",
		Title:     "Quota Exceeded",
		Status:    v.Class.Code(),
		Detail:    detailOf(v),
		Violated:  namesOf(v.Violations),
		Retryable: v.Retryable,
	}
	if v.Class == Pool {
		p.Type = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
		p.Title = "Temporary Reduced Capacity"
	}
	if v.Retryable {
		millis := v.RetryAfter.Milliseconds()
		p.RetryAfter = &millis
	}
	body, err := json.Marshal(p)
	if err != nil {
		return nil // texts, numbers and booleans always marshal
	}
	return body
}

func detailOf(v Verdict) string {
	wait := fmt.Sprintf("retry after %v", v.RetryAfter)
	if v.Estimated {
		wait = fmt.Sprintf("retry after about %v, which is an estimate", v.RetryAfter)
	}
	if !v.Retryable {
		wait = "retrying does not help"
	}
	var what string
	switch v.Reason {
	case BucketEmpty:
		what = fmt.Sprintf("The token bucket of limit %q has too few tokens left", v.Limit)
	case WindowFull:
		what = fmt.Sprintf("The quota of limit %q has too little left in its window", v.Limit)
	case LaneFull:
		what = fmt.Sprintf("All in-flight slots of limit %q are taken", v.Limit)
	case PoolFull:
		what = fmt.Sprintf("All in-flight slots of limit %q, which callers share, are taken", v.Limit)
	case CostExceedsCapacity:
		what = fmt.Sprintf("The request costs more than limit %q can ever allow", v.Limit)
	case Banned:
		what = fmt.Sprintf("Limit %q allows no requests", v.Limit)
	case StoreUnavailable:
		what = fmt.Sprintf("Limit %q cannot be looked up at present", v.Limit)
		if v.Limit == "" {
			what = "The limits cannot be looked up at present"
		}
	case StreamEnded:
		what = "The end of the stream that asks was told before"
	case NoReason:
		what = "The request was refused"
	default:
		what = fmt.Sprintf("Limit %q refused the request (%s)", v.Limit, v.Reason)
	}
	return what + "; " + wait + "."
}

func namesOf(vs []Violation) []string {
	list := []string{}
	for _, v := range vs {
		if len(list) < MaxNames && !slices.Contains(list, v.Limit) {
			list = append(list, v.Limit)
		}
	}
	return list
}
