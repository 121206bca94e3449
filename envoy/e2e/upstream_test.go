package e2e

import (
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"

	weirv1 "weir/proto/weir/v1"
	"weir/store/storetest"
)

// upstream is the service behind Envoy, by HTTP/1.1, HTTP/2 and gRPC (health). It
// releases each request's lease, as docs/envoy.md shows it.
type upstream struct {
	*httptest.Server
	leases  weirv1.LeaseServiceClient
	calls   *grpc.Server
	holding chan visit // requests that wait until their visit ends

	mu     sync.Mutex // guards visits
	visits map[string][]visit
}

const largeParts = 32 // of 1 MiB

// visit is a request that reached the upstream.
type visit struct {
	leases []string      // values of x-weir-lease
	stream string        // x-weir-stream
	leave  chan struct{} // closed: the request may end
}

func startUpstream(t *testing.T, leases weirv1.LeaseServiceClient) *upstream {
	u := &upstream{leases: leases, calls: grpc.NewServer(grpc.StreamInterceptor(brief)), holding: make(chan visit), visits: make(map[string][]visit)}
	healthpb.RegisterHealthServer(u.calls, health.NewServer())
	u.Server = httptest.NewUnstartedServer(u.releasing(t, http.HandlerFunc(u.work)))
	u.Config.Protocols = new(http.Protocols)
	u.Config.Protocols.SetHTTP1(true)
	u.Config.Protocols.SetUnencryptedHTTP2(true)
	// net/http tells the panics of handlers here.
	u.Config.ErrorLog = slog.NewLogLogger(slog.NewTextHandler(t.Output(), nil), slog.LevelError)
	u.Start()
	t.Cleanup(u.Close)
	return u
}

// brief ends a stream of a client with x-brief after a message.
func brief(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if md, _ := metadata.FromIncomingContext(stream.Context()); md.Get("x-brief") != nil {
		return stream.SendMsg(&healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING})
	}
	return handle(srv, stream)
}

// releasing releases the lease of a request when next has ended: by return or by
// panic. The call is deferred inside the handler, and waits for weir's answer. So
// it is over before net/http ends the response or, after a panic, closes the
// connection: whoever has seen the end of a response finds its slot free.
func (u *upstream) releasing(t *testing.T, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		lease := r.Header.Get("x-weir-lease")
		if lease == "" {
			next.ServeHTTP(w, r)
			return
		}
		defer func() {
			// The client may have gone, and its context with it; the slot is ours to give back all the same.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), storetest.Deadline)
			defer cancel()
			answer, err := u.leases.Release(ctx, &weirv1.ReleaseRequest{LeaseIds: []string{lease}})
			if err != nil {
				t.Errorf("Release(%q) of %s: %v", lease, r.URL.Path, err)
				return
			}
			if got := answer.GetResults()[0].GetStatus(); got != weirv1.ReleaseStatus_RELEASE_STATUS_RELEASED {
				t.Errorf("Release(%q) of %s = %v, want RELEASED", lease, r.URL.Path, got)
			}
		}()
		next.ServeHTTP(w, r)
	})
}

