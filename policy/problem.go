package policy

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxProblems is how many errors, and how many warnings, of one file are told.
const maxProblems = 1000

// problem is something wrong at a line of a file.
type problem struct {
	line int
	text string
}

// hidden is what errors and warnings of a file with sensitive policies show instead
// of any value that is written in it: which are sensitive is known too late.
const hidden = "(hidden)"

// problems are what is wrong in one file.
type problems struct {
	file       string
	hideValues bool
	list       []problem
}

// add notes a problem at a line and a place in the tree. The text says what is
// wrong and, after a semicolon, what to do.
func (ps *problems) add(line int, at *path, text string) {
	if ps.full() {
		return
	}
	if s := at.show(ps.hideValues); s != "" {
		text = s + ": " + text
	}
	ps.list = append(ps.list, problem{line, fmt.Sprintf("policy: %s:%d: %s", ps.file, line, text)})
}

// full reports whether no more problems are noted.
func (ps *problems) full() bool { return len(ps.list) >= maxProblems }

// lines returns the problems in the order of the file.
func (ps *problems) lines() []string {
	sorted := slices.Clone(ps.list)
	slices.SortStableFunc(sorted, func(a, b problem) int { return cmp.Compare(a.line, b.line) })
	var lines []string
	for _, p := range sorted {
		lines = append(lines, p.text)
	}
	if ps.full() {
		lines = append(lines, fmt.Sprintf("policy: %s: more than these %d were found; deal with them first", ps.file, maxProblems))
	}
	return lines
}

// err returns the problems as one error with a line for each, or nil.
func (ps *problems) err() error {
	var errs []error
	for _, line := range ps.lines() {
		errs = append(errs, errors.New(line))
	}
	return errors.Join(errs...)
}

// path is a place in the tree: a descriptor and those around it. A nil path is
// the root.
type path struct {
	up *path
	// key is "" as long as it isn't known; then index, the place in the list
	// around it, stands for it.
	key, value string
	index      int
}

// show is the path as errors show it: account.plan=trial.
func (at *path) show(hideValues bool) string {
	var parts []string
	for ; at != nil; at = at.up {
		switch {
		case at.key == "":
			parts = append(parts, "descriptors["+strconv.Itoa(at.index)+"]")
		case at.value == "":
			parts = append(parts, show(at.key))
		case hideValues:
			parts = append(parts, show(at.key)+"="+hidden)
		default:
			parts = append(parts, show(at.key)+"="+show(at.value))
		}
	}
	slices.Reverse(parts)
	return strings.Join(parts, ".")
}

// keys is the keys of the path joined by dots: the default name of its limits.
func (at *path) keys() string {
	var keys []string
	for ; at != nil; at = at.up {
		keys = append(keys, at.key)
	}
	slices.Reverse(keys)
	return strings.Join(keys, ".")
}

// show is a text from a file as it stands in an error: on one line, and short.
func show(s string) string {
	const most = 60
	short, dots := s, ""
	if len(s) > most {
		cut := most
		for !utf8.RuneStart(s[cut]) {
			cut--
		}
		short, dots = s[:cut], "…"
	}
	if printable(short) {
		return short + dots
	}
	return strconv.Quote(short) + dots
}

// printable reports whether s can stand in a line of text, a metric's label and
// a header as it is.
func printable(s string) bool {
	for _, r := range s {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return false
		}
	}
	return true
}
