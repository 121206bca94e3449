package faults

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

// What the policies of each domain allow.
const (
	tokens = 1_000_000 // of one bucket, which gains nothing to speak of
	slots  = 4         // of a lane
	burst  = 7         // of a fresh bucket
	second = 4         // of a bucket that gains as much a second
)

// domains are called as the failure mode of their limits.
var domains = []string{"open", "closed", "local"}

func policy(domain string, lease time.Duration) string {
	return fmt.Sprintf(`
domain: %s
failure_mode: %s
descriptors:
  - {key: all, token_bucket: {capacity: %d, refill: 1/d}}
  - {key: lane, concurrency: {max_in_flight: %d, lease: %s}}
  - {key: kept, concurrency: {max_in_flight: 1, lease: %s}}
  - {key: burst, token_bucket: {capacity: %d, refill: 1/d}}
  - {key: second, token_bucket: {capacity: %d, refill: %d/s}}
`, domain, domain, tokens, slots, lease, lease, burst, second, second)
}

// replica is a process of weir, and its way to Redis.
type replica struct {
	*servertest.Process
	leases weirv1.LeaseServiceClient
	proxy  *proxy // nil if there is none
}

func (w *world) newReplica(f fault) *replica {
	t := w.t
	t.Helper()
	r := &replica{}
	url := w.url
	if strings.HasPrefix(url, "redis://127.0.0.1:") {
		r.proxy = newProxy(t, strings.TrimPrefix(url, "redis://"))
		url = "redis://" + r.proxy.Listen
	}
	timeout := "100ms"
	if f.never {
		timeout = "20s" // a busy machine must not look like a fault
	}
	// Nobody waits for a slot: a second ask that is lost is told the refusal of the first, and
	// its hits stay charged (docs/promises.md), which would not be counted exactly here.
	flags := append([]string{"--redis", url, "--store-timeout", timeout, "--replicas", strconv.Itoa(replicas), "--max-wait", "0s"}, w.flags...)
	for _, domain := range domains[1:] {
		path := filepath.Join(t.TempDir(), domain+".yaml")
		if err := os.WriteFile(path, []byte(policy(domain, f.life())), 0o600); err != nil {
			t.Fatal(err)
		}
		flags = append(flags, "--policy", path)
	}
	r.Process = servertest.Start(t, policy(domains[0], f.life()), flags...)
	r.leases = weirv1.NewLeaseServiceClient(r.Dial(t))
	return r
}

// metrics are the values of all series, by their text.
func (r *replica) metrics(t testing.TB) map[string]float64 {
	t.Helper()
	_, text := r.Get(t, "/metrics")
	all := make(map[string]float64)
	for line := range strings.Lines(text) {
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			value, err := strconv.ParseFloat(strings.TrimSpace(line[i:]), 64)
			if err != nil {
				t.Fatalf("/metrics: %q: %v", line, err)
			}
			all[line[:i]] = value
		}
	}
	return all
}

// left is what the store says is left of the limit of a subject; false if it does not
// answer.
func (r *replica) left(domain, key, value string) (int, bool) {
	ctx, cancel := call()
	defer cancel()
	m, err := r.leases.Inspect(ctx, &weirv1.InspectRequest{Domain: domain, Entries: []*weirv1.Entry{{Key: key, Value: value}}})
	if err != nil || len(m.GetLimits()) != 1 {
		return 0, false
	}
	return int(m.GetLimits()[0].GetRemaining()), true
}

// call is for one call of a client.
func call() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), storetest.Deadline)
}

// acquire asks. There is an answer, whatever happens.
func (r *replica) acquire(t testing.TB, domain string, descriptors ...*weirv1.Descriptor) *weirv1.AcquireResponse {
	ctx, cancel := call()
	defer cancel()
	m, err := r.leases.Acquire(ctx, &weirv1.AcquireRequest{Domain: domain, Descriptors: descriptors})
	if err != nil {
		t.Errorf("Acquire: %v", err)
	}
	return m
}

func (r *replica) release(t testing.TB, id string) weirv1.ReleaseStatus {
	ctx, cancel := call()
	defer cancel()
	m, err := r.leases.Release(ctx, &weirv1.ReleaseRequest{LeaseIds: []string{id}})
	if err != nil {
		t.Errorf("Release: %v", err)
		return unreleased
	}
	return m.GetResults()[0].GetStatus()
}

func (r *replica) renew(t testing.TB, id string) weirv1.RenewStatus {
	ctx, cancel := call()
	defer cancel()
	m, err := r.leases.Renew(ctx, &weirv1.RenewRequest{LeaseIds: []string{id}})
	if err != nil {
		t.Errorf("Renew: %v", err)
		return unrenewed
	}
	return m.GetResults()[0].GetStatus()
}

// The answers to those, in short.
const (
	unreleased = weirv1.ReleaseStatus_RELEASE_STATUS_UNAVAILABLE
	released   = weirv1.ReleaseStatus_RELEASE_STATUS_RELEASED
	notHeld    = weirv1.ReleaseStatus_RELEASE_STATUS_NOT_HELD
	expired    = weirv1.ReleaseStatus_RELEASE_STATUS_EXPIRED
	unrenewed  = weirv1.RenewStatus_RENEW_STATUS_UNAVAILABLE
	renewed    = weirv1.RenewStatus_RENEW_STATUS_RENEWED
	lost       = weirv1.RenewStatus_RENEW_STATUS_LOST
)

func of(key, value string) *weirv1.Descriptor {
	return &weirv1.Descriptor{Entries: []*weirv1.Entry{{Key: key, Value: value}}}
}

// replicas is how many a world has.
const replicas = 2

// world is a Redis, the replicas on it and their clients.
type world struct {
	t     *testing.T
	bin   string
	url   string           // of the Redis
	flags []string         // of weir, that the Redis asks for
	redis *storetest.Redis // what is struck
	// What there may be besides.
	sentinel *storetest.Sentinel
	cluster  *storetest.Cluster
	clock    *clock
	ca       string            // weir's file of authorities
	kept     map[string]string // by domain, a lease from before the fault

	replicas []*replica
	load     *load
}

// newWorld starts all of it, and clients that ask.
func newWorld(t *testing.T, f fault, bin string) *world {
	t.Helper()
	w := &world{t: t, bin: bin}
	on := f.on
	if on == nil {
		on = oneRedis()
	}
	on(w)
	for range replicas {
		w.replicas = append(w.replicas, w.newReplica(f))
	}
	w.load = newLoad(w, f)
	return w
}
