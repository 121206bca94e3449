package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"weir/store"
)

func TestAnAnswerThatIsAnErrorIsNoLostConnection(t *testing.T) {
	for err, want := range map[error]string{
		fmt.Errorf("dial: %w", store.ErrUnavailable):                                   storeUnavailable,
		fmt.Errorf("%w: %w", store.ErrUnavailable, context.DeadlineExceeded):           storeTimeout,
		fmt.Errorf("%w: %w: OOM command", store.ErrUnavailable, store.ErrNotServing):   storeError,
		fmt.Errorf("%w: %w: LOADING Redis", store.ErrUnavailable, store.ErrNotServing): storeError,
		fmt.Errorf("%w: %w: READONLY You", store.ErrUnavailable, store.ErrNotServing):  storeError,
		errors.New("WRONGTYPE Operation"):                                              storeError,
		errBreakerOpen:                                                                 breakerOpen,
	} {
		if got := reason(err); got != want {
			t.Errorf("reason(%v) = %s, want %s", err, got, want)
		}
	}
}

func TestABreakerKeepsCallsFromAStoreThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var changes []string
		all := newBreakers(func(domain string, open bool) { changes = append(changes, fmt.Sprint(domain, " ", open)) })
		b := all.of("d")
		calls := 0
		// expect wants a call that ends so to be made, or not.
		expect := func(when string, ends error, made bool) {
			t.Helper()
			before := calls
			got := b.call(func() error { calls++; return ends })
			want := ends
			if !made {
				want = errBreakerOpen
			}
			if !errors.Is(got, want) || (calls > before) != made {
				t.Fatalf("%s: %v after %d calls, want %v", when, got, calls-before, want)
			}
		}
		away := fmt.Errorf("dial: %w", store.ErrUnavailable)
		full := fmt.Errorf("%w: %w: OOM", store.ErrUnavailable, store.ErrNotServing)
		bug := errors.New("WRONGTYPE")
		for range 20 { // what answers keeps nobody waiting
			expect("an answer", full, true)
			expect("an answer", bug, true)
		}
		for range 20 {
			for range breakAfter - 1 {
				expect("not in a row", away, true)
			}
			expect("not in a row", nil, true)
		}
		for range breakAfter {
			expect("until it opens", away, true)
		}
		expect("open", nil, false)
		time.Sleep(10 * stayOpen)
		expect("open, as long as the store says nothing at all", nil, false)
		if got := all.of("other").call(func() error { return nil }); got != nil {
			t.Errorf("another domain: %v, want a call", got)
		}
		if !all.someOpen() {
			t.Error("no breaker is open")
		}

		// One at a time, once the store answers something.
		if got := all.answered(); got != nil {
			t.Errorf("%v were not tried, and could not be", got)
		}
		err := b.call(func() error {
			expect("beside a probe", nil, false)
			return away
		})
		if !errors.Is(err, away) {
			t.Errorf("the probe: %v", err)
		}
		expect("after a probe that failed", nil, false)
		_ = all.answered()
		expect("at once after it", nil, false)
		time.Sleep(stayOpen + time.Millisecond)
		// Nobody has asked since: somebody should.
		if got := all.answered(); !slices.Equal(got, []*breaker{b}) {
			t.Errorf("%v were not tried, want d", got)
		}
		expect("the next probe", nil, true)
		expect("closed", nil, true)
		if all.someOpen() {
			t.Error("a breaker is open")
		}
		if got := all.answered(); got != nil {
			t.Errorf("%v were not tried, and need not be", got)
		}
		if want := []string{"d true", "d false"}; !slices.Equal(changes, want) {
			t.Errorf("changes %q, want %q", changes, want)
		}
	})
}

// A call that panics is one that failed, and the probe's place is free again.
func TestABreakerOutlivesAPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBreakers(func(string, bool) {}).of("d")
		for range 2 * breakAfter {
			func() {
				defer func() { _ = recover() }()
				_ = b.call(func() error { panic("a bug") })
			}()
		}
		if err := b.call(func() error { return nil }); !errors.Is(err, errBreakerOpen) {
			t.Fatalf("after panics: %v, want it open", err)
		}
		b.probing.Store(true)
		time.Sleep(stayOpen + time.Millisecond)
		if err := b.call(func() error { return nil }); err != nil {
			t.Errorf("the probe: %v", err)
		}
	})
}
