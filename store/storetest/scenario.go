// Package storetest is the suite that every store passes: it runs the scenario
// files of store/testdata, which say what the decisions are.
package storetest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"weir/limit"
	"weir/policy"
	"weir/store"
)

// Fixture is a store under test.
type Fixture struct {
	Store store.Store
	// Dump, if not nil, prints all that the store keeps and that still means
	// something, so that a refusal can be shown to change nothing.
	Dump func() string
}

// Clock is the clock that a scenario turns.
type Clock struct{ millis atomic.Int64 }

// Now returns milliseconds since the epoch.
func (c *Clock) Now() int64 { return c.millis.Load() }

// Advance moves the clock, backwards too.
func (c *Clock) Advance(d time.Duration) { c.millis.Add(d.Milliseconds()) }

// NewClock returns a clock that stands at noon, 2026-01-01 UTC.
func NewClock() *Clock {
	c := &Clock{}
	c.millis.Store(time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC).UnixMilli())
	return c
}

// Open returns an empty store that runs on now. It is closed by t's clean-up.
type Open func(t *testing.T, now func() int64) Fixture

// RunScenarios runs each file of dir against a store of its own. With -rewrite
// the files are written anew: read the difference before you believe it.
//
// A file has these commands:
//
//	policy            sets the policy: YAML. A later one is for other subjects
//	reload            changes the policy of subjects that have state
//	take              asks: one request a line; prints a line for each
//	  account=alice,plan=trial pool=images    two descriptors
//	  account=alice;hits=5;neg;limit=3/hour   a cost, a refund, an override
//	  account=alice | hits=5 as=A             the request's hits; a name for its lease
//	  50x account=alice                       the same 50 times, in one line
//	  account=alice | op=O1 attempt=2         an attempt of an operation
//	race              like take, with the repeats of a line at the same time
//	  account=alice | stream=s1               a request of a stream
//	renew             one lease a line, by its name or its id
//	  A by a sign of life                     by its stream, not by its holder
//	release           one lease a line, as in renew, or
//	  stream=s1                               what the stream holds; leaves a tombstone
//	  stream=s1 seen                          without a tombstone
//	  A early                                 ended before its upstream answered
//	undo              what a take of this line, which was granted a lease, has taken:
//	  account=alice | as=A
//	settle            what was used in truth, one a line
//	  account=alice;hits=5 | stream=s1        by the stream, and the descriptors
//	  account=alice;hits=5 | lease=A          by the lease
//	  A account=5                             by the lease, and the limit's name; *=5 for all
//	inspect           how the limits of a descriptor stand: one a line
//	held              how many leases are live
//	leases            which: a line each, and at most n a page
//	leases n=2
//	reset             forgets the state of what a line meets, as in inspect
//	advance 1.5s      moves the clock; -3s moves it back
func RunScenarios(t *testing.T, dir string, open Open) {
	datadriven.Walk(t, dir, func(t *testing.T, path string) {
		clock := NewClock()
		s := &scenario{clock: clock, Fixture: open(t, clock.Now), leases: make(map[string]limit.LeaseID)}
		datadriven.RunTest(t, path, s.run)
	})
}

type scenario struct {
	Fixture
	clock    *Clock
	policies *policy.Set
	leases   map[string]limit.LeaseID
	granted  uint64
	reloaded bool // some states may be carried over to a new limit

	mu sync.Mutex // guards granted while requests race
}

