package policy

import (
	"fmt"
	"slices"
	"strings"

	"weir/limit"
)

// How says how an entry of a descriptor led to a policy.
type How string

// The ways, in the order in which they are tried.
const (
	Exactly    How = "exactly"     // the policy has its key and its value
	ByWildcard How = "by wildcard" // it is the first pattern, in file order, that matches
	ByKey      How = "by key"      // the policy has its key, for any value
	ByNothing  How = "nothing"
)

// Explanation says why a request meets the limits that it meets. No value of a sensitive
// key is in it.
type Explanation struct {
	// File has the domain's policies, in the line Line; "" if no policy has the domain.
	File string
	Line int
	// Match is what [Set.Match] returns.
	Match Match
	// Descriptors has one element for each descriptor of the request, in order.
	Descriptors []Explained
}

// Explained says what became of one descriptor.
type Explained struct {
	// Steps has one element for each entry, up to the first that matched nothing.
	Steps []Step
	// Why says why there are no limits, and what would have matched; "" if there are.
	Why string
	// Rules are the limits of the policy that was reached, and the request's own before them.
	Rules []ExplainedRule
}

// Step is the walk from one policy to the next by an entry.
type Step struct {
	Entry string // as a person reads it
	How   How
	// Policy is the one that was reached, like account.plan=trial, and Line where it is; of
	// nothing they are empty.
	Policy string
	Line   int
	Shared bool // all that match its pattern share one subject
}

// ExplainedRule is one limit of a policy.
type ExplainedRule struct {
	Name  string
	Words string // the limit as a person says it
	Line  int    // of its policy; 0 of the request's own
	// Check is where it is in Match.Checks; -1 if it is not asked, and then LeftOut says why.
	Check   int
	LeftOut string
}

// Explain walks as [Set.Match] does, and says what it sees.
func (s *Set) Explain(r Request) Explanation {
	e := Explanation{Match: s.Match(r), Descriptors: make([]Explained, len(r.Descriptors))}
	d := s.domains[r.Domain]
	if d == nil {
		for i := range e.Descriptors {
			e.Descriptors[i].Why = "no policy has the domain " + show(r.Domain)
		}
		return e
	}
	e.File, e.Line = d.file, d.line
	r.Descriptors = slices.Clone(r.Descriptors) // the caller's stay as they are
	nodes := make([]*node, len(r.Descriptors))
	for i, asked := range r.Descriptors {
		nodes[i] = d.explainSteps(asked.Entries, &e.Descriptors[i])
		if asked.refundsNothing(r.Hits) {
			nodes[i], r.Descriptors[i].Override = nil, nil
			e.Descriptors[i].Why = "it gives back 0 hits, which meets no limit"
		}
	}
	for i := range r.Descriptors {
		e.Descriptors[i].Rules = d.explainRules(r, nodes, i, e.Match.Descriptors[i].Checks)
	}
	return e
}

// explainSteps says where the entries lead, as find does.
func (d *domain) explainSteps(entries []limit.Entry, out *Explained) *node {
	if len(entries) == 0 {
		out.Why = "it has no entries"
		return nil
	}
	n, at := &d.root, ""
	for i, e := range entries {
		step := Step{Entry: d.showEntry(e), How: ByWildcard}
		c := n.child(e)
		switch c {
		case nil:
			step.How = ByNothing
			out.Steps = append(out.Steps, step)
			out.Why = d.whyNothing(n, at, entries, i)
			return nil
		case n.exact[entry{e.Key, e.Value}]:
			step.How = Exactly
		case n.bare[e.Key]:
			step.How = ByKey
		}
		at = strings.TrimPrefix(at+"."+d.showPolicy(c), ".")
		step.Policy, step.Line, step.Shared = at, c.line, c.share
		out.Steps = append(out.Steps, step)
		n = c
	}
	if len(n.rules) == 0 {
		out.Why = fmt.Sprintf("the policy %s (line %d) has no limit", at, n.line)
		if below := d.some(n.children); below != "" {
			out.Why += "; those below it need one entry more: " + below
		}
	}
	return n
}

