package policy

import (
	"fmt"
	"slices"
	"strings"
)

// level is a kind of map in a policy file.
type level int

const (
	rootLevel level = iota
	descriptorLevel
	bucketLevel
	windowLevel
	concurrencyLevel
	replaceLevel
)

// levels says what the maps are called, how their keys are shown in errors, and
// which keys they may have.
var levels = [...]struct {
	name   string // "… means nothing in NAME; move it to NAME"
	prefix string
	keys   []string
}{
	rootLevel: {"the root of the file", "", []string{"domain", "descriptors", "shadow_mode", "failure_mode", "local_fraction"}},
	descriptorLevel: {"a descriptor", "", []string{
		"key", "value", "descriptors", "rate_limit", "token_bucket", "concurrency", "shadow_mode", "quota_mode",
		"reject_as", "failure_mode", "local_fraction", "sensitive", "share_threshold", "detailed_metric", "value_to_metric", "metadata",
	}},
	bucketLevel: {"token_bucket", "token_bucket.", []string{"capacity", "refill", "reserve", "name", "replaces"}},
	windowLevel: {"rate_limit", "rate_limit.", []string{
		"unit", "requests_per_unit", "unit_multiplier", "window", "unlimited", "on_over", "reserve", "name", "replaces",
	}},
	concurrencyLevel: {"concurrency", "concurrency.", []string{"max_in_flight", "lease", "retry_after", "linger", "max_wait", "name", "replaces"}},
	replaceLevel:     {"an item of replaces", "replaces.", []string{"name"}},
}

// required are the keys that a map of some level can't do without, and what to write
// where they have no value.
var required = map[string]string{
	"domain":            "write the name that Envoy sends",
	"key":               "write the key of an entry",
	"unit":              "write " + units,
	"requests_per_unit": "write how many requests a unit has, 0 to ban",
	"capacity":          "write how many tokens the bucket holds",
	"refill":            "write how fast it fills, like 1/s",
	"max_in_flight":     "write how many may run at once",
	"lease":             "write the longest time that one may hold its slot, like 2m",
}

const units = "second, minute, hour, day, week, month or year"

// theirs are the keys that envoyproxy/ratelimit has: it takes each of them at
// any level, and ignores those at the wrong one.
var theirs = []string{
	"domain", "descriptors", "key", "value", "rate_limit", "unit", "requests_per_unit", "unlimited", "name", "replaces",
	"shadow_mode", "quota_mode", "detailed_metric", "value_to_metric", "share_threshold", "metadata",
}

// misplaced says what is wrong with a key that its level doesn't have. mistake
// reports whether envoyproxy/ratelimit would ignore it.
func misplaced(key string, at level) (text string, mistake bool) {
	var homes []string
	for _, l := range levels {
		if slices.Contains(l.keys, key) {
			homes = append(homes, l.name)
		}
	}
	if len(homes) > 0 {
		return fmt.Sprintf("%s means nothing in %s; move it to %s", key, levels[at].name, strings.Join(homes, " or ")), slices.Contains(theirs, key)
	}
	near := nearest(key, levels[at].keys)
	if near == "" {
		var all []string
		for _, l := range levels {
			all = append(all, l.keys...)
		}
		near = nearest(key, all)
	}
	if near != "" {
		near = ", did you mean " + near + "?"
	}
	return fmt.Sprintf("unknown key %s%s; allowed in %s: %s", show(key), near, levels[at].name, strings.Join(levels[at].keys, ", ")), false
}

// nearest returns the word that key is probably a misspelling of, or "".
func nearest(key string, words []string) string {
	const longest = 40 // longer ones are no misspelling, and would take long to compare
	if len(key) > longest {
		return ""
	}
	key = plain(strings.ToLower(key))
	best, least := "", 3
	for _, w := range words {
		d := distance(key, plain(w))
		if d < least && 2*d < len(key) {
			best, least = w, d
		}
	}
	return best
}

// plain is a word without what separates its parts.
func plain(word string) string { return separators.Replace(word) }

var separators = strings.NewReplacer("_", "", "-", "", " ", "")

// distance is how many letters must be changed, added or left out to make b
// from a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
