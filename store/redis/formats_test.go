package redis_test

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"weir/limit"
	"weir/store"
	"weir/store/redis"
	"weir/store/storetest"
)

// The versions of weir in an upgrade to another format of states, made of today's
// scripts: docs/decisions/0007-state-formats.md.
var versions = map[string]func(source string) string{
	"today": func(source string) string { return source },
	// Writes one more field behind the others, and keeps the format's number.
	"adds a field": changed(1, 1, `local function pack_all(...)
  local state = {...}
  state[#state + 1] = {later = 'x'}
  return cmsgpack.pack(unpack(state))
end`),
	// Reads the next format too.
	"next": changed(2, 1, `local pack_all = cmsgpack.pack`),
	// Writes it.
	"after next": changed(2, 2, `local function pack_all(format, ...) return cmsgpack.pack(format, 'moved', {...}) end`),
}

// changed returns what makes scripts of a version with other formats: format 2 has
// all but its number in an array.
func changed(reads, writes int, pack string) func(string) string {
	prelude := `
local real = cmsgpack
local cmsgpack = {pack = real.pack, unpack = function(packed)
  local format, moved, fields = real.unpack(packed)
  if format ~= 2 or moved ~= 'moved' then return real.unpack(packed) end
  return format, unpack(fields)
end}
` + pack + "\n"
	return func(source string) string {
		shebang, rest, _ := strings.Cut(source, "\n")
		again := strings.NewReplacer(
			"local READS, WRITES = 1, 1", fmt.Sprintf("local READS, WRITES = %d, %d", reads, writes),
			"local function pack_state(...) return pack(WRITES, ...) end", "local function pack_state(...) return pack_all(WRITES, ...) end",
			"local function pack_bucket(level, limit, millis) return FORMAT .. pack(level) .. limit .. pack(millis) end", `
local function pack_bucket(level, limit, millis)
  local capacity, scale, refill = cmsgpack.unpack(limit)
  return pack_state(level, capacity, scale, refill, millis)
end`,
		).Replace(rest)
		if again == rest || !strings.Contains(again, "pack_all(WRITES") {
			panic("a script does not say which formats it knows, or how it packs them")
		}
		if strings.Contains(again, "FORMAT .. pack") {
			panic("pack_bucket is not what the replacement expects")
		}
		return shebang + "\n" + prelude + again
	}
}

func openVersion(t *testing.T, url string, now func() int64, version string) *redis.Store {
	t.Helper()
	s, err := redis.OpenChanged(redis.Options{URL: url, Now: now}, versions[version])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// Versions side by side on one Redis decide as one version alone, all through an
// upgrade and back: each step has the versions that may then run together.
func TestVersionsSideBySideDecideAsOne(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock()
		alone := openVersion(t, server.URL+"?db=1", clock.Now, "today")
		stores := make(map[string]*redis.Store)
		for version := range versions {
			stores[version] = openVersion(t, server.URL, clock.Now, version)
		}
		r := rand.New(rand.NewPCG(1, 2))
		var leases []limit.LeaseID
		for i, together := range [][]string{
			{"today", "adds a field"},
			{"today", "adds a field", "next"},
			{"next", "after next"},
			{"after next"},
			{"next", "after next"}, // back
			{"next"},
		} {
			for step := range 400 {
				version := together[r.IntN(len(together))]
				got, want := perform(t, r, clock, &leases, stores[version], alone)
				if got != want {
					t.Fatalf("part %d, step %d, %s:\n got %s\nwant %s", i, step, version, got, want)
				}
			}
		}
	})
}

