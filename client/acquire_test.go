package client_test

import (
	"errors"
	"testing"

	"weir/client"
	"weir/store/storetest"
)

func account(name string) client.Request { return client.Ask(client.Describe("account", name)) }

func TestALeaseIsHeldUntilItIsReleased(t *testing.T) {
	s := serve(t, images)
	c := newClient(t, s.conn, client.Options{NoOperations: true})
	ctx := storetest.Context(t)
	l, err := c.Acquire(ctx, account("alice"))
	if err != nil {
		t.Fatal(err)
	}
	if got := slots(t, s.conn, "account", "alice"); got != 1 {
		t.Errorf("%d slots are taken while the lease is held, want 1", got)
	}
	for range 3 {
		l.Release(ctx)
	}
	if got := slots(t, s.conn, "account", "alice"); got != 0 {
		t.Errorf("%d slots are taken after the release, want 0", got)
	}
}

func TestARefusalIsTyped(t *testing.T) {
	s := serve(t, images)
	c := newClient(t, s.conn, client.Options{NoOperations: true})
	ctx := storetest.Context(t)
	for range 3 {
		l, err := c.Acquire(ctx, account("alice"))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Release(ctx)
	}
	l, err := c.Acquire(ctx, account("alice"))
	limited, ok := errors.AsType[*client.LimitedError](err)
	if l != nil || !ok {
		t.Fatalf("Acquire(the 4th of 3 slots) = %v, %v, want a LimitedError", l, err)
	}
	if limited.Class != client.Lane || limited.Reason != "lane_full" || limited.Limit != "account" || !limited.Retryable || limited.RetryAfter <= 0 || !limited.Estimated || len(limited.Limits) != 1 {
		t.Errorf("the refusal is %+v", limited)
	}
}
