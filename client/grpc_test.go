package client_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"weir/client"
	"weir/store/storetest"
)

// painter is a gRPC service with a unary method and a stream, whose callers name
// themselves and what shall happen.
type painter struct {
	healthpb.UnimplementedHealthServer
	t       *testing.T
	waiting func() // is called when a handler waits for its client to leave
}

func (p *painter) paint(ctx context.Context, what string) error {
	if client.FromContext(ctx).ID() == "" && what != "free" {
		p.t.Errorf("%s: the handler's context has no lease", what)
	}
	switch what {
	case "fail":
		return status.Error(codes.DataLoss, "no paint")
	case "panic":
		panic("oh")
	case "wait":
		p.waiting()
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	}
	return nil
}

func (p *painter) Check(ctx context.Context, m *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}, p.paint(ctx, m.GetService())
}

func (p *painter) Watch(m *healthpb.HealthCheckRequest, stream grpc.ServerStreamingServer[healthpb.HealthCheckResponse]) error {
	if err := stream.Send(&healthpb.HealthCheckResponse{}); err != nil {
		return err
	}
	return p.paint(stream.Context(), m.GetService())
}

// byPeer asks for the account that the metadata names, and nothing for a free call.
func byPeer(ctx context.Context, method string, message any) client.Request {
	md, _ := metadata.FromIncomingContext(ctx)
	if len(md["account"]) == 0 {
		return client.Request{}
	}
	if _, ok := message.(*healthpb.HealthCheckRequest); ok != (method == "/grpc.health.v1.Health/Check") {
		panic("a unary call has its message, and a stream none")
	}
	return client.Ask(client.Describe(md["account"][0], "x"))
}

// painting is a server with the interceptors, and a client of it.
func painting(t *testing.T, c *client.Client, waiting func()) healthpb.HealthClient {
	recovered := func(p any) error {
		if p != "oh" {
			t.Errorf("it panicked with %v", p)
		}
		return status.Error(codes.Internal, "recovered")
	}
	g := grpc.NewServer(
		grpc.ChainUnaryInterceptor(func(ctx context.Context, m any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (r any, err error) {
			defer func() {
				if p := recover(); p != nil {
					err = recovered(p)
				}
			}()
			return h(ctx, m)
		}, c.UnaryInterceptor(byPeer)),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, h grpc.StreamHandler) (err error) {
			defer func() {
				if p := recover(); p != nil {
					err = recovered(p)
				}
			}()
			return h(srv, stream)
		}, c.StreamInterceptor(byPeer)),
	)
	healthpb.RegisterHealthServer(g, &painter{t: t, waiting: waiting})
	return healthpb.NewHealthClient(dial(t, g))
}

func as(ctx context.Context, account string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "account", account)
}

func TestInterceptorsReleaseHoweverTheHandlerEnds(t *testing.T) {
	s := serve(t, images)
	for _, tt := range []struct {
		what, outcome string
		code          codes.Code
	}{
		{"succeed", "ok", codes.OK},
		{"fail", "error", codes.DataLoss},
		{"panic", "panic", codes.Internal},
		{"wait", "cancelled", codes.Canceled},
	} {
		for _, kind := range []string{"unary", "stream"} {
			a := &accounting{wire: &wire{ClientConnInterface: s.conn}}
			ctx, cancel := context.WithCancel(as(t.Context(), "account"))
			defer cancel()
			p := painting(t, newClient(t, a, client.Options{}), cancel)
			m := &healthpb.HealthCheckRequest{Service: tt.what}
			var err error
			if kind == "unary" {
				_, err = p.Check(ctx, m)
			} else {
				var stream grpc.ServerStreamingClient[healthpb.HealthCheckResponse]
				stream, err = p.Watch(ctx, m)
				for err == nil {
					_, err = stream.Recv()
				}
				if errors.Is(err, io.EOF) {
					err = nil
				}
			}
			expect(t, tt.what+" "+kind, status.Code(err), tt.code)
			storetest.Eventually(t, tt.what+" "+kind+": the release", func() bool { return slots(t, s.conn, "x") == 0 })
			storetest.Eventually(t, tt.what+" "+kind+": the outcome", func() bool {
				a.mu.Lock()
				defer a.mu.Unlock()
				return len(a.endings) == 1
			})
			expect(t, tt.what+" "+kind+"'s outcome", a.endings[0].GetOutcome(), tt.outcome)
		}
	}
}

func TestAFreeCallIsNotAsked(t *testing.T) {
	s := serve(t, images)
	conn := &wire{ClientConnInterface: s.conn}
	p := painting(t, newClient(t, conn, client.Options{}), nil)
	if _, err := p.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "free"}); err != nil {
		t.Error(err)
	}
	expect(t, "asks", conn.count("Acquire"), 0)
}

func TestARefusalOverGRPCHasRetryInfoAndNoInternals(t *testing.T) {
	s := serve(t, problems)
	c := newClient(t, s.conn, client.Options{})
	p := painting(t, c, nil)
	for _, key := range []string{"day", "lane", "pool"} {
		defer acquire(t, c, client.Ask(client.Describe(key, "x"))).Release(t.Context())
	}
	for _, tt := range []struct {
		key     string
		code    codes.Code
		message string
		wait    time.Duration
		push    string
	}{
		{"lane", codes.ResourceExhausted, "too many requests of this caller", time.Second, "1000"},
		{"pool", codes.Unavailable, "the service has no room at present", time.Second, "1000"},
		{"banned", codes.ResourceExhausted, "too many requests of this caller", 0, "-1"},
	} {
		for _, kind := range []string{"unary", "stream"} {
			var trailer metadata.MD
			var err error
			if kind == "unary" {
				_, err = p.Check(as(t.Context(), tt.key), &healthpb.HealthCheckRequest{}, grpc.Trailer(&trailer))
			} else {
				stream, e := p.Watch(as(t.Context(), tt.key), &healthpb.HealthCheckRequest{})
				if e != nil {
					t.Fatal(e)
				}
				_, err = stream.Recv()
				trailer = stream.Trailer()
			}
			expect(t, tt.key+"'s code", status.Code(err), tt.code)
			expect(t, tt.key+"'s message", status.Convert(err).Message(), tt.message)
			var wait time.Duration
			for _, d := range status.Convert(err).Details() {
				if info, ok := d.(*errdetails.RetryInfo); ok {
					wait = info.GetRetryDelay().AsDuration()
				}
			}
			expect(t, tt.key+"'s RetryInfo", wait, tt.wait)
			if got := trailer.Get("grpc-retry-pushback-ms"); len(got) != 1 || got[0] != tt.push {
				t.Errorf("%s %s's push-back is %v, want %s", kind, tt.key, got, tt.push)
			}
		}
	}
}
