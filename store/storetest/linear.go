package storetest

import (
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// LinearTokens and LinearSlots are what a History is about: one bucket that gains nothing
// meanwhile, and one lane.
const (
	LinearTokens = 12
	LinearSlots  = 3
)

// Linear is what a History's clients ask. Leases are known by small numbers.
type Linear interface {
	// Take takes so many tokens, and a slot under a lease.
	Take(lease, hits int) Outcome
	Release(lease int) Outcome
	Renew(lease int) Outcome
}

// Outcome is what a client was told.
type Outcome struct {
	// Unknown: it took effect or not, now or later. If it was a Take, it is undone, now or
	// later.
	Unknown   bool
	OK        bool // admitted, released, renewed
	OnlyOK    bool // and nothing else is known: it was refused unasked
	Remaining int  // tokens that were left, of a Take
	Free      int  // and slots
}

// operation is what a client asked.
type operation struct {
	kind  kind
	hits  int
	lease int
}

type kind int

const (
	take kind = iota
	release
	renew
	undo
)

// world is the state of the sequential model.
type world struct {
	tokens int
	slots  uint64 // bit n: lease n is held
}

func (w world) step(op operation) (world, Outcome) {
	bit := uint64(1) << op.lease
	held := w.slots&bit != 0
	switch op.kind {
	case release:
		w.slots &^= bit
		return w, Outcome{OK: held}
	case renew:
		return w, Outcome{OK: held}
	case undo:
		if held {
			w.slots &^= bit
			w.tokens += op.hits
		}
		return w, Outcome{OK: held}
	case take:
	}
	o := Outcome{OK: w.tokens >= op.hits && bits.OnesCount64(w.slots) < LinearSlots}
	if o.OK {
		w.tokens -= op.hits
		w.slots |= bit
	}
	o.Remaining, o.Free = w.tokens, LinearSlots-bits.OnesCount64(w.slots)
	return w, o
}

var worlds = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{world{tokens: LinearTokens}} },
	Step: func(state, input, output any) []any {
		before, _ := state.(world)
		op, _ := input.(operation)
		told, _ := output.(Outcome)
		after, o := before.step(op)
		switch {
		case told.Unknown:
			return []any{before, after}
		case told == o, told == Outcome{OK: o.OK, OnlyOK: true}:
			return []any{after}
		}
		return nil
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
	DescribeState:     func(state any) string { return fmt.Sprintf("%+v", state) },
}).ToModel()

// History records what clients ask at the same time and are told. Its zero value is
// ready, for one bucket and lane that are new.
type History struct {
	mu         sync.Mutex // guards the rest
	operations []porcupine.Operation
	unknown    int
	leases     int
}

var began = time.Now()

func (h *History) add(client int, op operation, call time.Time, o Outcome) {
	h.mu.Lock()
	defer h.mu.Unlock()
	end := time.Since(began).Nanoseconds()
	if o.Unknown {
		h.unknown++
		end = math.MaxInt64
		o = Outcome{Unknown: true}
	}
	h.operations = append(h.operations, porcupine.Operation{ClientId: client, Input: op, Call: call.Sub(began).Nanoseconds(), Output: o, Return: end})
}

// Client asks a few times: it takes, renews and releases, and now and then releases
// twice. n numbers it, from 0.
func (h *History) Client(n, steps int, asked Linear) {
	r := rand.New(rand.NewPCG(uint64(n), uint64(time.Now().UnixNano())))
	var held []int
	for range steps {
		call := time.Now()
		switch choice := r.IntN(8); {
		case len(held) > 0 && choice < 4:
			op := operation{kind: release, lease: held[0]}
			if choice > 0 {
				held = held[1:]
			}
			h.add(n, op, call, asked.Release(op.lease))
			continue
		case len(held) > 0 && choice < 5:
			op := operation{kind: renew, lease: held[0]}
			h.add(n, op, call, asked.Renew(op.lease))
			continue
		}
		h.mu.Lock()
		op := operation{hits: 1 + r.IntN(2), lease: h.leases}
		h.leases++
		h.mu.Unlock()
		o := asked.Take(op.lease, op.hits)
		h.add(n, op, call, o)
		switch {
		case o.Unknown:
			h.add(n, operation{kind: undo, lease: op.lease, hits: op.hits}, call, o)
		case o.OK:
			held = append(held, op.lease)
		}
	}
}

// Unknown is how many outcomes were unknown.
func (h *History) Unknown() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.unknown
}

// Check looks, when all clients have ended, whether what they were told fits one order of
// events; if not the test fails. It reports whether it could say so: with many unknown
// outcomes, as on a busy machine, the search can take for ever.
func (h *History) Check(t testing.TB) (checked bool) {
	t.Helper()
	switch result, info := porcupine.CheckOperationsVerbose(worlds, h.operations, 3*time.Second); result {
	case porcupine.Ok:
		return true
	case porcupine.Unknown:
		t.Logf("a history with %d unknown outcomes was not checked", h.unknown)
	case porcupine.Illegal:
		path := t.ArtifactDir() + "/history.html"
		if err := porcupine.VisualizePath(worlds, info, path); err != nil {
			t.Error(err)
		}
		t.Fatalf("no order of events explains what clients were told; see %s", path)
	}
	return false
}
