// Package top shows the status of a weir in a terminal.
package top

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"weir/server/page"
)

// view is what weir top shows at one moment. Its lines depend on nothing else.
type view struct {
	addr   string
	now    time.Time
	seen   *page.Snapshot // the last that was told; nil: none yet
	err    error          // why there is no newer one; nil: there is
	silent time.Time      // since when there is none
	paused bool
}

// style is how a text is shown on a terminal with colours.
type style string

const (
	plain style = ""
	bold  style = "1"
	dim   style = "2"
	bad   style = "1;31"
	warn  style = "33"
	good  style = "32"
	note  style = "36"
)

// span is a text in one style, and line a line of them.
type (
	span struct {
		text  string
		style style
	}
	line []span
)

// clean is a text without what a terminal obeys, or a reader does not see: it may come
// from anybody's request.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(s, string(unicode.ReplacementChar)))
}

// write writes the line, cut at width characters (0: it is not) and cleaned.
func (l line) write(w io.Writer, width int, colours bool) {
	left := width
	for _, s := range l {
		text := clean(s.text)
		if width > 0 {
			if n := utf8.RuneCountInString(text); n > left {
				text = string([]rune(text)[:left])
			}
			left -= utf8.RuneCountInString(text)
		}
		if colours && s.style != plain && text != "" {
			text = "\x1b[" + string(s.style) + "m" + text + "\x1b[0m"
		}
		_, _ = io.WriteString(w, text) // a strings.Builder, or a picture that is drawn again
	}
}

// wrapped are the lines, those that are one sentence broken at width characters.
func wrapped(lines []line, width int) []line {
	var all []line
	for _, l := range lines {
		if len(l) != 1 || l[0].style == dim {
			all = append(all, l)
			continue
		}
		text := []rune(clean(l[0].text))
		indent := ""
		for len(indent)+len(text) > width && width > 20 {
			cut := width - len(indent)
			for i := cut; i > cut/2; i-- { // unless a word is that long
				if text[i] == ' ' {
					cut = i
					break
				}
			}
			all = append(all, line{{indent + string(text[:cut]), l[0].style}})
			text = text[cut:]
			if text[0] == ' ' {
				text = text[1:]
			}
			indent = "    "
		}
		all = append(all, line{{indent + string(text), l[0].style}})
	}
	return all
}

// lines are the picture: head stays when the rest is scrolled.
func (v view) lines() (head, rest []line) {
	title := line{{"weir " + v.addr, bold}}
	s := v.seen
	if s != nil {
		text := "  " + strings.TrimSpace(s.Host+" "+s.Version)
		if text != "  " {
			text += "  "
		}
		text += clock(s.At) + ", up " + since(s.At.Sub(s.Started))
		if s.Status != "ok" { // it is about readiness: beside a full pool "ok" would mislead
			text += ", " + strings.ReplaceAll(s.Status, "_", " ")
		}
		title = append(title, span{text, plain})
	}
	if v.paused {
		title = append(title, span{"  PAUSED (p: go on)", warn})
	}
	head = append(head, title)
	if v.err != nil {
		head = append(head, line{{fmt.Sprintf("weir does not answer since %s (%s): %v", clock(v.silent), since(v.now.Sub(v.silent)), v.err), bad}})
		if s != nil {
			head = append(head, line{{"What follows was so at " + clock(s.At), dim}})
		}
	}
	if s == nil {
		if v.err == nil {
			head = append(head, line{{"asking …", dim}})
		}
		return head, nil
	}
	head = append(head, line{{marks[s.Headline.Level] + s.Headline.Text, levels[s.Headline.Level]}})
	for _, p := range s.Problems {
		if p != s.Headline {
			rest = append(rest, line{{"  " + marks[p.Level] + p.Text, levels[p.Level]}})
		}
	}
	rest = append(rest, nil)
	rest = append(rest, v.health()...)
	for _, d := range s.Domains {
		rest = append(rest, domainLines(d)...)
	}
	if s.MoreLimits > 0 {
		rest = append(rest, line{{fmt.Sprintf("and %s limits more, which only the metrics have", whole(int64(s.MoreLimits))), dim}})
	}
	return head, append(rest, refusedLines(s)...)
}

var levels = map[string]style{"bad": bad, "warn": warn, "note": note, "ok": good}

// marks say the same without colours.
var marks = map[string]string{"bad": "✖ ", "warn": "⚠ ", "ok": "✔ "}

