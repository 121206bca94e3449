package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weir/client"
	weirv1 "weir/proto/weir/v1"
)

// metered is a policy whose accounts have 1000 tokens a day, and pay what they use.
const metered = `
domain: images
descriptors:
  - key: account
    rate_limit: {unit: day, requests_per_unit: 1000, reserve: 10m, name: tokens}
    concurrency: {max_in_flight: 3, lease: 30s}
`

func estimated(hits uint64) client.Request {
	r := account("alice")
	r.Hits = &hits
	return r
}

// S16: an estimate is reserved, and settled by what was used.
func TestUsageSettlesTheEstimateOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, metered)
		w := newWatcher()
		c := newClient(t, s.conn, client.Options{Observer: w})
		l := acquire(t, c, estimated(400))
		expect(t, "left after the estimate", tokens(t, s.conn, "alice"), 600)
		time.Sleep(time.Minute) // twice its life: it is renewed
		l.Use("tokens", 150)
		if err := l.End(t.Context(), client.Ending{Outcome: "ok"}); err != nil {
			t.Errorf("End: %v", err)
		}
		expect(t, "left after less was used", tokens(t, s.conn, "alice"), 850)
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
		got, err := l.Reconcile(t.Context(), map[string]uint64{"tokens": 999})
		if err != nil {
			t.Errorf("Reconcile: %v", err)
		}
		expect(t, "told again", got["tokens"], client.Settlement{Status: "already_settled"})
		expect(t, "settled", w.count("settlements settled"), 1)

		l = acquire(t, c, estimated(100))
		l.Release(t.Context())
		got, err = l.Reconcile(t.Context(), map[string]uint64{"tokens": 130, "nonsense": 1})
		if err != nil {
			t.Errorf("Reconcile after the release: %v", err)
		}
		expect(t, "usage after the release", got["tokens"], client.Settlement{Status: "settled", Difference: 30})
		expect(t, "usage of what was not reserved", got["nonsense"].Status, "not_reserved")
		expect(t, "left after more was used", tokens(t, s.conn, "alice"), 720)

		l = acquire(t, c, estimated(100))
		if _, err := l.Reconcile(t.Context(), map[string]uint64{"": 0}); err != nil {
			t.Errorf("Reconcile before the release: %v", err)
		}
		l.Release(t.Context())
		expect(t, "left after nothing was used", tokens(t, s.conn, "alice"), 720)
	})
}

// Whoever leaves while the answer is lost has done no work: nothing is taken.
func TestWhatWasReservedForNobodyIsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, metered)
		conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, method string, n int, _ proto.Message) loss {
			if method == "Acquire" && n == 1 {
				return loss{reply: cut}
			}
			return loss{}
		}}
		c := newClient(t, conn, client.Options{})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		if l, err := c.Acquire(ctx, estimated(400)); l != nil || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("Acquire = %v, %v, want the deadline's error", l, err)
		}
		time.Sleep(5 * time.Second)
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
		expect(t, "left", tokens(t, s.conn, "alice"), 1000)
	})
}

// A try that comes late, after the work is over, takes nothing.
func TestALateTryOfAnOperationTakesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		conn := &wire{ClientConnInterface: s.conn}
		c := newClient(t, conn, client.Options{})
		acquire(t, c, account("alice")).Release(t.Context())
		late, err := weirv1.NewLeaseServiceClient(s.conn).Acquire(t.Context(), conn.asked[0])
		if err == nil {
			t.Errorf("the first try, sent again after the release: %v, want an error", late)
		}
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
	})
}

// A misspelt name leaves each estimate as it is: somebody should hear of it, once.
func TestUsageOfWhatReservedNothingIsLoggedOnceANameAndNeverForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, metered)
		var log bytes.Buffer
		c := newClient(t, s.conn, client.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		for range 2 {
			l := acquire(t, c, estimated(1))
			l.Use("tokns", 1)
			l.Release(t.Context())
		}
		l := acquire(t, c, estimated(1))
		for range 2 { // the second finds nothing, as should be
			if _, err := l.Reconcile(t.Context(), map[string]uint64{"": 1}); err != nil {
				t.Error(err)
			}
		}
		l.Release(t.Context())
		if got := log.String(); strings.Count(got, "reserved nothing") != 1 || !strings.Contains(got, "limit=tokns") {
			t.Errorf("the log says\n%s\nwant one line of tokns", got)
		}
	})
}

