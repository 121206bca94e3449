package server_test

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weir/envoy"
	weirv1 "weir/proto/weir/v1"
	"weir/server"
)

const explainPolicy = `
domain: d
descriptors:
  - {key: account, token_bucket: {capacity: 10, refill: 1/s}}
  - {key: pool, value: p, concurrency: {max_in_flight: 1, lease: 1m}, reject_as: pool}
  - {key: trial, token_bucket: {capacity: 1, refill: 1/m}, shadow_mode: true}
  - {key: q1, rate_limit: {unit: hour, requests_per_unit: 1}, quota_mode: true}
  - {key: q2, rate_limit: {unit: hour, requests_per_unit: 2, name: second}, quota_mode: true}
  - {key: banned, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: secret, sensitive: true, token_bucket: {capacity: 1, refill: 1/m, reserve: 1m}}
`

// What is foreseen is what is decided then; and an explanation takes nothing, however often
// it is asked for.
func TestAnExplanationForeseesTheDecision(t *testing.T) {
	for _, tt := range []struct {
		name string
		took []*weirv1.Descriptor // before
		body string               // descriptors
		hits uint64
		ask  []*weirv1.Descriptor // the same
	}{
		{"admitted", nil, entriesJSON("account", "a"), 1, []*weirv1.Descriptor{typed("account", "a")}},
		{"an empty bucket", []*weirv1.Descriptor{costing(8, typed("account", "a"))}, entriesJSON("account", "a"), 5, []*weirv1.Descriptor{costing(5, typed("account", "a"))}},
		{"too much", nil, entriesJSON("account", "a"), 11, []*weirv1.Descriptor{costing(11, typed("account", "a"))}},
		{"a question", []*weirv1.Descriptor{costing(10, typed("account", "a"))}, entriesJSON("account", "a"), 0, []*weirv1.Descriptor{costing(0, typed("account", "a"))}},
		{"a full pool", []*weirv1.Descriptor{typed("pool", "p")}, entriesJSON("pool", "p"), 1, []*weirv1.Descriptor{typed("pool", "p")}},
		{"a lane beside a pool", []*weirv1.Descriptor{typed("pool", "p"), costing(10, typed("account", "a"))}, entriesJSON("pool", "p") + "," + entriesJSON("account", "a"), 1, []*weirv1.Descriptor{typed("pool", "p"), typed("account", "a")}},
		{"a shadow", []*weirv1.Descriptor{typed("trial", "a")}, entriesJSON("trial", "a"), 1, []*weirv1.Descriptor{typed("trial", "a")}},
		{"one quota of two", []*weirv1.Descriptor{typed("q1", "a")}, entriesJSON("q1", "a") + "," + entriesJSON("q2", "a"), 1, []*weirv1.Descriptor{typed("q1", "a"), typed("q2", "a")}},
		{"both quotas", []*weirv1.Descriptor{typed("q1", "a"), costing(2, typed("q2", "a"))}, entriesJSON("q1", "a") + "," + entriesJSON("q2", "a"), 1, []*weirv1.Descriptor{typed("q1", "a"), typed("q2", "a")}},
		{"a ban", nil, entriesJSON("banned", "a"), 1, []*weirv1.Descriptor{typed("banned", "a")}},
		{"the same twice", []*weirv1.Descriptor{costing(9, typed("account", "a"))}, entriesJSON("account", "a") + "," + entriesJSON("account", "a"), 1, []*weirv1.Descriptor{typed("account", "a"), typed("account", "a")}},
		{"no limit", nil, entriesJSON("nobody", "a"), 1, []*weirv1.Descriptor{typed("nobody", "a")}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := serve(t, explainPolicy)
			if tt.took != nil {
				acquire(t, s.leases, tt.took...)
			}
			s.clock.Advance(300 * time.Millisecond)
			var why server.AdminExplained
			for range 3 {
				why = server.AdminExplained{}
				adminOK(t, s.Server, "POST", "/explain", `{"domain":"d","hits":`+jsonNumber(tt.hits)+`,"descriptors":[`+tt.body+`]}`, &why)
			}
			r := acquire(t, s.leases, tt.ask...)
			v := r.GetVerdict()
			want := &server.AdminVerdict{Admitted: r.GetAdmitted(), Shadowed: []string{}}
			for _, w := range v.GetShadowed() {
				want.Shadowed = append(want.Shadowed, w.GetLimit())
			}
			if !want.Admitted {
				want.Class = strings.ToLower(strings.TrimPrefix(v.GetClass().String(), "CLASS_"))
				want.Limit, want.Reason = v.GetLimit(), v.GetReason()
				want.RetryAfter = v.GetRetryAfter().AsDuration().Milliseconds()
				want.Estimated, want.Retryable = v.GetEstimated(), v.GetRetryable()
			}
			if diff := cmp.Diff(want, why.Verdict); diff != "" {
				t.Errorf("decided and foreseen (-want +got):\n%s", diff)
			}
		})
	}
}

