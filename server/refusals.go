package server

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"weir/limit"
	"weir/server/page"
)

const (
	maxRefused  = 100              // subjects
	forgetAfter = 15 * time.Minute // without a refusal
	maxValue    = 64               // characters of a value that are shown
	maxSubject  = 256              // characters of a subject
)

// refusals keep who was refused most often, and what refused requests were told to wait.
// Only refusals touch them.
//
// The subjects are a space-saving sketch: who is not among them takes the place of the
// one with the fewest refusals, and its count, so that who is refused often enough is
// among them for sure and no count is too low.
type refusals struct {
	mu       sync.Mutex
	subjects []refused         // at most maxRefused
	index    map[refusedID]int // into subjects
	waits    map[limitKind]*waitsTold
}

type refusedID struct {
	limitName
	key string // of the store
}

type refused struct {
	id          refusedID
	count, over int64
	last        int64 // in nanoseconds since the epoch
}

// forgotten reports whether it was not refused for long.
func (r *refused) forgotten(now int64) bool { return now-r.last > int64(forgetAfter) }

// waitsTold are the Retry-After of a limit.
type waitsTold struct {
	last  time.Duration
	sum   float64 // seconds: a day's quota would soon be too much for a Duration
	count int64
	at    time.Time
}

func newRefusals() *refusals {
	return &refusals{index: make(map[refusedID]int), waits: make(map[limitKind]*waitsTold)}
}

// note counts a request that was refused. Its domain is a label, and names turns the
// names of limits into labels.
func (r *refusals) note(domain string, names *limitNames, checks []limit.Check, d limit.Decision, v limit.Verdict, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if d.StreamEnded {
		return
	}
	told := !v.Retryable
	for i, c := range checks {
		if d.Results[i].Passed || !v.Refuses(c) {
			continue
		}
		name := limitName{domain, names.of(domain, c.Name)}
		if !told && c.Name == v.Limit {
			told = true
			r.tell(limitKind{name, kind(c.Limit)}, v.RetryAfter, now)
		}
		if d.Results[i].Bypass != limit.ModeClosed { // that is nobody's fault
			r.count(refusedID{name, c.Key}, now)
		}
	}
}

// tell notes the Retry-After of a request that a limit refused.
func (r *refusals) tell(id limitKind, wait time.Duration, now time.Time) {
	told := r.waits[id]
	if told == nil {
		told = &waitsTold{}
		r.waits[id] = told
	}
	told.last, told.at = wait, now
	told.sum += wait.Seconds()
	told.count++
}

func (r *refusals) count(id refusedID, at time.Time) {
	now := at.UnixNano()
	i, known := r.index[id]
	switch {
	case known && r.subjects[i].forgotten(now):
		r.subjects[i] = refused{id: id}
	case known:
	case len(r.subjects) < maxRefused:
		i = len(r.subjects)
		r.subjects = append(r.subjects, refused{id: id})
		r.index[id] = i
	default:
		i = r.leastOf(now)
		least := r.subjects[i].count
		if r.subjects[i].forgotten(now) {
			least = 0
		}
		delete(r.index, r.subjects[i].id)
		r.subjects[i] = refused{id: id, count: least, over: least}
		r.index[id] = i
	}
	r.subjects[i].count++
	r.subjects[i].last = now
}

// leastOf is the subject whose place is taken: one that has long not been refused, or
// else the one with the fewest refusals.
func (r *refusals) leastOf(now int64) int {
	least := 0
	for i := range r.subjects {
		if r.subjects[i].forgotten(now) {
			return i
		}
		if r.subjects[i].count < r.subjects[least].count {
			least = i
		}
	}
	return least
}

// top returns the subjects that were refused in the last quarter of an hour.
func (r *refusals) top(now time.Time) []page.Subject {
	r.mu.Lock()
	all := slices.Clone(r.subjects)
	r.mu.Unlock()
	out := []page.Subject{}
	for _, s := range all {
		if !s.forgotten(now.UnixNano()) {
			out = append(out, page.Subject{Domain: s.id.domain, Limit: s.id.limit, Subject: subjectOf(s.id.key), Count: s.count, Over: s.over, Last: time.Unix(0, s.last).UTC()})
		}
	}
	slices.SortFunc(out, func(a, b page.Subject) int {
		return cmp.Or(cmp.Compare(b.Count-b.Over, a.Count-a.Over), cmp.Compare(b.Count, a.Count), cmp.Compare(a.Subject, b.Subject), cmp.Compare(a.Limit, b.Limit))
	})
	return out
}

// told returns what those were told whom a limit refused; nil: nobody was.
func (r *refusals) told(id limitKind) *page.RetryAfter {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.waits[id]
	if t == nil {
		return nil
	}
	return &page.RetryAfter{Last: t.last.Seconds(), Mean: t.sum / float64(t.count), Count: t.count, At: t.at.UTC()}
}

// keep forgets the limits that are not in the policies any more.
func (r *refusals) keep(now map[limitKind]int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	forget(r.waits, now)
}

// subjectOf is the subject in a key of the store, to be shown. Sensitive values are digests
// in there.
func subjectOf(key string) string {
	entries := strings.Split(limit.Subject(key), ",")
	for i, e := range entries {
		k, v, _ := strings.Cut(e, "=")
		entries[i] = cut(k, maxValue) + "=" + cut(v, maxValue)
	}
	return cut(strings.Join(entries, ","), maxSubject)
}

// visible is s in characters that can be seen: others could rule a terminal, or turn a line around.
func visible(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return utf8.RuneError
		}
		return r
	}, s)
}

// cut is s in characters that can be seen, at most n.
func cut(s string, n int) string {
	s = visible(s)
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}
