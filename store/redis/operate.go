package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"weir/limit"
)

// Leases implements [store.Store].
func (s *Store) Leases(ctx context.Context, domain string, after limit.Slot, n int) (limit.Listing, error) {
	c := newCall(s.scripts.leases)
	c.keys = []string{limit.LeasesKey(domain)}
	c.args = []any{s.clock(), limit.PageSize(n), limit.LeasePrefix(domain), after.Expiry, after.Token}
	reply, err := s.do(ctx, c)
	if err != nil {
		return limit.Listing{}, fmt.Errorf("redis: leases: %w", err)
	}
	page, err := listing(domain, reply)
	if err != nil {
		return limit.Listing{}, fmt.Errorf("redis: leases: %w", err)
	}
	return page, nil
}

// listing reads leases.lua's reply. It has the tokens of leases, which end them: an error
// says nothing of what is in it.
func listing(domain string, reply any) (page limit.Listing, err error) {
	const head, fields = 2, 8
	items, _ := reply.([]any)
	if len(items) < head || (len(items)-head)%fields != 0 {
		return page, fmt.Errorf("a reply of %d items", len(items))
	}
	read := &reader{}
	now, more := read.number(items[0]), read.number(items[1])
	var last limit.Slot
	for f := range slices.Chunk(items[head:], fields) {
		last = limit.Slot{Token: read.text(f[0]), Expiry: read.number(f[1])}
		one := limit.Listed{
			Lease: limit.LeaseOf(domain, last.Token), ExpiresAfter: limit.Millis(last.Expiry - now), Lingering: read.number(f[3]) == 1,
			Stream:    strings.TrimPrefix(read.text(f[4]), limit.StreamKey(domain, "")),
			Operation: strings.TrimPrefix(read.text(f[5]), limit.OperationKey(domain, "")),
		}
		if granted := read.number(f[2]); granted >= 0 {
			one.HeldFor = limit.Millis(max(0, now-granted))
		}
		for p := range slices.Chunk(read.list(f[6], 2), 2) {
			one.Slots = append(one.Slots, limit.ListedSlot{Key: read.text(p[0]), Limit: read.text(p[1])})
		}
		for p := range slices.Chunk(read.list(f[7], 4), 4) {
			one.Reserved = append(one.Reserved, limit.ListedReservation{
				Key: read.text(p[0]), Limit: read.text(p[1]), Hits: read.number(p[2]), Settled: read.number(p[3]) == 1,
			})
		}
		page.Leases = append(page.Leases, one)
	}
	if more == 1 {
		page.Next = last
	}
	if read.wrong {
		return limit.Listing{}, errors.New("a reply of other types than it should have")
	}
	return page, nil
}

// reader reads parts of a reply, and remembers whether one was of a wrong type.
type reader struct{ wrong bool }

func (r *reader) number(part any) int64 {
	n, ok := part.(int64)
	r.wrong = r.wrong || !ok
	return n
}

func (r *reader) text(part any) string {
	s, ok := part.(string)
	r.wrong = r.wrong || !ok
	return s
}

// list is one whose length is a multiple of n.
func (r *reader) list(part any, n int) []any {
	l, ok := part.([]any)
	if !ok || len(l)%n != 0 {
		r.wrong = true
		return nil
	}
	return l
}

// Reset implements [store.Store].
func (s *Store) Reset(ctx context.Context, checks []limit.Check) error {
	if len(checks) == 0 {
		return nil
	}
	c := newCall(s.scripts.reset)
	c.args = []any{s.clock()}
	for _, check := range checks {
		c.keys = append(c.keys, check.Key)
		switch l := check.Limit.(type) {
		case limit.TokenBucket:
			c.args = append(c.args, "b", 0)
		case limit.Window:
			c.args = append(c.args, windowKind(l), l.Length().Milliseconds())
		case limit.Concurrency:
			c.args = append(c.args, "c", 0)
		}
	}
	if _, err := s.do(ctx, c); err != nil {
		return fmt.Errorf("redis: reset: %w", err)
	}
	return nil
}
