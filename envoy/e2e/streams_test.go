package e2e

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"weir/store/storetest"
)

// stream is what a client does, and checks, of one ending.
type stream = func(t *testing.T, s *stack, account string)

// protocol makes a client that speaks it.
type protocol func(t *testing.T) *http.Client

func http1(t *testing.T) *http.Client {
	t.Helper()
	transport := new(http.Transport)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// http2 speaks HTTP/2 from the first byte.
func http2(t *testing.T) *http.Client {
	t.Helper()
	client, _ := http2Over(t)
	return client
}

// http2Over returns also the connections that the client has made.
func http2Over(t *testing.T) (*http.Client, <-chan *net.TCPConn) {
	t.Helper()
	connections := make(chan *net.TCPConn, 100)
	transport := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, address)
		if tcp, ok := c.(*net.TCPConn); ok {
			connections <- tcp
		}
		return c, err
	}}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}, connections
}

// by is a stream that ends with its response.
func by(p protocol, method, path string, code int, headers ...string) stream {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		a, err := s.sendBy(t.Context(), p(t), method, account, path, headers...)
		if err != nil {
			t.Fatalf("%s %s: %v", method, path, err)
		}
		a.want(t, code)
	}
}

func status(path string, code int, headers ...string) stream {
	return by(http1, http.MethodGet, path, code, headers...)
}

// cut is a stream that ends within its response.
func cut(p protocol, path string) stream {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		if a, err := s.sendBy(t.Context(), p(t), http.MethodGet, account, path); err == nil {
			t.Errorf("got all of a response that was cut: %+v", a)
		}
	}
}

func events(t *testing.T, s *stack, account string) {
	t.Helper()
	a := s.get(t, account, "/events")
	a.want(t, http.StatusOK, "content-type", "text/event-stream")
	if want := "data: 0\n\ndata: 1\n\ndata: 2\n\n"; a.body != want {
		t.Errorf("events %q, want %q", a.body, want)
	}
}

// trailers are of both directions.
func trailers(t *testing.T, s *stack, account string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.envoy.url+"/h2/trailers", io.MultiReader(strings.NewReader("ping")))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("x-account", account)
	r.Trailer = http.Header{"X-Start": {"told"}}
	response, err := http2(t).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, response.Body)
	_ = response.Body.Close()
	if got := response.Trailer.Get("x-end"); response.StatusCode != http.StatusOK || got != "told" {
		t.Errorf("%d with the trailer %q, want 200 and told", response.StatusCode, got)
	}
}

// leaves is a stream whose client goes when the upstream has it, and has begun to
// answer if it does.
func leaves(p protocol, path string) stream {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.envoy.url+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("x-account", account)
		done := make(chan error, 1)
		began := make(chan struct{})
		client := p(t)
		go func() {
			response, err := client.Do(r)
			if err == nil {
				close(began)
				_, err = io.Copy(io.Discard, response.Body)
				_ = response.Body.Close()
			}
			done <- err
		}()
		select {
		case <-s.upstream.holding:
		case <-began:
		case err := <-done:
			t.Fatalf("answered at once (err %v)", err)
		}
		leave()
		if err := <-done; err == nil {
			t.Error("a client that left was answered in full")
		}
	}
}

// leavesRetry goes while the upstream has failed, and Envoy waits to try again.
func leavesRetry(t *testing.T, s *stack, account string) {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	const failed = "cluster.upstream.retry.upstream_rq_completed"
	before := s.envoy.counter(t, failed)
	left := make(chan error, 1)
	go func() {
		_, err := s.send(ctx, account, "/later")
		left <- err
	}()
	storetest.Eventually(t, "the upstream has failed", func() bool { return s.envoy.counter(t, failed) > before })
	leave()
	if err := <-left; err == nil {
		t.Error("a client that left was answered")
	}
}

