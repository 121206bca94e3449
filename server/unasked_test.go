package server_test

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	weirv1 "weir/proto/weir/v1"
	"weir/server"
	"weir/store/memory"
	"weir/store/storetest"
)

const tenPolicy = `
domain: d
descriptors:
  - {key: a, token_bucket: {capacity: 2, refill: 1/h}}
  - {key: b, rate_limit: {unit: day, requests_per_unit: 2, reserve: 10m}}
  - {key: user, concurrency: {max_in_flight: 1, lease: 30s, max_wait: 1m}}
  - {key: pool, token_bucket: {capacity: 2, refill: 1/h}, reject_as: pool}
  - {key: banned, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: long, rate_limit: {unit: day, requests_per_unit: 1}}
`

// remembering is a service that remembers what was refused, on a clock that stands.
func remembering(t *testing.T) *service {
	t.Helper()
	clock := storetest.NewClock()
	s := serviceWith(t, memory.New(memory.Options{Now: clock.Now}), clock, func(o *server.Options) { o.RememberRefusals = time.Second })
	s.setPolicy(t, tenPolicy)
	return s
}

// unasked is how many were refused without asking the store.
func (s *service) unasked(t *testing.T) float64 {
	t.Helper()
	return s.metric(t, `weir_refused_unasked_total{domain="d"}`)
}

func TestWhatWasRefusedIsRefusedAgainUnasked(t *testing.T) {
	s := remembering(t)
	script(t, s,
		"[a=x]", "OK [OK 1]", "[a=x]", "OK [OK 0]",
		"[a=x]", "OVER [OVER 0]", "[a=x]", "OVER [OVER 0]",
		"[a=x][user=u]", "OVER [OVER 0][OK nil]", // of the lane nothing is known
		"[user=u]", "OK [OK 0]", // and it was not taken
	)
	if got := s.unasked(t); got != 2 {
		t.Errorf("%v were refused unasked, want 2", got)
	}
	for series, want := range map[string]float64{
		`weir_decisions_total{domain="d",verdict="refused"}`:                            3,
		`weir_checks_total{domain="d",kind="token_bucket",limit="a",result="refused"}`:  3,
		`weir_refusals_total{class="lane",domain="d",limit="a",reason="bucket_empty"}`:  3,
		`weir_checks_total{domain="d",kind="concurrency",limit="user",result="passed"}`: 1,
	} {
		if got := s.metric(t, series); got != want {
			t.Errorf("%s = %v, want %v", series, got, want)
		}
	}
}

// What this replica gives back counts at once.
func TestWhatIsGivenBackHereIsNotRefusedUnasked(t *testing.T) {
	s := remembering(t)
	script(t, s,
		"[a=x;hits=2]", "OK [OK 0]", "[a=x]", "OVER [OVER 0]", "[a=x]", "OVER [OVER 0]",
		"[a=x;hits=1;neg]", "OK [OK 1]", "[a=x]", "OK [OK 0]",
		// By usage.
		"[weir.stream_id=s1][b=x;hits=2]", "OK [OK nil][OK 0]", "[b=x]", "OVER [OVER 0]", "[b=x]", "OVER [OVER 0]",
		"[weir.event=usage,weir.stream_id=s1,b=x;hits=1]", "OK [OK nil]", "[b=x]", "OK [OK 0]",
	)
	if got := s.unasked(t); got != 2 {
		t.Errorf("%v were refused unasked, want 2", got)
	}
}

// A new policy is asked for.
func TestAnotherPolicyIsNotRefusedUnasked(t *testing.T) {
	s := remembering(t)
	script(t, s, "[a=x;hits=2]", "OK [OK 0]", "[a=x]", "OVER [OVER 0]")
	s.setPolicy(t, `
domain: d
descriptors:
  - {key: a, token_bucket: {capacity: 3, refill: 1/h}}
`)
	script(t, s, "[a=x]", "OVER [OVER 0]", "[a=x]", "OVER [OVER 0]")
	if got := s.unasked(t); got != 1 {
		t.Errorf("%v were refused unasked, want the last alone", got)
	}
}

