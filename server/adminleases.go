package server

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"weir/envoy"
	"weir/limit"
	"weir/policy"
)

// adminPage is how many leases of a domain one request of /leases looks at, at most, unless it says
// n: it takes the store as long as some 50 decisions, and those wait meanwhile.
const adminPage = 100

// Where a cursor of /leases stands: among the leases that this replica granted without the store,
// or among the store's.
const (
	hereCursor  = "here"
	storeCursor = "store"
)

type (
	// AdminLeases is a page of live leases, those that expire first first.
	AdminLeases struct {
		Leases []AdminLease `json:"leases"`
		// Next, if it is not "", asks for the next page, as after. A page may have no leases, and
		// others follow it.
		Next string `json:"next,omitempty"`
	}
	// AdminLease is a live lease.
	AdminLease struct {
		Lease        string             `json:"lease"`            // its whole id, which can end it
		HeldFor      int64              `json:"held_for_ms"`      // in ms
		ExpiresAfter int64              `json:"expires_after_ms"` // in ms, from now
		Lingering    bool               `json:"lingering"`
		Stream       string             `json:"stream,omitempty"`
		Operation    string             `json:"operation,omitempty"`
		Slots        []AdminSlot        `json:"slots"`
		Reserved     []AdminReservation `json:"reserved"`
		// Here: this replica granted it without the store, and it alone knows it.
		Here bool `json:"here,omitempty"`
	}
	// AdminSlot is a slot that a lease holds.
	AdminSlot struct {
		Limit   string `json:"limit"`
		Subject string `json:"subject"` // as it stands in the key; hashed if it is sensitive
		Key     string `json:"key"`
	}
	// AdminReservation is what a lease has reserved.
	AdminReservation struct {
		AdminSlot
		Hits    int64 `json:"hits"`
		Settled bool  `json:"settled"`
	}
)

// adminLeases answers GET /leases?domain=D, with limit=NAME and subject=KEY=VALUE (an entry each, in
// order) if only some are wanted, and after and n.
func (s *Server) adminLeases(r *http.Request) (any, error) {
	q := r.URL.Query()
	domain := q.Get("domain")
	for name := range q {
		if !slices.Contains([]string{"domain", "limit", "subject", "after", "n"}, name) {
			return nil, badRequestf("%q is no parameter of /leases; there are domain, limit, subject, after and n", name)
		}
	}
	if err := envoy.CheckDomain(domain); err != nil {
		return nil, badRequest{err}
	}
	n := adminPage
	if text := q.Get("n"); text != "" {
		var err error
		if n, err = strconv.Atoi(text); err != nil || n < 1 || n > limit.MaxListed {
			return nil, badRequestf("n must be 1..%d, got %q", limit.MaxListed, text)
		}
	}
	wanted, err := s.wanted(domain, q.Get("limit"), q["subject"])
	if err != nil {
		return nil, err
	}
	here, after, err := parseCursor(q.Get("after"))
	if err != nil {
		return nil, err
	}
	answer := AdminLeases{Leases: []AdminLease{}}
	if here {
		page := s.standby.Leases(domain, after, n)
		answer.add(page.Leases, wanted, true)
		switch {
		case page.Next != (limit.Slot{}):
			answer.Next = cursor(hereCursor, page.Next)
			return answer, nil
		case len(answer.Leases) > 0: // the store may be away: these are told all the same
			answer.Next = cursor(storeCursor, limit.Slot{})
			return answer, nil
		}
		after = limit.Slot{}
	}
	page, err := s.listLeases(r.Context(), domain, after, n)
	if err != nil {
		return nil, err
	}
	answer.add(page.Leases, wanted, false)
	if page.Next != (limit.Slot{}) {
		answer.Next = cursor(storeCursor, page.Next)
	}
	return answer, nil
}

// listLeases asks the store.
func (s *Server) listLeases(ctx context.Context, domain string, after limit.Slot, n int) (page limit.Listing, err error) {
	ctx, cancel := detach(ctx)
	defer cancel()
	err = s.call(ctx, "leases", domain, func() (err error) {
		page, err = s.store.Leases(ctx, domain, after, n)
		return err
	})
	return page, err
}

// wanted says which slots and reservations are asked for; a lease without any is left out. Nil: all.
// A domain, a limit or a subject that the policies do not know is an error: a typing error would
// read as if nobody held anything.
func (s *Server) wanted(domain, name string, subject []string) (func(key, limit string) bool, error) {
	set, err := s.adminPolicies(domain)
	if err != nil {
		return nil, err
	}
	if name != "" {
		if names := namesOfLimits(set, domain); !slices.Contains(names, name) {
			return nil, badRequestf("the domain %s has no limit %q; there are: %s", domain, name, few(names))
		}
	}
	if len(subject) == 0 {
		if name == "" {
			return nil, nil
		}
		return func(_, limit string) bool { return limit == name }, nil
	}
	d := AdminDescriptor{}
	for _, text := range subject {
		key, value, ok := strings.Cut(text, "=")
		if !ok {
			return nil, badRequestf("subject %q is not key=value", text)
		}
		d.Entries = append(d.Entries, AdminEntry{Key: key, Value: value})
	}
	asked, err := adminRequest(domain, []AdminDescriptor{d})
	if err != nil {
		return nil, err
	}
	keys := make(map[string]bool)
	for _, c := range set.Match(policy.Request{Domain: domain, Descriptors: asked.Descriptors}).Checks {
		keys[c.Key] = true
	}
	if len(keys) == 0 {
		return nil, badRequestf("the subject meets no limit of the domain")
	}
	return func(key, limit string) bool { return keys[key] && (name == "" || limit == name) }, nil
}

