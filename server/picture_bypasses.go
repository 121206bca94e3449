package server

import (
	"maps"
	"sync"
	"time"

	"weir/limit"
	"weir/server/page"
)

// bypasses count the requests that were decided without the store, and the times without
// it. The zero value has none. Nothing but a failure touches them.
type bypasses struct {
	mu     sync.Mutex
	total  page.Counts
	at     time.Time // of the last
	day    int64     // today, in days since the epoch
	today  page.Counts
	second int64               // the newest in recent, since the epoch
	recent [61]page.Counts     // requests of the last minute, by second
	outage *page.Outage        // the one that is, or the last; nil: none was
	began  page.Counts         // total when outage began
	limits map[limitKind]int64 // that were not looked at
	outages
}

// bypassSeconds is over how many seconds the rate is told.
const bypassSeconds = 5

// count counts a request that was decided without the store, at least in part: it passed
// and a limit was not looked at, or it was refused for a limit that is closed, or else
// this process's share decided it. What was refused for what can never pass is none.
// Its domain is a label, and names turns the names of limits into labels.
func (b *bypasses) count(domain string, names *limitNames, checks []limit.Check, d limit.Decision, v limit.Verdict, now time.Time) {
	var open, local, closed bool
	for i, c := range checks {
		switch d.Results[i].Bypass {
		case limit.DefaultMode:
		case limit.ModeOpen:
			open = true
		case limit.ModeLocal:
			local = true
		case limit.ModeClosed:
			closed = closed || v.Refuses(c)
		}
	}
	var one page.Counts
	switch {
	case d.Admitted && open:
		one.Unchecked = 1
	case closed:
		one.Refused = 1
	case local:
		one.Local = 1
	default:
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, c := range checks {
		if d.Results[i].Bypass != limit.DefaultMode {
			if b.limits == nil {
				b.limits = make(map[limitKind]int64)
			}
			b.limits[limitKind{limitName{domain, names.of(domain, c.Name)}, kind(c.Limit)}]++
		}
	}
	if day := now.Unix() / 86400; day > b.day {
		b.day, b.today = day, page.Counts{}
	}
	b.total, b.today, b.at = b.total.Plus(one), b.today.Plus(one), now
	b.turn(now)
	newest := &b.recent[b.second%int64(len(b.recent))]
	*newest = newest.Plus(one)
}

// of is how often a limit was decided without the store.
func (b *bypasses) of(id limitKind) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.limits[id]
}

// keep forgets the limits that are not in the policies any more.
func (b *bypasses) keep(now map[limitKind]int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	forget(b.limits, now)
}

// forget takes out what is not there any more.
func forget[T any](all map[limitKind]T, now map[limitKind]int) {
	maps.DeleteFunc(all, func(id limitKind, _ T) bool {
		_, is := now[id]
		return !is
	})
}

// turn makes now the newest of the recent seconds. The caller holds mu.
func (b *bypasses) turn(now time.Time) {
	n := int64(len(b.recent))
	second := max(now.Unix(), b.second)
	for s := max(b.second+1, second-n+1); s <= second; s++ {
		b.recent[s%n] = page.Counts{}
	}
	b.second = second
}

// away begins a time without the store, unless there is one.
func (b *bypasses) away(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.outage == nil || !b.outage.To.IsZero() {
		b.outage, b.began = &page.Outage{From: now.UTC(), Late: true}, b.total
	}
}

// back ends it.
func (b *bypasses) back(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.outage != nil && b.outage.To.IsZero() {
		over := page.Outage{From: b.outage.From, To: now.UTC(), Late: b.outage.Late, Counts: b.total.Minus(b.began)}
		b.outage = &over
		b.outages.over(over)
	}
}

// tell returns what was counted, and the outage that is, or the last.
func (b *bypasses) tell(now time.Time) (page.Bypassed, *page.Outage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn(now)
	all := page.Bypassed{Total: b.total, At: b.at.UTC()}
	if b.at.IsZero() {
		all.At = time.Time{}
	}
	if now.Unix()/86400 == b.day {
		all.Today = b.today
	}
	over := bypassSeconds + float64(now.Nanosecond())/1e9 // the newest second is not over, and comes on top
	n := int64(len(b.recent))
	for ago := range min(n, b.second+1) {
		one := b.recent[(b.second-ago)%n]
		if all.LastMinute = all.LastMinute.Plus(one); ago <= bypassSeconds {
			all.PerSecond += float64(one.Total()) / over
		}
	}
	if b.outage == nil {
		return all, nil
	}
	outage := *b.outage
	if outage.To.IsZero() {
		outage.Counts = b.total.Minus(b.began)
	}
	return all, &outage
}
