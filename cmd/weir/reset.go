package main

import (
	"fmt"
	"io"
	"strings"

	"weir/server"
)

type resetCommand struct {
	operator
	Domain      string   `required:"" help:"Domain of the policy."`
	Descriptors []string `name:"descriptor" short:"d" required:"" sep:"none" placeholder:"KEY=VALUE,…" help:"A descriptor: entries, separated by commas. Repeat it for several, which are forgotten together."`
	Yes         bool     `help:"Do not ask."`
}

// Help is shown by weir reset --help.
func (c *resetCommand) Help() string {
	return `Example: weir reset --domain inference -d account=alice

A bucket is full again, a window has counted nothing, and of a lane or a pool nobody holds a slot: work that goes on is not counted any more, and its leases cannot be renewed. Where nobody but a crashed client is in the way, weir leases release does less.

It shows how the limits stand, and asks. The service logs and counts it.

Exit 0: it is forgotten; 1: no limit is met, or you said no; 2: error.`
}

// Run forgets the state of what the descriptors meet.
func (c *resetCommand) Run(con console) error {
	descriptors, err := adminDescriptors(c.Descriptors)
	if err != nil {
		return err
	}
	con.notePatterns(c.Descriptors)
	body := server.AdminReset{Domain: c.Domain, Descriptors: descriptors, DryRun: true}
	var now server.AdminResetDone
	if err := c.post(con.ctx, "/reset", body, &now); err != nil {
		return err
	}
	if len(now.Limits) == 0 {
		_, _ = fmt.Fprintln(con.stderr, noLimitMet+"; nothing is forgotten")
		return exit(exitNo)
	}
	if err := printStanding(con.stdout, now.Limits); err != nil {
		return err
	}
	if !c.Yes {
		yes, err := con.confirm("Forget this?")
		if err != nil {
			return err
		}
		if !yes {
			_, _ = fmt.Fprintln(con.stderr, "nothing is forgotten")
			return exit(exitNo)
		}
	}
	body.DryRun = false
	if err := c.post(con.ctx, "/reset", body, &now); err != nil {
		return err
	}
	_, err = fmt.Fprintln(con.stdout, "forgotten")
	return err
}

// printStanding says how limits stand.
func printStanding(w io.Writer, limits []server.AdminLimit) error {
	var b strings.Builder
	for _, l := range limits {
		fmt.Fprintf(&b, "%-12s %s of %s: %s\n", l.Kind, l.Name, l.Subject, standing(l))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// standing is how a limit stands.
func standing(l server.AdminLimit) string {
	switch l.Kind {
	case "token_bucket":
		return fmt.Sprintf("level %d of %d", l.Level, l.Capacity)
	case "rate_limit":
		return fmt.Sprintf("%d of %d counted", l.Count, l.Capacity)
	}
	return fmt.Sprintf("%d of %d held", l.Count, l.Capacity)
}
