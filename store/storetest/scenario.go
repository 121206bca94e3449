// Package storetest is the suite that every store passes: it runs the scenario
// files of store/testdata, which say what the decisions are.
package storetest

import (
	"encoding/binary"
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
//	race              like take, with the repeats of a line at the same time
//	  account=alice | stream=s1               a request of a stream
//	renew             one lease a line, by its name or its id
//	  A by a sign of life                     by its stream, not by its holder
//	release           one lease a line, as in renew, or
//	  stream=s1                               what the stream holds; leaves a tombstone
//	  stream=s1 seen                          without a tombstone
//	  A early                                 ended before its upstream answered
//	charge            one request a line: account=alice;hits=5 | stream=s1
//	inspect           how the limits of a descriptor stand: one a line
//	held              how many leases are live
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
	case "take", "race", "release", "renew", "inspect", "charge":
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
		case "charge":
			text, err = s.charge(t, line)
		case "inspect":
			text, err = s.inspect(t, line)
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
		return s.once(t, m, ask.stream, ask.name, true)
	}
	texts := make([]string, ask.times)
	errs := make([]error, ask.times)
	var group sync.WaitGroup
	for i := range texts {
		one := func() { texts[i], errs[i] = s.once(t, m, ask.stream, "", !race) }
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

func (s *scenario) once(t *testing.T, m policy.Match, stream, name string, alone bool) (string, error) {
	r := limit.Request{Domain: s.policies.Domains()[0], Checks: m.Checks}
	if limit.NeedsLease(m.Checks) {
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
	if err != nil {
		return "", err
	}
	if quiet && !d.Admitted {
		if after := s.Dump(); after != before {
			t.Errorf("a refusal changed the state from\n%s\nto\n%s", before, after)
		}
	}
	if d.Lease != "" {
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
	text := line + ": " + r.Result.String()
	if r.Result == limit.Released || r.Result == limit.Lingering {
		text += fmt.Sprintf(", held %v", r.HeldFor)
		for i, f := range r.Freed {
			text += []string{" by ", ", "}[min(i, 1)] + f.Limit
		}
	}
	return text, nil
}

func (s *scenario) charge(t *testing.T, line string) (string, error) {
	ask, err := parseAsk(s.policies.Domains()[0], line)
	if err != nil {
		return "", err
	}
	u := limit.Usage{Domain: ask.request.Domain, Stream: ask.stream}
	for _, c := range s.policies.Match(ask.request).Checks {
		if _, ok := c.Limit.(limit.Concurrency); !ok {
			u.Checks = append(u.Checks, c)
		}
	}
	charged, err := s.Store.Charge(t.Context(), u)
	if err != nil {
		return "", err
	}
	var words []string
	for i, c := range u.Checks {
		word := c.Name + " charged"
		if !charged[i] {
			word = c.Name + " not again"
		}
		words = append(words, word)
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

// Sentence says a decision in one line. A full lane or pool is told to wait one
// second: no store knows better.
func Sentence(checks []limit.Check, d limit.Decision, lease string) string {
	v := limit.Judge(checks, d, func(limit.Check) time.Duration { return time.Second })
	var b strings.Builder
	switch {
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

// ask is a line of take.
type ask struct {
	request policy.Request
	times   int
	name    string // of its lease
	stream  string
}

func parseAsk(domain, line string) (ask, error) {
	a := ask{request: policy.Request{Domain: domain}, times: 1}
	descriptors, options, _ := strings.Cut(line, "|")
	for _, word := range strings.Fields(options) {
		key, value, _ := strings.Cut(word, "=")
		switch key {
		case "as":
			a.name = value
		case "stream":
			a.stream = value
		case "hits":
			n, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				return ask{}, err
			}
			a.request.Hits = n
		default:
			return ask{}, fmt.Errorf("unknown option %q", word)
		}
	}
	for _, word := range strings.Fields(descriptors) {
		if n, ok := strings.CutSuffix(word, "x"); ok && !strings.Contains(word, "=") {
			times, err := strconv.Atoi(n)
			if err != nil {
				return ask{}, err
			}
			a.times = times
			continue
		}
		d, err := parseDescriptor(word)
		if err != nil {
			return ask{}, err
		}
		a.request.Descriptors = append(a.request.Descriptors, d)
	}
	return a, nil
}

func parseDescriptor(word string) (policy.Descriptor, error) {
	var d policy.Descriptor
	entries, options, _ := strings.Cut(word, ";")
	for _, entry := range strings.Split(entries, ",") {
		key, value, _ := strings.Cut(entry, "=")
		d.Entries = append(d.Entries, limit.Entry{Key: key, Value: value})
	}
	if options == "" {
		return d, nil
	}
	for _, option := range strings.Split(options, ";") {
		key, value, _ := strings.Cut(option, "=")
		var err error
		switch key {
		case "hits":
			d.HasHits = true
			d.Hits, err = strconv.ParseUint(value, 10, 64)
		case "neg":
			d.Negative = true
		case "limit":
			d.Override, err = parseOverride(value)
		default:
			err = fmt.Errorf("unknown option %q", option)
		}
		if err != nil {
			return policy.Descriptor{}, err
		}
	}
	return d, nil
}

func parseOverride(text string) (*limit.Window, error) {
	count, unit, _ := strings.Cut(text, "/")
	n, err := strconv.ParseInt(count, 10, 64)
	if err != nil {
		return nil, err
	}
	w, err := limit.NewWindow(n, limit.ParseUnit(unit), 1)
	return &w, err
}
