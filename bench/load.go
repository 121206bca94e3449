package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	weirv1 "weir/proto/weir/v1"
)

const (
	connections = 4 // of one load; its callers are spread over them
	warmUp      = 250 * time.Millisecond
	// How long a load waits for its last answers; after that it hangs up.
	drainTime = 5 * time.Second
)

// load is a number of callers and what they ask for.
type load struct {
	address         string // of the server
	callers         int
	request         template
	first, subjects int                        // whom requests are for: subjects of them, by their numbers
	want            rls.RateLimitResponse_Code // any other answer ends the run
	// release makes the end of the lease a part of every decision. lease, if not
	// "", is the one to end: for a server that grants none.
	release bool
	lease   string
	drain   time.Duration // drainTime if 0
}

// patience is how long the load waits for its last answers.
func (l *load) patience() time.Duration {
	if l.drain == 0 {
		return drainTime
	}
	return l.drain
}

// decided is what callers saw in the window of a run.
type decided struct {
	latencies []time.Duration // of decisions, in no order
	bypassed  int             // of them: answered without the store
	// ended is how many decisions ended while resources were counted: what CPU time
	// is divided by.
	ended int
	// unfinished is how many were due and never ended: latencies has how long they
	// had waited when the load gave up.
	unfinished int
}

// The phases of a closed loop: callers note their decisions in the window only.
const (
	warming int32 = iota
	counting
	stopping
)

// closed has each caller ask, for subjects at random, as soon as it has its last
// answer. It calls begin after the warm-up and end after the window.
func (l *load) closed(window time.Duration, begin, end func() error) (decided, error) {
	var phase atomic.Int32
	seen := make([]decided, l.callers)
	wait, err := l.start(func(i int, c *caller) error {
		random := rand.New(rand.NewPCG(uint64(i), 1))
		for phase.Load() != stopping {
			start := time.Now()
			if err := c.decide(start, random.IntN(l.subjects)); err != nil {
				return err
			}
			if phase.Load() == counting {
				seen[i].latencies = append(seen[i].latencies, time.Since(start))
				if c.bypassed {
					seen[i].bypassed++
				}
			}
		}
		return nil
	})
	if err != nil {
		return decided{}, err
	}
	time.Sleep(warmUp)
	err = begin()
	phase.Store(counting)
	time.Sleep(window)
	err = errors.Join(err, end())
	phase.Store(stopping)
	// The error of a caller comes first: it tells why the rest has failed.
	err = errors.Join(wait(), err)
	var all decided
	for _, d := range seen {
		all.latencies = append(all.latencies, d.latencies...)
		all.bypassed += d.bypassed
	}
	all.ended = len(all.latencies)
	return all, err
}

// once asks for each subject once, as many at a time as a request is for; subjects is
// a multiple of that. No decision may be made without the store.
func (l *load) once() error {
	var next atomic.Int64
	wait, err := l.start(func(_ int, c *caller) error {
		for {
			n := int(next.Add(1)-1) * l.request.subjects
			if n >= l.subjects {
				return nil
			}
			if err := c.decide(time.Now(), n); err != nil {
				return err
			}
			if c.bypassed {
				return errors.New("a decision was made without the store")
			}
		}
	})
	if err != nil {
		return err
	}
	return wait()
}

// start runs f for each caller. The function that it returns waits for all, hangs
// up on those that take longer than l.drain, and returns the first error.
func (l *load) start(f func(i int, c *caller) error) (wait func() error, err error) {
	var conns []*grpc.ClientConn
	hangUp := sync.OnceFunc(func() {
		for _, c := range conns {
			_ = c.Close()
		}
	})
	for range min(l.callers, connections) {
		c, err := grpc.NewClient("passthrough:///"+l.address, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{})), grpc.WithDisableServiceConfig())
		if err != nil {
			hangUp()
			return nil, err
		}
		conns = append(conns, c)
	}
	errs := make([]error, l.callers)
	var work sync.WaitGroup
	for i := range l.callers {
		work.Go(func() {
			errs[i] = f(i, &caller{load: l, conn: conns[i%len(conns)], request: bytes.Clone(l.request.message)})
		})
	}
	return func() error {
		late := time.AfterFunc(l.patience(), hangUp)
		work.Wait()
		inTime := late.Stop()
		hangUp()
		for _, err := range errs {
			switch {
			case err != nil && !inTime:
				return fmt.Errorf("%w after %v: %w", errHungUp, l.patience(), err)
			case err != nil:
				return err
			}
		}
		return nil
	}, nil
}

