package server_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
)

// marker stands in every value that must not be seen.
const marker = "s3cr3tM4rk"

const sensitivePolicy = `
domain: d
descriptors:
  - {key: api_key, value: s3cr3tM4rk-written, sensitive: true, token_bucket: {capacity: 2, refill: 1/d}}
  - {key: api_key, sensitive: true, token_bucket: {capacity: 3, refill: 1/d}, concurrency: {max_in_flight: 2, lease: 1h}}
  - {key: ban, sensitive: true, rate_limit: {unit: day, requests_per_unit: 0, on_over: charge}}
  - {key: tried, sensitive: true, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: "x-*", value: "*", sensitive: true, share_threshold: true, token_bucket: {capacity: 3, refill: 1/d}}
  - {key: account, token_bucket: {capacity: 1000, refill: 1/d}, descriptors: [{key: api_key, rate_limit: {unit: hour, requests_per_unit: 2}}]}
`

// secrets are values of hostile text, each with the marker.
func secrets() []string {
	var all []string
	for _, text := range []string{
		"%s", "%s\n", "\"%s\"", "{%s}", "}%s{", "\x00%s", "%%%s", "#%s", "%s,account=x", "%s:=%%", "*%s*", "\u202e%s", "'%s\\", "<%s>", " %s ",
	} {
		all = append(all, fmt.Sprintf(text, marker))
	}
	return append(all, strings.Repeat(marker, 7), strings.Repeat(marker, 2_000))
}

// seen is all that somebody may see of requests: answers, pages, logs and Redis.
type seen struct{ strings.Builder }

func (s *seen) add(m proto.Message, err error) {
	if err != nil {
		s.WriteString(err.Error() + "\n")
		return
	}
	s.WriteString(prototext.Format(m) + "\n")
}

