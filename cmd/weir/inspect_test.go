package main

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	weirv1 "weir/proto/weir/v1"
)

// What a service of one's own does not easily come to: debt, a ban, more leases
// than are told.
func TestInspectionInWords(t *testing.T) {
	holder := &weirv1.Holder{Lease: "AAAAAAAA…", ExpiresAfter: durationpb.New(1500 * time.Millisecond)}
	var n inspection
	n.add(&weirv1.InspectResponse{Limits: []*weirv1.LimitState{
		{
			Name: "account", Kind: weirv1.LimitKind_LIMIT_KIND_TOKEN_BUCKET, Class: weirv1.Class_CLASS_LANE, Capacity: 10, Level: -3,
			ResetAfter: durationpb.New(13 * time.Second), RetryAfter: durationpb.New(4 * time.Second),
		},
		{Name: "banned", Kind: weirv1.LimitKind_LIMIT_KIND_WINDOW, Class: weirv1.Class_CLASS_LANE, Shadow: true, ResetAfter: durationpb.New(time.Hour)},
		{
			Name: "pool", Kind: weirv1.LimitKind_LIMIT_KIND_CONCURRENCY, Class: weirv1.Class_CLASS_POOL, Capacity: 2, Count: 5,
			RetryAfter: durationpb.New(time.Second), Estimated: true, Holders: []*weirv1.Holder{holder, holder},
		},
	}})
	var b strings.Builder
	if err := n.print(&b); err != nil {
		t.Fatal(err)
	}
	want := `token_bucket account: level -3 of 10, 0 free, full in 13s, wait 4s
rate_limit   banned (shadow): 0 of 0 counted, 0 free, at 0 again in 1h0m0s
concurrency  pool (pool): 5 of 2 held, 0 free, wait about 1s (estimated)
  AAAAAAAA… expires in 1.5s
  AAAAAAAA… expires in 1.5s
  and 3 more
`
	if got := b.String(); got != want {
		t.Errorf("print = %s\nwant %s", got, want)
	}
}
