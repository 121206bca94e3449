package page

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Words says what is wrong, for somebody who was just woken up, the worst first.
func Words(s *Snapshot) []Problem {
	w := words{now: s.At, problems: []Problem{}}
	if s.Status == "draining" {
		w.add("warn", "This replica is about to stop: it takes no new callers")
	}
	if w.kept = "Redis"; s.Store.Kind == "memory" {
		w.kept = "The memory store"
	}
	none := s.Policies.Version == ""
	switch n := s.Policies.Wrong; {
	case none && n > 0:
		w.add("bad", files(n)+": no policies are loaded, and no request is answered, until every file is right")
	case none:
		w.add("bad", "No policies are loaded: no request is answered")
	case n > 0:
		w.add("warn", files(n)+": what a file said when it was right stays in force; the domain of a file that never was is not limited")
	}
	w.store(s)
	for _, d := range s.Domains {
		of := ""
		if len(s.Domains) > 1 {
			of = " of " + d.Name
		}
		for _, l := range d.Limits {
			if len(l.Pools) < 2 {
				w.pool(l.Name, l.Pool, of)
				continue
			}
			for i := range l.Pools {
				w.pool(l.Pools[i].Subject, &l.Pools[i], of)
			}
		}
	}
	for _, d := range s.Domains {
		if d.ExpiredLately > 0 {
			w.add("warn", fmt.Sprintf("%s of %s expired in the last 5 minutes: whoever held them died, or does not release", count(int64(d.ExpiredLately), "lease", "leases"), d.Name))
		}
	}
	if n := s.Unknown.Lately; n > 0 {
		w.add("warn", count(int64(n), "request", "requests")+" in the last minute named a domain that no policy file has: nothing limits those")
	}
	w.over(s)
	order := map[string]int{"bad": 0, "warn": 1, "note": 2}
	slices.SortStableFunc(w.problems, func(a, b Problem) int { return order[a.Level] - order[b.Level] })
	return w.problems
}

// Headline is the worst of the problems of s, or says that there is none.
func Headline(s *Snapshot) Problem {
	if len(s.Problems) > 0 && s.Problems[0].Level != "note" {
		return s.Problems[0]
	}
	kept := "Redis answers"
	if s.Store.Kind == "memory" {
		kept = "the state is in memory (this process only)"
	}
	text := "All is well: " + kept + ", no request passes unchecked, no pool is full"
	if len(s.Problems) > 0 { // it is over
		text = "All is well now: " + kept + ", no pool is full"
	}
	return Problem{"ok", text}
}

type words struct {
	now      time.Time
	kept     string // the store's name
	problems []Problem
}

func (w *words) add(level, text string) {
	w.problems = append(w.problems, Problem{level, text})
}

func (w *words) store(s *Snapshot) {
	since := func(t time.Time) string { return fmt.Sprintf("%s (%s)", clock(t), span(w.now.Sub(t))) }
	var counts Counts
	if o := s.Store.Outage; o != nil && o.To.IsZero() {
		counts = o.Counts
	}
	switch {
	case s.Store.State == "not_found":
		text := fmt.Sprintf("%s has not answered since the start at %s: this replica is not ready", w.kept, since(s.Store.Since))
		if counts.Total() > 0 {
			text += ", and " + passed(counts)
		}
		w.add("bad", text)
	case s.Store.State == "away" && s.Store.Silent:
		w.add("bad", fmt.Sprintf("%s does not answer since %s: %s", w.kept, since(s.Store.Since), passed(counts)))
	case s.Store.State == "away" && len(s.Store.Breakers) > 0:
		w.add("bad", fmt.Sprintf("%s does not answer for %s since %s: %s", w.kept, domains(s.Store.Breakers), since(s.Store.Since), passed(counts)))
	case s.Store.Erring != nil:
		text := fmt.Sprintf("%s answers with errors since %s: %s", w.kept, since(s.Store.Erring.From), passed(s.Store.Erring.Counts))
		if e := s.Store.LastError; e != nil && e.Word != "" {
			text += "; the last error is " + e.Word
		}
		w.add("bad", text)
	case s.Store.State == "away":
		w.add("warn", fmt.Sprintf("%s fails some calls since %s: %s", w.kept, since(s.Store.Since), passed(counts)))
	case s.Bypassed.LastMinute.Total() > 0:
		w.add("warn", fmt.Sprintf("%s in the last minute: %s", passed(s.Bypassed.LastMinute), w.because(s)))
	}
}