// perform does the same to both stores, and says what they told.
func perform(t *testing.T, r *rand.Rand, clock *storetest.Clock, leases *[]limit.LeaseID, s, alone store.Store) (got, want string) {
	t.Helper()
	ctx := storetest.Context(t)
	subject := fmt.Sprint(r.IntN(3))
	b := bucket(t, 5, time.Duration(1+r.IntN(2))*time.Second) // its policy changes all the time
	lingers := lane(t, 3, time.Minute)
	lingers.Linger = 7 * time.Second
	checks := []limit.Check{check(b, subject), check(hourly(t, 300), subject), check(slides(t, 40), subject), check(lingers, subject), check(lane(t, 5, 20*time.Second), "pool")}
	checks = checks[r.IntN(4):]
	if r.IntN(2) == 0 {
		for i := range checks {
			if _, slot := checks[i].Limit.(limit.Concurrency); !slot {
				checks[i].Reserve = 30 * time.Second
			}
		}
	}
	stream := fmt.Sprint(r.IntN(5))
	do := func(one func(s store.Store) (string, error)) (string, string) {
		var texts []string
		for _, s := range []store.Store{s, alone} {
			text, err := one(s)
			if err != nil {
				t.Fatal(err)
			}
			texts = append(texts, text)
		}
		return texts[0], texts[1]
	}
	id := storetest.TestLease("d", 1)
	if len(*leases) > 0 {
		id = (*leases)[max(0, len(*leases)-1-r.IntN(6))]
	}
	switch r.IntN(12) {
	case 10:
		return do(func(s store.Store) (string, error) {
			page, err := s.Leases(ctx, "d", limit.Slot{}, 50)
			return fmt.Sprintf("leases %+v", page), err
		})
	case 11:
		return do(func(s store.Store) (string, error) { return "reset", s.Reset(ctx, checks) })
	case 0:
		clock.Advance(time.Duration(r.IntN(9000)) * time.Millisecond)
		return "", ""
	case 1:
		ending := limit.Ending{Lease: id, Early: r.IntN(2) == 0}
		if r.IntN(2) == 0 {
			ending = limit.Ending{Domain: "d", Stream: stream, Tombstone: r.IntN(2) == 0, Early: ending.Early}
		}
		return do(func(s store.Store) (string, error) {
			released, err := s.Release(ctx, ending)
			return fmt.Sprintf("release %+v", released), err
		})
	case 2:
		return do(func(s store.Store) (string, error) {
			renewed, err := s.Renew(ctx, limit.Extension{Lease: id})
			return fmt.Sprintf("renew %+v", renewed), err
		})
	case 3:
		return do(func(s store.Store) (string, error) {
			states, err := s.Inspect(ctx, checks)
			return fmt.Sprintf("inspect %+v", states), err
		})
	case 4:
		usage := limit.Usage{Domain: "d", Stream: stream, Checks: []limit.Check{check(b, subject), check(hourly(t, 300), subject), check(slides(t, 40), subject)}}
		return do(func(s store.Store) (string, error) {
			settled, err := s.Settle(ctx, usage)
			return fmt.Sprintf("settle %v", settled), err
		})
	case 5:
		usage := limit.Usage{Domain: "d", Lease: id, Limits: []limit.Used{{Hits: r.Int64N(4)}}}
		return do(func(s store.Store) (string, error) {
			settled, err := s.Settle(ctx, usage)
			return fmt.Sprintf("settle %v", settled), err
		})
	case 6:
		if len(*leases) == 0 {
			return "", "" // it would give up the lease of a request to come
		}
		undone := limit.Request{Domain: "d", Lease: id, Checks: checks}
		return do(func(s store.Store) (string, error) {
			released, err := s.Undo(ctx, undone)
			return fmt.Sprintf("undo %+v", released), err
		})
	}
	ask := withLease(request(checks...))
	switch r.IntN(3) {
	case 0:
		ask.Stream = stream
	case 1:
		ask.Operation = limit.Operation{ID: stream, Attempt: r.Uint32N(3)}
	}
	*leases = append(*leases, ask.Lease)
	return do(func(s store.Store) (string, error) {
		d, err := s.Decide(ctx, ask)
		if errors.Is(err, store.ErrOtherRequest) || errors.Is(err, store.ErrLateAttempt) {
			return err.Error(), nil
		}
		if err != nil {
			return "", err
		}
		return storetest.Sentence(checks, d, "L"), nil
	})
}

