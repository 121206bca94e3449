package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"weir/store/storetest"
)

// prompts are all ways in which a job can end.
var prompts = []string{"sing a song", "fail", "deny it", "vanish at once", "break off", "nonsense please", "a long song", "slow song"}

// standing has the bucket of requests gain nothing, and the day never end.
var standing = []string{"capacity: 60, refill: 60/m", "capacity: 60, refill: 1/d", "unit: day", "unit: year, unit_multiplier: 100"}

func TestTheTotalsOfFiveReplicasAreExactUnderFaults(t *testing.T) {
	f := start(t, 5, standing...)
	users := []string{"alice", "bob", "carol"}
	f.give("alice", "free", "bob", "free", "carol", "free", "dora", "free")
	for _, w := range f.weirs { // what is left of a reply that is cut never comes
		if _, err := w.Toxics.AddToxicJson(bytes.NewReader([]byte(`{"type":"limit_data","stream":"downstream","attributes":{"bytes":1500}}`))); err != nil {
			t.Fatal(err)
		}
	}
	var asked, away atomic.Int64
	// load has two callers at each of the replicas, who ask for all users until stop, a
	// moment that comes, or each has asked so often.
	load := func(replicas []*replica, times int) *sync.WaitGroup {
		var callers sync.WaitGroup
		for i, r := range replicas {
			for c := range 2 {
				callers.Go(func() {
					for n := range times {
						switch a := r.ask(t, users[(n+i)%len(users)], prompts[(n+c*3)%len(prompts)], 100); a.code {
						case http.StatusOK, http.StatusBadGateway, http.StatusTooManyRequests:
						case http.StatusServiceUnavailable: // weir was away for all tries, and nothing is charged
							away.Add(1)
						default:
							t.Errorf("an answer is %v", a)
						}
						asked.Add(1)
					}
				})
			}
		}
		return &callers
	}
	load(f.services, 4).Wait()

	// A replica is killed while the model works for it. What it has not told before is lost.
	killed, others := f.services[4], f.services[:4]
	killed.settled(t)
	var held sync.WaitGroup
	const holds = 3
	before := len(f.model.all())
	for range holds {
		held.Go(func() {
			a := answer{code: http.StatusServiceUnavailable}
			for a.code == http.StatusServiceUnavailable { // as above
				a = killed.ask(t, "alice", "hold on", 1000)
			}
			if a.code != 0 {
				t.Errorf("a request of a dying replica is answered: %v", a)
			}
		})
	}
	storetest.Eventually(t, "the model works", func() bool { return len(f.model.all()) == before+holds })
	if err := killed.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	held.Wait()

	// A replica of weir is killed under load, and replaced.
	callers := load(others, 20)
	began := asked.Load()
	storetest.Eventually(t, "the load is on", func() bool { return asked.Load() > began+10 })
	f.weirs[0].Signal(t, syscall.SIGKILL)
	f.weirs[0].Process.Wait(t)
	began = asked.Load()
	storetest.Eventually(t, "the other replica answers", func() bool { return asked.Load() > began+10 })
	f.replaceWeir(0)
	callers.Wait()

	// What a lost request had taken is given back, and then is there to be had.
	for _, r := range others {
		r.settled(t)
	}
	for _, user := range users {
		for n := 0; ; n++ {
			a := others[n%len(others)].ask(t, user, "sing a song", 100)
			if a.code == http.StatusTooManyRequests {
				break
			}
			if a.code != http.StatusOK && a.code != http.StatusServiceUnavailable {
				t.Fatalf("an answer is %v", a)
			}
		}
	}
	storetest.Eventually(t, "the new replica of weir is asked", func() bool {
		others[0].ask(t, "alice", "sing a song", 100)
		_, text := f.weirs[0].Get(t, "/metrics")
		return strings.Contains(text, `weir_decisions_total{domain="api",verdict="refused"}`)
	})
	// A model that is not there has used nothing.
	f.modelAt.Close()
	if a := others[0].ask(t, "dora", "sing a song", 100); a.code != http.StatusBadGateway {
		t.Errorf("without a model an answer is %v", a)
	}
	lost := 0.0
	for _, r := range others {
		r.settled(t)
		lost += r.vars(t)["retries lost"]
		r.end(t)
	}

	for _, user := range users {
		if requests, _ := f.asked(user); requests != 60 {
			t.Errorf("%s asked the model %d times, want 60 times exactly", user, requests)
		}
		f.expectCharged(user)
	}
	if requests, tokens := f.charged("dora"); requests != 1 || tokens != 0 {
		t.Errorf("without a model %d requests and %d tokens are charged, want 1 and 0", requests, tokens)
	}
	if lost < 10 {
		t.Errorf("%v answers of weir were lost, want more to tell anything", lost)
	}
	t.Logf("%d requests, %v lost answers of weir, which %d times was away for all tries", asked.Load(), lost, away.Load())

	// An API key is a secret.
	texts := []string{f.redis.MustDo(t, "KEYS", "*"), f.weirs[0].Log(), f.weirs[1].Log()}
	for _, r := range others {
		texts = append(texts, r.log.String())
	}
	for _, text := range texts {
		for _, user := range users {
			if strings.Contains(text, "sk-"+user) {
				t.Error("Redis or a log has an API key in clear text")
			}
		}
	}
}

