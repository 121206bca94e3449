package storetest

import (
	"context"
	"testing"
	"time"
)

// Deadline is how long a test waits for what must come.
const Deadline = 20 * time.Second

// Context is a context for one call of a test.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), Deadline)
	t.Cleanup(cancel)
	return ctx
}

// Eventually asks again and again until ok, which what describes.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	end := time.After(Deadline)
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("not in %v: %s", Deadline, what)
		}
	}
}
