package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"weir/server"
)

type explainCommand struct {
	operator
	Domain      string   `required:"" help:"Domain of the policy."`
	Descriptors []string `name:"descriptor" short:"d" required:"" sep:"none" placeholder:"KEY=VALUE,…" help:"A descriptor: entries, separated by commas. Repeat it for several, which are one request."`
	Hits        *uint64  `placeholder:"N" help:"What the request would cost (1); 0 asks without charging."`
	Output      string   `short:"o" enum:"text,json" default:"text" help:"text or json (${default})."`
}

// Help is shown by weir explain --help.
func (c *explainCommand) Help() string {
	return `Example: weir explain --domain inference -d account=alice,plan=trial -d pool=images

For each descriptor it shows how each entry led to a policy, or why none, and each limit there: whether it is asked, under which key, how it stands, and whether it would pass now; then what would become of the request. It takes nothing. Values of sensitive keys are not shown.

Exit 0: it would be admitted; 1: it would be refused; 2: error.`
}

// Run asks why, and prints it.
func (c *explainCommand) Run(con console) error {
	descriptors, err := adminDescriptors(c.Descriptors)
	if err != nil {
		return err
	}
	var why server.AdminExplained
	if err := c.post(con.ctx, "/explain", server.AdminExplain{Domain: c.Domain, Descriptors: descriptors, Hits: c.Hits}, &why); err != nil {
		return err
	}
	if c.Output == "json" {
		err = printJSON(con.stdout, why)
	} else {
		err = printExplanation(con.stdout, why)
	}
	switch {
	case err != nil:
		return err
	case why.Verdict == nil:
		return errors.New(why.StoreError + "; nobody knows how the limits stand: they are decided by their failure modes")
	case !why.Verdict.Admitted:
		return exit(exitNo)
	}
	return nil
}

func printExplanation(w io.Writer, why server.AdminExplained) error {
	var b strings.Builder
	told := make(map[int]bool) // limits that several descriptors meet
	for i, d := range why.Descriptors {
		fmt.Fprintf(&b, "descriptor %d\n", i+1)
		wide := 0
		for _, s := range d.Steps {
			wide = max(wide, len([]rune(s.Entry)))
		}
		for _, s := range d.Steps {
			fmt.Fprintf(&b, "  %-*s  ", wide, s.Entry)
			if s.Policy == "" {
				b.WriteString("matches nothing\n")
				continue
			}
			fmt.Fprintf(&b, "matches %-11s  %s (%s:%d)", s.Matched, s.Policy, why.File, s.Line)
			if s.Shared {
				b.WriteString(", which all that match share")
			}
			b.WriteByte('\n')
		}
		if d.Why != "" {
			fmt.Fprintf(&b, "  no limit: %s\n", d.Why)
		}
		for _, r := range d.Rules {
			printRule(&b, why, r, told)
		}
	}
	if v := why.Verdict; v != nil {
		b.WriteString(verdictWords(*v, len(why.Limits)) + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func printRule(b *strings.Builder, why server.AdminExplained, r server.AdminRule, told map[int]bool) {
	if r.Limit < 0 || r.Limit >= len(why.Limits) {
		fmt.Fprintf(b, "  - %s: %s: not asked: %s\n", r.Name, r.Words, r.LeftOut)
		return
	}
	l := why.Limits[r.Limit]
	var notes strings.Builder
	if l.Class == "pool" {
		notes.WriteString(" (pool)")
	}
	if l.Shadow {
		notes.WriteString(" (shadow)")
	}
	if l.Quota {
		notes.WriteString(" (quota)")
	}
	fmt.Fprintf(b, "  - %s %s%s: %s\n", l.Kind, r.Name, notes.String(), r.Words)
	if told[r.Limit] {
		fmt.Fprintf(b, "    the same as above: %s\n", l.Key)
		return
	}
	told[r.Limit] = true
	fmt.Fprintf(b, "    key %s, without the store: %s\n", l.Key, l.FailureMode)
	if l.Known {
		fmt.Fprintf(b, "    %s: %s\n", standing(l.AdminLimit), answerWords(l))
	}
}

// answerWords says what a limit would answer.
func answerWords(l server.AdminLimitAnswer) string {
	hits := fmt.Sprintf("%d hits", l.Hits)
	switch {
	case l.Kind == "concurrency":
		hits = "one slot"
	case l.Hits == 1:
		hits = "1 hit"
	}
	if l.Passes {
		return hits + " would pass"
	}
	return fmt.Sprintf("%s would not pass: %s", hits, waitWords(l.Reason, l.RetryAfter, l.Estimated, l.Retryable))
}

func waitWords(reason string, wait int64, estimated, retryable bool) string {
	switch {
	case !retryable:
		return reason + ", it can never pass"
	case estimated:
		return fmt.Sprintf("%s, retry after about %v (estimated)", reason, millis(wait))
	}
	return fmt.Sprintf("%s, retry after %v", reason, millis(wait))
}

func verdictWords(v server.AdminVerdict, limits int) string {
	if !v.Admitted {
		return fmt.Sprintf("it would be refused by %s (%s): %s", v.Limit, v.Class, waitWords(v.Reason, v.RetryAfter, v.Estimated, v.Retryable))
	}
	text := "it would be admitted"
	if limits == 0 {
		text += ": no limit is asked"
	}
	if len(v.Shadowed) > 0 {
		text += "; in shadow, and refusing if enforced: " + strings.Join(v.Shadowed, ", ")
	}
	return text
}