// namesOfLimits are the names of a domain's limits, sorted, each once.
func namesOfLimits(set *policy.Set, domain string) []string {
	names := make(map[string]bool)
	for of, c := range set.Limits() {
		if of == domain && c.Name != policy.OverrideName { // that one has no leases
			names[c.Name] = true
		}
	}
	return sorted(names)
}

// add adds those leases that are wanted.
func (a *AdminLeases) add(leases []limit.Listed, wanted func(key, limit string) bool, here bool) {
	for _, l := range leases {
		out := AdminLease{
			Lease: string(l.Lease), HeldFor: l.HeldFor.Milliseconds(), ExpiresAfter: l.ExpiresAfter.Milliseconds(),
			Lingering: l.Lingering, Stream: l.Stream, Operation: l.Operation, Here: here,
			Slots: []AdminSlot{}, Reserved: []AdminReservation{},
		}
		meant := wanted == nil
		for _, h := range l.Slots {
			meant = meant || wanted(h.Key, h.Limit)
			out.Slots = append(out.Slots, AdminSlot{h.Limit, visible(limit.Subject(h.Key)), h.Key})
		}
		for _, v := range l.Reserved {
			meant = meant || wanted(v.Key, v.Limit)
			out.Reserved = append(out.Reserved, AdminReservation{AdminSlot{v.Limit, visible(limit.Subject(v.Key)), v.Key}, v.Hits, v.Settled})
		}
		if meant {
			a.Leases = append(a.Leases, out)
		}
	}
}

// cursor is where a page begins, as text.
func cursor(where string, at limit.Slot) string {
	return where + "." + strconv.FormatInt(at.Expiry, 10) + "." + at.Token
}

// parseCursor reads one; "" is the beginning.
func parseCursor(text string) (here bool, at limit.Slot, err error) {
	if text == "" {
		return true, at, nil
	}
	where, rest, _ := strings.Cut(text, ".")
	expiry, token, ok := strings.Cut(rest, ".")
	at.Token = token
	if at.Expiry, err = strconv.ParseInt(expiry, 10, 64); err != nil || !ok || at.Expiry < 0 || where != hereCursor && where != storeCursor {
		return false, at, badRequestf("after must be the next of a page before")
	}
	return where == hereCursor, at, nil
}

type (
	// AdminRelease asks to end leases.
	AdminRelease struct {
		Leases []string `json:"leases"` // whole ids, 1..1000
	}
	// AdminReleased tells what each of them was.
	AdminReleased struct {
		Results []AdminResult `json:"results"`
	}
	// AdminResult is what a lease was.
	AdminResult struct {
		Lease string `json:"lease"`
		// Result is RELEASED, NOT_HELD, EXPIRED, or UNAVAILABLE: it is not known.
		Result string `json:"result"`
	}
)

// adminRelease answers POST /leases/release.
func (s *Server) adminRelease(r *http.Request) (any, error) {
	var body AdminRelease
	if err := readJSON(r, &body); err != nil {
		return nil, err
	}
	if err := leaseCount(len(body.Leases)); err != nil {
		return nil, err
	}
	ids := make([]limit.LeaseID, len(body.Leases))
	for i, text := range body.Leases {
		var err error
		if ids[i], err = limit.ParseLeaseID(text); err != nil {
			return nil, badRequestf("leases[%d]: %w", i, err)
		}
	}
	ctx, cancel := detach(r.Context())
	defer cancel()
	answer := AdminReleased{Results: make([]AdminResult, len(ids))}
	freed := make([][]limit.Freed, len(ids))
	each(ids, func(i int, id limit.LeaseID) {
		out := AdminResult{Lease: string(id), Result: "UNAVAILABLE"}
		if r, err := s.releaseInFull(ctx, limit.Ending{Lease: id}, byAdmin); err == nil {
			out.Result, freed[i] = r.Result.String(), r.Freed
		}
		answer.Results[i] = out
	})
	ended := make(map[string]int) // by domain
	names := make(map[string]map[string]bool)
	for i, out := range answer.Results {
		if out.Result != limit.Released.String() {
			continue
		}
		domain := s.label(ids[i].Domain())
		ended[domain]++
		if names[domain] == nil {
			names[domain] = make(map[string]bool)
		}
		for _, f := range freed[i] {
			names[domain][s.metrics.names.of(domain, f.Limit)] = true
		}
	}
	for domain, n := range ended {
		s.log.WarnContext(r.Context(), "an operator released leases", "domain", domain, "leases", n, "limits", sorted(names[domain]))
	}
	return answer, nil
}

// sorted are the members of a set, in order.
func sorted(set map[string]bool) []string {
	names := make([]string, 0, len(set))
	for name := range set {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