func (s *scenario) run(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	switch d.Cmd {
	case "policy", "reload":
		set, err := policy.Parse("policy.yaml", []byte(d.Input), policy.Options{})
		if err != nil {
			return err.Error() + "\n"
		}
		s.reloaded = d.Cmd == "reload"
		s.policies = set
		return "ok\n"
	case "advance":
		by, err := time.ParseDuration(d.CmdArgs[0].Key)
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		s.clock.Advance(by)
		return time.UnixMilli(s.clock.Now()).UTC().Format("15:04:05.000") + "\n"
	case "held":
		n, err := s.Store.Held(t.Context(), s.policies.Domains()[0])
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		return strconv.FormatInt(n, 10) + "\n"
	case "leases":
		return s.list(t, d)
	case "take", "race", "release", "renew", "inspect", "settle", "undo", "reset":
	default:
		d.Fatalf(t, "unknown command %q", d.Cmd)
	}
	var out strings.Builder
	for line := range strings.Lines(d.Input) {
		line = strings.TrimSpace(line)
		var text string
		var err error
		switch d.Cmd {
		case "take":
			text, err = s.take(t, line, false)
		case "race":
			text, err = s.take(t, line, true)
		case "release":
			text, err = s.release(t, line)
		case "renew":
			text, err = s.renew(t, line)
		case "settle":
			text, err = s.settle(t, line)
		case "undo":
			text, err = s.undo(t, line)
		case "inspect":
			text, err = s.inspect(t, line)
		case "reset":
			text, err = s.reset(t, line)
		}
		if err != nil {
			d.Fatalf(t, "%s: %v", line, err)
		}
		out.WriteString(text + "\n")
	}
	return out.String()
}

// take asks the request of a line, as often as it says.
func (s *scenario) take(t *testing.T, line string, race bool) (string, error) {
	ask, err := parseAsk(s.policies.Domains()[0], line)
	if err != nil {
		return "", err
	}
	m := s.policies.Match(ask.request)
	if ask.times == 1 {
		return s.once(t, m, ask, true)
	}
	texts := make([]string, ask.times)
	errs := make([]error, ask.times)
	var group sync.WaitGroup
	for i := range texts {
		one := func() { texts[i], errs[i] = s.once(t, m, ask, !race) }
		if race {
			group.Go(one)
		} else {
			one()
		}
	}
	group.Wait()
	admitted, last := 0, ""
	for i, text := range texts {
		if errs[i] != nil {
			return "", errs[i]
		}
		if strings.HasPrefix(text, "admitted") {
			admitted++
		}
		last = text
	}
	text := fmt.Sprintf("%d admitted, %d refused", admitted, ask.times-admitted)
	if !race {
		text += "; at last " + last
	}
	return text, nil
}

func (s *scenario) once(t *testing.T, m policy.Match, ask ask, alone bool) (string, error) {
	name, stream := ask.name, ask.stream
	r := limit.Request{Domain: s.policies.Domains()[0], Checks: m.Checks, Operation: ask.operation}
	if r.Operation.ID != "" {
		r.Operation.Body = limit.BodyOf(m.Checks)
	}
	if r.NeedsLease() {
		s.mu.Lock()
		s.granted++
		n := s.granted
		s.mu.Unlock()
		r.Lease, r.Stream = TestLease(r.Domain, n), stream
		if name == "" {
			name = "L" + strconv.FormatUint(n, 10)
		}
	}
	before := ""
	quiet := alone && stream == "" && s.Dump != nil && !s.reloaded && !hasChargeOver(m.Checks)
	if quiet {
		before = s.Dump()
	}
	d, err := s.Store.Decide(t.Context(), r)
	if text := conflict(err); text != "" {
		return text, nil
	}
	if err != nil {
		return "", err
	}
	if quiet && !d.Admitted {
		if after := s.Dump(); after != before {
			t.Errorf("a refusal changed the state from\n%s\nto\n%s", before, after)
		}
	}
	switch {
	case d.Replayed:
		name = s.leaseName(d.Lease.Token())
	case d.Lease != "":
		s.mu.Lock()
		s.leases[name] = d.Lease
		s.mu.Unlock()
	}
	return Sentence(m.Checks, d, name), nil
}

func (s *scenario) lease(word string) limit.LeaseID {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id, ok := s.leases[word]; ok {
		return id
	}
	return limit.LeaseID(word)
}

func (s *scenario) release(t *testing.T, line string) (string, error) {
	word, options, _ := strings.Cut(line, " ")
	e := limit.Ending{Early: strings.Contains(options, "early")}
	if stream, ok := strings.CutPrefix(word, "stream="); ok {
		e.Domain, e.Stream, e.Tombstone = s.policies.Domains()[0], stream, !strings.Contains(options, "seen")
	} else {
		e.Lease = s.lease(word)
	}
	r, err := s.Store.Release(t.Context(), e)
	if err != nil {
		return "", err
	}
	return line + ": " + released(r), nil
}

