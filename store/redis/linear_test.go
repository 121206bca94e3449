package redis_test

import (
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"weir/limit"
	"weir/store"
	"weir/store/storetest"
)

// world is the state of the sequential model: one bucket that gains nothing
// while the clock stands, and one lane.
type world struct {
	tokens int
	slots  uint64 // bit n: lease n is held
}

const (
	worldTokens = 12
	worldSlots  = 3
)

// operation is what a client asked: with hits == 0, the release of a lease.
type operation struct {
	hits  int // tokens to take, with one slot
	lease int
}

// outcome is what it was told. Unknown: an error, so it took effect or not, now
// or later.
type outcome struct {
	unknown   bool
	ok        bool // admitted, or released
	remaining int  // tokens and slots that were left
	free      int
}

func (w world) step(op operation) (world, outcome) {
	bit := uint64(1) << op.lease
	if op.hits == 0 {
		held := w.slots&bit != 0
		w.slots &^= bit
		return w, outcome{ok: held}
	}
	o := outcome{ok: w.tokens >= op.hits && bits.OnesCount64(w.slots) < worldSlots}
	if o.ok {
		w.tokens -= op.hits
		w.slots |= bit
	}
	o.remaining, o.free = w.tokens, worldSlots-bits.OnesCount64(w.slots)
	return w, o
}

var worlds = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{world{tokens: worldTokens}} },
	Step: func(state, input, output any) []any {
		before, _ := state.(world)
		op, _ := input.(operation)
		told, _ := output.(outcome)
		after, o := before.step(op)
		switch {
		case told.unknown:
			return []any{before, after}
		case told == o:
			return []any{after}
		}
		return nil
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
	DescribeState:     func(state any) string { return fmt.Sprintf("%+v", state) },
}).ToModel()

// TestHistoriesAreLinearizable runs clients at the same time, while connections
// are killed under them, and asks whether what they were told fits one order of
// events.
func TestHistoriesAreLinearizable(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		clock := storetest.NewClock() // it stands
		s, client := open(t, server, clock.Now)
		unknown, checked := 0, 0
		for round := range 40 {
			h := history{store: s, domain: fmt.Sprintf("d%d", round), bucket: bucket(t, worldTokens, 24*time.Hour), lane: lane(t, worldSlots, time.Hour)}
			var clients sync.WaitGroup
			for n := range 4 {
				clients.Go(func() { h.client(t, n, 6) })
			}
			if round%2 == 1 {
				for range 3 {
					if err := client.ClientKillByFilter(storetest.Context(t), "TYPE", "normal", "SKIPME", "yes").Err(); err != nil {
						t.Error(err)
					}
				}
			}
			clients.Wait()
			unknown += h.unknown
			// With many unknown outcomes, as on a busy machine, the search can take for ever.
			result, info := porcupine.CheckOperationsVerbose(worlds, h.operations, 3*time.Second)
			switch result {
			case porcupine.Ok:
				checked++
			case porcupine.Unknown:
				t.Logf("round %d with %d unknown outcomes was not checked", round, h.unknown)
			case porcupine.Illegal:
				path := t.ArtifactDir() + "/history.html"
				if err := porcupine.VisualizePath(worlds, info, path); err != nil {
					t.Error(err)
				}
				t.Fatalf("round %d is %s; see %s", round, result, path)
			}
		}
		t.Logf("%d outcomes were unknown", unknown)
		if checked < 30 {
			t.Errorf("%d of 40 rounds were checked, want at least 30", checked)
		}
	})
}

// history records what clients ask and are told.
type history struct {
	store  store.Store
	domain string
	bucket limit.TokenBucket
	lane   limit.Concurrency

	mu         sync.Mutex // guards the rest
	operations []porcupine.Operation
	unknown    int
	leases     int
}

var start = time.Now()

func (h *history) add(client int, op operation, call time.Time, o outcome) {
	h.mu.Lock()
	defer h.mu.Unlock()
	end := time.Since(start).Nanoseconds()
	if o.unknown {
		h.unknown++
		end = math.MaxInt64
	}
	h.operations = append(h.operations, porcupine.Operation{ClientId: client, Input: op, Call: call.Sub(start).Nanoseconds(), Output: o, Return: end})
}

func (h *history) client(t *testing.T, n, steps int) {
	r := rand.New(rand.NewPCG(uint64(n), uint64(len(h.domain))))
	var held []int
	for range steps {
		call := time.Now()
		if len(held) > 0 && r.IntN(2) == 0 {
			op := operation{lease: held[0]}
			if r.IntN(4) > 0 { // now and then it releases twice
				held = held[1:]
			}
			released, err := h.store.Release(storetest.Context(t), limit.Ending{Lease: storetest.TestLease(h.domain, uint64(op.lease))})
			h.add(n, op, call, outcome{unknown: err != nil, ok: released.Result == limit.Released})
			continue
		}
		h.mu.Lock()
		op := operation{hits: 1 + r.IntN(2), lease: h.leases}
		h.leases++
		h.mu.Unlock()
		subject := []limit.Entry{{Key: "k", Value: "x"}}
		d, err := h.store.Decide(storetest.Context(t), limit.Request{
			Domain: h.domain,
			Checks: []limit.Check{
				{Name: "bucket", Limit: h.bucket, Hits: int64(op.hits), Key: limit.Key(h.domain, h.bucket, subject)},
				{Name: "lane", Limit: h.lane, Hits: int64(op.hits), Key: limit.Key(h.domain, h.lane, subject)},
			},
			Lease: storetest.TestLease(h.domain, uint64(op.lease)),
		})
		if err != nil {
			h.add(n, op, call, outcome{unknown: true})
			h.add(n, operation{lease: op.lease}, call, outcome{unknown: true}) // the store gives it back
			continue
		}
		h.add(n, op, call, outcome{ok: d.Admitted, remaining: int(d.Results[0].Remaining), free: int(d.Results[1].Remaining)})
		if d.Admitted {
			held = append(held, op.lease)
		}
	}
}
