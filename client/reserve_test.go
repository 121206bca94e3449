package client_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

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