// released says what a release found.
func released(r limit.Release) string {
	text := r.Result.String()
	if r.Result == limit.Released || r.Result == limit.Lingering {
		text += fmt.Sprintf(", held %v", r.HeldFor)
		for i, f := range r.Freed {
			text += []string{" by ", ", "}[min(i, 1)] + f.Limit
		}
	}
	return text
}

// undo undoes the decision for the request of a line.
func (s *scenario) undo(t *testing.T, line string) (string, error) {
	ask, err := parseAsk(s.policies.Domains()[0], line)
	if err != nil {
		return "", err
	}
	r, err := s.Store.Undo(t.Context(), limit.Request{
		Domain: ask.request.Domain, Checks: s.policies.Match(ask.request).Checks, Lease: s.lease(ask.name),
	})
	return line + ": " + released(r), err
}

// settle settles or charges what a line says was used.
func (s *scenario) settle(t *testing.T, line string) (string, error) {
	u := limit.Usage{Domain: s.policies.Domains()[0]}
	var names []string
	if descriptors, _, ok := strings.Cut(line, "|"); ok {
		ask, err := parseAsk(u.Domain, line)
		if err != nil {
			return "", err
		}
		u.Stream, u.Lease = ask.stream, s.lease(ask.lease)
		for _, c := range s.policies.Match(ask.request).Checks {
			if _, slot := c.Limit.(limit.Concurrency); !slot {
				u.Checks = append(u.Checks, c)
				names = append(names, c.Name)
			}
		}
		line = strings.TrimSpace(descriptors)
	} else {
		words := strings.Fields(line)
		u.Lease = s.lease(words[0])
		for _, word := range words[1:] {
			name, hits, _ := strings.Cut(word, "=")
			n, err := strconv.ParseInt(hits, 10, 64)
			if err != nil {
				return "", err
			}
			u.Limits = append(u.Limits, limit.Used{Limit: strings.TrimPrefix(name, "*"), Hits: n})
			names = append(names, name)
		}
	}
	all, err := s.Store.Settle(t.Context(), u)
	if err != nil {
		return "", err
	}
	words := make([]string, len(all))
	for i, one := range all {
		words[i] = names[i] + " " + one.Result.String()
		if one.Result == limit.Settled || one.Result == limit.Charged {
			words[i] += fmt.Sprintf(" %+d", one.Difference)
		}
	}
	return line + ": " + strings.Join(words, ", "), nil
}

func (s *scenario) renew(t *testing.T, line string) (string, error) {
	word, ofStream := strings.CutSuffix(line, " by a sign of life")
	r, err := s.Store.Renew(t.Context(), limit.Extension{Lease: s.lease(word), OfStream: ofStream})
	switch {
	case err != nil:
		return "", err
	case r.Renewed:
		return fmt.Sprintf("%s: RENEWED for %v", line, r.TTL), nil
	}
	return line + ": LOST", nil
}

func (s *scenario) inspect(t *testing.T, word string) (string, error) {
	d, err := parseDescriptor(word)
	if err != nil {
		return "", err
	}
	m := s.policies.Match(policy.Request{Domain: s.policies.Domains()[0], Descriptors: []policy.Descriptor{d}})
	before := ""
	if s.Dump != nil {
		before = s.Dump()
	}
	states, err := s.Store.Inspect(t.Context(), m.Checks)
	if err != nil {
		return "", err
	}
	if s.Dump != nil {
		if after := s.Dump(); after != before {
			t.Errorf("an inspection changed the state from\n%s\nto\n%s", before, after)
		}
	}
	var parts []string
	for i, c := range m.Checks {
		parts = append(parts, s.stateSentence(c, states[i]))
	}
	switch {
	case m.Descriptors[0].Unlimited:
		parts = append(parts, "unlimited")
	case len(parts) == 0:
		return "no limit met", nil
	}
	return strings.Join(parts, " | "), nil
}