func entriesJSON(key, value string) string {
	return `{"entries":[{"key":"` + key + `","value":"` + value + `"}]}`
}

func jsonNumber(n uint64) string { return strconv.FormatUint(n, 10) }

func TestAnExplanationTellsEachLimit(t *testing.T) {
	s := serve(t, explainPolicy)
	acquire(t, s.leases, costing(8, typed("account", "a")))
	var why server.AdminExplained
	adminOK(t, s.Server, "POST", "/explain", `{"domain":"d","descriptors":[{"entries":[{"key":"account","value":"a"},{"key":"weir.stream_id","value":"s"}],"hits":4},`+entriesJSON("secret", "hunter2")+`]}`, &why)
	if len(why.Limits) != 2 {
		t.Fatalf("%+v", why)
	}
	want := server.AdminLimitAnswer{
		AdminLimit: server.AdminLimit{
			Name: "account", Kind: "token_bucket", Class: "lane", Subject: "account=a", Key: "weir:{d}:b:account=a", Capacity: 10, Remaining: 2, Level: 2, ResetAfter: 8000,
		},
		Hits: 4, FailureMode: "open", Known: true, Reason: "bucket_empty", RetryAfter: 2000, Retryable: true,
	}
	if diff := cmp.Diff(want, why.Limits[0]); diff != "" {
		t.Errorf("account (-want +got):\n%s", diff)
	}
	if got := why.Limits[1]; got.Reserves != 60_000 || !got.Passes || !strings.HasPrefix(got.Subject, "secret=#") {
		t.Errorf("secret: %+v", got)
	}
	steps := []server.AdminStep{{Entry: "secret=(hidden)", Matched: "by key", Policy: "secret", Line: 10}}
	if diff := cmp.Diff(steps, why.Descriptors[1].Steps); diff != "" {
		t.Errorf("the walk (-want +got):\n%s", diff)
	}
	if _, text := admin(s.Server, "POST", "/explain", `{"domain":"d","descriptors":[`+entriesJSON("secret", "hunter2")+`]}`); strings.Contains(text, "hunter2") {
		t.Errorf("a secret is in %s", text)
	}
}

func TestAnExplanationRefusesWhatItDoesNotUnderstand(t *testing.T) {
	s := newService(t, envoy.Options{})
	body := `{"domain":"d","descriptors":[` + entriesJSON("account", "a") + `]}`
	if code, text := admin(s.Server, "POST", "/explain", body); code != 503 || text != "no policy is loaded yet" {
		t.Errorf("without policies = %d %s", code, text)
	}
	s.setPolicy(t, explainPolicy)
	for body, want := range map[string]string{
		`{"domain":"d","descriptors":[]}`:                                        "descriptors is empty",
		`{"domain":"d","hits":-1,"descriptors":[` + entriesJSON("a", "b") + `]}`: "cannot unmarshal number -1",
		`{"domain":"d","hit":1,"descriptors":[` + entriesJSON("a", "b") + `]}`:   `unknown field "hit"`,
	} {
		if code, text := admin(s.Server, "POST", "/explain", body); code != 400 || !strings.Contains(text, want) {
			t.Errorf("%s = %d %s, want 400 %s", body, code, text, want)
		}
	}
}
