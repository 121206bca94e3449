package policy

import (
	"cmp"
	"slices"
	"strings"
)

// wildcards finds, of many policies with patterns that stand beside each other, the first in
// file order that an entry matches, without a look at each.
type wildcards struct {
	keys    map[string]*values // by keys without a star: their values are patterns
	globbed globs              // by keys that are patterns
}

// values are the policies of one key, by what they say of the value. The key is met.
type values struct {
	first   int              // the least place of all of them
	any     *node            // whatever the value
	texts   map[string]*node // without a star
	globbed globs
}

// newWildcards returns the index of policies, which have their places in file order.
func newWildcards(list []*node) *wildcards {
	w := &wildcards{keys: make(map[string]*values)}
	byKey := make(map[string][]*node)
	var keys []string // in file order
	for _, n := range list {
		if byKey[n.key] == nil {
			keys = append(keys, n.key)
		}
		byKey[n.key] = append(byKey[n.key], n)
	}
	var patterns []pattern
	for _, key := range keys {
		v := newValues(byKey[key])
		if strings.Contains(key, "*") {
			patterns = append(patterns, pattern{text: key, first: v.first, values: v})
		} else {
			w.keys[key] = v
		}
	}
	w.globbed = newGlobs(patterns)
	return w
}

func newValues(list []*node) *values {
	v := &values{first: list[0].place, texts: make(map[string]*node)}
	var patterns []pattern
	for _, n := range list {
		switch {
		case n.value == "":
			v.any = n
		case strings.Contains(n.value, "*"):
			patterns = append(patterns, pattern{text: n.value, first: n.place, node: n})
		default:
			v.texts[n.value] = n
		}
	}
	v.globbed = newGlobs(patterns)
	return v
}

// find returns the first policy that the key and the value match; nil if none.
func (w *wildcards) find(key, value string) *node {
	var best *node
	if v := w.keys[key]; v != nil {
		best = v.find(value, best)
	}
	return w.globbed.find(key, value, best)
}

// find returns best or, if it comes before it, the first of v that the value matches.
func (v *values) find(value string, best *node) *node {
	best = v.any.before(best)
	best = v.texts[value].before(best)
	return v.globbed.find(value, "", best)
}

// before returns the one of two policies that comes first in the file; nil is none.
func (n *node) before(best *node) *node {
	if n == nil || best != nil && best.place < n.place {
		return best
	}
	return n
}

// pattern is a text with stars, and what it leads to: a policy, or those of a key.
type pattern struct {
	text   string
	inner  string // from its first star to its last
	first  int    // the least place of what it leads to
	node   *node
	values *values
}

// globs is a set of patterns that finds those that match a text. They are told apart by
// what stands before their first star and behind their last, and these are found by
// bisection.
type globs struct {
	heads affixes
	tails []tails // by the index of the head
}

type tails struct {
	ends  affixes
	inner []inners // by the index of the end
}

// manyInner is how many patterns with one head and one tail are compared one after the other
// at most.
const manyInner = 128

// inners are the patterns with one head and one tail, by their places.
type inners struct {
	list []pattern
	// Of more than manyInner, those with a text between stars are here: list has the rest.
	index *parts
}

// parts are patterns by the longest text between their stars.
type parts struct {
	texts  affixes
	lists  [][]pattern // by the index of the text
	begins [256]bool   // the first bytes of texts
}

// newGlobs returns the set of patterns, which come by their places.
func newGlobs(list []pattern) globs {
	byHead, heads := group(list, func(p pattern) string { return p.text[:strings.IndexByte(p.text, '*')] })
	g := globs{heads: newAffixes(heads, strings.Compare, strings.HasPrefix)}
	for _, head := range g.heads.texts {
		byTail, ends := group(byHead[head], func(p pattern) string { return p.text[strings.LastIndexByte(p.text, '*')+1:] })
		t := tails{ends: newAffixes(ends, compareBack, strings.HasSuffix)}
		for _, tail := range t.ends.texts {
			same := byTail[tail]
			for i := range same {
				same[i].inner = same[i].text[len(head) : len(same[i].text)-len(tail)]
			}
			t.inner = append(t.inner, newInners(same))
		}
		g.tails = append(g.tails, t)
	}
	return g
}