// What another replica gives back, by a refund or by an operator's reset, counts within the time
// that refusals are remembered.
func TestWhatAnotherReplicaGivesBackIsHonouredInTime(t *testing.T) {
	const remembered = 50 * time.Millisecond
	shared := memory.New(memory.Options{})
	replica := func() *service {
		s := serviceWith(t, shared, nil, func(o *server.Options) { o.RememberRefusals = remembered })
		s.setPolicy(t, tenPolicy)
		return s
	}
	here, there := replica(), replica()
	for name, giveBack := range map[string]func(){
		"refund": func() { ask(t, there.envoy, "d", "[a=refund;hits=1;neg]", 0) },
		"reset": func() {
			w := httptest.NewRecorder()
			r := httptest.NewRequest("POST", "/reset", strings.NewReader(`{"domain": "d", "descriptors": [{"entries": [{"key": "a", "value": "reset"}]}]}`))
			r.Header.Set("Content-Type", "application/json")
			r.Host = "localhost"
			there.Admin().ServeHTTP(w, r)
			if w.Code != 200 {
				t.Fatalf("reset: %d %s", w.Code, w.Body)
			}
		},
	} {
		subject := "[a=" + name + "]"
		script(t, here, "[a="+name+";hits=2]", "OK [OK 0]", subject, "OVER [OVER 0]")
		giveBack()
		begin := time.Now()
		storetest.Eventually(t, name+" is honoured", func() bool { return strings.HasPrefix(ask(t, here.envoy, "d", subject, 0), "OK") })
		t.Logf("%s: honoured after %v", name, time.Since(begin))
	}
}

// A refund of a request that waits for a slot is given when the slot came, and from then on
// counts here.
func TestARefundAfterAWaitIsNotRefusedUnasked(t *testing.T) {
	s := remembering(t)
	script(t, s, "[a=x;hits=2]", "OK [OK 0]")
	held := acquire(t, s.leases, typed("user", "u")).GetLease().GetId()
	refund := costing(2, typed("a", "x"))
	refund.Refund = true
	done := make(chan bool)
	go func() { done <- acquire(t, s.leases, typed("user", "u"), refund).GetAdmitted() }()
	storetest.Eventually(t, "it waits", func() bool { return s.metric(t, "weir_waiting") == 1 })
	script(t, s, "[a=x]", "OVER [OVER 0]") // is remembered
	release(t, s.leases, held)
	if !<-done {
		t.Fatal("not admitted")
	}
	before := s.unasked(t)
	script(t, s, "[a=x]", "OK [OK 1]")
	if got := s.unasked(t) - before; got != 0 {
		t.Errorf("%v refused unasked after this replica's own refund", got)
	}
}

// What can never pass is told so, whatever else is remembered; and so is whose fault it is.
func TestWhatCanNeverPassIsToldSoAlsoUnasked(t *testing.T) {
	for _, tt := range []struct {
		name string
		ask  []*weirv1.Descriptor
		want string // class, reason, retryable
	}{
		{"beside a ban", []*weirv1.Descriptor{typed("a", "x"), typed("banned", "y")}, "CLASS_LANE banned false"},
		{"beside a cost above the capacity", []*weirv1.Descriptor{typed("a", "x"), costing(3, typed("a", "y"))}, "CLASS_LANE cost_exceeds_capacity false"},
		{"a pool beside an empty lane", []*weirv1.Descriptor{typed("pool", "x"), typed("long", "x")}, "CLASS_LANE window_full true"},
	} {
		for _, remember := range []time.Duration{0, time.Second} {
			t.Run(fmt.Sprint(tt.name, " ", remember), func(t *testing.T) {
				clock := storetest.NewClock()
				s := serviceWith(t, memory.New(memory.Options{Now: clock.Now}), clock, func(o *server.Options) { o.RememberRefusals = remember })
				s.setPolicy(t, tenPolicy)
				script(t, s, "[a=x;hits=2]", "OK [OK 0]", "[pool=x;hits=2]", "OK [OK 0]", "[long=x]", "OK [OK 0]", "[a=x]", "OVER [OVER 0]", "[pool=x]", "OVER [OVER 0]")
				v := acquire(t, s.leases, tt.ask...).GetVerdict()
				if got := fmt.Sprint(v.GetClass(), " ", v.GetReason(), " ", v.GetRetryable()); got != tt.want {
					t.Errorf("verdict %s, want %s", got, tt.want)
				}
			})
		}
	}
}