// work does what the path says, or ?do=, and tells as its usage what x-use says.
func (u *upstream) work(w http.ResponseWriter, r *http.Request) {
	v := visit{leases: r.Header.Values("x-weir-lease"), stream: r.Header.Get("x-weir-stream"), leave: make(chan struct{})}
	account := r.Header.Get("x-account")
	u.mu.Lock()
	u.visits[account] = append(u.visits[account], v)
	u.mu.Unlock()
	if strings.HasPrefix(r.Header.Get("content-type"), "application/grpc") {
		u.calls.ServeHTTP(w, r)
		return
	}

	what, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	if do := r.URL.Query().Get("do"); do != "" {
		what = do
	}
	used := r.Header.Get("x-use")
	if used != "" && what != "json" && what != "sse" {
		w.Header().Set("x-usage", used)
	}
	switch what {
	case "json":
		w.Header().Set("content-type", "application/json")
		to, end := packing(w, r)
		_, _ = fmt.Fprintf(to, `{"answer": "done", "usage": {"total_tokens": %s}}`, used)
		end()
	case "sse": // the usage stands in the last event but one
		w.Header().Set("content-type", "text/event-stream")
		to, end := packing(w, r)
		for _, data := range []string{`{"answer": "do", "usage": null}`, `{"answer": "ne"}`, `{"usage": {"total_tokens": ` + used + `}}`, "[DONE]"} {
			_, _ = fmt.Fprintf(to, "data: %s\n\n", data)
			_ = http.NewResponseController(w).Flush()
		}
		end()
	case "ok":
		_, _ = io.WriteString(w, "done")
	case "stream": // the response begins long before its end
		for _, part := range []string{"do", "ne"} {
			_, _ = io.WriteString(w, part)
			_ = http.NewResponseController(w).Flush()
		}
	case "events": // as a model streams its tokens
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			_, _ = fmt.Fprintf(w, "data: %d\n\n", i)
			_ = http.NewResponseController(w).Flush()
		}
	case "upload":
		if _, err := io.Copy(io.Discard, r.Body); err == nil {
			_, _ = io.WriteString(w, "done")
		}
	case "drip": // without an end
		for r.Context().Err() == nil {
			_, _ = io.WriteString(w, "drop")
			if http.NewResponseController(w).Flush() != nil {
				return
			}
			select {
			case <-time.After(5 * time.Millisecond):
			case <-r.Context().Done():
			}
		}
	case "mute": // when it has begun
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	case "cut":
		_, _ = io.WriteString(w, "do")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	case "garbage": // no HTTP
		if c, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_, _ = io.WriteString(c, "as the test asks\r\n\r\n")
			_ = c.Close()
		}
	case "hints": // before the answer
		w.WriteHeader(http.StatusEarlyHints)
		_, _ = io.WriteString(w, "done")
	case "early": // before it has read the request
		_ = http.NewResponseController(w).EnableFullDuplex()
		http.Error(w, "no more", http.StatusRequestEntityTooLarge)
	case "trailers":
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "done")
		w.Header().Set(http.TrailerPrefix+"x-end", "told")
	case "away": // over HTTP/2 a GOAWAY
		w.Header().Set("connection", "close")
		_, _ = io.WriteString(w, "done")
	case "large": // more than lies between it and a client that does not read
		part := make([]byte, 1<<20)
		for range largeParts {
			if _, err := w.Write(part); err != nil {
				return
			}
		}
	case "slow": // the first time
		if len(u.of(account)) == 1 {
			<-r.Context().Done()
			return
		}
		_, _ = io.WriteString(w, "done")
	case "flaky": // twice
		if len(u.of(account)) < 3 {
			http.Error(w, "not yet", http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, "done")
	case "redirect":
		w.Header().Set("location", "http://"+r.Host+"/ok") // whole, or Envoy passes it on
		w.WriteHeader(http.StatusFound)
	case "socket": // an upgrade, and an echo until it hears "bye"
		c, in, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer func() { _ = c.Close() }()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: ICX+Yqv66kxgM0FcWaLWlFLwTAI=\r\n\r\n")
		for line := ""; err == nil && line != "bye\n"; {
			if line, err = in.ReadString('\n'); err == nil {
				_, err = io.WriteString(c, line)
			}
		}
	case "error":
		w.Header().Set("x-after", "100")
		http.Error(w, "failed", http.StatusInternalServerError)
	case "panic":
		panic("as the test asks")
	case "hold":
		select {
		case u.holding <- v:
		case <-r.Context().Done():
			return
		}
		select {
		case <-v.leave:
		case <-r.Context().Done():
		}
		_, _ = io.WriteString(w, "done")
	default:
		http.NotFound(w, r)
	}
}

// packing is where a response is written that is compressed for those who ask for it, as
// Go's client does.
func packing(w http.ResponseWriter, r *http.Request) (to io.Writer, end func()) {
	if !strings.Contains(r.Header.Get("accept-encoding"), "gzip") {
		return w, func() {}
	}
	w.Header().Set("content-encoding", "gzip")
	z := gzip.NewWriter(w)
	return z, func() { _ = z.Close() }
}

// of returns the visits of an account, in the order of their coming.
func (u *upstream) of(account string) []visit {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.visits[account]
}
