// Package policy reads policy files and says which checks a request meets.
package policy

import (
	"iter"
	"slices"

	"weir/limit"
)

// OverrideName is the name of the check that a descriptor's Override makes.
const OverrideName = "override"

// Request is what a caller asks about: a domain and a list of descriptors.
type Request struct {
	Domain      string
	Descriptors []Descriptor
	// Hits is the cost of every descriptor that has none of its own; 0 means 1.
	Hits uint64
}

// Descriptor is one list of entries that a request carries.
type Descriptor struct {
	Entries []limit.Entry
	// Hits is the descriptor's own cost if HasHits; 0 asks without charging.
	Hits     uint64
	HasHits  bool
	Negative bool // the hits are refunded instead
	// Override, if not nil, replaces the policy's buckets and windows (S12). It
	// must come from limit.NewWindow.
	Override *limit.Window
}

// Match is what a request meets.
type Match struct {
	// Checks are the limits that are asked: each state once, with the hits of
	// all descriptors that meet it.
	Checks []limit.Check
	// Descriptors has one element for each descriptor of the request, in order.
	Descriptors []Matched
}

// Matched is what one descriptor meets.
type Matched struct {
	Checks    []int // indices into Match.Checks; empty means no limit
	Unlimited bool  // an unlimited rate_limit matched
}

// Options say how policy files are read. The zero value is strict.
type Options struct {
	// Lenient loads, with a warning, what envoyproxy/ratelimit accepts by
	// mistake: see [Set.Warnings].
	Lenient bool
	// Shadow makes every limit of every domain a shadow one: a first week in which
	// nobody is refused.
	Shadow bool
	// HashKey is the secret under which the values of sensitive policies are hashed,
	// the same in all replicas; empty means a random one, which a [Files] keeps.
	HashKey []byte
	// NeedHashKey makes a sensitive policy an error if HashKey is empty.
	NeedHashKey bool
	// Progress, if not nil, is told after each file how many have been read. It is called
	// by one goroutine after the other, before the reading ends.
	Progress func(files int)
}

// Set is the policies of some domains. It never changes once it is loaded and
// may be used by many goroutines at once. The zero value knows no domain.
type Set struct {
	domains  map[string]*domain
	names    []string // of the domains, sorted
	warnings []string
	version  string
	files    []string // of the domains
}

// Version tells sets apart: 12 hexadecimal digits that depend on the contents of
// the files alone, so that replicas with the same files have the same.
func (s *Set) Version() string { return s.version }

// Domains returns the names of the domains, sorted.
func (s *Set) Domains() []string { return slices.Clone(s.names) }

// Has reports whether the domain has a policy file.
func (s *Set) Has(domain string) bool { return s.domains[domain] != nil }

// File is the path of a domain's policy file, as it was given; "" for a domain that has none.
func (s *Set) File(domain string) string {
	if d := s.domains[domain]; d != nil {
		return d.file
	}
	return ""
}

// Warnings returns what a person should know of files that were loaded all the
// same, in the form of the errors of [Load]: keys that have no effect in weir,
// and what is let pass because of Options.Lenient.
func (s *Set) Warnings() []string { return slices.Clone(s.warnings) }

// Limits returns the domain and the check, without key and hits, of every limit that
// can be asked, for metrics; with one named [OverrideName] for each domain. Names may
// come again.
func (s *Set) Limits() iter.Seq2[string, limit.Check] {
	return func(yield func(domain string, c limit.Check) bool) {
		for _, name := range s.names {
			d := s.domains[name]
			if !yield(name, limit.Check{Name: OverrideName, Shadow: d.shadow, FailureMode: d.failure.mode, Fraction: d.failure.fraction}) {
				return
			}
			for n := range d.policies() {
				for _, r := range n.rules {
					if r.check.Limit != nil && !yield(name, r.check) {
						return
					}
				}
			}
		}
	}
}
