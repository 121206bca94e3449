package main

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"weir/store/storetest"
)

// answer is what a client of the service sees.
type answer struct {
	code     int    // 0: none came
	bypassed string // why it was admitted unchecked
	violated string // the limits that refused
}

// problem is the body of a refusal.
type problem struct {
	Status     int
	RetryAfter int      `json:"retry_after_ms"`
	Violated   []string `json:"violated-policies"`
	Retryable  bool
}

// post asks an instance for an image, once, and checks the form of a refusal.
func (w *world) post(ctx context.Context, instance int, account, query string) (a answer) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, w.instances[instance].url+"/images?"+query, http.NoBody)
	if err != nil {
		w.t.Error(err)
		return a
	}
	request.Header.Set("X-Account", account)
	response, err := w.http.Do(request)
	if err != nil {
		return a
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return a
	}
	a.code, a.bypassed = response.StatusCode, response.Header.Get("Limits-Bypassed")
	if a.code != http.StatusTooManyRequests && a.code != http.StatusServiceUnavailable {
		return a
	}
	seconds, err := strconv.Atoi(response.Header.Get("Retry-After"))
	var p problem
	switch unread := json.Unmarshal(body, &p); {
	case err != nil, unread != nil, response.Header.Get("Content-Type") != "application/problem+json":
		w.t.Errorf("a refusal has the headers %v and the body %s", response.Header, body)
	case seconds < 1, seconds != (max(1, p.RetryAfter)+999)/1000, p.Status != a.code, !p.Retryable, len(p.Violated) == 0:
		w.t.Errorf("a refusal with Retry-After %d has the body %s", seconds, body)
	}
	a.violated = strings.Join(p.Violated, " ")
	return a
}

// tally is what a load has seen.
type tally struct{ admitted, lane, pool atomic.Int64 }

// hammer has so many workers ask for images of an account, without any patience, until
// enough. Each keeps to one instance. Bypasses are errors.
func (w *world) hammer(account string, workers int, query string, enough func(*tally) bool) *tally {
	seen := new(tally)
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	var all sync.WaitGroup
	for n := range workers {
		all.Go(func() {
			for !enough(seen) && !w.t.Failed() {
				switch a := w.post(ctx, n%len(w.instances), account, query); {
				case a.code == http.StatusOK && a.bypassed == "":
					seen.admitted.Add(1)
				case a.code == http.StatusTooManyRequests:
					seen.lane.Add(1)
				case a.code == http.StatusServiceUnavailable:
					seen.pool.Add(1)
				default:
					w.t.Errorf("%s: got %+v", account, a)
				}
			}
		})
	}
	all.Wait()
	return seen
}

// hold begins jobs that last, one after the other, and returns what ends them all and
// waits for their requests to return.
func (w *world) hold(instance int, account string, jobs int) (end func()) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var held sync.WaitGroup
	for range jobs {
		before := w.begun(account)
		held.Go(func() {
			if a := w.post(ctx, instance, account, "work=1h"); a.code != 0 {
				w.t.Errorf("a job that lasts got %+v", a)
			}
		})
		storetest.Eventually(w.t, "the job begins", func() bool { return w.begun(account) == before+1 })
	}
	end = func() {
		cancel()
		held.Wait()
	}
	w.t.Cleanup(end)
	return end
}

// events are those of all instances, as they happened.
func (w *world) events() (all []event) {
	for _, i := range w.instances {
		all = append(all, i.events()...)
	}
	slices.SortStableFunc(all, func(a, b event) int {
		return cmp.Or(a.Time.Compare(b.Time), -strings.Compare(a.Message, b.Message)) // ends first
	})
	return all
}

// begun is how many jobs of an account instances have begun, but for those that went
// unchecked.
func (w *world) begun(account string) (n int) {
	for _, e := range w.events() {
		if e.Message == "work begins" && e.Account == account && e.Bypass == "" {
			n++
		}
	}
	return n
}

// most is how many jobs worked at once in all instances together: of an account, or of
// all if that is empty.
func (w *world) most(account string) (most int) {
	now := 0
	for _, e := range w.events() {
		switch {
		case account != "" && e.Account != account:
		case e.Message == "work begins":
			now++
			most = max(most, now)
		case e.Message == "work ends":
			now--
		}
	}
	return most
}

// nothingHeld waits until no lease is left in any replica's account.
func (w *world) nothingHeld(t testing.TB) {
	t.Helper()
	storetest.Eventually(t, "no lease is left", func() bool {
		return w.total(`weir_leases_held{domain="images"}`) == 0
	})
}
