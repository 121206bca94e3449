package server

import (
	"context"
	"log/slog"
	"runtime"
	"strings"
	"testing"
	"time"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"weir/policy"
	"weir/store/memory"
)

// benchServer serves policies from memory, until the benchmark ends.
func benchServer(b *testing.B, policies string, remember time.Duration) *Server {
	b.Helper()
	set, err := policy.Parse("bench.yaml", []byte(policies), policy.Options{})
	if err != nil {
		b.Fatal(err)
	}
	store := memory.New(memory.Options{})
	b.Cleanup(func() { _ = store.Close() })
	s := New(Options{Store: store, Instant: true, Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry(), RememberRefusals: remember})
	s.SetPolicy(b.Context(), policy.Reading{Set: set})
	return s
}

// BenchmarkShouldRateLimit is what one decision costs in this process, from the bytes of
// the request to those of the answer: without the network, HTTP/2 and a Redis.
func BenchmarkShouldRateLimit(b *testing.B) {
	s := benchServer(b, `
domain: ai
descriptors:
  - {key: account, token_bucket: {capacity: 1000000000, refill: 1000000/s}}
  - {key: path, token_bucket: {capacity: 1000000000, refill: 1000000/s}}
  - {key: tenant, token_bucket: {capacity: 1000000000, refill: 1000000/s}}
  - {key: refused, token_bucket: {capacity: 1, refill: 1/d}}
`, 0)
	var handler func(srv any, ctx context.Context, next func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error)
	registered := registrar(func(desc *grpc.ServiceDesc) { handler = desc.Methods[0].Handler })
	rateLimit{Server: s}.register(registered)
	codec := wire{encoding.GetCodecV2("proto")}
	for _, keys := range []string{"account", "account path tenant", "refused"} {
		b.Run(keys, func(b *testing.B) {
			m := &rls.RateLimitRequest{Domain: "ai"}
			for key := range strings.FieldsSeq(keys) {
				m.Descriptors = append(m.Descriptors, &ratelimit.RateLimitDescriptor{Entries: []*ratelimit.RateLimitDescriptor_Entry{{Key: key, Value: "a000000042"}}})
			}
			message, err := proto.Marshal(m)
			if err != nil {
				b.Fatal(err)
			}
			ctx := b.Context()
			b.ReportAllocs()
			for b.Loop() {
				answer, err := handler(rateLimit{Server: s}, ctx, func(into any) error {
					return codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(message)}, into)
				}, nil)
				if err != nil {
					b.Fatal(err)
				}
				out, err := codec.Marshal(answer)
				if err != nil {
					b.Fatal(err)
				}
				out.Free()
			}
		})
	}
}

// BenchmarkManyCallers is what a decision costs many callers of one subject at once, admitted
// or refused by what is remembered.
func BenchmarkManyCallers(b *testing.B) {
	s := benchServer(b, `
domain: ai
descriptors:
  - {key: admitted, token_bucket: {capacity: 1000000000, refill: 1000000/s}}
  - {key: refused, token_bucket: {capacity: 1, refill: 1/d}}
`, time.Hour)
	for _, key := range []string{"admitted", "refused"} {
		b.Run(key, func(b *testing.B) {
			message, err := proto.Marshal(&rls.RateLimitRequest{Domain: "ai", Descriptors: []*ratelimit.RateLimitDescriptor{
				{Entries: []*ratelimit.RateLimitDescriptor_Entry{{Key: key, Value: "a000000042"}}},
			}})
			if err != nil {
				b.Fatal(err)
			}
			b.SetParallelism(64 / runtime.GOMAXPROCS(0))
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					q, _ := questions.Get().(*question)
					if err := q.read(message); err != nil {
						b.Error(err)
						return
					}
					if _, err := (rateLimit{Server: s}).encoded(b.Context(), q); err != nil {
						b.Error(err)
						return
					}
					q.free()
				}
			})
		})
	}
}

// registrar is told of a service.
type registrar func(*grpc.ServiceDesc)

// RegisterService implements [grpc.ServiceRegistrar].
func (r registrar) RegisterService(desc *grpc.ServiceDesc, _ any) { r(desc) }