// A sensitive value is seen nowhere, whatever becomes of the request.
func TestNobodySeesASensitiveValue(t *testing.T) {
	key := filepath.Join(t.TempDir(), "hash.key")
	if err := os.WriteFile(key, []byte("0123456789abcdef0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	redis := storetest.StartRedis(t, storetest.AnyRedis(t), "--rdbcompression", "no", "--slowlog-log-slower-than", "0", "--slowlog-max-len", "100000")
	r := newReplica(t, sensitivePolicy, "--redis", redis.URL, "--hash-key-file", key, "--log-level", "debug", "--store-timeout", "5s", "--ratelimit-headers", "--lease-header")
	r.ready(t)
	client := redisClient(t, redis)
	var s seen

	ask := func(d ...*ratelimit.RateLimitDescriptor) *rls.RateLimitResponse {
		m, err := r.envoy.ShouldRateLimit(storetest.Context(t), &rls.RateLimitRequest{Domain: "d", Descriptors: d})
		s.add(m, err)
		return m
	}
	entry := func(entries ...string) *ratelimit.RateLimitDescriptor {
		d := &ratelimit.RateLimitDescriptor{}
		for i := 0; i < len(entries); i += 2 {
			d.Entries = append(d.Entries, &ratelimit.RateLimitDescriptor_Entry{Key: entries[i], Value: entries[i+1]})
		}
		return d
	}
	overriding := func(d *ratelimit.RateLimitDescriptor, unit typev3.RateLimitUnit) *ratelimit.RateLimitDescriptor {
		d.Limit = &ratelimit.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 1, Unit: unit}
		return d
	}
	everyWay := func(secret string) {
		for range 4 { // admitted, then refused by the lane, and by the bucket
			ask(entry("api_key", secret), entry("account", "visible"))
		}
		for range 2 {
			ask(entry("ban", secret))
			ask(entry("tried", secret))
			ask(entry("x-forwarded", secret), entry("x-other", secret))
			ask(entry("account", "visible", "api_key", secret))
			ask(overriding(entry("api_key", secret), typev3.RateLimitUnit_DAY))
			ask(overriding(entry("nothing", "here", "api_key", secret), typev3.RateLimitUnit_DAY))
			ask(overriding(entry("x-unknown", secret, "tried", secret), typev3.RateLimitUnit_MONTH))
		}
		refund := entry("api_key", secret)
		refund.IsNegativeHits, refund.HitsAddend = true, wrapperspb.UInt64(1)
		ask(refund)
		// Mistakes.
		ask(overriding(entry("api_key", secret), typev3.RateLimitUnit_UNKNOWN))
		ask(entry("", secret))
		ask(entry("api_key", secret, "weir.event", secret))
		ask(entry("api_key", secret, "weir.event", "usage"))
		ask(entry("api_key", secret, "weir.event", "release", "weir.lease_id", secret))
		ask(entry("api_key", secret, "weir.event", "release"))
		ask()
		many := entry()
		for range 65 {
			many.Entries = append(many.Entries, entry("api_key", secret).GetEntries()...)
		}
		ask(many)
		acquired, err := r.leases.Acquire(storetest.Context(t), &weirv1.AcquireRequest{Domain: "d", Descriptors: []*weirv1.Descriptor{typed("api_key", secret), typed("x-a", secret)}})
		s.add(acquired, err)
		acquired, err = r.leases.Acquire(storetest.Context(t), &weirv1.AcquireRequest{Domain: "d", Descriptors: []*weirv1.Descriptor{typed("", secret)}})
		s.add(acquired, err)
		released, err := r.leases.Release(storetest.Context(t), &weirv1.ReleaseRequest{LeaseIds: []string{secret}})
		s.add(released, err)
	}
	for _, secret := range secrets() {
		everyWay(secret)
	}
	everyWay(marker + "-written") // the one of the policy
	plain, err := proto.Marshal(&rls.RateLimitRequest{Domain: "d", Descriptors: []*ratelimit.RateLimitDescriptor{entry("api_key", marker)}})
	if err != nil {
		t.Fatal(err)
	}
	// No UTF-8: a value that is decided all the same, and a key that is not.
	for _, invalid := range [][]byte{append(bytes.Clone(plain[:len(plain)-1]), 0xff), bytes.ReplaceAll(plain, []byte("api_key"), []byte("api\xffkey"))} {
		m, err := send(storetest.Context(t), r.conn, shouldRateLimit, invalid)
		s.add(m, err)
	}

	// Somebody else's values under the keys: WRONGTYPE, which is logged.
	look := func() {
		keys, err := client.Keys(t.Context(), "*").Result()
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range keys {
			value, err := client.Dump(t.Context(), k).Result()
			if err != nil {
				t.Fatal(err)
			}
			s.WriteString(k + "\n" + value + "\n")
		}
	}
	look()
	keys, err := client.Keys(t.Context(), "*api_key*").Result()
	if err != nil || len(keys) < 3*len(secrets()) {
		t.Fatalf("%d keys of api_key (%v), want some of each secret", len(keys), err)
	}
	for _, k := range keys {
		client.Del(t.Context(), k)
		if err := client.RPush(t.Context(), k, "x").Err(); err != nil {
			t.Fatal(err)
		}
	}
	for _, secret := range secrets() {
		if m := ask(entry("api_key", secret)); m.GetDynamicMetadata().GetFields()["bypass_reason"].GetStringValue() != "store_error" {
			t.Errorf("with a list under its key: %v, want a store error", m)
		}
	}
	look()
	slow, err := client.SlowLogGet(t.Context(), -1).Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range slow {
		s.WriteString(strings.Join(entry.Args, "\n") + "\n")
	}
	info, err := client.Info(t.Context(), "everything").Result() // it counts errors by their text
	if err != nil {
		t.Fatal(err)
	}
	s.WriteString(info)

	// And when Redis is away.
	redis.Kill()
	for _, secret := range secrets() {
		ask(entry("api_key", secret))
	}
	for _, page := range []string{"/metrics", "/healthz", "/status.json"} {
		_, body := r.Get(t, page)
		s.WriteString(body)
	}
	rlconfig, err := http.Get("http://" + r.Admin + "/rlconfig")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rlconfig.Body.Close() }()
	if _, err := io.Copy(&s, rlconfig.Body); err != nil {
		t.Fatal(err)
	}
	s.WriteString(r.Log())

	all := s.String()
	// What is there shows that the search would find.
	for _, want := range []string{
		"account=visible", "api_key=#", "api_key=(hidden)", "store answered with an error", "WRONGTYPE", "store failed",
		"weir_checks_total", "LANE_FULL", "lane_full", "banned", "InvalidArgument", "is unknown; use one of", "no valid UTF-8", "evalsha",
	} {
		if !strings.Contains(strings.ToLower(all), strings.ToLower(want)) {
			t.Errorf("%q is nowhere to be seen", want)
		}
	}
	if at := strings.Index(all, marker); at >= 0 {
		t.Errorf("a sensitive value is seen: %q", all[max(0, at-300):min(len(all), at+100)])
	}
	for _, secret := range secrets() {
		sum := sha256.Sum256([]byte(secret))
		for _, digest := range []string{base64.RawURLEncoding.EncodeToString(sum[:]), hex.EncodeToString(sum[:]), base64.RawURLEncoding.EncodeToString([]byte(secret))} {
			if strings.Contains(all, digest[:min(len(digest), 20)]) {
				t.Errorf("a digest without a key, or an encoding, of %.40q is seen", secret)
			}
		}
	}
}