func TestAKeyThatHasSpentItsDayIsRefusedUntilItEnds(t *testing.T) {
	const day = 5 * time.Second // of this test
	f := start(t, 2, "unit: day", "unit: second, unit_multiplier: 5", "refill: 60/m", "refill: 1/d")
	users := []string{"u0", "u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8", "u9"}
	f.give(strings.Split(strings.Join(users, " free ")+" free", " ")...)
	endOf := func(t time.Time) time.Time { return t.Truncate(day).Add(day) }
	// spend reports whether a user's story was told within one day, and the beginning of the next.
	spend := func(user string) bool {
		before := f.now()
		end := endOf(before)
		// It may use 60,001 tokens, and uses 120,003 of the 100,000 that there are.
		first := f.services[0].ask(t, user, "long song", 60_000)
		f.services[0].settled(t)
		asked := f.now()
		second := f.services[1].ask(t, user, "hi", 1)
		after := f.now()
		if !endOf(after).Equal(end) {
			return false
		}
		if first.code != http.StatusOK || second.code != http.StatusTooManyRequests {
			t.Fatalf("the answers are %d and %d (%s), want 200 and 429", first.code, second.code, second.text)
		}
		var problem struct {
			Violated   []string `json:"violated-policies"`
			RetryAfter int64    `json:"retry_after_ms"`
		}
		if err := json.Unmarshal([]byte(second.text), &problem); err != nil {
			t.Fatal(err)
		}
		wait := time.Duration(problem.RetryAfter) * time.Millisecond
		if shortest, longest := end.Sub(after), end.Sub(asked)+time.Millisecond; wait < shortest || wait > longest || !slices.Equal(problem.Violated, []string{"tokens"}) {
			t.Errorf("%v are full, retry after %v, want tokens, and the end of the day in %v to %v", problem.Violated, wait, shortest, longest)
		}
		if got, want := second.header.Get("Retry-After"), strconv.Itoa(int((wait+time.Second-1)/time.Second)); got != want {
			t.Errorf("Retry-After is %s, want %s", got, want)
		}

		storetest.Eventually(t, "the next day begins", func() bool {
			return f.services[0].ask(t, user, "hi there", 10).code == http.StatusOK
		})
		if now := f.now(); now.Before(end) {
			t.Errorf("it is admitted at %v, and the day ends at %v", now, end)
		}
		f.services[0].settled(t)
		requests, tokens := f.charged(user)
		if !endOf(f.now()).Equal(end.Add(day)) {
			return false
		}
		if asked, _ := f.asked(user); asked != 2 || requests != 2 || tokens != 7 {
			t.Errorf("the model was asked %d times, and %d requests are charged, and today %d tokens; want 2, 2, and 7", asked, requests, tokens)
		}
		return true
	}
	if !slices.ContainsFunc(users, spend) {
		t.Error("no user came to the end within a day")
	}
}