// errHungUp is the end of calls that a server did not answer.
var errHungUp = errors.New("hung up")

// caller asks one question after the other.
type caller struct {
	*load
	conn        *grpc.ClientConn
	request     []byte // a copy of load.request's
	answer, end []byte // messages; used again each time
	bypassed    bool   // the last decision
}

// decide asks for the subject with a number below l.subjects, and ends the lease
// that was granted if the load says so.
func (c *caller) decide(now time.Time, subject int) error {
	c.load.request.write(c.request, c.first+subject)
	if err := c.call(now, rls.RateLimitService_ShouldRateLimit_FullMethodName, c.request); err != nil {
		return err
	}
	var err error
	if c.bypassed, err = c.check(c.answer); err != nil {
		return err
	}
	if !c.release || c.bypassed {
		return nil
	}
	lease := c.lease
	if lease == "" {
		var r rls.RateLimitResponse
		if err := proto.Unmarshal(c.answer, &r); err != nil {
			return err
		}
		if lease = r.GetDynamicMetadata().GetFields()["lease_id"].GetStringValue(); lease == "" {
			return fmt.Errorf("no lease in the answer: %v", &r)
		}
	}
	c.end = protowire.AppendTag(c.end[:0], 1, protowire.BytesType) // lease_ids of a ReleaseRequest
	c.end = protowire.AppendString(c.end, lease)
	return c.call(now, weirv1.LeaseService_Release_FullMethodName, c.end)
}

// check tells whether an answer was given without the store. Any other than the wanted
// one is an error.
func (l *load) check(answer []byte) (bypassed bool, err error) {
	bypassed = bytes.Contains(answer, []byte("bypass_reason"))
	if code := overallCode(answer); code != l.want && !bypassed {
		return bypassed, otherAnswer{code, l.want}
	}
	return bypassed, nil
}

// otherAnswer is the error of an answer that is not the wanted one.
type otherAnswer struct{ got, want rls.RateLimitResponse_Code }

// Error implements error.
func (o otherAnswer) Error() string { return fmt.Sprintf("the answer is %v, want %v", o.got, o.want) }

func (c *caller) call(now time.Time, method string, request []byte) error {
	return c.conn.Invoke(&deadline{context.Background(), now.Add(toldTimeout)}, method, &request, &c.answer)
}

// toldTimeout is the deadline that a server is told of. It is so long that grpc-go tells it
// in whole milliseconds: a constant, as Envoy's is, which header compression sends
// as one byte. Nobody waits for it: load.start hangs up before.
const toldTimeout = 2 * time.Minute

// deadline tells a deadline and has no timer, so that a call costs the generator less
// of the CPU that it shares with what is measured.
type deadline struct {
	context.Context
	at time.Time
}

func (d *deadline) Deadline() (time.Time, bool) { return d.at, true }

// overallCode reads the first field of an answer: to decode all of it would take
// CPU from the server that is measured.
func overallCode(answer []byte) rls.RateLimitResponse_Code {
	if number, kind, n := protowire.ConsumeTag(answer); n > 0 && number == 1 && kind == protowire.VarintType {
		code, _ := protowire.ConsumeVarint(answer[n:])
		return rls.RateLimitResponse_Code(code)
	}
	return rls.RateLimitResponse_UNKNOWN
}

// raw is a codec for messages that are marshalled already: caller.call passes
// nothing but *[]byte, and anything else is a bug that panics.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (raw) Unmarshal(data []byte, v any) error {
	into := v.(*[]byte)
	*into = append((*into)[:0], data...)
	return nil
}

func (raw) Name() string { return "proto" }
