package e2e

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
)

const (
	variants       = "../variants/"
	variantsPolicy = variants + "policy.yaml"
)

var place = regexp.MustCompile(`(?m)^# (Before|After|Instead of) "(.+)"\n`)

// variant reads the pieces of a file in the folder of variants, each under a line that
// says where in the shipped configuration it belongs, and makes changes of them.
func variant(t *testing.T, name string) []change {
	t.Helper()
	b, err := os.ReadFile(variants + name)
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	places := place.FindAllStringSubmatchIndex(text, -1)
	if len(places) == 0 {
		t.Fatalf("%s says nowhere to what place it belongs", name)
	}
	var changes []change
	for i, m := range places {
		end := len(text)
		if i+1 < len(places) {
			end = places[i+1][0]
		}
		line := lineOf(t, text[m[4]:m[5]])
		indent := line[:len(line)-len(strings.TrimLeft(line, " "))]
		var piece strings.Builder
		for l := range strings.Lines(text[m[1]:end]) {
			if strings.TrimSpace(l) != "" {
				l = indent + l
			}
			piece.WriteString(l)
		}
		now := map[string]string{
			"Before":     piece.String() + line,
			"After":      line + piece.String(),
			"Instead of": piece.String(),
		}[text[m[2]:m[3]]]
		changes = append(changes, change{line, now})
	}
	return changes
}

// lineOf is the one line of the shipped configuration that begins with text, after
// its indentation.
func lineOf(t *testing.T, text string) string {
	t.Helper()
	b, err := os.ReadFile(shipped)
	if err != nil {
		t.Fatal(err)
	}
	lines := regexp.MustCompile(`(?m)^ *`+regexp.QuoteMeta(text)+`.*\n`).FindAllString(string(b), -1)
	if len(lines) != 1 {
		t.Fatalf("%s has %d lines that begin with %q, want 1", shipped, len(lines), text)
	}
	return lines[0]
}

// Each variant, put into the file that users have; and together those that do not
// exclude each other.
func TestEnvoyAcceptsTheVariants(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(variants + "*.yaml")
	if err != nil || len(files) < 2 {
		t.Fatalf("%d variants: %v", len(files), err)
	}
	_, secured := secretFiles(t, storetest.NewAuthority(t), edge)
	check := func(name string, changes ...change) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "envoy.yaml")
			if err := os.WriteFile(file, []byte(configure(t, changes...)), 0o600); err != nil {
				t.Fatal(err)
			}
			validate(t, file)
		})
	}
	for _, f := range files {
		switch name := filepath.Base(f); name {
		case filepath.Base(variantsPolicy):
		case tlsVariant:
			check(name, secured...)
		default:
			check(name, variant(t, name)...)
		}
	}
	all := slices.Clone(secured)
	for _, name := range []string{"account-api-key.yaml", "cost-header.yaml", "grpc.yaml", "routes.yaml", "shadow.yaml", "usage-sse.yaml"} {
		all = append(all, variant(t, name)...)
	}
	check("together", all...)
}

// startVariant runs a stack with a variant and the policy of the variants.
func startVariant(t *testing.T, name string, flags []string, changes ...change) *stack {
	t.Helper()
	return startPolicy(t, variantsPolicy, flags, append(variant(t, name), changes...)...)
}