func TestAPlanIsUpgradedWhileRunning(t *testing.T) {
	const of = "requests_per_unit: 2000000"
	f := start(t, 2, append(standing, of, "requests_per_unit: 1000")...)
	f.give("alice", "free", "bob", "pro")
	expect := func(what string, r *replica, user string, maxTokens, code int) {
		t.Helper()
		if a := r.ask(t, user, "hi", maxTokens); a.code != code {
			t.Errorf("%s: %s is answered by %d (%s), want %d", what, user, a.code, a.text, code)
		}
		r.settled(t)
	}
	one, other := f.services[0], f.services[1]

	// The plan gets other numbers: what is counted stays.
	expect("at first", one, "bob", 900, http.StatusOK) // which uses 451
	expect("with 549 left", other, "bob", 900, http.StatusTooManyRequests)
	f.setPolicy(append(standing, of, "requests_per_unit: 5000")...)
	for _, w := range f.weirs {
		storetest.Eventually(t, "weir has read the policy", func() bool {
			return f.state(w, "pro", "api_key_tokens", "bob").GetCapacity() == 5000
		})
	}
	if count := f.state(f.weirs[0], "pro", "api_key_tokens", "bob").GetCount(); count != 451 {
		t.Errorf("after the upgrade %d tokens are counted, want 451", count)
	}
	expect("after the upgrade", other, "bob", 900, http.StatusOK)

	// A key gets another plan: it counts for itself, and so does the one before.
	expect("at first", one, "alice", 99_000, http.StatusOK)
	expect("at first", one, "alice", 99_000, http.StatusTooManyRequests)
	f.give("alice", "pro", "bob", "pro")
	expect("in the plan pro", other, "alice", 900, http.StatusOK)
	f.give("alice", "free", "bob", "pro")
	expect("in the plan free again", one, "alice", 99_000, http.StatusTooManyRequests)
	for user, want := range map[string]uint64{"alice": 2, "bob": 2} {
		if requests, _ := f.asked(user); requests != want {
			t.Errorf("%s asked the model %d times, want %d", user, requests, want)
		}
	}
}

func TestANoisyKeyDoesNotDisturbAQuietOne(t *testing.T) {
	f := start(t, 5)
	f.give("noisy", "free", "quiet", "free")
	began := f.now()
	var callers sync.WaitGroup
	var over atomic.Bool
	var admitted, refused atomic.Int64
	for i := range 20 {
		callers.Go(func() {
			for !over.Load() {
				switch a := f.services[i%5].ask(t, "noisy", "hi", 10); a.code {
				case http.StatusOK:
					admitted.Add(1)
				case http.StatusTooManyRequests:
					refused.Add(1)
				default:
					t.Errorf("an answer is %v", a)
					return
				}
			}
		})
	}
	storetest.Eventually(t, "the noise is loud", func() bool { return refused.Load() > 20 || t.Failed() })
	for n := range 60 {
		if a := f.services[n%5].ask(t, "quiet", "hi", 10); a.code != http.StatusOK {
			t.Errorf("request %d of the quiet key is answered by %d (%s), want 200", n, a.code, a.text)
		}
	}
	over.Store(true)
	callers.Wait()
	most := 60 + int64(f.now().Sub(began)/time.Second)
	if n := admitted.Load(); n < 60 || n > most {
		t.Errorf("%d requests of the noisy key were admitted, want 60 to %d", n, most)
	}
	for user, want := range map[string]uint64{"noisy": uint64(admitted.Load()), "quiet": 60} { //nolint:gosec // it is not negative
		if requests, _ := f.asked(user); requests != want {
			t.Errorf("%s asked the model %d times, want %d: as often as it was admitted", user, requests, want)
		}
	}
}

func TestWhileNobodyCanCountNothingIsServed(t *testing.T) {
	f := start(t, 1, standing...)
	f.give("alice", "free")
	expect := func(what string, code int) {
		t.Helper()
		a := f.services[0].ask(t, "alice", "hi", 10)
		if a.code != code || code != http.StatusOK && a.header.Get("Retry-After") != "1" {
			t.Errorf("%s the answer is %v, want %d", what, a, code)
		}
	}
	expect("at first", http.StatusOK)
	f.services[0].settled(t)
	f.redis.Kill()
	expect("without Redis", http.StatusServiceUnavailable)
	for _, w := range f.weirs {
		w.Signal(t, syscall.SIGKILL)
		w.Process.Wait(t)
	}
	expect("without weir", http.StatusServiceUnavailable)
	if n := len(f.model.all()); n != 1 {
		t.Errorf("the model was asked %d times, want once", n)
	}
}
