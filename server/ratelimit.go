package server

import (
	"context"
	"errors"
	"path"
	"slices"
	"sync"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"weir/envoy"
	"weir/limit"
	"weir/policy"
)

// rateLimit is Envoy's RateLimitService: ShouldRateLimit decides whether work may start, and
// ends leases whose descriptors say so.
type rateLimit struct {
	rls.UnimplementedRateLimitServiceServer
	*Server
}

// question is a message under way. Its memory is used again.
type question struct {
	received
	envoy.Decoder
}

var questions = sync.Pool{New: func() any { return new(question) }}

// free is called when nothing of the question is needed any more.
func (q *question) free() {
	q.Forget()
	q.Buffer = nil // of a call that ended in the middle of it
	questions.Put(q)
}

// read reads a message. Its error is a gRPC status.
func (q *question) read(message []byte) error {
	err := q.Read(message)
	if err == nil {
		return nil
	}
	if err := countFields(message); err != nil {
		return toStatus(err)
	}
	return toStatus(noMessage())
}

// answered is an Ask with what was decided. If nothing was asked it admits.
type answered struct {
	ask envoy.Ask
	decided
}

// answer is ShouldRateLimit, before it is put into Envoy's words, of a question that was
// read. What it returns is of use until the question is freed. Its error is a gRPC status.
func (s rateLimit) answer(ctx context.Context, q *question) (answered, error) {
	now := s.loaded.Load()
	if now.set == nil {
		return answered{}, toStatus(errNoPolicy)
	}
	ask, err := q.Decode()
	if err != nil {
		return answered{}, toStatus(badRequest{err})
	}
	ask.SetDomain(now.name(ask.Request.Domain))
	// Usage before the release: it may be of the lease that ends.
	if err := s.settleAll(ctx, now.set, ask); err != nil {
		return answered{}, toStatus(err)
	}
	if err := s.releaseAll(ctx, ask.Request.Domain, ask.Endings); err != nil {
		return answered{}, toStatus(err)
	}
	if len(ask.Request.Descriptors) == 0 { // nothing is asked
		return answered{ask, decided{decision: limit.Decision{Admitted: true}, verdict: limit.Verdict{Admitted: true}}}, nil
	}
	d, err := s.decide(ctx, now, ask.Request, asker{stream: ask.Stream})
	if err != nil {
		return answered{}, toStatus(err)
	}
	return answered{ask, d}, nil
}

// register registers the service: as generated code does, but for ShouldRateLimit, whose
// messages and answers are bytes for [wire] and never messages of protobuf's: those cost
// more than the decision.
func (s rateLimit) register(services grpc.ServiceRegistrar) {
	desc := rls.RateLimitService_ServiceDesc
	desc.Methods = slices.Clone(desc.Methods)
	for i, m := range desc.Methods {
		if m.MethodName != path.Base(rls.RateLimitService_ShouldRateLimit_FullMethodName) {
			continue
		}
		info := &grpc.UnaryServerInfo{Server: s, FullMethod: rls.RateLimitService_ShouldRateLimit_FullMethodName}
		var handle grpc.UnaryHandler = s.encoded
		desc.Methods[i].Handler = func(_ any, ctx context.Context, next func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			q, _ := questions.Get().(*question)
			defer q.free()
			if err := q.receive(next); err != nil {
				return nil, err
			}
			if interceptor == nil {
				return handle(ctx, q)
			}
			return interceptor(ctx, q, info, handle)
		}
	}
	services.RegisterService(&desc, s)
}

// receive reads the next message. Its error is a gRPC status.
func (q *question) receive(next func(any) error) error {
	if err := next(&q.received); err != nil {
		return err
	}
	defer q.received.release()
	return q.read(q.ReadOnlyData())
}

// encoded is ShouldRateLimit of a question, on the wire.
func (s rateLimit) encoded(ctx context.Context, q any) (any, error) {
	a, err := s.answer(ctx, q.(*question)) //nolint:errcheck // it is what the handler made
	if err != nil {
		return nil, err
	}
	out := new(answer)
	out.bytes = envoy.Append(out.room[:0], a.ask, a.match, a.decision, a.verdict, s.encode)
	return out, nil
}

// message is ShouldRateLimit of messages. Its error is a gRPC status.
func (s rateLimit) message(ctx context.Context, m *rls.RateLimitRequest) (*rls.RateLimitResponse, error) {
	b, err := proto.Marshal(m)
	if err != nil {
		return nil, toStatus(noMessage())
	}
	q := new(question)
	if err := q.read(b); err != nil {
		return nil, err
	}
	a, err := s.answer(ctx, q)
	if err != nil {
		return nil, err
	}
	return envoy.Encode(a.ask, a.match, a.decision, a.verdict, s.encode), nil
}

// settleAll settles what a stream has used by what its lease has reserved of the limits
// that it meets, and charges what was not reserved, whatever is left of it; never to a
// concurrency. As a release it never fails open.
func (s rateLimit) settleAll(ctx context.Context, set *policy.Set, ask envoy.Ask) error {
	if len(ask.Usage.Descriptors) == 0 {
		return nil
	}
	m, err := match(set, ask.Usage)
	if err != nil {
		return err
	}
	u := limit.Usage{Domain: ask.Usage.Domain, Stream: ask.Stream, Lease: ask.UsageLease}
	for _, c := range m.Checks {
		if _, slot := c.Limit.(limit.Concurrency); !slot && (c.Hits != 0 || c.Reserve > 0) {
			u.Checks = append(u.Checks, c)
		}
	}
	if len(u.Checks) == 0 {
		return nil
	}
	ctx, cancel := detach(ctx)
	defer cancel()
	_, err = s.settle(ctx, u)
	return err
}

// releaseAll ends the work that a message ends. A release never fails open: an error
// is UNAVAILABLE, so that Envoy tries again.
func (s rateLimit) releaseAll(ctx context.Context, domain string, endings []limit.Ending) error {
	if len(endings) == 0 {
		return nil
	}
	ctx, cancel := detach(ctx)
	defer cancel()
	errs := make([]error, len(endings))
	each(endings, func(i int, e limit.Ending) {
		if e.Lease != "" && e.Lease.Domain() != domain { // another domain's lease is not held in this one
			s.metrics.released.WithLabelValues(s.label(domain), limit.NotHeld.String()).Inc()
			return
		}
		_, errs[i] = s.release(ctx, e, byRateLimitService)
	})
	return errors.Join(errs...)
}
