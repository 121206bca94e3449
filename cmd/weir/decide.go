package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	weirv1 "weir/proto/weir/v1"
)

type decideCommand struct {
	remote
	Domain      string   `required:"" help:"Domain of the policy."`
	Descriptors []string `name:"descriptor" short:"d" required:"" sep:"none" placeholder:"KEY=VALUE,…" help:"A descriptor: entries, separated by commas. Repeat it for several."`
	Hits        *uint64  `placeholder:"N" help:"What the request costs (1); 0 asks without charging."`
	OperationID *string  `placeholder:"ID" help:"Names the operation, so that asking again takes nothing while its lease is held."`
	Attempt     uint32   `placeholder:"N" help:"Which try of the operation this is, from 1 on. After the release of a lease, an attempt that is no higher than that lease's is late and takes nothing."`
	Output      string   `short:"o" enum:"text,json" default:"text" help:"text or json (${default})."`
}

// Help is shown by weir decide --help.
func (c *decideCommand) Help() string {
	return `Example: weir decide --domain inference -d account=alice -d pool=images -o json

A lease that is granted holds its slots until weir release, or until it expires.`
}

// Run asks once and prints the answer.
func (c *decideCommand) Run(con console) error {
	descriptors, err := parseDescriptors(c.Descriptors)
	if err != nil {
		return err
	}
	m := &weirv1.AcquireRequest{Domain: c.Domain, Descriptors: descriptors, Hits: c.Hits, Attempt: c.Attempt}
	if c.OperationID != nil {
		if m.OperationId = *c.OperationID; m.OperationId == "" {
			return errors.New("--operation-id is empty; name the operation, or leave the flag out")
		}
	}
	var answer *weirv1.AcquireResponse
	err = c.call(con.ctx, func(ctx context.Context, client weirv1.LeaseServiceClient) (err error) {
		answer, err = client.Acquire(ctx, m)
		return err
	})
	if err != nil {
		return err
	}
	a := readAnswer(answer)
	if c.Output == "json" {
		out := json.NewEncoder(con.stdout)
		out.SetIndent("", "  ")
		err = out.Encode(a)
	} else {
		err = a.print(con.stdout)
	}
	if err == nil && !a.Admitted {
		return exit(exitNo)
	}
	return err
}

// answer is what decide prints.
type answer struct {
	Admitted     bool         `json:"admitted"`
	Replayed     bool         `json:"replayed,omitempty"` // the operation held its lease already
	LeaseID      string       `json:"lease_id,omitempty"`
	LeaseTTL     int64        `json:"lease_ttl_ms,omitempty"`
	RejectClass  string       `json:"reject_class,omitempty"` // lane or pool
	Reason       string       `json:"reason,omitempty"`
	Limit        string       `json:"limit,omitempty"` // that Reason is about
	RetryAfter   int64        `json:"retry_after_ms,omitempty"`
	Estimated    bool         `json:"estimated,omitempty"`
	Retryable    *bool        `json:"retryable,omitempty"` // of a refusal
	Bypass       string       `json:"bypass,omitempty"`
	BypassReason string       `json:"bypass_reason,omitempty"`
	Limits       []limitState `json:"limits"`
	unlimited    bool         // an unlimited policy matched
}

// noLimitMet tells that nothing limits what was asked: often a typing error.
const noLimitMet = "no limit met"

// limitState is one limit that the request met.
type limitState struct {
	Name       string `json:"name"`
	Kind       string `json:"kind"`
	Passed     bool   `json:"passed"`
	Shadow     bool   `json:"shadow,omitempty"`
	Remaining  uint64 `json:"remaining"`
	Capacity   uint64 `json:"capacity"`
	ResetAfter int64  `json:"reset_after_ms,omitempty"`
}

var kinds = map[weirv1.LimitKind]string{
	weirv1.LimitKind_LIMIT_KIND_TOKEN_BUCKET: "token_bucket",
	weirv1.LimitKind_LIMIT_KIND_WINDOW:       "rate_limit",
	weirv1.LimitKind_LIMIT_KIND_CONCURRENCY:  "concurrency",
}

func readAnswer(m *weirv1.AcquireResponse) answer {
	a := answer{
		Admitted: m.GetAdmitted(),
		Replayed: m.GetReplayed(),
		LeaseID:  m.GetLease().GetId(),
		LeaseTTL: m.GetLease().GetTtl().AsDuration().Milliseconds(),
		Limits:   []limitState{},
	}
	if m.GetBypass() != weirv1.Bypass_BYPASS_UNSPECIFIED {
		a.Bypass = strings.ToLower(strings.TrimPrefix(m.GetBypass().String(), "BYPASS_"))
		a.BypassReason = m.GetBypassReason()
	}
	if v := m.GetVerdict(); !a.Admitted {
		a.RejectClass = className(v.GetClass())
		a.Reason, a.Limit, a.Estimated = v.GetReason(), v.GetLimit(), v.GetEstimated()
		a.RetryAfter = v.GetRetryAfter().AsDuration().Milliseconds()
		a.Retryable = &v.Retryable
	}
	for _, d := range m.GetStatuses() {
		a.unlimited = a.unlimited || d.GetUnlimited()
		for _, l := range d.GetLimits() {
			a.Limits = append(a.Limits, limitState{
				Name: l.GetName(), Kind: kinds[l.GetKind()], Passed: l.GetPassed(), Shadow: l.GetShadow(),
				Remaining: l.GetRemaining(), Capacity: l.GetCapacity(), ResetAfter: l.GetResetAfter().AsDuration().Milliseconds(),
			})
		}
	}
	return a
}

func (a answer) print(w io.Writer) error {
	var b strings.Builder
	without := ""
	if a.Bypass != "" {
		without = fmt.Sprintf(" without the store (%s: %s)", a.Bypass, a.BypassReason)
	}
	switch {
	case a.Replayed:
		b.WriteString("admitted before: the operation holds its lease already\n")
	case a.Admitted:
		fmt.Fprintf(&b, "admitted%s\n", without)
	case a.Retryable != nil && *a.Retryable:
		guess := ""
		if a.Estimated {
			guess = " (estimated)"
		}
		fmt.Fprintf(&b, "refused%s by %s: %s (%s), retry after %v%s\n", without, a.Limit, a.Reason, a.RejectClass, millis(a.RetryAfter), guess)
	default:
		fmt.Fprintf(&b, "refused%s by %s: %s (%s), it can never pass\n", without, a.Limit, a.Reason, a.RejectClass)
	}
	if a.LeaseID != "" {
		fmt.Fprintf(&b, "lease %s for %v\n", a.LeaseID, millis(a.LeaseTTL))
	}
	if a.Admitted && a.Bypass == "" && !a.unlimited && len(a.Limits) == 0 {
		b.WriteString(noLimitMet + "\n")
	}
	for _, l := range a.Limits {
		fmt.Fprintf(&b, "  %-12s %s: %d of %d left", l.Kind, l.Name, l.Remaining, l.Capacity)
		if !l.Passed {
			b.WriteString(", not enough")
		}
		if l.Shadow {
			b.WriteString(" (shadow)")
		}
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}
