package envoy

import (
	"strconv"
	"testing"
	"time"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"weir/limit"
)

// wide is a message of n descriptors.
func wide(n int) *rls.RateLimitRequest {
	var list []*ratelimit.RateLimitDescriptor
	for i := range n {
		list = append(list, descriptor("account", "customer-"+strconv.Itoa(i), "path", "/v1/images"))
	}
	return ask(list...)
}

// What one message of Envoy's costs to read, from its bytes to our types.
func BenchmarkMessage(b *testing.B) {
	for _, tt := range []struct {
		name string
		m    *rls.RateLimitRequest
	}{
		{"one descriptor", ask(descriptor("account", "alice"))},
		{"three descriptors", ask(descriptor("account", "alice"), descriptor("account", "alice", "plan", "trial"), descriptor("pool", "images"))},
		{"three descriptors of a stream", ask(
			descriptor("account", "alice"), descriptor("pool", "images"), descriptor(keyStream, "0b0f4b60-0a87-4f0a-9d6a-6c9d52d9b2d7"),
		)},
		{"a release", ask(descriptor(keyEvent, eventRelease, keyLease, leaseText))},
		{"1000 descriptors", wide(1000)},
	} {
		b.Run(tt.name, func(b *testing.B) {
			message := marshal(b, tt.m)
			var d Decoder
			b.ReportAllocs()
			for b.Loop() {
				err := d.Read(message)
				if err == nil {
					_, err = d.Decode()
				}
				if err != nil {
					b.Fatal(err)
				}
				d.Forget()
			}
		})
	}
}

// What one answer costs to write.
func BenchmarkAppend(b *testing.B) {
	full := limit.Result{}
	bucket, slots, shared := aBucket("account", 10), lane("account", 3), pool("pool", 100)
	var many [][]decided
	for i := range 1000 {
		many = append(many, []decided{{aBucket("account"+strconv.Itoa(i), 10), passed(9, time.Second)}})
	}
	for _, tt := range []struct {
		name string
		d    decision
	}{
		{"one bucket admits", decide([]decided{{bucket, passed(9, time.Second)}})},
		{"one bucket refuses", decide([]decided{{bucket, failed(0, time.Second, 10*time.Second)}})},
		{"bucket, lane and pool admit", decide([]decided{{bucket, passed(9, time.Second)}, {slots, passed(2, 0)}}, []decided{{shared, passed(199, 0)}})},
		{"bucket, lane and pool, the pool refuses", decide([]decided{{bucket, passed(10, 0)}, {slots, passed(3, 0)}}, []decided{{shared, full}})},
		{"1000 buckets admit", decide(many...)},
	} {
		for _, with := range []struct {
			name string
			o    Options
		}{{"", Options{}}, {", with headers", Options{LeaseHeader: true, RateLimitHeaders: true}}} {
			b.Run(tt.name+with.name, func(b *testing.B) {
				b.ReportAllocs()
				var buffer []byte
				for b.Loop() {
					buffer = Append(buffer[:0], tt.d.a, tt.d.m, tt.d.d, tt.d.v, with.o)
				}
				b.ReportMetric(float64(len(buffer)), "bytes")
			})
		}
	}
}
