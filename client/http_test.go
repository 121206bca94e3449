package client_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weir/client"
	"weir/store/storetest"
)

// problems has a limit for each reason to refuse.
const problems = `
domain: images
descriptors:
  - {key: bucket, token_bucket: {capacity: 1, refill: 1/7s}}
  - {key: day, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: lane, concurrency: {max_in_flight: 1, lease: 30s}}
  - {key: pool, concurrency: {max_in_flight: 1, lease: 30s}, reject_as: pool}
  - {key: banned, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: free, token_bucket: {capacity: 100, refill: 1/s}}
`

func byAccount(r *http.Request) client.Request { return account(r.Header.Get("X-Account")) }

// A refusal by the middleware is the one that Envoy's clients get.
func TestARefusalOverHTTPIsTheServicesOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // where no time passes between the two
		s := serve(t, problems)
		c := newClient(t, s.conn, client.Options{})
		for _, tt := range []struct {
			keys       []string
			hits       uint64
			code       int
			retryAfter string
		}{
			{[]string{"bucket"}, 1, 429, "7"},
			{[]string{"day"}, 1, 429, "86400"},
			{[]string{"lane"}, 1, 429, "1"},
			{[]string{"pool"}, 1, 503, "1"},
			{[]string{"pool", "bucket", "lane", "day"}, 1, 429, "86400"},
			{[]string{"banned"}, 1, 429, ""},
			{[]string{"free"}, 101, 429, ""},
		} {
			r := client.Request{Hits: &tt.hits}
			m := &rls.RateLimitRequest{Domain: "images", HitsAddend: uint32(tt.hits)}
			for _, key := range tt.keys {
				r.Descriptors = append(r.Descriptors, client.Describe(key, "x"))
				m.Descriptors = append(m.Descriptors, &ratelimit.RateLimitDescriptor{
					Entries: []*ratelimit.RateLimitDescriptor_Entry{{Key: key, Value: "x"}},
				})
			}
			if l, err := c.Acquire(t.Context(), r); err == nil { // it takes all there is
				defer l.Release(t.Context())
			}
			envoys, err := rls.NewRateLimitServiceClient(s.conn).ShouldRateLimit(t.Context(), m)
			if err != nil {
				t.Fatal(err)
			}
			w := httptest.NewRecorder()
			c.Middleware(func(*http.Request) client.Request { return r })(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				t.Errorf("%v: a refused request reached the handler", tt.keys)
			})).ServeHTTP(w, httptest.NewRequest("POST", "/images", nil))
			expect(t, fmt.Sprint(tt.keys, "'s code"), w.Code, tt.code)
			expect(t, fmt.Sprint(tt.keys, "'s body"), w.Body.String(), string(envoys.GetRawBody()))
			expect(t, fmt.Sprint(tt.keys, "'s Retry-After"), w.Header().Get("Retry-After"), tt.retryAfter)
			for _, h := range envoys.GetResponseHeadersToAdd() {
				expect(t, fmt.Sprint(tt.keys, "'s ", h.GetKey()), w.Header().Get(h.GetKey()), h.GetValue())
			}
		}
	})
}

func TestAnyRefusalHasATrueText(t *testing.T) {
	for _, tt := range []struct {
		in   client.LimitedError
		want string
	}{
		{
			client.LimitedError{Class: client.Pool, Reason: "store_unavailable", Limit: "a", Retryable: true, RetryAfter: 1e9, Estimated: true},
			`{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","title":"Temporary Reduced Capacity","status":503,"detail":"Limit \"a\" cannot be looked up at present; retry after about 1s, which is an estimate.","retry_after_ms":1000,"violated-policies":[],"retryable":true}`,
		},
		{
			client.LimitedError{Class: client.Pool, Reason: client.ReasonServiceAway, Retryable: true, RetryAfter: 1e9, Estimated: true},
			`{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","title":"Temporary Reduced Capacity","status":503,"detail":"The limits cannot be looked up at present; retry after about 1s, which is an estimate.","retry_after_ms":1000,"violated-policies":[],"retryable":true}`,
		},
		{
			client.LimitedError{Class: client.Lane, Reason: "something_new", Limit: "a", Retryable: true},
			`{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":429,"detail":"Limit \"a\" refused the request (something_new); retry after 0s.","retry_after_ms":0,"violated-policies":[],"retryable":true}`,
		},
		{
			client.LimitedError{Class: client.Lane},
			`{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":429,"detail":"The request was refused; retrying does not help.","violated-policies":[],"retryable":false}`,
		},
	} {
		w := httptest.NewRecorder()
		tt.in.ServeHTTP(w, nil)
		expect(t, "body", w.Body.String(), tt.want)
		if got := w.Header().Get("Retry-After"); tt.in.Retryable != (got == "1") {
			t.Errorf("Retry-After of %+v is %q, want 1 if it is retryable", tt.in, got)
		}
	}
}

