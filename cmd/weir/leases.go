package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"weir/limit"
	"weir/server"
)

type leasesCommand struct {
	List    leasesListCommand    `cmd:"" default:"withargs" help:"Who holds what of a domain, how long, and until when; the newest last."`
	Release leasesReleaseCommand `cmd:"" help:"End leases by the start of their ids."`
}

// Help is shown by weir leases --help.
func (c *leasesCommand) Help() string {
	return `Example: weir leases --domain inference --longer-than 5m
Example: weir leases release --domain inference 3kTq0ZbX

weir leases alone is weir leases list.`
}

type leasesListCommand struct {
	operator
	Domain     string        `required:"" help:"Domain of the policy."`
	Limit      string        `placeholder:"NAME" help:"Only leases that hold something of this limit."`
	Descriptor string        `short:"d" placeholder:"KEY=VALUE,…" help:"Only leases that hold something of the limits that this descriptor meets."`
	LongerThan time.Duration `placeholder:"DURATION" help:"Only leases that have been held longer than this."`
	Output     string        `short:"o" enum:"text,json" default:"text" help:"text or json (${default})."`
}

// Help is shown by weir leases list --help.
func (c *leasesListCommand) Help() string {
	return `Example: weir leases --domain inference -d account=alice --longer-than 5m

Each lease has the start of its id, which weir leases release takes. Of a value that is sensitive its digest is shown.

Exit 0: they are shown, if there are any; 2: error.`
}

// Run lists leases.
func (c *leasesListCommand) Run(con console) error {
	query, err := c.query()
	if err != nil {
		return err
	}
	con.notePatterns([]string{c.Descriptor})
	list, more, err := c.list(con.ctx, query)
	list = slices.DeleteFunc(list, func(l server.AdminLease) bool { return millis(l.HeldFor) <= c.LongerThan && c.LongerThan > 0 })
	if err != nil && len(list) == 0 {
		return err
	}
	slices.SortStableFunc(list, func(a, b server.AdminLease) int { return int(max(-1, min(1, b.HeldFor-a.HeldFor))) })
	for i := range list {
		list[i].Lease = short(list[i].Lease)
	}
	if c.Output == "json" {
		if list == nil {
			list = []server.AdminLease{}
		}
		return errors.Join(printJSON(con.stdout, server.AdminLeases{Leases: list}), err)
	}
	return errors.Join(printLeases(con.stdout, list, more), err)
}

// query is what the flags ask /leases for.
func (c *leasesListCommand) query() (url.Values, error) {
	query := url.Values{"domain": {c.Domain}}
	if c.Limit != "" {
		query.Set("limit", c.Limit)
	}
	if c.Descriptor == "" {
		return query, nil
	}
	descriptors, err := parseDescriptors([]string{c.Descriptor})
	if err != nil {
		return nil, err
	}
	for _, e := range descriptors[0].GetEntries() {
		query.Add("subject", e.GetKey()+"="+e.GetValue())
	}
	return query, nil
}

// maxPages is how many pages of leases are read: more is nothing for a person to read.
const maxPages = 1000

// list reads all pages, each lease once; more says that there were too many. With an error it
// returns those that were read before.
func (o operator) list(ctx context.Context, query url.Values) (list []server.AdminLease, more bool, err error) {
	seen := make(map[string]int) // where in list; one that was renewed meanwhile comes again
	for range maxPages {
		var page server.AdminLeases
		if err := o.get(ctx, "/leases", query, &page); err != nil {
			return list, false, err
		}
		for _, l := range page.Leases {
			if i, again := seen[l.Lease]; again {
				list[i] = l
				continue
			}
			seen[l.Lease] = len(list)
			list = append(list, l)
		}
		if page.Next == "" {
			return list, false, nil
		}
		query.Set("after", page.Next)
	}
	return list, true, nil
}

func printLeases(w io.Writer, list []server.AdminLease, more bool) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(list) > 0 {
		_, _ = fmt.Fprintln(table, "LEASE\tHELD FOR\tEXPIRES IN\tHOLDS") // its error is Flush's
	}
	for _, l := range list {
		_, _ = fmt.Fprintf(table, "%s\t%v\t%v\t%s\n", l.Lease, brief(l.HeldFor), brief(l.ExpiresAfter), holds(l))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	tail := ""
	if more {
		tail = ", and there are more: ask by --limit or -d"
	}
	_, err := fmt.Fprintf(w, "%s%s\n", leaseCount(len(list)), tail)
	return err
}

func leaseCount(n int) string {
	if n == 1 {
		return "1 lease"
	}
	return fmt.Sprintf("%d leases", n)
}

// brief is a duration for people: whole seconds from ten on.
func brief(ms int64) time.Duration {
	d := millis(ms)
	if d >= 10*time.Second {
		return d.Round(time.Second)
	}
	return d.Round(100 * time.Millisecond)
}