// A state of a format that is not known is an error that says so, never a guess:
// nothing is changed, and the store goes on.
func TestAnUnknownFormatIsAnError(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock()
		s, client := open(t, server, clock.Now)
		ctx := storetest.Context(t)
		later := withLease(request(check(bucket(t, 5, time.Second), "x"), check(hourly(t, 5), "x"), check(lane(t, 5, time.Minute), "x")))
		decide(t, openVersion(t, server.URL, clock.Now, "after next"), later)
		lingers := lane(t, 5, time.Minute)
		lingers.Linger = time.Second
		held := withLease(request(check(lane(t, 5, time.Minute), "y"), check(lingers, "z")))
		held.Stream = "s"
		decide(t, s, held)
		if err := client.Set(ctx, limit.StreamKey(held.Domain, held.Stream), "\x02", time.Hour).Err(); err != nil {
			t.Fatal(err)
		}
		before := raw(t, client)
		expect := func(what string, err error) {
			t.Helper()
			if err == nil || errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "state of format 2") {
				t.Errorf("%s of format 2: %v, want an error that names it and is no ErrUnavailable", what, err)
			}
		}
		for _, c := range later.Checks[:2] {
			_, err := s.Decide(ctx, request(check(bucket(t, 5, time.Second), "other"), c))
			expect("Decide", err)
			_, err = s.Inspect(ctx, []limit.Check{c})
			expect("Inspect", err)
		}
		_, err := s.Release(ctx, limit.Ending{Lease: later.Lease})
		expect("Release", err)
		_, err = s.Renew(ctx, limit.Extension{Lease: later.Lease})
		expect("Renew", err)
		// The lease is of today's format, and what is known of its stream is not.
		_, err = s.Release(ctx, limit.Ending{Lease: held.Lease})
		expect("Release", err)
		_, err = s.Release(ctx, limit.Ending{Lease: held.Lease, Early: true})
		expect("Release of what lingers", err)
		_, err = s.Renew(ctx, limit.Extension{Lease: held.Lease})
		expect("Renew", err)
		_, err = s.Release(ctx, limit.Ending{Domain: held.Domain, Stream: held.Stream, Tombstone: true})
		expect("Release by the stream", err)
		again := withLease(request(held.Checks...))
		again.Stream = held.Stream
		_, err = s.Decide(ctx, again)
		expect("Decide for the stream", err)
		if diff := mapDiff(before, raw(t, client)); diff != "" {
			t.Errorf("what Redis keeps has changed: %s", diff)
		}
		if d := decide(t, s, request(check(bucket(t, 5, time.Second), "other"))); d.Results[0].Remaining != 4 {
			t.Errorf("the next request leaves %d, want 4", d.Results[0].Remaining)
		}
	})
}

func mapDiff(a, b map[string]string) string {
	var diff []string
	for key := range a {
		if a[key] != b[key] {
			diff = append(diff, fmt.Sprintf("%s: %s, now %s", key, a[key], b[key]))
		}
	}
	for key := range b {
		if _, ok := a[key]; !ok {
			diff = append(diff, key+" is new")
		}
	}
	return strings.Join(diff, "; ")
}

const goldenFile = "testdata/format1.txt"

// goldenStates are the states of format 1 as the file has them, by name.
func goldenStates(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(goldenFile)
	if err != nil {
		t.Fatal(err)
	}
	states := make(map[string]string)
	for line := range strings.Lines(string(text)) {
		name, digits, ok := strings.Cut(strings.TrimSpace(line), ": ")
		if !ok || strings.HasPrefix(name, "#") {
			continue
		}
		value, err := hex.DecodeString(strings.ReplaceAll(digits, " ", ""))
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		states[name] = string(value)
	}
	return states
}

