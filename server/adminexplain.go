package server

import (
	"net/http"
	"time"

	"google.golang.org/grpc/status"

	"weir/limit"
	"weir/policy"
)

type (
	// AdminExplain asks which limits a request would meet, why, and what would become of it.
	AdminExplain struct {
		Domain      string            `json:"domain"`
		Descriptors []AdminDescriptor `json:"descriptors"`
		Hits        *uint64           `json:"hits,omitempty"` // nil: 1; 0 asks without charging
	}
	// AdminExplained is why.
	AdminExplained struct {
		// File has the domain's policies, in the line Line; "" if no policy has the domain.
		File        string             `json:"file"`
		Line        int                `json:"line"`
		Version     string             `json:"version"` // of the policies in force
		Descriptors []AdminWalk        `json:"descriptors"`
		Limits      []AdminLimitAnswer `json:"limits"` // that would be asked, each once
		// Verdict is missing if the store did not answer; StoreError says how.
		Verdict    *AdminVerdict `json:"verdict,omitempty"`
		StoreError string        `json:"store_error,omitempty"`
	}
	// AdminWalk is what became of one descriptor.
	AdminWalk struct {
		Steps []AdminStep `json:"steps"`
		Why   string      `json:"why,omitempty"` // there are no limits
		Rules []AdminRule `json:"rules"`
	}
	// AdminStep is where an entry led.
	AdminStep struct {
		Entry   string `json:"entry"`
		Matched string `json:"matched"` // exactly, by wildcard, by key, or nothing
		Policy  string `json:"policy,omitempty"`
		Line    int    `json:"line,omitempty"`
		Shared  bool   `json:"shared,omitempty"` // all that match the pattern share one subject
	}
	// AdminRule is one limit of the policy that was reached.
	AdminRule struct {
		Name    string `json:"name"`
		Words   string `json:"words"`
		Line    int    `json:"line,omitempty"`     // 0: a request's own
		Limit   int    `json:"limit"`              // where it stands in limits; -1: it is not asked
		LeftOut string `json:"left_out,omitempty"` // why not
	}
	// AdminLimitAnswer is how a limit stands, and what it would answer.
	AdminLimitAnswer struct {
		AdminLimit
		Hits        int64  `json:"hits"`
		Quota       bool   `json:"quota"` // it refuses only if every quota limit of the request is over
		FailureMode string `json:"failure_mode"`
		Reserves    int64  `json:"reserves_ms"` // in ms: how long a reservation lives; 0: it reserves nothing
		Known       bool   `json:"known"`       // false: the store did not answer, and what follows means nothing
		Passes      bool   `json:"passes"`
		Reason      string `json:"reason,omitempty"` // why it does not
		RetryAfter  int64  `json:"retry_after_ms"`   // in ms; 0: now
		Estimated   bool   `json:"estimated"`
		Retryable   bool   `json:"retryable"` // of one that does not pass: it may later
	}
	// AdminVerdict is what would become of the request now.
	AdminVerdict struct {
		Admitted   bool     `json:"admitted"`
		Class      string   `json:"class,omitempty"`
		Limit      string   `json:"limit,omitempty"`
		Reason     string   `json:"reason,omitempty"`
		RetryAfter int64    `json:"retry_after_ms"` // in ms; 0: now
		Estimated  bool     `json:"estimated"`
		Retryable  bool     `json:"retryable"`
		Shadowed   []string `json:"shadowed"` // limits that would refuse if they were enforced
	}
)

// adminExplain answers POST /explain. It takes nothing.
func (s *Server) adminExplain(r *http.Request) (any, error) {
	var body AdminExplain
	if err := readJSON(r, &body); err != nil {
		return nil, err
	}
	asked, err := adminRequest(body.Domain, body.Descriptors)
	if err != nil {
		return nil, err
	}
	if body.Hits != nil {
		for i := range asked.Descriptors {
			if d := &asked.Descriptors[i]; !d.HasHits {
				d.Hits, d.HasHits = *body.Hits, true
			}
		}
	}
	set := s.policies()
	if set == nil {
		return nil, errNoPolicy
	}
	if _, err := match(set, asked); err != nil {
		return nil, err
	}
	e := set.Explain(asked)
	out := AdminExplained{File: e.File, Line: e.Line, Version: set.Version(), Descriptors: make([]AdminWalk, len(e.Descriptors)), Limits: make([]AdminLimitAnswer, len(e.Match.Checks))}
	for i, d := range e.Descriptors {
		out.Descriptors[i] = adminWalk(d)
	}
	checks := e.Match.Checks
	states, err := s.inspect(r.Context(), body.Domain, checks, detachedTimeout)
	if err != nil {
		out.StoreError = status.Convert(toStatus(err)).Message()
		for i, c := range checks {
			out.Limits[i] = s.adminAnswer(c, limit.State{})
		}
		return out, nil
	}
	estimate := func(c limit.Check) time.Duration { return s.holds.estimate(body.Domain, c) }
	d := limit.Foresee(checks, states)
	for i, c := range checks {
		answer := s.adminAnswer(c, states[i])
		answer.Known, answer.Passes = true, d.Results[i].Passed
		if !answer.Passes {
			// What it alone would say.
			alone := c
			alone.Shadow, alone.Quota = false, 0
			v := limit.Judge([]limit.Check{alone}, limit.Decision{Results: d.Results[i : i+1]}, estimate)
			answer.Reason, answer.RetryAfter = string(v.Reason), v.RetryAfter.Milliseconds()
			answer.Estimated, answer.Retryable = v.Estimated, v.Retryable
		}
		out.Limits[i] = answer
	}
	out.Verdict = adminVerdict(limit.Judge(checks, d, estimate))
	return out, nil
}

func adminWalk(d policy.Explained) AdminWalk {
	out := AdminWalk{Steps: []AdminStep{}, Why: d.Why, Rules: []AdminRule{}}
	for _, step := range d.Steps {
		out.Steps = append(out.Steps, AdminStep{Entry: step.Entry, Matched: string(step.How), Policy: step.Policy, Line: step.Line, Shared: step.Shared})
	}
	for _, rule := range d.Rules {
		out.Rules = append(out.Rules, AdminRule{Name: rule.Name, Words: rule.Words, Line: rule.Line, Limit: rule.Check, LeftOut: rule.LeftOut})
	}
	return out
}

func (s *Server) adminAnswer(c limit.Check, state limit.State) AdminLimitAnswer {
	return AdminLimitAnswer{
		AdminLimit: adminLimit(c, state), Hits: c.Hits, Quota: c.Quota != 0,
		FailureMode: s.standby.Mode(c).String(), Reserves: c.Reserve.Milliseconds(),
	}
}

func adminVerdict(v limit.Verdict) *AdminVerdict {
	out := &AdminVerdict{Admitted: v.Admitted, Shadowed: []string{}}
	for _, w := range v.Shadowed {
		out.Shadowed = append(out.Shadowed, w.Limit)
	}
	if !v.Admitted {
		out.Class, out.Limit, out.Reason = v.Class.String(), v.Limit, string(v.Reason)
		out.RetryAfter, out.Estimated, out.Retryable = v.RetryAfter.Milliseconds(), v.Estimated, v.Retryable
	}
	return out
}