// health is what holds for the whole replica.
func (v view) health() []line {
	s := v.seen
	how := map[string]style{"up": good, "away": bad, "not_found": bad}[s.Store.State]
	kind := s.Store.Kind + " "
	if s.Store.Address != "" {
		kind += s.Store.Address + " "
	}
	store := line{{"Store     ", bold}, {kind, plain}, {s.Store.State, how}, {" since " + clock(s.Store.Since), plain}}
	for _, b := range s.Store.Breakers {
		store = append(store, span{"  breaker of " + b.Domain + " open since " + clock(b.Since), bad})
	}
	if e := s.Store.LastError; e != nil {
		store = append(store, span{"  last error " + cmp.Or(e.Word, strings.TrimPrefix(e.Reason, "store_")) + " at " + clock(e.At), warn})
	}
	bypassed := line{{"Bypassed  ", bold}, {counts(s.Bypassed.Today) + " today", warnIf(s.Bypassed.Today.Total() > 0)}}
	if s.Bypassed.PerSecond > 0 {
		bypassed = append(bypassed, span{"  " + rate(s.Bypassed.PerSecond) + " now", bad})
	}
	if s.Unknown.Lately > 0 {
		bypassed = append(bypassed, span{"  " + whole(int64(s.Unknown.Lately)) + " of unknown domains in the last minute", warn})
	}
	latency := line{{"Latency   ", bold}, {"decisions " + percentiles(s.Latency.Decisions) + "   store " + percentiles(s.Latency.Store), plain}, {"  (5 minutes)", dim}}
	policies := line{{"Policies  ", bold}, {cmp.Or(s.Policies.Version, "none"), plain}}
	if !s.Policies.LoadedAt.IsZero() {
		policies = append(policies, span{" since " + clock(s.Policies.LoadedAt), plain})
	}
	lines := []line{store, bypassed, latency, policies}
	if s.Policies.Wrong > 0 {
		for _, e := range s.Policies.Errors {
			lines = append(lines, line{{"          " + e, warn}})
		}
	}
	return lines
}

func warnIf(is bool) style {
	if is {
		return warn
	}
	return plain
}

// domainLines are a domain and its limits.
func domainLines(d page.Domain) []line {
	held := "?"
	if d.LeasesHeld != nil {
		held = whole(*d.LeasesHeld)
	}
	title := line{
		{d.Name, bold},
		{fmt.Sprintf("  %s admitted, %s refused, %s leases held", rate(d.AdmittedPerSecond), rate(d.RefusedPerSecond), held), plain},
	}
	if d.LeasesExpired > 0 {
		title = append(title, span{", " + whole(int64(d.LeasesExpired)) + " expired", warnIf(d.ExpiredLately > 0)})
	}
	lines := []line{nil, title}
	if len(d.Limits) == 0 {
		return append(lines, line{{"  no limits", dim}})
	}
	name, what := len("limit"), len("in flight, or what it is")
	for _, l := range d.Limits {
		name = min(max(name, utf8.RuneCountInString(clean(l.Name))), 24)
		text, _ := state(l)
		what = min(max(what, utf8.RuneCountInString(text)), 48)
		for _, p := range several(l) {
			name = min(max(name, utf8.RuneCountInString(clean(p.Subject))+2), 24)
		}
	}
	lines = append(lines, line{{fmt.Sprintf("  %-*s  %-*s %8s %8s %9s %9s %9s  %s", name, "limit", what, "in flight, or what it is", "passed/s", "ref'd/s", "refused", "would", "bypassed", "last wait"), dim}})
	for _, l := range d.Limits {
		lines = append(lines, limitLine(l, name, what))
		for _, p := range several(l) {
			lines = append(lines, line{{"  " + column("  "+p.Subject, name) + "  ", plain}, poolSpan(&p)})
		}
	}
	return lines
}

// kinds are those of limits as they are shown, beside what they allow each subject.
var kinds = map[string]string{"token_bucket": "bucket of", "rate_limit": "window of", "concurrency": "lanes of", "": "of the requests"}

// state is what is in flight of a limit, or what it allows each subject.
func state(l page.Limit) (text string, how style) {
	text = fmt.Sprintf("%s %s", kinds[l.Kind], whole(l.Capacity))
	if l.Capacity == 0 {
		text = strings.TrimSuffix(cmp.Or(kinds[l.Kind], l.Kind), " of")
	}
	if n := len(several(l)); n > 0 {
		text = whole(int64(n)) + " pools"
	} else if l.Pool != nil {
		s := poolSpan(l.Pool)
		text, how = s.text, s.style
	}
	if l.Shadow {
		text += ", in shadow"
	}
	return clean(text), how
}

// several are the pools of a limit that has more than one; nil of others.
func several(l page.Limit) []page.Pool {
	if len(l.Pools) < 2 {
		return nil
	}
	return l.Pools
}