// goldenRequest is what the golden states were made by: 3 tokens of 10, 3 hits of
// 5, and two slots under one lease, at noon.
func goldenRequest(t *testing.T) limit.Request {
	t.Helper()
	b, err := limit.NewTokenBucket(10, 2, 7*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	r := request(check(b, "x"), check(hourly(t, 5), "x"), check(lane(t, 2, time.Minute), "x"), check(lane(t, 2, 90*time.Second), "y"))
	for i := range r.Checks {
		r.Checks[i].Hits = 3
	}
	r.Lease = storetest.TestLease("d", 7)
	return r
}

// goldenReserved is what the golden states of a stream were made by: 3 tokens of 10 and 3
// hits of 5 that are reserved, and a slot that lingers.
func goldenReserved(t *testing.T) limit.Request {
	t.Helper()
	r := goldenRequest(t)
	lingers := lane(t, 2, time.Minute)
	lingers.Linger = 7 * time.Second
	r.Checks = append(r.Checks[:2:2], check(lingers, "z"))
	for i := range r.Checks[:2] {
		r.Checks[i].Reserve = 10 * time.Minute
	}
	r.Lease, r.Stream = storetest.TestLease("d", 8), "s"
	return r
}

// goldenOperated is what the golden states of an operation were made by: its second
// attempt, for a slot, was told again.
func goldenOperated(t *testing.T) limit.Request {
	t.Helper()
	r := request(check(lane(t, 2, time.Minute), "o"))
	r.Lease, r.Operation = storetest.TestLease("d", 9), limit.Operation{ID: "o", Body: [16]byte{1, 2, 3}, Attempt: 1}
	return r
}

// goldenSliding is what the golden states of a sliding window were made by: 3 hits of 9 that
// are reserved, 4 in the window before.
func goldenSliding(t *testing.T) limit.Request {
	t.Helper()
	w := hourly(t, 9)
	w.Sliding = true
	r := request(check(w, "x"))
	r.Checks[0].Hits, r.Checks[0].Reserve = 3, 10*time.Minute
	r.Lease = storetest.TestLease("d", 12)
	return r
}

// goldenBehind is what the golden states of a window were made by that began at noon, when time
// had been set back by a minute: 2 hits of 5 and a slot, beside 1 hit of before.
func goldenBehind(t *testing.T) limit.Request {
	t.Helper()
	r := request(check(hourly(t, 5), "behind"), check(lane(t, 2, 2*time.Minute), "behind"))
	r.Checks[0].Hits = 2
	r.Lease = storetest.TestLease("d", 13)
	return r
}

// goldenKeys are the keys of the golden states.
func goldenKeys(t *testing.T) map[string]string {
	t.Helper()
	r := goldenRequest(t)
	return map[string]string{
		"bucket": r.Checks[0].Key, "window": r.Checks[1].Key, "lease": limit.LeaseKey(r.Lease),
		"reserved": limit.LeaseKey(goldenReserved(t).Lease), "stream": limit.StreamKey("d", "s"),
		"operated": limit.LeaseKey(goldenOperated(t).Lease), "operation": limit.OperationKey("d", "o"),
		"sliding": goldenSliding(t).Checks[0].Key, "slid": limit.LeaseKey(goldenSliding(t).Lease),
		"ahead": goldenBehind(t).Checks[0].Key, "behind": limit.LeaseKey(goldenBehind(t).Lease),
	}
}

func TestStatesAreWrittenInFormat1(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock()
		s, client := open(t, server, clock.Now)
		clock.Advance(-time.Hour)
		before := request(goldenSliding(t).Checks...)
		before.Checks[0].Hits, before.Checks[0].Reserve = 4, 0
		decide(t, s, before)
		clock.Advance(time.Hour)
		decide(t, s, goldenSliding(t))
		decide(t, s, goldenReserved(t))
		again := goldenOperated(t)
		decide(t, s, again)
		again.Lease, again.Operation.Attempt = storetest.TestLease("d", 10), 2
		decide(t, s, again)
		if err := client.Del(storetest.Context(t), goldenKeys(t)["bucket"], goldenKeys(t)["window"]).Err(); err != nil {
			t.Fatal(err)
		}
		decide(t, s, goldenRequest(t))
		behind := goldenBehind(t)
		first := request(behind.Checks[0])
		first.Checks[0].Hits = 1
		decide(t, s, first)
		clock.Advance(-time.Minute)
		decide(t, s, behind)
		golden := goldenStates(t)
		for name, key := range goldenKeys(t) {
			got, err := client.Get(storetest.Context(t), key).Result()
			if err != nil {
				t.Fatal(err)
			}
			if got != golden[name] {
				t.Errorf("%s is % x, want % x", name, got, golden[name])
			}
		}
	})
}