// because says why requests of the last minute were decided without the store, which is up.
func (w *words) because(s *Snapshot) string {
	if o := s.Store.Outage; o != nil && !o.Late && !o.To.Before(s.Bypassed.At) {
		return fmt.Sprintf("%s was away until %s", w.kept, clock(o.To))
	}
	e := s.Store.LastError
	switch {
	case e == nil:
		return w.kept + " was not asked"
	case e.Word != "":
		return w.kept + " answered with the error " + e.Word
	case e.Reason == "store_timeout":
		return w.kept + " answered too late"
	case e.Reason == "store_unavailable":
		return w.kept + " could not be reached"
	case e.Reason == "hurried":
		return "their callers had too little time left to ask " + w.kept
	}
	return w.kept + " answered with an error"
}

// over says what is over since an hour at most.
func (w *words) over(s *Snapshot) {
	if n := s.Store.LastHour; n != nil {
		before := ""
		if s.Store.State != "up" {
			before = " before"
		}
		took := time.Duration(n.Seconds * float64(time.Second))
		if n.Number == 1 && before == "" {
			w.add("note", fmt.Sprintf("%s answers again since %s. It was away for %s: %s", w.kept, clock(n.To), span(took), passed(n.Counts)))
		} else {
			all := span(took)
			if took < 2*time.Minute {
				all = fmt.Sprintf("%d s", took/time.Second)
			}
			w.add("note", fmt.Sprintf("%s%s without %s in the last hour, %s in all: %s; the last until %s",
				count(int64(n.Number), "time", "times"), before, strings.Replace(w.kept, "The", "the", 1), all, passed(n.Counts), clock(n.To)))
		}
	}
	if n := s.Store.LateLastHour; n != nil && n.Total() > 0 {
		w.add("note", fmt.Sprintf("%s failed some calls %s in the last hour: %s; the last until %s", w.kept, count(int64(n.Number), "time", "times"), passed(n.Counts), clock(n.To)))
	}
}

// domains names those of breakers, the first few.
func domains(open []Breaker) string {
	const most = 3
	var names []string
	for _, b := range open[:min(len(open), most)] {
		names = append(names, b.Domain)
	}
	if more := len(open) - most; more > 0 {
		names = append(names, thousands(int64(more))+" more")
	}
	return strings.Join(names, ", ")
}

// passed says what became of requests that the store did not decide.
func passed(c Counts) string {
	parts := []string{count(c.Unchecked, "request", "requests") + " passed unchecked"}
	if c.Local > 0 {
		parts = append(parts, thousands(c.Local)+" decided by this replica's own share")
	}
	if c.Refused > 0 {
		parts = append(parts, thousands(c.Refused)+" refused")
	}
	return strings.Join(parts, ", ")
}

// pool tells of one that is full, or nearly; nil: it is none. Limits of several pools have
// these told by their subjects.
func (w *words) pool(name string, p *Pool, of string) {
	if p == nil || p.InFlight == nil {
		return
	}
	level, word := "bad", "is full"
	switch {
	case p.Full():
	case *p.InFlight*10 >= p.Capacity*9:
		level, word = "warn", "is nearly full"
	default:
		return
	}
	text := fmt.Sprintf("Pool %s%s %s: %s of %s", name, of, word, thousands(*p.InFlight), thousands(p.Capacity))
	if p.Old {
		text += ", when Redis last told at " + clock(p.At)
	}
	w.add(level, text)
}

func files(n int) string {
	if n == 1 {
		return "A policy file is wrong"
	}
	return thousands(int64(n)) + " policy files are wrong"
}

func count(n int64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return thousands(n) + " " + many
}

// thousands is a number as people read it: 1,234,567.
func thousands(n int64) string {
	digits := strconv.FormatInt(n, 10)
	for i := len(digits) - 3; i > 0 && digits[i-1] != '-'; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

func clock(t time.Time) string { return t.UTC().Format("15:04:05") + " UTC" }

// span is a time as people say it, in its largest unit or two.
func span(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%d s", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%d min", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h %d min", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%d days", d/(24*time.Hour))
}
