package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	weirv1 "weir/proto/weir/v1"
)

type inspectCommand struct {
	remote
	Domain      string   `required:"" help:"Domain of the policy."`
	Descriptors []string `name:"descriptor" short:"d" required:"" sep:"none" placeholder:"KEY=VALUE,…" help:"A descriptor: entries, separated by commas. Repeat it for several, which are looked at one after the other."`
	Output      string   `short:"o" enum:"text,json" default:"text" help:"text or json (${default})."`
}

// Help is shown by weir inspect --help.
func (c *inspectCommand) Help() string {
	return `Example: weir inspect --domain inference -d account=alice -d pool=images

It takes nothing and changes nothing. Of a full lane or pool it shows who holds it: the start of each lease's id, the first to expire first, at most 100.

Exit 0: it is shown, whatever it says; 2: error.`
}

// Run looks once at each descriptor's limits and prints how they stand.
func (c *inspectCommand) Run(con console) error {
	descriptors, err := parseDescriptors(c.Descriptors)
	if err != nil {
		return err
	}
	seen := inspection{Limits: []inspectedLimit{}}
	err = c.call(con.ctx, func(ctx context.Context, client weirv1.LeaseServiceClient) error {
		for _, d := range descriptors {
			answer, err := client.Inspect(ctx, &weirv1.InspectRequest{Domain: c.Domain, Entries: d.GetEntries()})
			if err != nil {
				return err
			}
			seen.add(answer)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if c.Output == "json" {
		out := json.NewEncoder(con.stdout)
		out.SetIndent("", "  ")
		return out.Encode(seen)
	}
	return seen.print(con.stdout)
}

// inspection is what inspect prints.
type inspection struct {
	Unlimited bool             `json:"unlimited,omitempty"` // an unlimited policy matched
	Limits    []inspectedLimit `json:"limits"`
}

// inspectedLimit is how one limit stands. Numbers that its kind does not have are 0.
type inspectedLimit struct {
	Name       string            `json:"name"`
	Kind       string            `json:"kind"`
	Class      string            `json:"class"` // lane or pool
	Shadow     bool              `json:"shadow"`
	Capacity   uint64            `json:"capacity"`
	Remaining  uint64            `json:"remaining"`
	Level      int64             `json:"level"` // of a token_bucket
	Count      uint64            `json:"count"` // of the others
	RetryAfter int64             `json:"retry_after_ms"`
	Estimated  bool              `json:"estimated"`
	ResetAfter int64             `json:"reset_after_ms"`
	Holders    []inspectedHolder `json:"holders"`
}

// inspectedHolder is a lease that holds a slot.
type inspectedHolder struct {
	Lease        string `json:"lease"` // the start of its id
	ExpiresAfter int64  `json:"expires_after_ms"`
}

func (n *inspection) add(m *weirv1.InspectResponse) {
	n.Unlimited = n.Unlimited || m.GetUnlimited()
	for _, l := range m.GetLimits() {
		out := inspectedLimit{
			Name: l.GetName(), Kind: kinds[l.GetKind()], Class: className(l.GetClass()), Shadow: l.GetShadow(),
			Capacity: l.GetCapacity(), Remaining: l.GetRemaining(), Level: l.GetLevel(), Count: l.GetCount(),
			RetryAfter: l.GetRetryAfter().AsDuration().Milliseconds(), Estimated: l.GetEstimated(),
			ResetAfter: l.GetResetAfter().AsDuration().Milliseconds(), Holders: []inspectedHolder{},
		}
		for _, h := range l.GetHolders() {
			out.Holders = append(out.Holders, inspectedHolder{h.GetLease(), h.GetExpiresAfter().AsDuration().Milliseconds()})
		}
		n.Limits = append(n.Limits, out)
	}
}

func (n *inspection) print(w io.Writer) error {
	var b strings.Builder
	for _, l := range n.Limits {
		l.print(&b)
	}
	switch {
	case n.Unlimited:
		b.WriteString("unlimited\n")
	case len(n.Limits) == 0:
		b.WriteString(noLimitMet + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (l inspectedLimit) print(b *strings.Builder) {
	fmt.Fprintf(b, "%-12s %s", l.Kind, l.Name)
	if l.Class == className(weirv1.Class_CLASS_POOL) {
		b.WriteString(" (pool)")
	}
	if l.Shadow {
		b.WriteString(" (shadow)")
	}
	reset := millis(l.ResetAfter)
	switch l.Kind {
	case kinds[weirv1.LimitKind_LIMIT_KIND_TOKEN_BUCKET]:
		fmt.Fprintf(b, ": level %d of %d, %d free", l.Level, l.Capacity, l.Remaining)
		if reset > 0 {
			fmt.Fprintf(b, ", full in %v", reset)
		}
	case kinds[weirv1.LimitKind_LIMIT_KIND_WINDOW]:
		fmt.Fprintf(b, ": %d of %d counted, %d free, at 0 again in %v", l.Count, l.Capacity, l.Remaining, reset)
	default:
		fmt.Fprintf(b, ": %d of %d held, %d free", l.Count, l.Capacity, l.Remaining)
	}
	switch {
	case l.Estimated:
		fmt.Fprintf(b, ", wait about %v (estimated)", millis(l.RetryAfter))
	case l.RetryAfter > 0:
		fmt.Fprintf(b, ", wait %v", millis(l.RetryAfter))
	}
	b.WriteByte('\n')
	for _, h := range l.Holders {
		fmt.Fprintf(b, "  %s expires in %v\n", h.Lease, millis(h.ExpiresAfter))
	}
	if more := l.Count - uint64(len(l.Holders)); len(l.Holders) > 0 && more > 0 {
		fmt.Fprintf(b, "  and %d more\n", more)
	}
}

func millis(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// className is a class in the words of policy files.
func className(c weirv1.Class) string {
	return strings.ToLower(strings.TrimPrefix(c.String(), "CLASS_"))
}
