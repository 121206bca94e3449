package storetest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"weir/limit"
	"weir/policy"
)

// list lists the leases of the domain, page by page.
func (s *scenario) list(t *testing.T, d *datadriven.TestData) string {
	n := limit.MaxListed
	d.MaybeScanArgs(t, "n", &n)
	before := ""
	if s.Dump != nil {
		before = s.Dump()
	}
	var out strings.Builder
	after := limit.Slot{}
	for {
		page, err := s.Store.Leases(t.Context(), s.policies.Domains()[0], after, n)
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		for _, l := range page.Leases {
			out.WriteString(s.listed(l) + "\n")
		}
		if page.Next == (limit.Slot{}) {
			break
		}
		out.WriteString("and more\n")
		after = page.Next
	}
	if s.Dump != nil && s.Dump() != before {
		t.Errorf("a listing changed the state from\n%s\nto\n%s", before, s.Dump())
	}
	if out.Len() == 0 {
		return "none\n"
	}
	return out.String()
}

// listed says in a line what is told of a lease.
func (s *scenario) listed(l limit.Listed) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s held for %v, expires in %v", s.leaseName(l.Lease.Token()), l.HeldFor, l.ExpiresAfter)
	if l.Lingering {
		b.WriteString(", lingers")
	}
	if l.Stream != "" {
		b.WriteString(", stream " + l.Stream)
	}
	if l.Operation != "" {
		b.WriteString(", operation " + l.Operation)
	}
	for _, h := range l.Slots {
		fmt.Fprintf(&b, " | slot %s %s", h.Limit, limit.Subject(h.Key))
	}
	for _, r := range l.Reserved {
		fmt.Fprintf(&b, " | reserved %s %s %d", r.Limit, limit.Subject(r.Key), r.Hits)
		if r.Settled {
			b.WriteString(" settled")
		}
	}
	return b.String()
}

// reset forgets the states that a descriptor meets.
func (s *scenario) reset(t *testing.T, word string) (string, error) {
	d, err := parseDescriptor(word)
	if err != nil {
		return "", err
	}
	m := s.policies.Match(policy.Request{Domain: s.policies.Domains()[0], Descriptors: []policy.Descriptor{d}})
	return fmt.Sprintf("%s: %d reset", word, len(m.Checks)), s.Store.Reset(t.Context(), m.Checks)
}