func TestTheMiddlewareReleasesHoweverTheHandlerEnds(t *testing.T) {
	s := serve(t, images)
	for _, tt := range []struct {
		name    string
		outcome string
		handler http.HandlerFunc
	}{
		{"it answers", "ok", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "done") }},
		{"it panics", "panic", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }},
		{"it tells its own outcome", "error", func(_ http.ResponseWriter, r *http.Request) {
			_ = client.FromContext(r.Context()).End(r.Context(), client.Ending{Outcome: "error"})
		}},
		{"its client leaves", "cancelled", nil},
	} {
		a := &accounting{wire: &wire{ClientConnInterface: s.conn}}
		c := newClient(t, a, client.Options{})
		ctx, cancel := context.WithCancel(t.Context())
		h := tt.handler
		if h == nil {
			h = func(http.ResponseWriter, *http.Request) { cancel() }
		}
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(ctx, "POST", "/images", nil)
		r.Header.Set("X-Account", "alice")
		func() {
			defer func() {
				if p, ok := recover().(error); ok != (tt.outcome == "panic") || ok && !errors.Is(p, http.ErrAbortHandler) {
					t.Errorf("%s: it panicked with %v", tt.name, p)
				}
			}()
			c.Middleware(byAccount)(http.HandlerFunc(func(got http.ResponseWriter, r *http.Request) {
				if got != http.ResponseWriter(w) {
					t.Errorf("%s: the handler has another ResponseWriter: %T", tt.name, got)
				}
				expect(t, tt.name+": slots meanwhile", slots(t, s.conn, "alice"), 1)
				h(got, r)
			})).ServeHTTP(w, r)
		}()
		cancel()
		expect(t, tt.name+": slots afterwards", slots(t, s.conn, "alice"), 0)
		if len(a.endings) != 1 || a.endings[0].GetOutcome() != tt.outcome {
			t.Errorf("%s: the service was told %v, want %q once", tt.name, a.endings, tt.outcome)
		}
	}
}

func TestWhatIsNotAskedIsFree(t *testing.T) {
	s := serve(t, images)
	conn := &wire{ClientConnInterface: s.conn}
	c := newClient(t, conn, client.Options{})
	w := httptest.NewRecorder()
	c.Middleware(func(*http.Request) client.Request { return client.Request{} })(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if l := client.FromContext(r.Context()); l != nil {
			t.Errorf("it has a lease: %+v", l)
		}
		w.WriteHeader(http.StatusNoContent)
	})).ServeHTTP(w, httptest.NewRequest("GET", "/healthz", nil))
	expect(t, "code", w.Code, http.StatusNoContent)
	expect(t, "asks", conn.count("Acquire"), 0)
}