// stateSentence says how a limit stands.
func (s *scenario) stateSentence(c limit.Check, state limit.State) string {
	var b strings.Builder
	switch l := c.Limit.(type) {
	case limit.TokenBucket:
		fmt.Fprintf(&b, "bucket %s level %d of %d", c.Name, state.Level, l.Capacity)
	case limit.Window:
		fmt.Fprintf(&b, "window %s count %d of %d", c.Name, state.Count, l.Max)
	case limit.Concurrency:
		fmt.Fprintf(&b, "concurrency %s holds %d of %d", c.Name, state.Count, l.Max)
	}
	if c.Shadow {
		b.WriteString(" (shadow)")
	}
	fmt.Fprintf(&b, ", %d left", state.Remaining)
	if state.RetryAfter != 0 {
		fmt.Fprintf(&b, ", retry %v", state.RetryAfter)
	}
	if state.ResetAfter != 0 {
		fmt.Fprintf(&b, ", reset %v", state.ResetAfter)
	}
	const some = 4
	for i, h := range state.Holders {
		if i == some {
			last := state.Holders[len(state.Holders)-1]
			fmt.Fprintf(&b, ", and so on, %d in all, the last %s for %v", len(state.Holders), s.leaseName(last.Token), last.ExpiresAfter)
			break
		}
		fmt.Fprintf(&b, ", %s for %v", s.leaseName(h.Token), h.ExpiresAfter)
	}
	return b.String()
}

// leaseName is the name of the lease with the token.
func (s *scenario) leaseName(token string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, id := range s.leases {
		if id.Token() == token {
			return name
		}
	}
	return token
}

// conflict says why an operation was not decided; "" if that is not it.
func conflict(err error) string {
	switch {
	case errors.Is(err, store.ErrOtherRequest):
		return "a conflict: the operation holds a lease for another request"
	case errors.Is(err, store.ErrLateAttempt):
		return "a conflict: the attempt is late"
	}
	return ""
}

// Sentence says a decision in one line. A full lane or pool is told to wait one
// second: no store knows better.
func Sentence(checks []limit.Check, d limit.Decision, lease string) string {
	v := limit.Judge(checks, d, func(limit.Check) time.Duration { return time.Second })
	var b strings.Builder
	switch {
	case d.Replayed:
		b.WriteString("told again")
	case v.Admitted:
		b.WriteString("admitted")
	case d.StreamEnded:
		b.WriteString("refused, since its stream has ended")
	case v.Retryable:
		fmt.Fprintf(&b, "refused %s %s %s, retry %v", v.Class, v.Limit, v.Reason, v.RetryAfter)
		if v.Estimated {
			b.WriteString(" estimated")
		}
	default:
		fmt.Fprintf(&b, "refused %s %s %s, never", v.Class, v.Limit, v.Reason)
	}
	if len(v.Violations) > 1 {
		b.WriteString(" (all:")
		for _, w := range v.Violations {
			fmt.Fprintf(&b, " %s %s", w.Limit, w.Reason)
		}
		b.WriteString(")")
	}
	for i, c := range checks {
		r := d.Results[i]
		kind := "concurrency"
		switch c.Limit.(type) {
		case limit.TokenBucket:
			kind = "bucket"
		case limit.Window:
			kind = "window"
		case limit.Concurrency:
		}
		fmt.Fprintf(&b, " | %s %s", kind, c.Name)
		if c.Shadow {
			b.WriteString(" (shadow)")
		}
		if r.Passed {
			fmt.Fprintf(&b, " ok %d", r.Remaining)
		} else {
			fmt.Fprintf(&b, " NO %d", r.Remaining)
		}
		if r.RetryAfter != 0 {
			fmt.Fprintf(&b, ", retry %v", r.RetryAfter)
		}
		if r.ResetAfter != 0 {
			fmt.Fprintf(&b, ", reset %v", r.ResetAfter)
		}
	}
	if d.Lease != "" {
		fmt.Fprintf(&b, " | lease %s for %v", lease, d.TTL)
	}
	if d.Expired > 0 {
		fmt.Fprintf(&b, " | %d expired", d.Expired)
	}
	return b.String()
}

// TestLease is the n-th lease id of a test, always the same.
func TestLease(domain string, n uint64) limit.LeaseID {
	var random [16]byte
	binary.BigEndian.PutUint64(random[8:], n)
	return limit.NewLeaseID(domain, random)
}

func hasChargeOver(checks []limit.Check) bool {
	for _, c := range checks {
		if w, ok := c.Limit.(limit.Window); ok && w.ChargeOver {
			return true
		}
	}
	return false
}