// leavesAround sends requests whose clients leave at any moment up to about twice the
// time that an answer takes.
func leavesAround(path string) stream {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		begin := time.Now()
		for range 5 {
			s.get(t, account, path)
		}
		usual := time.Since(begin) / 5
		all := []*http.Client{http1(t), http2(t)}
		var clients sync.WaitGroup
		for i := range 4 {
			clients.Go(func() {
				for range 50 {
					ctx, cancel := context.WithTimeout(t.Context(), rand.N(2*usual))
					_, _ = s.sendBy(ctx, all[i%2], http.MethodGet, account, path)
					cancel()
				}
			})
		}
		clients.Wait()
	}
}

// leavesDecision goes while Redis, and so weir, does not answer. Whether it was granted
// is a matter of who was first.
func leavesDecision(p protocol) stream {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		client := p(t)
		signal(t, s.redis, syscall.SIGSTOP)
		defer signal(t, s.redis, syscall.SIGCONT)
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		left := make(chan error, 1)
		asked := s.envoy.counter(t, "cluster.weir.upstream_rq_total")
		go func() {
			_, err := s.sendBy(ctx, client, http.MethodGet, account, "/ok")
			left <- err
		}()
		storetest.Eventually(t, "weir is asked", func() bool { return s.envoy.counter(t, "cluster.weir.upstream_rq_total") > asked })
		leave()
		if err := <-left; err == nil {
			t.Error("a client that left was answered")
		}
		// If weir could decide before that, the upstream might be called.
		storetest.Eventually(t, "Envoy has seen it", func() bool { return s.envoy.counter(t, "http.ingress.downstream_rq_active") == 0 })
	}
}

// losesConnection is a client of HTTP/2 whose connection ends.
func losesConnection(reset bool) stream {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		client, connections := http2Over(t)
		var all []held
		for range 3 {
			all = append(all, s.holdBy(t, client, account, "/hold"))
		}
		for len(connections) > 0 { // one, if net/http was not in a hurry
			c := <-connections
			if reset {
				_ = c.SetLinger(0)
			}
			_ = c.Close()
		}
		for _, h := range all {
			if r := <-h.ended; r.err == nil {
				t.Errorf("answered %d over no connection", r.code)
			}
		}
	}
}

// saysGoAway is a client of HTTP/2 that will not begin another stream.
func saysGoAway(t *testing.T, s *stack, account string) {
	t.Helper()
	client, connections := http2Over(t)
	h := s.holdBy(t, client, account, "/hold")
	// RFC 9113, 6.8: the length of what follows, GOAWAY, no flags, of the connection; the last stream, NO_ERROR.
	if _, err := (<-connections).Write([]byte{0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		t.Fatal(err)
	}
	close(h.visit.leave)
	if r := <-h.ended; r.err != nil || r.code != http.StatusOK {
		t.Errorf("%+v, want 200", r)
	}
}

// dial connects to Envoy.
func (s *stack) dial(t *testing.T) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", strings.TrimPrefix(s.envoy.url, "http://"), storetest.Deadline)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(storetest.Deadline))
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		t.Fatalf("%T is no TCP", c)
	}
	return tcp
}

// say sends the head of a request for an account, and what follows, over a connection
// of its own. The head has no empty line at its end.
func (s *stack) say(t *testing.T, account, head, body string) (*net.TCPConn, *bufio.Reader) {
	t.Helper()
	c := s.dial(t)
	t.Cleanup(func() { _ = c.Close() })
	if _, err := io.WriteString(c, head+"X-Account: "+account+"\r\n\r\n"+body); err != nil {
		t.Fatal(err)
	}
	return c, bufio.NewReader(c)
}

func wantResponse(t *testing.T, in *bufio.Reader, code int) *http.Response {
	t.Helper()
	response, err := http.ReadResponse(in, nil)
	if err != nil || response.StatusCode != code {
		t.Fatalf("%v, %v, want %d", response, err, code)
	}
	return response
}

// speaks is a stream of a head.
func speaks(head string, code int) stream {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		c, in := s.say(t, account, head, "")
		wantResponse(t, in, code)
		_ = c.Close()
	}
}

