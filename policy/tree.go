package policy

import (
	"crypto/sha256"
	"iter"
	"strconv"
	"strings"
	"time"

	"weir/limit"
)

// domain is the tree of one policy file.
type domain struct {
	name    string
	file    string
	line    int               // of the domain's name
	sum     [sha256.Size]byte // of the file
	shadow  bool
	root    node
	failure failure
	// sensitive are the keys of sensitive policies, and hasher hides the values of
	// entries that have one; nil if there are none.
	sensitive *keySet
	hasher    *hasher
	// replaces says that some limit replaces others: without one, Match need not
	// look for them.
	replaces bool
}

// failure is what becomes of limits while the store is away.
type failure struct {
	mode     limit.FailureMode
	fraction limit.Fraction // never 0
}

// words are the failure as a person says it; "" if the service's default is all.
func (f failure) words() string {
	var parts []string
	if f.mode != limit.DefaultMode {
		parts = append(parts, "failure mode "+f.mode.String())
	}
	if f.fraction != limit.Whole {
		parts = append(parts, "local fraction "+strconv.FormatFloat(float64(f.fraction)/float64(limit.Whole), 'f', -1, 64))
	}
	return strings.Join(parts, ", ")
}

// node is one policy: a place in the tree, with its limits.
type node struct {
	key, value string // as written; the value "" means any
	line       int
	shadow     bool
	quota      bool
	share      bool // all that match this wildcard share one subject
	class      limit.Class
	failure    failure // its own, or its domain's
	ownFailure bool
	sensitive  bool
	// harmless: sensitive: false is written, so that the key's look is no reason to
	// warn.
	harmless bool
	rules    []rule
	children []*node // in file order
	place    int     // among its siblings, in file order

	// The children again, as they are looked up. A wildcard stands here too,
	// since its own text, taken literally, matches it before any wildcard does.
	exact map[entry]*node  // with a value
	bare  map[string]*node // without
	wild  []*node          // in file order
	// index has those of wild if they are more than few; it is made when all are there.
	index *wildcards
}

// rule is one limit of a policy.
type rule struct {
	// check is what a match makes but for the hits and the key. Its Limit is nil for an
	// unlimited rate_limit.
	check limit.Check
	// prefix begins the keys of the limit's subjects: see limit.KeyOf.
	prefix string
	// quota makes Match set the check's group.
	quota bool
	// explicit is the name written in the file, if any: what replaces may name.
	explicit string
	// replaces are the explicit names that this limit replaces.
	replaces []string
	// count and period are the refill as written, for Describe: the limit itself
	// has it reduced.
	count  int64
	period time.Duration
}

// entry is a key and a value as they are compared.
type entry struct{ key, value string }

// policies returns all nodes but the root, each before its children.
func (d *domain) policies() iter.Seq[*node] {
	return func(yield func(*node) bool) { d.root.each(yield) }
}

func (n *node) each(yield func(*node) bool) bool {
	for _, c := range n.children {
		if !yield(c) || !c.each(yield) {
			return false
		}
	}
	return true
}

// isPattern reports whether the node's key or value is a pattern.
func (n *node) isPattern() bool {
	return strings.Contains(n.key, "*") || strings.Contains(n.value, "*")
}

// add makes c the last child of n. It returns the child that has the same key
// and value already, if any, and then adds nothing.
func (n *node) add(c *node) (before *node) {
	own := entry{c.key, c.value}
	if c.value == "" {
		before = n.bare[c.key]
	} else {
		before = n.exact[own]
	}
	if before != nil {
		return before
	}
	c.place = len(n.children)
	n.children = append(n.children, c)
	switch {
	case c.value != "":
		if n.exact == nil {
			n.exact = make(map[entry]*node)
		}
		n.exact[own] = c
	default:
		if n.bare == nil {
			n.bare = make(map[string]*node)
		}
		n.bare[c.key] = c
	}
	if c.isPattern() {
		n.wild = append(n.wild, c)
	}
	return nil
}

// child returns the child that e leads to: exact key and value, then the first
// wildcard in file order, then the key alone; or nil. Keys and values are
// compared each by itself, never as one text, so that key foo_bar is not taken
// for foo=bar (R08).
func (n *node) child(e limit.Entry) *node {
	if c := n.exact[entry{e.Key, e.Value}]; c != nil {
		return c
	}
	if c := n.wildcard(e); c != nil {
		return c
	}
	return n.bare[e.Key]
}

// wildcard returns the first pattern among the children, in file order, that e matches; or
// nil.
func (n *node) wildcard(e limit.Entry) *node {
	if n.index != nil {
		return n.index.find(e.Key, e.Value)
	}
	for _, c := range n.wild {
		if glob(c.key, e.Key) && (c.value == "" || glob(c.value, e.Value)) {
			return c
		}
	}
	return nil
}

// indexed makes the index of the patterns among the children, which all must be there.
func (n *node) indexed() {
	if len(n.wild) > few {
		n.index = newWildcards(n.wild)
	}
}

// place is where the entries of a descriptor lead.
type place struct {
	node *node // nil if they lead nowhere
	// shared: a policy on the way has share_threshold, so that the subject is
	// not the entries but [domain.subject].
	shared bool
}

// find returns the policy that the entries lead to: exactly as deep, and
// without going back to try a sibling.
func (d *domain) find(entries []limit.Entry) place {
	if len(entries) == 0 {
		return place{}
	}
	p := place{node: &d.root}
	for _, e := range entries {
		if p.node = p.node.child(e); p.node == nil {
			return place{}
		}
		p.shared = p.shared || p.node.share
	}
	return p
}

// subject is the entries with the pattern's text in place of each key or value
// that a pattern with share_threshold stands for. The entries must be found.
func (d *domain) subject(entries []limit.Entry) []limit.Entry {
	s := make([]limit.Entry, len(entries))
	n := &d.root
	for i, e := range entries {
		n = n.child(e)
		if n.share && strings.Contains(n.key, "*") {
			e.Key = n.key
		}
		if n.share && strings.Contains(n.value, "*") {
			e.Value = n.value
		}
		s[i] = e
	}
	return s
}

// glob reports whether text matches pattern, in which each * stands for zero or
// more bytes. It never goes back: the leftmost place for each part between two
// stars leaves the most for the rest.
func glob(pattern, text string) bool {
	head, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == text
	}
	text, ok := strings.CutPrefix(text, head)
	if !ok {
		return false
	}
	for {
		part, more, star := strings.Cut(rest, "*")
		if !star {
			return strings.HasSuffix(text, part)
		}
		i := strings.Index(text, part)
		if i < 0 {
			return false
		}
		text, rest = text[i+len(part):], more
	}
}