// state is how a limit stands for the subject of one entry.
func (s *stack) state(t *testing.T, key, value, limit string) *weirv1.LimitState {
	t.Helper()
	r, err := s.upstream.leases.Inspect(t.Context(), &weirv1.InspectRequest{
		Domain: "inference", Entries: []*weirv1.Entry{{Key: key, Value: value}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range r.GetLimits() {
		if l.GetName() == limit {
			return l
		}
	}
	t.Fatalf("%s=%s has no limit %q, but %v", key, value, limit, r.GetLimits())
	return nil
}

// requestsLeft are the tokens in an account's bucket of requests.
func (s *stack) requestsLeft(t *testing.T, account string) int64 {
	t.Helper()
	return s.state(t, "account", account, "requests").GetLevel()
}

// tokensUsed is what an account's window of tokens has counted.
func (s *stack) tokensUsed(t *testing.T, account string) uint64 {
	t.Helper()
	return s.state(t, "account_tokens", account, "tokens").GetCount()
}

func TestTheAccountIsThatOfTheAPIKey(t *testing.T) {
	t.Parallel()
	s := startVariant(t, "account-api-key.yaml", nil)
	for range 3 { // and not the account that the client would like to be
		s.get(t, "bob", "/ok", "authorization", "Bearer change-me-1").want(t, http.StatusOK)
	}
	s.wantAuthenticated(t)
	if got := len(s.upstream.of("alice")); got != 3 {
		t.Errorf("the upstream had %d visits of alice, want 3", got)
	}
}

func TestTheAccountIsAClaimOfTheToken(t *testing.T) {
	t.Parallel()
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	changes := variant(t, "account-jwt.yaml")
	key := regexp.MustCompile(`"x": "[^"]+"`)
	if n := len(key.FindAllString(changes[0].now, -1)); n != 1 {
		t.Fatalf("the variant has %d keys, want 1", n)
	}
	changes[0].now = key.ReplaceAllString(changes[0].now, `"x": "`+base64.RawURLEncoding.EncodeToString(public)+`"`)
	s := startPolicy(t, variantsPolicy, nil, changes...)

	bearer := "Bearer " + token(t, private, "https://login.example.com", "alice")
	for range 3 {
		s.get(t, "bob", "/ok", "authorization", bearer).want(t, http.StatusOK)
	}
	// Whose token is of another issuer, or of another key, is nobody.
	s.get(t, "alice", "/ok", "authorization", "Bearer "+token(t, private, "https://other.example.com", "alice")).want(t, http.StatusUnauthorized)
	_, other, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	s.get(t, "alice", "/ok", "authorization", "Bearer "+token(t, other, "https://login.example.com", "alice")).want(t, http.StatusUnauthorized)
	s.wantAuthenticated(t)
	// Whose token says no account has limits all the same.
	nobody := "Bearer " + token(t, private, "https://login.example.com", "")
	for range 10 {
		s.get(t, "alice", "/ok", "authorization", nobody).want(t, http.StatusOK)
	}
	storetest.Eventually(t, "its slots are free", func() bool { return s.metric(t, heldNow) == 0 })
	s.get(t, "alice", "/ok", "authorization", nobody).wantRefused(t, http.StatusTooManyRequests, "requests")
}

// token makes a JSON Web Token.
func token(t *testing.T, key ed25519.PrivateKey, issuer, subject string) string {
	t.Helper()
	var parts []string
	for _, part := range []map[string]any{
		{"alg": "EdDSA", "typ": "JWT", "kid": "example"},
		{"iss": issuer, "sub": subject, "exp": time.Now().Add(time.Hour).Unix()},
	} {
		b, err := json.Marshal(part)
		if err != nil {
			t.Fatal(err)
		}
		parts = append(parts, base64.RawURLEncoding.EncodeToString(b))
	}
	text := strings.Join(parts, ".")
	return text + "." + base64.RawURLEncoding.EncodeToString(ed25519.Sign(key, []byte(text)))
}

// wantAuthenticated checks that alice has asked three times and bob never, that who
// proves nothing gets 401, and that weir was asked about nobody else, and nothing
// released but alice's.
func (s *stack) wantAuthenticated(t *testing.T) {
	t.Helper()
	s.get(t, "alice", "/ok").want(t, http.StatusUnauthorized)
	s.get(t, "alice", "/ok", "authorization", "Bearer guessed").want(t, http.StatusUnauthorized)
	if alice, bob := s.requestsLeft(t, "alice"), s.requestsLeft(t, "bob"); alice != 7 || bob != 10 {
		t.Errorf("alice has %d requests left and bob %d, want 7 and 10", alice, bob)
	}
	if d := cmp.Diff(map[string]int{"ok": 3}, s.envoy.counters(t)); d != "" {
		t.Errorf("Envoy's counters (-want +got):\n%s", d)
	}
	s.wantReleased(t, 3)
}

// wantReleased waits until so many leases are released, and no others are held.
func (s *stack) wantReleased(t *testing.T, n int) {
	t.Helper()
	storetest.Eventually(t, strconv.Itoa(n)+" leases are released, and none is held", func() bool {
		return s.metric(t, `weir_leases_released_total{domain="inference",result="RELEASED"}`) == n && s.metric(t, `weir_leases_held{domain="inference"}`) == 0
	})
}

// Usage closes the gate for those who come later, wherever the upstream tells it.
func TestUsageClosesTheGate(t *testing.T) {
	t.Parallel()
	for name, path := range map[string]string{
		"usage-header.yaml": "/ok",
		"usage-json.yaml":   "/json",
		"usage-sse.yaml":    "/sse",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startVariant(t, name, nil)
			use := func(account, n string) {
				t.Helper()
				s.get(t, account, path, "x-use", n).want(t, http.StatusOK)
			}
			used := func(account string, n uint64) {
				t.Helper()
				storetest.Eventually(t, strconv.FormatUint(n, 10)+" tokens are charged", func() bool { return s.tokensUsed(t, account) == n })
			}
			use("alice", "600")
			used("alice", 600)
			use("alice", "400")
			used("alice", 1000)
			use("alice", "234") // none is left, and nothing is over
			used("alice", 1234)

			// Months begin every 30 days: whoever tests just then gets a new one.
			s.get(t, "alice", path+"/over", "x-use", "5").wantRefused(t, http.StatusTooManyRequests, "tokens")
			want := logEntry{
				Path: path + "/over", Status: http.StatusTooManyRequests, Details: "request_rate_limited",
				Verdict: "refused", Reason: "window_full", Limits: []string{"tokens"},
			}
			if d := cmp.Diff(want, s.envoy.logged(t, path+"/over")); d != "" {
				t.Errorf("access log (-want +got):\n%s", d)
			}
			use("bob", "1")
			used("bob", 1)
			// Without a number that Envoy takes, nothing is charged, and the slot is free all the same.
			for _, n := range []string{`"many"`, "-3"} {
				use("bob", n)
			}
			s.get(t, "bob", "/error").want(t, http.StatusInternalServerError)
			s.wantReleased(t, 7)
			// The refused one was charged nothing: neither what it would have used, nor a request.
			used("alice", 1234)
			used("bob", 1)
			if alice, bob := s.requestsLeft(t, "alice"), s.requestsLeft(t, "bob"); alice != 7 || bob != 6 {
				t.Errorf("alice has %d requests left and bob %d, want 7 and 6", alice, bob)
			}
		})
	}
}

// What a request reserves by its estimate is settled at its end, wherever the usage stands.
func TestAnEstimateIsSettledByTheUsage(t *testing.T) {
	t.Parallel()
	for from, path := range map[string]string{
		"usage-header.yaml": "/ok",
		"usage-json.yaml":   "/json",
		"usage-sse.yaml":    "/sse",
	} {
		t.Run(from, func(t *testing.T) {
			t.Parallel()
			s := startPolicy(t, variantsPolicy, nil, estimateFrom(t, from)...)
			use := func(estimate, used string, want int, more ...string) {
				t.Helper()
				headers := append([]string{"x-estimate", estimate, "x-use", used}, more...)
				s.get(t, "alice", path, headers...).want(t, want)
			}
			stands := func(n uint64) {
				t.Helper()
				storetest.Eventually(t, strconv.FormatUint(n, 10)+" tokens are counted", func() bool {
					return s.state(t, "account_reserved", "alice", "reserved").GetCount() == n
				})
			}
			use("400", "150", http.StatusOK)
			stands(150)
			use("", "50", http.StatusOK) // the estimate was 100
			stands(200)
			use("much", "20", http.StatusOK)
			stands(220)
			use("200", "330", http.StatusOK) // more than its estimate
			stands(550)
			// No room for the estimate: it does not reach the upstream, and costs nothing.
			s.get(t, "alice", path+"/over", "x-estimate", "400", "x-use", "5").wantRefused(t, http.StatusTooManyRequests, "reserved")
			stands(550)
			// Nothing is told: the estimate stands.
			use("100", `"many"`, http.StatusOK)
			stands(750)
			use("150", "0", http.StatusOK)
			stands(750)
			// While it works its estimate is taken.
			h := s.holdAt(t, "alice", "/hold", "x-estimate", "100", "x-use", "1")
			stands(950)
			h.end(t, s)
			s.wantReleased(t, 7)
		})
	}
}

// estimateFrom is the variant that reserves, with the usage from where another finds it.
func estimateFrom(t *testing.T, usage string) []change {
	t.Helper()
	changes := variant(t, "estimate.yaml")
	const header = `"%RESP(x-usage)%"`
	if usage == "usage-header.yaml" {
		return changes
	}
	for i := range changes {
		changes[i].now = strings.ReplaceAll(changes[i].now, header, `"%DYNAMIC_METADATA(usage:tokens)%"`)
	}
	for _, c := range variant(t, usage) {
		if strings.Contains(c.now, "remove: accept-encoding") || strings.Contains(c.now, "_to_metadata") {
			changes = append(changes, c)
		}
	}
	return changes
}

// Envoy tries again what weir did not answer in time.
func TestUsageIsChargedOnce(t *testing.T) {
	t.Parallel()
	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	s := startVariant(t, "usage-header.yaml", onRedis(redis))
	h := s.holdAt(t, "alice", "/hold", "x-use", "70")
	signal(t, redis, syscall.SIGSTOP)
	close(h.visit.leave)
	if r := <-h.ended; r.err != nil || r.code != http.StatusOK {
		t.Fatalf("answered %d, %v", r.code, r.err)
	}
	storetest.Eventually(t, "Envoy tries again", func() bool { return s.envoy.counter(t, "cluster.weir_release.upstream_rq_retry") >= 1 })
	signal(t, redis, syscall.SIGCONT)
	storetest.Eventually(t, "the slot is free", func() bool { return s.metric(t, `weir_leases_held{domain="inference"}`) == 0 })
	storetest.Eventually(t, "no call is under way", func() bool {
		// The access log's stream stays.
		return s.envoy.counter(t, "cluster.weir_release.upstream_rq_active") <= 1 && s.tokensUsed(t, "alice") != 0
	})
	// And once more.
	_, err := rls.NewRateLimitServiceClient(s.weir.Dial(t)).ShouldRateLimit(t.Context(), usage(h.visit.stream, "alice", 70))
	if err != nil {
		t.Fatal(err)
	}
	if got := s.tokensUsed(t, "alice"); got != 70 {
		t.Errorf("%d tokens are charged, want 70", got)
	}
}

func TestARequestCostsWhatItsHeaderSays(t *testing.T) {
	t.Parallel()
	s := startVariant(t, "cost-header.yaml", nil)
	for _, c := range []struct {
		cost string
		left int64
	}{{"7", 3}, {"", 2}, {"much", 1}} {
		s.get(t, "alice", "/ok", "x-cost", c.cost).want(t, http.StatusOK)
		if got := s.requestsLeft(t, "alice"); got != c.left {
			t.Errorf("after a cost of %q alice has %d left, want %d", c.cost, got, c.left)
		}
	}
	s.get(t, "alice", "/ok", "x-cost", "2").wantRefused(t, http.StatusTooManyRequests, "requests")
	// No number that Envoy takes is 1: nobody pays less, and of more than 32 bits nobody pays more.
	for _, cost := range []string{"-3", "0", "1.5", "4294967301", "18446744073709551621"} {
		before := s.requestsLeft(t, "bob")
		s.get(t, "bob", "/ok", "x-cost", cost).want(t, http.StatusOK)
		if got := s.requestsLeft(t, "bob"); got != before-1 {
			t.Errorf("after a cost of %q bob has %d left, want %d", cost, got, before-1)
		}
	}
	var p problem
	a := s.get(t, "carol", "/ok", "x-cost", "4294967295")
	a.want(t, http.StatusTooManyRequests, "retry-after", "")
	if err := json.Unmarshal([]byte(a.body), &p); err != nil || p.Retryable {
		t.Errorf("body %q, want a problem that no retry helps (%v)", a.body, err)
	}
	s.wantReleased(t, 8)
}

// usage is what a filter says at the end of a stream.
func usage(stream, account string, hits uint64) *rls.RateLimitRequest {
	return &rls.RateLimitRequest{Domain: "inference", Descriptors: []*ratelimit.RateLimitDescriptor{{
		Entries: []*ratelimit.RateLimitDescriptor_Entry{
			{Key: "weir.event", Value: "usage"}, {Key: "weir.stream_id", Value: stream}, {Key: "account_tokens", Value: account},
		},
		HitsAddend: wrapperspb.UInt64(hits),
	}}}
}

func TestRoutesHaveLimitsOfTheirOwn(t *testing.T) {
	t.Parallel()
	s := startVariant(t, "routes.yaml", nil)
	var all []held
	for range 2 {
		all = append(all, s.holdAt(t, "alice", "/chat?do=hold"))
	}
	for _, path := range []string{"/chat", "//chat", "/./chat", "/x/../chat", "/x/%2e%2e/chat", "/%63hat"} { // as a service may read them
		s.get(t, "bob", path+"?do=ok").wantRefused(t, http.StatusServiceUnavailable, "chat")
	}
	s.get(t, "bob", "/x%2f..%2fchat").want(t, http.StatusBadRequest)
	// The other pool has room, and alice's lane is the same on every route.
	s.get(t, "bob", "/ok").want(t, http.StatusOK)
	all = append(all, s.hold(t, "alice"))
	s.get(t, "alice", "/ok").wantRefused(t, http.StatusTooManyRequests, "lane")
	s.get(t, "alice", "/chat?do=ok").wantRefused(t, http.StatusTooManyRequests, "chat", "lane")
	asked := s.envoy.counters(t)
	s.get(t, "alice", "/healthz?do=ok").want(t, http.StatusOK, "x-ratelimit-limit", "")
	if d := cmp.Diff(asked, s.envoy.counters(t)); d != "" {
		t.Errorf("weir was asked about a health check (-before +after):\n%s", d)
	}
	for _, h := range all {
		h.end(t, s)
	}
	s.wantReleased(t, 4)
}

// As docs/envoy.md says it: Envoy does not release, and still renews.
func TestTheUpstreamAloneReleases(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile(shipped)
	if err != nil {
		t.Fatal(err)
	}
	release := regexp.MustCompile(`(?s)          # The release: .*?\n( +- name: envoy\.filters\.http\.ratelimit\n)`).FindStringSubmatch(string(b))
	filter := regexp.MustCompile(`(?s)(- name: envoy\.access_loggers\.http_grpc\n +filter:\n).*?( +typed_config:\n)`).FindStringSubmatch(string(b))
	if release == nil || filter == nil {
		t.Fatalf("%s has changed", shipped)
	}
	s := start(t, []string{"--lease-header"},
		change{release[0], release[1]},
		change{filter[0], filter[1] + "              log_type_filter: {types: [DownstreamPeriodic]}\n" + filter[2]},
		change{"access_log_flush_interval: 30s", "access_log_flush_interval: 0.05s"})
	h := s.hold(t, "alice")
	storetest.Eventually(t, "its lease is renewed", func() bool {
		_, page := s.weir.Get(t, "/metrics")
		return strings.Contains(page, `weir_access_log_entries_total{domain="inference",kind="renewal"}`)
	})
	h.end(t, s)
	s.get(t, "alice", "/ok").want(t, http.StatusOK)
	s.wantReleased(t, 2)
	_, page := s.weir.Get(t, "/metrics")
	if strings.Contains(page, `weir_access_log_entries_total{domain="inference",kind="end"}`) || s.metric(t, `weir_leases_released_total{domain="inference",result="NOT_HELD"}`) != 0 {
		t.Errorf("somebody else has released, too:\n%s", page)
	}
}

func TestALimitThatIsTriedOut(t *testing.T) {
	t.Parallel()
	s := startVariant(t, "shadow.yaml", nil)
	for i, limits := range [][]string{nil, {"large"}, {"large"}} {
		path := "/ok/" + strconv.Itoa(i)
		// Alice sees her lane, as without it.
		s.get(t, "alice", path, "x-model", "large").want(t, http.StatusOK, "x-ratelimit-remaining", "2")
		want := logEntry{Path: path, Status: http.StatusOK, Details: "via_upstream", Verdict: "admitted", Limits: limits}
		if d := cmp.Diff(want, s.envoy.logged(t, path)); d != "" {
			t.Errorf("access log (-want +got):\n%s", d)
		}
		s.wantReleased(t, i+1)
	}
	if got := s.metric(t, `weir_checks_total{domain="inference",kind="token_bucket",limit="large",result="shadow_refused"}`); got != 2 {
		t.Errorf("%d were counted, want 2", got)
	}
}

func TestAClientOfGRPC(t *testing.T) {
	t.Parallel()
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, health.NewServer())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	s := startVariant(t, "grpc.yaml", nil, port("9001", portOf(t, l.Addr().String())))
	conn, err := grpc.NewClient("passthrough:///"+strings.TrimPrefix(s.envoy.url, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	client := healthpb.NewHealthClient(conn)
	as := func(account string) context.Context {
		ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "x-account", account), storetest.Deadline)
		t.Cleanup(cancel)
		return ctx
	}
	// watch is a call that goes on until it is left.
	watch := func(account string) (leave func()) {
		t.Helper()
		ctx, cancel := context.WithCancel(as(account))
		stream, err := client.Watch(ctx, &healthpb.HealthCheckRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		if err != nil {
			t.Fatal(err)
		}
		return cancel
	}
	refused := func(account string, code int, limit string) {
		t.Helper()
		var header, trailer metadata.MD
		_, err := client.Check(as(account), &healthpb.HealthCheckRequest{}, grpc.Header(&header), grpc.Trailer(&trailer))
		if got := grpcstatus.Code(err); got != codes.ResourceExhausted {
			t.Fatalf("%s got %v, want RESOURCE_EXHAUSTED", account, err)
		}
		var p problem
		if err := json.Unmarshal([]byte(grpcstatus.Convert(err).Message()), &p); err != nil || p.Status != code || !cmp.Equal(p.Violated, []string{limit}) {
			t.Errorf("%s got %q, want a problem of status %d and limit %s", account, grpcstatus.Convert(err).Message(), code, limit)
		}
		// Such a response has one part, which Go calls the trailer.
		if got := append(header.Get("retry-after"), trailer.Get("retry-after")...); len(got) != 1 || got[0] != "1" {
			t.Errorf("retry-after = %q, want 1", got)
		}
	}

	if _, err := client.Check(as("alice"), &healthpb.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	s.wantReleased(t, 1)
	var leave []func()
	for range 3 {
		leave = append(leave, watch("alice"))
	}
	refused("alice", http.StatusTooManyRequests, "lane")
	leave = append(leave, watch("bob"), watch("bob"))
	refused("carol", http.StatusServiceUnavailable, "images")
	for _, leave := range leave {
		leave()
	}
	s.wantReleased(t, 6)
	if _, err := client.Check(as("alice"), &healthpb.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	s.wantReleased(t, 7)
}