// whyNothing says why entries[i] leads nowhere from n, the policy at, and what would.
func (d *domain) whyNothing(n *node, at string, entries []limit.Entry, i int) string {
	e := entries[i]
	where := "in the file"
	if n != &d.root {
		where = fmt.Sprintf("below %s (line %d)", at, n.line)
	}
	var keys []string
	var near []*node // of this key, for other values
	for _, c := range n.children {
		keys = append(keys, c.key)
		if glob(c.key, e.Key) {
			near = append(near, c)
		}
	}
	var why string
	switch {
	case len(n.children) == 0:
		why = fmt.Sprintf("no policy is %s: the descriptor has more entries than the policies", where)
	case len(near) > 0:
		why = fmt.Sprintf("no policy %s has this value of the key %s; there is %s", where, show(e.Key), d.some(near))
	default:
		why = fmt.Sprintf("no policy %s has the key %s", where, show(e.Key))
		if word := nearest(e.Key, keys); word != "" {
			why += ", did you mean " + show(word) + "?"
		} else {
			why += "; there is " + d.some(n.children)
		}
	}
	if other := d.root.elsewhere(entries); other != nil {
		why += fmt.Sprintf("; the policy in line %d would match, by another way that was not taken: once an entry has matched, there is no way back", other.line)
	}
	return why
}

// elsewhere is the policy that entries would lead to if a way that ends were given up
// for the next; nil if there is none.
func (n *node) elsewhere(entries []limit.Entry) *node {
	if len(entries) == 0 {
		return n
	}
	e := entries[0]
	ways := []*node{n.exact[entry{e.Key, e.Value}]}
	for _, c := range n.wild {
		if glob(c.key, e.Key) && (c.value == "" || glob(c.value, e.Value)) {
			ways = append(ways, c)
		}
	}
	for _, c := range append(ways, n.bare[e.Key]) {
		if c == nil {
			continue
		}
		if found := c.elsewhere(entries[1:]); found != nil {
			return found
		}
	}
	return nil
}

// explainRules says what became of each limit that descriptor i reached; checks are those that it
// meets, in order.
func (d *domain) explainRules(r Request, nodes []*node, i int, checks []int) (rules []ExplainedRule) {
	next := func() int {
		first := checks[0]
		checks = checks[1:]
		return first
	}
	override := r.Descriptors[i].Override
	if override != nil {
		own := rule{check: limit.Check{Limit: *override}}
		rules = append(rules, ExplainedRule{Name: OverrideName, Words: own.words(), Check: next()})
	}
	n := nodes[i]
	if n == nil {
		return rules
	}
	for j := range n.rules {
		own := &n.rules[j]
		out := ExplainedRule{Name: own.check.Name, Words: own.words(), Line: n.line, Check: -1}
		switch by := replacedBy(r, nodes, own.explicit); {
		case override != nil && !own.outlivesOverride():
			out.LeftOut = "the request's own limit stands in for it"
		case by != "":
			out.LeftOut = "replaced by " + by
		case own.check.Limit == nil:
			out.LeftOut = "it always passes"
		default:
			out.Check = next()
		}
		rules = append(rules, out)
	}
	return rules
}

// replacedBy names the first limit of the request that replaces the one of this name; "" if
// none does.
func replacedBy(r Request, nodes []*node, explicit string) string {
	if explicit == "" {
		return ""
	}
	for i, n := range nodes {
		if n == nil {
			continue
		}
		for j := range n.rules {
			by := &n.rules[j]
			if (r.Descriptors[i].Override == nil || by.outlivesOverride()) && slices.Contains(by.replaces, explicit) {
				return fmt.Sprintf("%s (line %d)", show(by.check.Name), n.line)
			}
		}
	}
	return ""
}

// showEntry is an entry as it may be shown.
func (d *domain) showEntry(e limit.Entry) string {
	if d.sensitive.has(e.Key) {
		return show(e.Key) + "=" + hidden
	}
	return show(e.Key) + "=" + show(e.Value)
}

// showPolicy is a policy as it may be shown, without those above it.
func (d *domain) showPolicy(n *node) string {
	switch {
	case n.value == "":
		return show(n.key)
	case d.sensitive.has(n.key):
		return show(n.key) + "=" + hidden
	}
	return show(n.key) + "=" + show(n.value)
}

// some names the first few policies of a list, with their lines.
func (d *domain) some(list []*node) string {
	const most = 3
	var names []string
	for _, n := range list[:min(len(list), most)] {
		names = append(names, fmt.Sprintf("%s (line %d)", d.showPolicy(n), n.line))
	}
	if more := len(list) - most; more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(names, ", ")
}
