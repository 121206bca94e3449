package server

import (
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"weir/server/page"
	"weir/store"
)

const (
	outagesFor = time.Hour   // how long outages that are over are told
	erringFor  = time.Minute // how long the store is said to answer with errors after the last
	lateAtMost = time.Second // errors for longer are an outage, and not some calls
)

// outages are the times without the store that are over, in sums of a minute each, and how it
// fails. The zero value has none. The caller of each method but decided holds the mutex of
// bypasses.
type outages struct {
	past []minuteOfOutages // the oldest first

	last   *page.StoreError // nil: none
	erring atomic.Bool      // no decision has succeeded since from
	from   time.Time
	before page.Counts // total at from
}

// minuteOfOutages are those that ended within a minute, of one kind.
type minuteOfOutages struct {
	minute int64 // since the epoch
	late   bool
	sum    page.Outages
}

// over notes an outage that is over. Of a number that ends within an hour it keeps
// one sum a minute, and so is bounded.
func (o *outages) over(one page.Outage) {
	minute := one.To.Unix() / 60
	o.past = slices.DeleteFunc(o.past, func(m minuteOfOutages) bool { return m.minute < minute-int64(outagesFor/time.Minute) })
	i := slices.IndexFunc(o.past, func(m minuteOfOutages) bool { return m.minute == minute && m.late == one.Late })
	if i < 0 {
		i = len(o.past)
		o.past = append(o.past, minuteOfOutages{minute: minute, late: one.Late})
	}
	sum := &o.past[i].sum
	sum.Number++
	sum.Seconds += one.To.Sub(one.From).Seconds()
	sum.To, sum.Counts = one.To, sum.Counts.Plus(one.Counts)
}

// lately is the sum of those of the last hour, of one kind; nil if there were none.
func (o *outages) lately(now time.Time, late bool) *page.Outages {
	var all page.Outages
	for _, m := range o.past {
		if m.late == late && now.Sub(m.sum.To) < outagesFor {
			all.Number += m.sum.Number
			all.Seconds += m.sum.Seconds
			all.To, all.Counts = m.sum.To, all.Counts.Plus(m.sum.Counts)
		}
	}
	if all.Number == 0 {
		return nil
	}
	return &all
}

// failed notes a call that failed, which began at start.
func (b *bypasses) failed(op string, start time.Time, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o := &b.outages
	o.last = &page.StoreError{At: start.UTC(), Reason: reason(err), Word: wordOf(err)}
	if errors.Is(err, errHurried) {
		o.last.Reason = hurried
	}
	if op != "decide" || !errors.Is(err, store.ErrNotServing) {
		return
	}
	if !o.erring.Load() {
		o.from, o.before = start, b.total
		o.erring.Store(true)
	}
	if start.Sub(o.from) >= lateAtMost {
		b.notLate()
	}
}

// decided notes a decision of the store that began at start.
func (b *bypasses) decided(start time.Time) {
	if !b.outages.erring.Load() {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if start.After(b.outages.from) {
		b.outages.erring.Store(false)
	}
}

// silent notes that the store does not answer at all, or is not asked for a domain.
func (b *bypasses) silent() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.notLate()
}

// notLate: the outage that is, if one is, is of more than some calls.
func (b *bypasses) notLate() {
	if b.outage != nil && b.outage.To.IsZero() {
		b.outage.Late = false
	}
}

// tellFailures tells what failed in the last hour.
func (b *bypasses) tellFailures(to *page.Store, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o := &b.outages
	to.LastHour, to.LateLastHour = o.lately(now, false), o.lately(now, true)
	if o.last != nil {
		last := *o.last
		to.LastError = &last
		if o.erring.Load() && now.Sub(last.At) < erringFor {
			to.Erring = &page.Outage{From: o.from.UTC(), Counts: b.total.Minus(o.before)}
		}
	}
}

// hurried is the reason of a call whose caller had too little time left.
const hurried = "hurried"

// redisWords are the first words of errors of Redis. An error's text may have values of
// requests, and these are none.
var redisWords = map[string]bool{
	"ASK": true, "BUSY": true, "CLUSTERDOWN": true, "CROSSSLOT": true, "EXECABORT": true, "LOADING": true, "MASTERDOWN": true,
	"MISCONF": true, "MOVED": true, "NOAUTH": true, "NOPERM": true, "NOREPLICAS": true, "NOSCRIPT": true, "OOM": true,
	"READONLY": true, "TRYAGAIN": true, "WRONGPASS": true, "WRONGTYPE": true,
}

// wordOf is the first word of Redis in an error, "" if it has none.
func wordOf(err error) string {
	for word := range strings.FieldsSeq(err.Error()) {
		if redisWords[word] {
			return word
		}
	}
	return ""
}
