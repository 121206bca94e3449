package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corerl "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	weirv1 "weir/proto/weir/v1"
)

const (
	connections = 4 // of one load; its callers are spread over them
	callTimeout = 5 * time.Second
	warmUp      = 250 * time.Millisecond
)

// marshal returns a request for each account. It has a descriptor a key, and the
// account's name, of ten characters, as its value.
func marshal(keys string, accounts int) ([][]byte, error) {
	requests := make([][]byte, accounts)
	for i := range requests {
		r := &rls.RateLimitRequest{Domain: domain}
		for key := range strings.FieldsSeq(keys) {
			value := fmt.Sprintf("a%09d", i)
			if key == "pool" || key == "refused" { // all share one
				value = "all"
			}
			r.Descriptors = append(r.Descriptors, &corerl.RateLimitDescriptor{
				Entries: []*corerl.RateLimitDescriptor_Entry{{Key: key, Value: value}},
			})
		}
		var err error
		if requests[i], err = proto.Marshal(r); err != nil {
			return nil, err
		}
	}
	return requests, nil
}

// load is a number of callers, each of which asks as soon as it has its last
// answer.
type load struct {
	address  string // of the server
	callers  int
	requests [][]byte
	want     rls.RateLimitResponse_Code // any other answer ends the run
	// release makes the end of the lease a part of every decision. lease, if not
	// "", is the one to end: for a server that grants none.
	release bool
	lease   string
}

// decided is what callers saw in the window of a run.
type decided struct {
	latencies []time.Duration // of decisions, in no order
	bypassed  int             // of them: answered without the store
}

// The phases of a run: callers note their decisions in the window only.
const (
	warming int32 = iota
	counting
	stopping
)

// run lets the callers ask for requests at random. It calls begin after the
// warm-up and end after the window.
func (l *load) run(window time.Duration, begin, end func() error) (decided, error) {
	var phase atomic.Int32
	seen := make([]decided, l.callers)
	stop, err := l.start(func(i int, c *caller) error {
		random := rand.New(rand.NewPCG(uint64(i), 1))
		for phase.Load() != stopping {
			start := time.Now()
			if err := c.decide(l.requests[random.IntN(len(l.requests))]); err != nil {
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
	if e := end(); err == nil {
		err = e
	}
	phase.Store(stopping)
	if e := stop(); err == nil {
		err = e
	}
	var all decided
	for _, d := range seen {
		all.latencies = append(all.latencies, d.latencies...)
		all.bypassed += d.bypassed
	}
	return all, err
}

// once sends every request once.
func (l *load) once() error {
	var next atomic.Int64
	stop, err := l.start(func(_ int, c *caller) error {
		for {
			n := int(next.Add(1)) - 1
			if n >= len(l.requests) {
				return nil
			}
			if err := c.decide(l.requests[n]); err != nil {
				return err
			}
		}
	})
	if err != nil {
		return err
	}
	return stop()
}

// start runs f for each caller. The function that it returns waits for all and
// returns the first error.
func (l *load) start(f func(i int, c *caller) error) (wait func() error, err error) {
	var conns []*grpc.ClientConn
	hangUp := func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}
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
		work.Go(func() { errs[i] = f(i, &caller{load: l, conn: conns[i%len(conns)]}) })
	}
	return func() error {
		work.Wait()
		hangUp()
		for _, err := range errs {
			if err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// caller asks one question after the other.
type caller struct {
	*load
	conn        *grpc.ClientConn
	answer, end []byte // messages; used again each time
	bypassed    bool   // the last decision
}

// decide asks, and ends the lease that was granted if the load says so.
func (c *caller) decide(request []byte) error {
	if err := c.call(rls.RateLimitService_ShouldRateLimit_FullMethodName, request); err != nil {
		return err
	}
	c.bypassed = bytes.Contains(c.answer, []byte("bypass_reason"))
	if code := overallCode(c.answer); code != c.want && !c.bypassed {
		return fmt.Errorf("the answer is %v, want %v", code, c.want)
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
	return c.call(weirv1.LeaseService_Release_FullMethodName, c.end)
}

func (c *caller) call(method string, request []byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	return c.conn.Invoke(ctx, method, &request, &c.answer)
}

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