// States of format 1 are read for as long as a version may find them.
func TestStatesOfFormat1AreRead(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		_, client := open(t, server, nil)
		golden := goldenStates(t)
		for version := range versions {
			for _, suffix := range []string{"", " with more"} {
				clock := storetest.NewClock()
				s := openVersion(t, server.URL, clock.Now, version)
				ctx := storetest.Context(t)
				if err := client.FlushAll(ctx).Err(); err != nil {
					t.Fatal(err)
				}
				r := goldenRequest(t)
				expiry := clock.Now() + time.Minute.Milliseconds()
				for _, c := range r.Checks[2:] {
					if err := client.ZAdd(ctx, c.Key, goredis.Z{Score: float64(expiry), Member: r.Lease.Token()}).Err(); err != nil {
						t.Fatal(err)
					}
				}
				for name, key := range goldenKeys(t) {
					if golden[name+suffix] == "" {
						t.Fatalf("%s has no %s", goldenFile, name+suffix)
					}
					if err := client.Set(ctx, key, golden[name+suffix], time.Hour).Err(); err != nil {
						t.Fatal(err)
					}
				}
				clock.Advance(3500 * time.Millisecond)
				what := version + suffix
				states := inspect(t, s, r.Checks...)
				if states[0].Level != 8 || states[1].Count != 3 || states[2].Count != 1 || states[3].Holders[0].ExpiresAfter != 56500*time.Millisecond {
					t.Errorf("%s: Inspect = %+v, want 8 tokens, 3 hits, a slot of each lane for 56.5s", what, states)
				}
				next := r
				next.Lease = storetest.TestLease("d", 18)
				d := decide(t, s, next)
				if d.Admitted || d.Results[0].Remaining != 8 || d.Results[1].Remaining != 2 || d.Results[2].Remaining != 1 {
					t.Errorf("%s: Decide = %+v, want a refusal by the window, with 8, 2, 1 left", what, d)
				}
				if renewed, err := s.Renew(ctx, limit.Extension{Lease: r.Lease}); err != nil || renewed.TTL != time.Minute {
					t.Errorf("%s: Renew = %+v, %v", what, renewed, err)
				}
				want := limit.Release{Result: limit.Released, HeldFor: 3500 * time.Millisecond, Freed: []limit.Freed{{Key: r.Checks[2].Key, Limit: "k"}, {Key: r.Checks[3].Key, Limit: "k"}}}
				if released, err := s.Release(ctx, limit.Ending{Lease: r.Lease}); err != nil || fmt.Sprint(released) != fmt.Sprint(want) {
					t.Errorf("%s: Release = %+v, %v, want %+v", what, released, err, want)
				}
				if states := inspect(t, s, r.Checks[2:]...); states[0].Count+states[1].Count != 0 {
					t.Errorf("%s: after a release the lanes hold %+v", what, states)
				}
				readReserved(t, what, s, client)
				debt := []limit.Check{r.Checks[0]}
				debt[0].Hits = 1
				if err := client.Set(ctx, debt[0].Key, golden["debt"], time.Hour).Err(); err != nil {
					t.Fatal(err)
				}
				if got := inspect(t, s, debt...)[0]; got.Level != -4 || got.Remaining != 0 || got.RetryAfter != 15750*time.Millisecond {
					t.Errorf("%s: in debt: %+v, want level -4, and a token in 15.75s", what, got)
				}
				undone, err := s.Undo(ctx, goldenBehind(t))
				if got := inspect(t, s, goldenBehind(t).Checks[0])[0]; err != nil || undone.Result != limit.Released || got.Count != 1 {
					t.Errorf("%s: Undo = %+v, %v, and %d hits are left, want 1 in the window that was charged", what, undone, err, got.Count)
				}
				readSliding(t, what, s, clock)
			}
		}
	})
}