// breaksOff is a client that leaves when it has said that.
func breaksOff(text string) stream {
	return func(t *testing.T, s *stack, _ string) {
		t.Helper()
		c := s.dial(t)
		if _, err := io.WriteString(c, text); err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
}

const post = "POST %s HTTP/1.1\r\nHost: x\r\n"

// uploads sends four bytes of so many, and waits for an answer if there is one.
func uploads(headers, length, answer string) stream {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		c, in := s.say(t, account, fmt.Sprintf(post, "/upload")+headers+"Content-Length: "+length+"\r\n", "ping")
		if answer != "" {
			response := wantFinal(t, in)
			if b, err := io.ReadAll(response.Body); response.StatusCode != http.StatusOK || string(b) != answer || err != nil {
				t.Errorf("%d %q, %v, want 200 %q", response.StatusCode, b, err, answer)
			}
		}
		_ = c.Close()
	}
}

// wantFinal passes over what comes before the response.
func wantFinal(t *testing.T, in *bufio.Reader) *http.Response {
	t.Helper()
	for {
		response, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		if response.StatusCode != http.StatusContinue {
			return response
		}
	}
}

// uploadsInVain sends more than Envoy keeps while weir decides.
func uploadsInVain(t *testing.T, s *stack, account string) {
	t.Helper()
	const length = 4 << 20
	c, in := s.say(t, account, fmt.Sprintf(post, "/upload")+fmt.Sprintf("Expect: 100-continue\r\nContent-Length: %d\r\n", length), "")
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = c.Write(make([]byte, length)) // Envoy may close before it has all
	}()
	if got := wantFinal(t, in).StatusCode; got != http.StatusTooManyRequests {
		t.Errorf("answered %d, want 429", got)
	}
	_ = c.Close()
	<-sent
}

// stallsUpload sends half of what it has announced.
func stallsUpload(t *testing.T, s *stack, account string) {
	t.Helper()
	_, in := s.say(t, account, fmt.Sprintf(post, "/upload")+"Content-Length: 10\r\n", "half")
	wantResponse(t, in, http.StatusRequestTimeout)
}

// answersEarly is an upstream that answers half an upload.
func answersEarly(t *testing.T, s *stack, account string) {
	t.Helper()
	_, in := s.say(t, account, fmt.Sprintf(post, "/early")+"Content-Length: 10\r\n", "half")
	_, _ = io.Copy(io.Discard, wantResponse(t, in, http.StatusRequestEntityTooLarge).Body)
}

// garbles is a client that breaks the rules in its body.
func garbles(t *testing.T, s *stack, account string) {
	t.Helper()
	c, in := s.say(t, account, fmt.Sprintf(post, "/hold")+"Transfer-Encoding: chunked\r\n", "4\r\nping\r\n")
	v := <-s.upstream.holding
	defer close(v.leave) // it does not notice: net/http reads what follows a request only behind its body
	if _, err := io.WriteString(c, "no length\r\n"); err != nil {
		t.Fatal(err)
	}
	wantResponse(t, in, http.StatusBadRequest)
	_ = c.Close()
}

// pipelined is a client that sends two requests at once.
func pipelined(t *testing.T, s *stack, account string) {
	t.Helper()
	head := "GET /ok HTTP/1.1\r\nHost: x\r\nX-Account: " + account + "\r\n\r\n"
	_, in := s.say(t, account, head+strings.TrimSuffix(head, "X-Account: "+account+"\r\n\r\n"), "")
	for range 2 {
		_, _ = io.Copy(io.Discard, wantResponse(t, in, http.StatusOK).Body)
	}
}

// breaks is a client of HTTP/2 that sends some frames, in hex, when the upstream has its
// stream, which is the first.
func breaks(frames string) func(*testing.T, *stack, string) {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		c := s.dial(t)
		defer func() { _ = c.Close() }()
		// SETTINGS; HEADERS: GET, http, and the path, authority and account as they are.
		request := "\x82\x86\x04\x05/hold\x01\x01x\x00\x09x-account" + string(rune(len(account))) + account
		if _, err := io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"+"\x00\x00\x00\x04\x00\x00\x00\x00\x00"+
			"\x00\x00"+string(rune(len(request)))+"\x01\x05\x00\x00\x00\x01"+request); err != nil {
			t.Fatal(err)
		}
		<-s.upstream.holding
		b, err := hex.DecodeString(frames)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		_ = c.CloseWrite()
		_, _ = io.Copy(io.Discard, c) // until Envoy has read all
	}
}