func newInners(list []pattern) inners {
	if len(list) <= manyInner {
		return inners{list: list}
	}
	byPart, texts := group(list, func(p pattern) (longest string) {
		for part := range strings.SplitSeq(p.inner, "*") {
			if len(part) > len(longest) {
				longest = part
			}
		}
		return longest
	})
	texts = slices.DeleteFunc(texts, func(text string) bool { return text == "" })
	index := &parts{texts: newAffixes(texts, strings.Compare, strings.HasPrefix)}
	for _, text := range index.texts.texts {
		index.lists = append(index.lists, byPart[text])
		index.begins[text[0]] = true
	}
	return inners{byPart[""], index}
}

// group returns the patterns by what of tells of them, and that, each once.
func group(list []pattern, of func(pattern) string) (by map[string][]pattern, names []string) {
	by = make(map[string][]pattern)
	for _, p := range list {
		name := of(p)
		if by[name] == nil {
			names = append(names, name)
		}
		by[name] = append(by[name], p)
	}
	return by, names
}

// find returns best or, if it comes before it, the first policy that the patterns that
// match text lead to; of those of a key, the first that has the value.
func (g *globs) find(text, value string, best *node) *node {
	for h := g.heads.longest(text); h >= 0; h = g.heads.shorter[h] {
		t := &g.tails[h]
		rest := text[len(g.heads.texts[h]):]
		for e := t.ends.longest(rest); e >= 0; e = t.ends.shorter[e] {
			best = t.inner[e].find(rest[:len(rest)-len(t.ends.texts[e])], value, best)
		}
	}
	return best
}

func (in *inners) find(text, value string, best *node) *node {
	best = scan(in.list, text, value, best)
	if in.index == nil {
		return best
	}
	for i := range len(text) {
		if !in.index.begins[text[i]] {
			continue
		}
		for p := in.index.texts.longest(text[i:]); p >= 0; p = in.index.texts.shorter[p] {
			best = scan(in.index.lists[p], text, value, best)
		}
	}
	return best
}

// scan is find of patterns that are compared one after the other.
func scan(list []pattern, text, value string, best *node) *node {
	for i := range list {
		p := &list[i]
		if best != nil && best.place < p.first {
			break
		}
		switch {
		case !glob(p.inner, text):
		case p.values != nil:
			best = p.values.find(value, best)
		default:
			best = p.node.before(best)
		}
	}
	return best
}

// affixes is a set of texts that finds those with which a text begins (or ends).
type affixes struct {
	texts []string // sorted by compare
	// shorter is, of each text, the longest other one with which it begins; -1 for none.
	shorter []int
	compare func(a, b string) int
	has     func(text, affix string) bool
}

// newAffixes returns the set of texts. compare orders them so that all that begin alike
// stand together behind what they begin with.
func newAffixes(texts []string, compare func(a, b string) int, has func(text, affix string) bool) affixes {
	slices.SortFunc(texts, compare)
	a := affixes{texts: texts, shorter: make([]int, len(texts)), compare: compare, has: has}
	for i, text := range texts {
		before := i - 1
		for before >= 0 && !has(text, texts[before]) {
			before = a.shorter[before]
		}
		a.shorter[i] = before
	}
	return a
}

// longest returns the index of the longest text with which this one begins; -1 for none.
// The others are shorter[i], and so on.
func (a *affixes) longest(text string) int {
	i, found := slices.BinarySearchFunc(a.texts, text, a.compare)
	if found {
		return i
	}
	// What text begins with stands before it, and so does only what begins with that, too.
	for i--; i >= 0 && !a.has(text, a.texts[i]); {
		i = a.shorter[i]
	}
	return i
}

// compareBack compares two texts from their ends.
func compareBack(a, b string) int {
	for i := 1; i <= min(len(a), len(b)); i++ {
		if c := cmp.Compare(a[len(a)-i], b[len(b)-i]); c != 0 {
			return c
		}
	}
	return cmp.Compare(len(a), len(b))
}