func TestWhoCannotBeAskedIsAnErrorWithoutDetails(t *testing.T) {
	s := serve(t, images)
	for _, tt := range []struct {
		err  error
		code int
		rpc  codes.Code
	}{
		{status.Error(codes.PermissionDenied, "secret"), 500, codes.Internal},
		{status.Error(codes.InvalidArgument, "secret"), 500, codes.Internal},
		{nil, 503, codes.Unavailable}, // the client is closed
	} {
		c := newClient(t, &wire{ClientConnInterface: s.conn, lose: func(context.Context, string, int, proto.Message) loss { return loss{request: tt.err} }}, client.Options{})
		if tt.err == nil {
			c.Close()
		}
		w := httptest.NewRecorder()
		c.Middleware(byAccount)(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("it reached the handler") })).
			ServeHTTP(w, httptest.NewRequest("POST", "/", nil))
		expect(t, "code", w.Code, tt.code)
		_, err := c.UnaryInterceptor(func(context.Context, string, any) client.Request { return account("alice") })(
			t.Context(), nil, &grpc.UnaryServerInfo{}, func(context.Context, any) (any, error) { t.Error("it reached the handler"); return nil, nil })
		expect(t, "gRPC's code", status.Code(err), tt.rpc)
		if strings.Contains(w.Body.String()+err.Error(), "secret") {
			t.Errorf("it tells %q and %v", w.Body, err)
		}
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := newClient(t, s.conn, client.Options{})
	w := httptest.NewRecorder()
	c.Middleware(byAccount)(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("it reached the handler") })).
		ServeHTTP(w, httptest.NewRequestWithContext(ctx, "POST", "/", nil))
	expect(t, "code for who left", w.Code, 503)
	_, err := c.UnaryInterceptor(func(context.Context, string, any) client.Request { return account("alice") })(
		ctx, nil, &grpc.UnaryServerInfo{}, func(context.Context, any) (any, error) { t.Error("it reached the handler"); return nil, nil })
	expect(t, "gRPC's code for who left", status.Code(err), codes.Canceled)
}

// A handler that flushes and one that hijacks find what they need in a real server.
func TestTheMiddlewareLeavesTheConnectionToTheHandler(t *testing.T) {
	s := serve(t, images)
	c := newClient(t, s.conn, client.Options{})
	server := httptest.NewServer(c.Middleware(byAccount)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/flush" {
			_, _ = io.WriteString(w, "a\n")
			w.(http.Flusher).Flush() //nolint:errcheck // the test panics
			<-r.Context().Done()
			return
		}
		conn, buf, err := w.(http.Hijacker).Hijack() //nolint:errcheck // the test panics
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = buf.WriteString("HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
		_ = errors.Join(buf.Flush(), conn.Close())
	})))
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	get := func(path string) *http.Response {
		r, err := http.NewRequestWithContext(ctx, "GET", server.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("X-Account", "alice")
		answer, err := server.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
	hijacked := get("/hijack")
	expect(t, "code", hijacked.StatusCode, http.StatusNoContent)
	_ = hijacked.Body.Close()

	flushed := get("/flush")
	line, err := bufio.NewReader(flushed.Body).ReadString('\n')
	if line != "a\n" || err != nil {
		t.Errorf("it read %q, %v before the handler ended, want a line", line, err)
	}
	cancel()
	_ = flushed.Body.Close()
	storetest.Eventually(t, "the slot of who left is free", func() bool { return slots(t, s.conn, "alice") == 0 })
}

// The service may see the deadline of a caller pass before its context is over.
func TestADeadlineThatTheServiceSawFirstIsNoInternalError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, images)
		conn := &wire{ClientConnInterface: s.conn, lose: func(context.Context, string, int, proto.Message) loss {
			return loss{request: status.Error(codes.DeadlineExceeded, "a millisecond before the caller's")}
		}}
		c := newClient(t, conn, client.Options{Timeout: 250 * time.Millisecond})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		h := c.Middleware(func(*http.Request) client.Request { return account("alice") })(http.NotFoundHandler())
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
		expect(t, "status", w.Code, http.StatusServiceUnavailable)
		_, err := c.UnaryInterceptor(func(context.Context, string, any) client.Request { return account("alice") })(
			ctx, nil, &grpc.UnaryServerInfo{}, func(context.Context, any) (any, error) { return nil, nil })
		expect(t, "code", status.Code(err), codes.DeadlineExceeded)
	})
}