// holds says what a lease holds, and for whom.
func holds(l server.AdminLease) string {
	var parts []string
	for _, s := range l.Slots {
		parts = append(parts, subject(s))
	}
	for _, r := range l.Reserved {
		if !r.Settled {
			parts = append(parts, fmt.Sprintf("reserves %d of %s", r.Hits, subject(r.AdminSlot)))
		}
	}
	if len(parts) == 0 {
		parts = append(parts, "nothing any more")
	}
	if l.Lingering {
		parts = append(parts, "lingers")
	}
	if l.Operation != "" {
		parts = append(parts, "operation "+l.Operation)
	}
	if l.Here {
		parts = append(parts, "granted by this replica without the store")
	}
	return strings.Join(parts, ", ")
}

// subject is whose slot it is, with the limit's name if that says more.
func subject(s server.AdminSlot) string {
	var keys []string
	for entry := range strings.SplitSeq(s.Subject, ",") {
		key, _, _ := strings.Cut(entry, "=")
		keys = append(keys, key)
	}
	if strings.Join(keys, ".") == s.Limit {
		return s.Subject
	}
	return s.Subject + " (" + s.Limit + ")"
}

// short names a lease for people, and cannot end it.
func short(id string) string {
	return limit.Holder{Token: limit.LeaseID(id).Token()}.Short()
}

type leasesReleaseCommand struct {
	operator
	Domain string   `required:"" help:"Domain of the leases."`
	Yes    bool     `help:"Do not ask."`
	Leases []string `arg:"" name:"lease" help:"The start of a lease's id, as weir leases shows it, or the whole. It must be the start of one alone."`
}

// Help is shown by weir leases release --help.
func (c *leasesReleaseCommand) Help() string {
	return `Example: weir leases release --domain inference 3kTq0ZbX

Its slots are free at once, and others get them, while the work of whoever held it may go on. The service logs and counts it.

Exit 0: all are released; 1: some are not, or you said no; 2: error.`
}

// minPrefix is the shortest start of an id: a shorter one is a typing error that fits by chance.
const minPrefix = 4

// tokenLength is how many characters of an id are enough to name one lease of a domain.
const tokenLength = 22

// Run ends leases.
func (c *leasesReleaseCommand) Run(con console) error {
	list, more, err := c.list(con.ctx, url.Values{"domain": {c.Domain}})
	if err != nil {
		return err
	}
	var meant []server.AdminLease
	for _, text := range c.Leases {
		l, err := findLease(list, text, c.Domain, more)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(meant, func(m server.AdminLease) bool { return m.Lease == l.Lease }) {
			meant = append(meant, l)
		}
	}
	if !c.Yes {
		yes, err := con.confirm(question(meant))
		if err != nil {
			return err
		}
		if !yes {
			_, _ = fmt.Fprintln(con.stderr, "nothing is released")
			return exit(exitNo)
		}
	}
	body := server.AdminRelease{}
	for _, l := range meant {
		body.Leases = append(body.Leases, l.Lease)
	}
	var answer server.AdminReleased
	if err := c.post(con.ctx, "/leases/release", body, &answer); err != nil {
		return err
	}
	missed, unknown := 0, 0
	for _, r := range answer.Results {
		if _, err := fmt.Fprintf(con.stdout, "%s %s\n", short(r.Lease), r.Result); err != nil {
			return err
		}
		switch r.Result {
		case limit.Released.String():
		case "UNAVAILABLE":
			unknown++
		default:
			missed++
		}
	}
	switch {
	case unknown > 0:
		return fmt.Errorf("%d of %d leases: the service's store did not answer, or another replica granted them while it did not; release them again", unknown, len(answer.Results))
	case missed > 0:
		return exit(exitNo)
	}
	return nil
}

// findLease returns the one lease whose id begins with text.
func findLease(list []server.AdminLease, text, domain string, more bool) (server.AdminLease, error) {
	start := strings.TrimSuffix(text, "…")
	if len(start) < minPrefix {
		return server.AdminLease{}, fmt.Errorf("%q: give at least the first %d characters of the id", text, minPrefix)
	}
	var found []server.AdminLease
	for _, l := range list {
		if strings.HasPrefix(l.Lease, start) {
			found = append(found, l)
		}
	}
	switch {
	case len(found) > 1:
		return server.AdminLease{}, fmt.Errorf("%q: the ids of %d leases begin so; give more of it", text, len(found))
	case more && len(start) < tokenLength: // others may begin so, too
		return server.AdminLease{}, fmt.Errorf("%q: the domain has more than the %d leases that were looked at, so give the whole id: weir release, or weir leases release with all of it", text, len(list))
	case len(found) == 0 && more:
		return server.AdminLease{}, fmt.Errorf("%q: it is none of the first %d leases of the domain; give the whole id to weir release", text, len(list))
	case len(found) == 0:
		return server.AdminLease{}, fmt.Errorf("%q: no live lease of the domain %s has an id that begins so; see weir leases --domain %s", text, domain, domain)
	}
	return found[0], nil
}

// question asks whether to end leases.
func question(list []server.AdminLease) string {
	if len(list) == 1 {
		l := list[0]
		return fmt.Sprintf("Release lease %s, which holds %s, for %v?", short(l.Lease), holds(l), brief(l.HeldFor))
	}
	var b strings.Builder
	for _, l := range list {
		fmt.Fprintf(&b, "%s holds %s, for %v\n", short(l.Lease), holds(l), brief(l.HeldFor))
	}
	fmt.Fprintf(&b, "Release these %s?", leaseCount(len(list)))
	return b.String()
}