// closesHalf is a client that has no more to say, and listens.
func closesHalf(t *testing.T, s *stack, account string) {
	t.Helper()
	c, in := s.say(t, account, "GET /hold HTTP/1.1\r\nHost: x\r\n", "")
	<-s.upstream.holding
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(in); len(b) > 0 || err != nil {
		t.Errorf("%q, %v, want an end without an answer", b, err)
	}
}

// readsHead reads no more than the head of a large response, while the slot is taken.
func readsHead(t *testing.T, s *stack, account string) (*net.TCPConn, *http.Response) {
	t.Helper()
	c, in := s.say(t, account, "GET /large HTTP/1.1\r\nHost: x\r\n", "")
	response := wantResponse(t, in, http.StatusOK)
	if got := s.metric(t, heldNow); got != 1 {
		t.Errorf("%d leases are held while the client reads, want 1", got)
	}
	return c, response
}

func readsSlowly(t *testing.T, s *stack, account string) {
	t.Helper()
	c, response := readsHead(t, s, account)
	if n, err := io.Copy(io.Discard, response.Body); n != largeParts<<20 || err != nil {
		t.Errorf("got %d bytes, %v, want all", n, err)
	}
	_ = c.Close()
}

func stopsReading(t *testing.T, s *stack, account string) {
	t.Helper()
	c, _ := readsHead(t, s, account)
	_ = c.Close()
}

// neverReads waits until Envoy has lost patience.
func neverReads(t *testing.T, s *stack, account string) {
	t.Helper()
	c, response := readsHead(t, s, account)
	s.eventually(t, heldNow, 0)
	if n, err := io.Copy(io.Discard, response.Body); err == nil {
		t.Errorf("got %d bytes, and not the end of what Envoy had given up", n)
	}
	_ = c.Close()
}

// webSocket speaks over an upgraded connection, and leaves if it says nothing, or waits
// until the other side does.
func webSocket(last string) stream {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		c, in := s.say(t, account, "GET /socket HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
			"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n", "")
		wantResponse(t, in, http.StatusSwitchingProtocols)
		if _, err := io.WriteString(c, "ping\n"); err != nil {
			t.Fatal(err)
		}
		if got, err := in.ReadString('\n'); err != nil || got != "ping\n" {
			t.Errorf("echo = %q, %v", got, err)
		}
		if got := s.metric(t, heldNow); got != 1 {
			t.Errorf("%d leases are held while the socket is open, want 1", got)
		}
		if last != "" {
			_, _ = io.WriteString(c, last)
			_, _ = io.Copy(io.Discard, in)
		}
		_ = c.Close()
	}
}

// hedged is answered by the second try, while the first one is still at work.
func hedged(t *testing.T, s *stack, account string) {
	t.Helper()
	s.get(t, account, "/hedge").want(t, http.StatusOK)
	if got := len(s.upstream.of(account)); got < 2 {
		t.Errorf("the upstream was called %d times, want once more", got)
	}
}

// fullLane is a stream that finds its lane full.
func fullLane(end stream) stream {
	return func(t *testing.T, s *stack, account string) {
		t.Helper()
		var all []held
		for range 3 {
			all = append(all, s.hold(t, account))
		}
		end(t, s, account)
		for _, h := range all {
			h.end(t, s)
		}
	}
}

// fullPool finds the pool full, and its lane not.
func fullPool(t *testing.T, s *stack, account string) {
	t.Helper()
	var all []held
	for _, a := range []string{account, account, account, account + "-2", account + "-2"} {
		all = append(all, s.hold(t, a))
	}
	s.get(t, account+"-2", "/ok").wantRefused(t, http.StatusServiceUnavailable, "images")
	for _, h := range all {
		h.end(t, s)
	}
}

// laneOf names the limit of an account.
func laneOf(account string) string {
	if strings.HasPrefix(account, "gpu-") {
		return "gpu"
	}
	return "lane"
}