// accounting is a service whose Release and Reconcile settle, and remember.
type accounting struct {
	*wire
	mu      sync.Mutex
	endings []*weirv1.ReleaseRequest
	status  weirv1.SettlementStatus
	refuse  bool
}

func (a *accounting) Invoke(ctx context.Context, method string, request, reply any, opts ...grpc.CallOption) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	settle := func(list []*weirv1.LeaseUsage) (out []*weirv1.ReconcileResult) {
		for _, u := range list {
			r := &weirv1.ReconcileResult{}
			for _, l := range u.GetLimits() {
				r.Limits = append(r.Limits, &weirv1.Settlement{Status: a.status, Difference: int64(l.GetHits()) - 10})
			}
			out = append(out, r)
		}
		return out
	}
	switch m := request.(type) {
	case *weirv1.ReleaseRequest:
		a.endings = append(a.endings, m)
		if a.refuse && len(m.GetUsage()) > 0 {
			return status.Error(codes.InvalidArgument, "no such limit")
		}
		if err := a.wire.Invoke(ctx, method, &weirv1.ReleaseRequest{LeaseIds: m.GetLeaseIds()}, reply, opts...); err != nil {
			return err
		}
		proto.Merge(reply.(proto.Message), &weirv1.ReleaseResponse{Usage: settle(m.GetUsage())}) //nolint:errcheck // it is one
		return nil
	case *weirv1.ReconcileRequest:
		proto.Merge(reply.(proto.Message), &weirv1.ReconcileResponse{Results: settle(m.GetUsage())}) //nolint:errcheck // it is one
		return nil
	}
	return a.wire.Invoke(ctx, method, request, reply, opts...)
}

func TestAReleaseBringsTheUsage(t *testing.T) {
	s := serve(t, images)
	w := newWatcher()
	a := &accounting{wire: &wire{ClientConnInterface: s.conn}, status: weirv1.SettlementStatus_SETTLEMENT_STATUS_SETTLED}
	c := newClient(t, a, client.Options{Observer: w})
	l := acquire(t, c, account("alice"))
	l.Use("tokens", 1)
	l.Use("tokens", 7)
	l.Use("pages", 3)
	if err := l.End(t.Context(), client.Ending{Outcome: "ok", Usage: map[string]uint64{"pages": 4}}); err != nil {
		t.Fatal(err)
	}
	l.Use("tokens", 8)
	want := &weirv1.ReleaseRequest{LeaseIds: []string{l.ID()}, Outcome: "ok", Usage: []*weirv1.LeaseUsage{{
		LeaseId: l.ID(), Limits: []*weirv1.LimitUsage{{Limit: "pages", Hits: 4}, {Limit: "tokens", Hits: 7}},
	}}}
	if len(a.endings) != 1 || !proto.Equal(a.endings[0], want) {
		t.Errorf("it was told %v, want %v", a.endings, want)
	}
	expect(t, "settlements", w.count("settlements settled"), 2)
}

func TestAUsageThatIsNotTakenKeepsNoSlot(t *testing.T) {
	s := serve(t, images)
	w := newWatcher()
	a := &accounting{wire: &wire{ClientConnInterface: s.conn}, refuse: true}
	c := newClient(t, a, client.Options{Observer: w})
	l := acquire(t, c, account("alice"))
	l.Use("tokens", 7)
	if err := l.End(t.Context(), client.Ending{}); err == nil || !strings.Contains(err.Error(), "no such limit") {
		t.Errorf("End = %v, want the service's error", err)
	}
	expect(t, "slots", slots(t, s.conn, "alice"), 0)
	expect(t, "refused", w.count("settlements refused"), 1)

	l = acquire(t, c, account("alice"))
	if err := l.End(t.Context(), client.Ending{Outcome: "\xff" + strings.Repeat("a", 5<<20)}); err != nil {
		t.Errorf("End with an outcome that is no word: %v", err)
	}
	expect(t, "slots", slots(t, s.conn, "alice"), 0)

	l = acquire(t, c, account("alice"))
	for i := range 65 {
		l.Use(fmt.Sprint(i), 1)
	}
	if err := l.End(t.Context(), client.Ending{}); err == nil || !strings.Contains(err.Error(), "usage of 65 limits, at most 64") {
		t.Errorf("End with usage of 65 limits: %v", err)
	}
	expect(t, "slots", slots(t, s.conn, "alice"), 0)
}

