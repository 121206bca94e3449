package server_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	als "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	weirv1 "weir/proto/weir/v1"
	"weir/server/servertest"
	"weir/store/storetest"
)

// A value has no bound of its own: what Envoy takes for a header must be decided.
func TestKeysHaveABoundAndValuesNone(t *testing.T) {
	s := serve(t, tlsPolicy)
	for _, tt := range []struct{ descriptor, want string }{
		{"[a=" + strings.Repeat("v", 60<<10) + "]", "OK [OK 999]"}, // all headers of a request, at Envoy
		{"[a=" + strings.Repeat("v", 4<<20-100) + "]", "OK [OK 999]"},
		{"[" + strings.Repeat("k", 4096) + "=x]", "OK [OK nil]"},
		{"[" + strings.Repeat("k", 4097) + "=x]", "InvalidArgument"},
	} {
		if got := ask(t, s.envoy, "d", tt.descriptor, 0); got != tt.want {
			t.Errorf("%.10s… of %d bytes: %s, want %s", tt.descriptor, len(tt.descriptor), got, tt.want)
		}
		key, value, _ := strings.Cut(strings.Trim(tt.descriptor, "[]"), "=")
		_, err := s.leases.Acquire(storetest.Context(t), &weirv1.AcquireRequest{Domain: "d", Descriptors: []*weirv1.Descriptor{typed(key, value)}})
		if want := tt.want == "InvalidArgument"; (status.Code(err) == codes.InvalidArgument) != want {
			t.Errorf("Acquire with %.10s… of %d bytes: %v", tt.descriptor, len(tt.descriptor), err)
		}
	}
}

func TestHeadersAreOf64KilobytesAtMost(t *testing.T) {
	s := serve(t, tlsPolicy)
	ctx := metadata.AppendToOutgoingContext(storetest.Context(t), "x", strings.Repeat("v", 70<<10))
	if _, err := healthpb.NewHealthClient(s.conn).Check(ctx, &healthpb.HealthCheckRequest{}); err == nil {
		t.Error("headers of 70 kB are taken")
	}
}

// A connection has 10,000 streams at most; another waits until one ends.
func TestAConnectionHasABoundOfStreams(t *testing.T) {
	s := serve(t, tlsPolicy)
	client := healthpb.NewHealthClient(s.conn)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var opening sync.WaitGroup
	for range 8 {
		opening.Go(func() {
			for range 10_000 / 8 {
				watch, err := client.Watch(ctx, &healthpb.HealthCheckRequest{})
				if err == nil {
					_, err = watch.Recv()
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	opening.Wait()
	short, stop := context.WithTimeout(ctx, 200*time.Millisecond)
	defer stop()
	if _, err := client.Check(short, &healthpb.HealthCheckRequest{}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("stream 10,001: %v, want that it waits", err)
	}
	cancel()
	if _, err := client.Check(storetest.Context(t), &healthpb.HealthCheckRequest{}); err != nil {
		t.Errorf("when they have ended: %v", err)
	}
}

// frames speaks HTTP/2 by hand, as no client does that behaves.
type frames struct {
	net.Conn
	in *bufio.Reader
}

func dialFrames(t *testing.T, addr string) frames {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(storetest.Deadline)); err != nil {
		t.Fatal(err)
	}
	f := frames{conn, bufio.NewReader(conn)}
	_, _ = conn.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	f.write(4, nil)
	return f
}

// write sends a frame of stream 0, without flags. Errors are seen by read.
func (f frames) write(kind byte, payload []byte) {
	_, _ = f.Write(append([]byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, 0, 0, 0, 0, 0}, payload...))
}

func (f frames) read() (kind byte, payload []byte, err error) {
	var head [9]byte
	if _, err := io.ReadFull(f.in, head[:]); err != nil {
		return 0, nil, err
	}
	payload = make([]byte, binary.BigEndian.Uint32(head[:])>>8)
	_, err = io.ReadFull(f.in, payload)
	return head[3], payload, err
}

// Who pings more often than every 5 s is sent away.
func TestPingsComeNotTooOften(t *testing.T) {
	p := servertest.Start(t, tlsPolicy)
	f := dialFrames(t, p.GRPC)
	const goAway, ping = 7, 6
	for range 10 {
		f.write(ping, make([]byte, 8))
	}
	for {
		kind, payload, err := f.read()
		if err != nil {
			t.Fatalf("the connection ends with %v, want a GOAWAY", err)
		}
		if kind == goAway {
			if !bytes.Contains(payload, []byte("too_many_pings")) {
				t.Errorf("GOAWAY %q, want that pings are too many", payload)
			}
			return
		}
	}
}

// A connection that says nothing ends: after 5 s, and at a page after 10.
func TestASilentConnectionEnds(t *testing.T) {
	t.Parallel()
	s := startTLS(t, false, nil)
	clear := servertest.Start(t, tlsPolicy)
	for name, addr := range map[string]string{"gRPC": clear.GRPC, "gRPC by TLS": s.GRPC, "HTTP by TLS": s.HTTP, "HTTP": clear.HTTP} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			if err := conn.SetDeadline(time.Now().Add(storetest.Deadline)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, conn); isTimeout(err) {
				t.Errorf("after %v: %v, want that the server ends it", storetest.Deadline, err)
			}
		})
	}
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// A connection that has its age is left for a new one, and no call fails by it. A
// stream ends with its age too, and a log that ends so is not called broken.
func TestConnectionsHaveAnAge(t *testing.T) {
	t.Parallel()
	p := servertest.Start(t, tlsPolicy, "--max-connection-age", "1s")
	conn := p.Dial(t)
	log, err := als.NewAccessLogServiceClient(conn).StreamAccessLogs(storetest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := log.Send(&als.StreamAccessLogsMessage{Identifier: &als.StreamAccessLogsMessage_Identifier{LogName: "d"}}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = log.RecvMsg(new(als.StreamAccessLogsResponse))
	}()
	client, locals := healthpb.NewHealthClient(conn), make(map[string]bool)
	for begin := time.Now(); len(locals) < 4; {
		var at peer.Peer
		if _, err := client.Check(storetest.Context(t), &healthpb.HealthCheckRequest{}, grpc.Peer(&at)); err != nil {
			t.Fatalf("after %v and %d connections: %v", time.Since(begin), len(locals), err)
		}
		locals[at.LocalAddr.String()] = true
		if time.Since(begin) > storetest.Deadline {
			t.Fatalf("there were %d connections in %v, want 4", len(locals), storetest.Deadline)
		}
	}
	<-ended
	if got := metricOf(t, p, "weir_access_logs_broken_total"); got != 0 {
		t.Errorf("%v logs are called broken, want 0", got)
	}
	if _, err := client.Check(storetest.Context(t), &healthpb.HealthCheckRequest{}); err != nil {
		t.Error(err)
	}
}