// poolSpan is what is in flight of a pool.
func poolSpan(p *page.Pool) span {
	s := span{bar(p), good}
	switch {
	case p.Full():
		s.style = bad
	case p.InFlight == nil || p.Old:
		s.style = dim
	case *p.InFlight*10 >= p.Capacity*9:
		s.style = warn
	}
	return s
}

// column is a text that is cleaned, cut and filled up to a width.
func column(text string, width int) string {
	runes := []rune(clean(text))
	if len(runes) > width {
		runes = append(runes[:width-1], '…')
	}
	return fmt.Sprintf("%-*s", width, string(runes))
}

// limitLine is a limit; name and what are the widths of its first columns.
func limitLine(l page.Limit, name, what int) line {
	text, how := state(l)
	wait := ""
	if l.RetryAfter != nil {
		wait = "  " + strconv.FormatFloat(l.RetryAfter.Last, 'f', -1, 64) + " s"
	}
	refusing := plain
	if l.RefusedPerSecond > 0 {
		refusing = bold
	}
	return line{
		{"  " + column(l.Name, name) + "  ", plain},
		{fmt.Sprintf("%-*s", what, text), how},
		{fmt.Sprintf(" %8s", number(l.PassedPerSecond)), plain},
		{fmt.Sprintf(" %8s %9s", number(l.RefusedPerSecond), whole(int64(l.Refused))), refusing},
		{fmt.Sprintf(" %9s", whole(int64(l.WouldRefuse))), plain},
		{fmt.Sprintf(" %9s", whole(int64(l.Bypassed))), warnIf(l.Bypassed > 0)},
		{wait, plain},
	}
}

// bar is what is in flight against the capacity.
func bar(p *page.Pool) string {
	const width = 10
	if p.InFlight == nil {
		return "[" + strings.Repeat("?", width) + "] ? of " + whole(p.Capacity)
	}
	filled := width
	if *p.InFlight < p.Capacity {
		filled = int(max(0, *p.InFlight) * width / p.Capacity)
	}
	text := fmt.Sprintf("[%s%s] %s of %s", strings.Repeat("#", filled), strings.Repeat(".", width-filled), whole(*p.InFlight), whole(p.Capacity))
	if p.Old {
		text += " at " + p.At.UTC().Format(time.TimeOnly)
	}
	return text
}

// refusedLines are the subjects that were refused most.
func refusedLines(s *page.Snapshot) []line {
	if len(s.Refused) == 0 {
		return nil
	}
	lines := []line{nil, {{"Refused most", bold}}}
	for _, r := range s.Refused {
		times := whole(r.Count)
		if r.Over > 0 {
			times = "≤ " + times
		}
		lines = append(lines, line{{fmt.Sprintf("%11s  %s  %s  %s", times, r.Domain, r.Limit, r.Subject), plain}, {"  last " + clock(r.Last), dim}})
	}
	return lines
}

func counts(c page.Counts) string {
	text := whole(c.Unchecked) + " passed unchecked"
	if c.Local > 0 {
		text += ", " + whole(c.Local) + " by this replica's share"
	}
	if c.Refused > 0 {
		text += ", " + whole(c.Refused) + " refused"
	}
	return text
}

func percentiles(p page.Percentiles) string {
	if len(p.All) < 3 {
		return "none"
	}
	ms := func(f float64) string {
		if f >= 100 {
			return whole(int64(f + 0.5))
		}
		return strconv.FormatFloat(f, 'g', 3, 64)
	}
	return fmt.Sprintf("p50 %s p95 %s p99 %s ms", ms(p.All[0]), ms(p.All[1]), ms(p.All[2]))
}

// rate is a number a second.
func rate(f float64) string { return number(f) + "/s" }

// number has a decimal if it is small.
func number(f float64) string {
	if f >= 99.95 {
		return whole(int64(f + 0.5))
	}
	return strconv.FormatFloat(f, 'f', 1, 64)
}

// whole is a number as people read it: 1,234,567.
func whole(n int64) string {
	digits := strconv.FormatInt(n, 10)
	for i := len(digits) - 3; i > 0 && digits[i-1] != '-'; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

func clock(t time.Time) string { return t.UTC().Format(time.TimeOnly) + " UTC" }

// since is a time in its largest unit or two: 5s, 3m20s, 2h5m, 3 days.
func since(d time.Duration) string {
	switch d = max(d, 0); {
	case d < time.Hour:
		return d.Truncate(time.Second).String()
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Truncate(time.Minute).String(), "0s")
	}
	return whole(int64(d/(24*time.Hour))) + " days"
}