// readSliding reads the golden states of a sliding window, and moves the clock.
func readSliding(t *testing.T, what string, s *redis.Store, clock *storetest.Clock) {
	t.Helper()
	r := goldenSliding(t)
	if got := inspect(t, s, r.Checks...)[0]; got.Count != 7 {
		t.Errorf("%s: Inspect = %+v, want 3 hits and 4", what, got)
	}
	if d := decide(t, s, request(check(r.Checks[0].Limit, "x"))); d.Results[0].Remaining != 1 {
		t.Errorf("%s: Decide = %+v, want 1 left", what, d)
	}
	settled, err := s.Settle(storetest.Context(t), limit.Usage{Domain: "d", Lease: r.Lease, Limits: []limit.Used{{Hits: 1}}})
	if err != nil || settled[0] != (limit.Settlement{Result: limit.Settled, Difference: -2}) {
		t.Errorf("%s: Settle = %+v, %v, want two hits back", what, settled, err)
	}
	if got := inspect(t, s, r.Checks...)[0]; got.Count != 6 {
		t.Errorf("%s: Inspect = %+v, want 2 hits and 4", what, got)
	}
	clock.Advance(time.Hour - 3500*time.Millisecond)
	if got := inspect(t, s, r.Checks...)[0]; got.Count != 2 || got.ResetAfter != time.Hour {
		t.Errorf("%s: an hour later: %+v, want the 2 hits of the hour before", what, got)
	}
}

// readReserved reads the golden states of a stream and an operation.
func readReserved(t *testing.T, what string, s *redis.Store, client *goredis.Client) {
	t.Helper()
	ctx := storetest.Context(t)
	r, operated := goldenReserved(t), goldenOperated(t)
	settled, err := s.Settle(ctx, limit.Usage{Domain: "d", Stream: "s", Checks: []limit.Check{r.Checks[1]}})
	if err != nil || settled[0] != (limit.Settlement{Result: limit.Settled}) {
		t.Errorf("%s: Settle by the stream = %+v, %v, want what was reserved", what, settled, err)
	}
	settled, err = s.Settle(ctx, limit.Usage{Domain: "d", Lease: r.Lease, Limits: []limit.Used{{Hits: 1}}})
	if err != nil || settled[0] != (limit.Settlement{Result: limit.Settled, Difference: -2}) {
		t.Errorf("%s: Settle = %+v, %v, want two tokens back", what, settled, err)
	}
	// It lingers in the slot that it has, and in no other.
	slot := goredis.Z{Score: float64(storetest.NewClock().Now() + time.Minute.Milliseconds()), Member: r.Lease.Token()}
	if err := client.ZAdd(ctx, r.Checks[2].Key, slot).Err(); err != nil {
		t.Fatal(err)
	}
	lingers, err := s.Release(ctx, limit.Ending{Domain: "d", Stream: "s", Early: true})
	if err != nil || lingers.Result != limit.Lingering || lingers.HeldFor != 3500*time.Millisecond {
		t.Errorf("%s: an early release = %+v, %v, want LINGERING after 3.5s", what, lingers, err)
	}
	again := operated
	again.Lease, again.Operation.Attempt = storetest.TestLease("d", 11), 3
	if d := decide(t, s, again); !d.Replayed || d.Lease != operated.Lease || d.TTL != 56500*time.Millisecond {
		t.Errorf("%s: Decide of the operation = %+v, want its lease for 56.5s", what, d)
	}
	if _, err := s.Release(ctx, limit.Ending{Lease: operated.Lease}); err != nil {
		t.Errorf("%s: Release: %v", what, err)
	}
	if _, err := s.Decide(ctx, again); !errors.Is(err, store.ErrLateAttempt) {
		t.Errorf("%s: the same attempt after the release: %v, want ErrLateAttempt", what, err)
	}
	// What was made of them is of the version's own format.
	if err := client.Del(ctx, goldenKeys(t)["reserved"], goldenKeys(t)["operation"], r.Checks[2].Key).Err(); err != nil {
		t.Fatal(err)
	}
}