// What no limit's name can be is not sent, so that it is in nobody's way.
func TestANameThatNoLimitCanHaveKeepsNoOtherFromBeingSettled(t *testing.T) {
	s := serve(t, metered)
	w := newWatcher()
	conn := &wire{ClientConnInterface: s.conn}
	c := newClient(t, conn, client.Options{Observer: w})
	for i, name := range []string{strings.Repeat("a", 129), "\xff", strings.Repeat("a", 5<<20)} {
		l := acquire(t, c, estimated(100))
		if _, err := l.Reconcile(t.Context(), map[string]uint64{name: 7}); err == nil || len(err.Error()) > 200 {
			t.Errorf("Reconcile with a name of %d bytes: %v, want an error that is short", len(name), err)
		}
		l.Use(name, 7)
		l.Use("tokens", 10)
		if err := l.End(t.Context(), client.Ending{}); err == nil || len(err.Error()) > 200 {
			t.Errorf("End with a name of %d bytes: %v, want an error that is short", len(name), err)
		}
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
		expect(t, "left", tokens(t, s.conn, "alice"), 1000-10*(i+1))
		expect(t, "refused", w.count("settlements refused"), i+1)
		expect(t, "calls", conn.count("Release"), i+1)
	}
}

func TestUsageIsSentAgainAfterTheRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		w := newWatcher()
		a := &accounting{wire: &wire{ClientConnInterface: s.conn}, status: weirv1.SettlementStatus_SETTLEMENT_STATUS_UNAVAILABLE}
		c := newClient(t, a, client.Options{Observer: w})
		l := acquire(t, c, account("alice"))
		l.Use("tokens", 7)
		if err := l.End(t.Context(), client.Ending{}); err == nil {
			t.Error("End = nil though the usage was not settled")
		}
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
		time.Sleep(5 * time.Minute) // long after the lease has expired
		a.mu.Lock()
		a.status = weirv1.SettlementStatus_SETTLEMENT_STATUS_SETTLED
		a.mu.Unlock()
		time.Sleep(10 * time.Second)
		expect(t, "settled", w.count("settlements settled"), 1)
		expect(t, "unavailable, since it was settled in the end", w.count("settlements unavailable"), 0)
		expect(t, "released", w.count("releases released"), 1)
		expect(t, "pending", w.level(client.ReleasesPending), 0)

		a.mu.Lock()
		a.status = weirv1.SettlementStatus_SETTLEMENT_STATUS_UNAVAILABLE
		a.mu.Unlock()
		l = acquire(t, c, account("alice"))
		l.Use("tokens", 7)
		l.Release(t.Context())
		time.Sleep(2 * time.Hour)
		expect(t, "unavailable to the end", w.count("settlements unavailable"), 1)
		expect(t, "released", w.count("releases released"), 2)
		expect(t, "pending", w.level(client.ReleasesPending), 0)
	})
}

func TestReconcileTellsWhatBecameOfEachLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		w := newWatcher()
		a := &accounting{wire: &wire{ClientConnInterface: s.conn}, status: weirv1.SettlementStatus_SETTLEMENT_STATUS_SETTLED}
		c := newClient(t, a, client.Options{Observer: w})
		l := acquire(t, c, account("alice"))
		for range 2 {
			got, err := l.Reconcile(t.Context(), map[string]uint64{"tokens": 7, "pages": 12})
			if err != nil {
				t.Fatal(err)
			}
			expect(t, "tokens", got["tokens"], client.Settlement{Status: "settled", Difference: -3})
			expect(t, "pages", got["pages"], client.Settlement{Status: "settled", Difference: 2})
			l.Release(t.Context())
		}
		a.mu.Lock()
		a.status = weirv1.SettlementStatus_SETTLEMENT_STATUS_UNAVAILABLE
		a.mu.Unlock()
		if got, err := l.Reconcile(t.Context(), map[string]uint64{"tokens": 7}); got != nil || err == nil {
			t.Errorf("Reconcile while the store is away = %v, %v, want an error", got, err)
		}
		expect(t, "unavailable, of two tries", w.count("settlements unavailable"), 1)
	})
}

