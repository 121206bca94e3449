package policy

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"weir/limit"
)

// Describe writes what was understood of the policy files, for a person to
// check: per domain a line for each policy, with its limits in words.
func (s *Set) Describe(w io.Writer) error {
	var b strings.Builder
	for i, name := range s.names {
		if i > 0 {
			b.WriteByte('\n')
		}
		s.domains[name].describe(&b)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (d *domain) describe(b *strings.Builder) {
	var rows []row
	for _, c := range d.root.children {
		rows = c.rows(rows, "", d.sensitive)
	}
	limits, widest := 0, 0
	for n := range d.policies() {
		limits += len(n.rules)
	}
	for _, r := range rows {
		widest = max(widest, utf8.RuneCountInString(r.at))
	}
	fmt.Fprintf(b, "domain %s (%s): %s, %s, Redis Cluster slot %d", show(d.name), show(d.file), count(len(rows), "policy", "policies"), count(limits, "limit", "limits"), limit.ClusterSlot(d.name))
	if words := d.failure.words(); words != "" {
		b.WriteString("; " + words)
	}
	if d.shadow {
		b.WriteString("; all in shadow, requests' own limits too: nothing is refused")
	}
	b.WriteByte('\n')
	for _, r := range rows {
		fmt.Fprintf(b, "  %-*s  %s\n", widest, r.at, r.words)
	}
}

// row is the line of one policy.
type row struct{ at, words string }

// rows adds the row of a policy and those of its children.
func (n *node) rows(rows []row, above string, secret *keySet) []row {
	at := above + show(n.key)
	switch {
	case n.value == "":
	case secret.has(n.key):
		at += "=" + hidden
	default:
		at += "=" + show(n.value)
	}
	var parts []string
	for i := range n.rules {
		parts = append(parts, n.rules[i].words())
	}
	if len(n.rules) == 0 {
		parts = append(parts, "no limit")
	}
	for _, o := range []struct {
		on    bool
		words string
	}{
		{n.shadow, "in shadow"},
		{n.quota, "quota"},
		{n.class == limit.Pool, "rejects as pool"},
		{n.share, "all that match share it"},
		{n.ownFailure, n.failure.words()},
		// Beside a sensitive policy of the same key, too.
		{secret.names(n.key), "sensitive"},
	} {
		if o.on {
			parts = append(parts, o.words)
		}
	}
	rows = append(rows, row{at, strings.Join(parts, "; ")})
	for _, c := range n.children {
		rows = c.rows(rows, at+".", secret)
	}
	return rows
}

// words is a limit as a person says it.
func (r *rule) words() string {
	var b strings.Builder
	switch l := r.check.Limit.(type) {
	case limit.TokenBucket:
		fmt.Fprintf(&b, "%s, %d per %v (burst %d)", count(l.Capacity, "token", "tokens"), r.count, r.period, l.Capacity)
	case limit.Window:
		fmt.Fprintf(&b, "%d per ", l.Max)
		if l.Multiplier == 1 {
			b.WriteString(l.Unit.String())
		} else {
			fmt.Fprintf(&b, "%d %ss", l.Multiplier, l.Unit)
		}
		if l.Max == 0 {
			b.WriteString(" (banned)")
		}
		if l.Sliding {
			b.WriteString(", sliding")
		}
		if l.ChargeOver {
			b.WriteString(", charged when over")
		}
	case limit.Concurrency:
		fmt.Fprintf(&b, "%d in flight, lease %v", l.Max, l.Lease)
		if l.RetryAfterMax > 0 {
			fmt.Fprintf(&b, ", retry after at most %v", l.RetryAfterMax)
		}
		switch {
		case l.MaxWait > 0:
			fmt.Fprintf(&b, ", waits at most %v for a slot", l.MaxWait)
		case l.MaxWait < 0:
			b.WriteString(", does not wait for a slot")
		}
		if l.Linger > 0 {
			fmt.Fprintf(&b, ", lingers %v", l.Linger)
		}
	case nil:
		b.WriteString("unlimited")
	}
	if r.check.Reserve > 0 {
		fmt.Fprintf(&b, ", reserves for %v", r.check.Reserve)
	}
	if r.explicit != "" {
		b.WriteString(", named " + show(r.explicit))
	}
	for i, name := range r.replaces {
		if i == 0 {
			b.WriteString(", replaces ")
		} else {
			b.WriteString(" and ")
		}
		b.WriteString(show(name))
	}
	return b.String()
}

func count[T int | int64](n T, one, many string) string {
	if n == 1 {
		return fmt.Sprintf("%d %s", n, one)
	}
	return fmt.Sprintf("%d %s", n, many)
}
