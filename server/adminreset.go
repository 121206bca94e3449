package server

import (
	"context"
	"net/http"

	"weir/limit"
)

type (
	// AdminReset asks to forget the state of each limit that the descriptors meet.
	AdminReset struct {
		Domain      string            `json:"domain"`
		Descriptors []AdminDescriptor `json:"descriptors"`
		DryRun      bool              `json:"dry_run,omitempty"` // look, and forget nothing
	}
	// AdminResetDone tells what was forgotten, or would be.
	AdminResetDone struct {
		Limits []AdminLimit `json:"limits"` // as they stood just before
		Reset  bool         `json:"reset"`  // false: nothing was changed
	}
	// AdminLimit is how a limit stands for a subject. Numbers that its kind does not have are 0.
	AdminLimit struct {
		Name       string `json:"name"`
		Kind       string `json:"kind"`  // token_bucket, rate_limit or concurrency
		Class      string `json:"class"` // lane or pool
		Shadow     bool   `json:"shadow"`
		Subject    string `json:"subject"` // as it stands in the key
		Key        string `json:"key"`
		Capacity   int64  `json:"capacity"`
		Remaining  int64  `json:"remaining"`
		Level      int64  `json:"level"`          // of a token_bucket
		Count      int64  `json:"count"`          // of the others
		ResetAfter int64  `json:"reset_after_ms"` // in ms: until it is as new
	}
)

// adminReset answers POST /reset.
func (s *Server) adminReset(r *http.Request) (any, error) {
	var body AdminReset
	if err := readJSON(r, &body); err != nil {
		return nil, err
	}
	asked, err := adminRequest(body.Domain, body.Descriptors)
	if err != nil {
		return nil, err
	}
	set, err := s.adminPolicies(body.Domain)
	if err != nil {
		return nil, err
	}
	m, err := match(set, asked)
	if err != nil {
		return nil, err
	}
	ctx, cancel := detach(r.Context())
	defer cancel()
	states, err := s.inspect(ctx, body.Domain, m.Checks, detachedTimeout)
	if err != nil {
		return nil, err
	}
	done := AdminResetDone{Limits: make([]AdminLimit, len(states))}
	for i, c := range m.Checks {
		done.Limits[i] = adminLimit(c, states[i])
	}
	if body.DryRun || len(m.Checks) == 0 {
		return done, nil
	}
	if err := s.reset(ctx, body.Domain, m.Checks); err != nil {
		return nil, err
	}
	done.Reset = true
	return done, nil
}

// reset forgets the state of checks, counts that and tells of it. Its ctx is one of detach.
func (s *Server) reset(ctx context.Context, domain string, checks []limit.Check) error {
	defer s.givingBack(keysOf(checks))()
	err := s.call(ctx, "reset", domain, func() error { return s.store.Reset(ctx, checks) })
	if err != nil {
		return err
	}
	s.standby.Reset(checks)
	label := s.label(domain)
	names := make(map[string]bool)
	for _, c := range checks {
		names[s.metrics.names.of(label, c.Name)] = true
		if _, slot := c.Limit.(limit.Concurrency); slot {
			s.waits.wake(c.Key)
		}
	}
	s.metrics.resets.WithLabelValues(label).Inc()
	s.log.WarnContext(ctx, "an operator had the state of a subject forgotten", "domain", label, "limits", sorted(names))
	return nil
}

func adminLimit(c limit.Check, state limit.State) AdminLimit {
	_, capacity := kindOf(c.Limit)
	return AdminLimit{
		Name: c.Name, Kind: kind(c.Limit), Class: c.Class.String(), Shadow: c.Shadow,
		Subject: visible(limit.Subject(c.Key)), Key: c.Key, Capacity: int64(capacity),
		Remaining: state.Remaining, Level: state.Level, Count: state.Count, ResetAfter: state.ResetAfter.Milliseconds(),
	}
}