// Releases that are sent again go in one call: if the service does not take the usage of
// one of them, it is that one's alone that is not told.
func TestUsageThatIsNotTakenKeepsNoOthersFromBeingSettled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, roomy)
		var isAway atomic.Bool
		conn := &wire{ClientConnInterface: s.conn, lose: func(_ context.Context, _ string, _ int, m proto.Message) loss {
			release, _ := m.(*weirv1.ReleaseRequest)
			for _, u := range release.GetUsage() {
				if u.GetLimits()[0].GetLimit() == "bad" {
					return loss{request: status.Error(codes.InvalidArgument, "bad")}
				}
			}
			if isAway.Load() {
				return loss{request: refused}
			}
			return loss{}
		}}
		w := newWatcher()
		c := newClient(t, conn, client.Options{Observer: w})
		before := tokens(t, s.conn, "alice")
		isAway.Store(false)
		var held []*client.Lease
		for i := range 1000 {
			l := acquire(t, c, estimated(10))
			l.Use("tokens", 3)
			if i == 500 || i == 501 || i == 999 {
				l.Use("bad", 3)
			}
			held = append(held, l)
		}
		isAway.Store(true)
		for _, l := range held {
			l.Release(t.Context())
		}
		isAway.Store(false)
		sent := conn.count("Release")
		time.Sleep(20 * time.Second)
		expect(t, "slots", slots(t, s.conn, "alice"), 0)
		expect(t, "charged", before-tokens(t, s.conn, "alice"), 997*3+3*10)
		expect(t, "refused", w.count("settlements refused"), 3)
		expect(t, "released", w.count("releases released"), 1000)
		if n := conn.count("Release") - sent; n > 100 {
			t.Errorf("it took %d calls to find three of 1000", n)
		}
	})
}

// lease.proto does not let one usage tell of a limit and of each: so they are told one
// after the other.
func TestUsageOfOneLimitAndOfEachIsSettled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, metered+"  - {key: pages, rate_limit: {unit: day, requests_per_unit: 1000, reserve: 10m, name: pages}}\n")
		var isAway atomic.Bool
		conn := &wire{ClientConnInterface: s.conn, lose: away("Release", &isAway, refused)}
		w := newWatcher()
		c := newClient(t, conn, client.Options{Observer: w})
		pages := func() int {
			m, err := weirv1.NewLeaseServiceClient(s.conn).Inspect(t.Context(), &weirv1.InspectRequest{
				Domain: "images", Entries: []*weirv1.Entry{{Key: "pages", Value: "alice"}},
			})
			if err != nil {
				t.Fatal(err)
			}
			return int(m.GetLimits()[0].GetCount())
		}
		for i, end := range []func(*client.Lease){
			func(l *client.Lease) {
				l.Use("", 10)
				l.Use("tokens", 150)
				l.Release(t.Context())
			},
			func(l *client.Lease) {
				l.Use("tokens", 150)
				if err := l.End(t.Context(), client.Ending{Usage: map[string]uint64{"": 10}}); err != nil {
					t.Errorf("End: %v", err)
				}
			},
			func(l *client.Lease) {
				got, err := l.Reconcile(t.Context(), map[string]uint64{"": 10, "tokens": 150})
				if err != nil {
					t.Errorf("Reconcile: %v", err)
				}
				expect(t, "what became of tokens", got["tokens"], client.Settlement{Status: "settled", Difference: -250})
				expect(t, "what became of the rest", got[""], client.Settlement{Status: "settled", Difference: -390})
				l.Release(t.Context())
			},
			func(l *client.Lease) {
				l.Use("", 10)
				l.Use("tokens", 150)
				isAway.Store(true)
				l.Release(t.Context())
				isAway.Store(false)
				time.Sleep(10 * time.Second)
			},
		} {
			r := estimated(400)
			r.Descriptors = append(r.Descriptors, client.Describe("pages", "alice"))
			end(acquire(t, c, r))
			expect(t, "left of tokens", tokens(t, s.conn, "alice"), 1000-150*(i+1))
			expect(t, "pages", pages(), 10*(i+1))
			expect(t, "slots", slots(t, s.conn, "alice"), 0)
			expect(t, "released", w.count("releases released"), i+1)
			expect(t, "settled", w.count("settlements settled"), 2*(i+1))
			expect(t, "settled before", w.count("settlements already_settled"), 0)
		}
	})
}
