package server

import (
	"context"
	"strings"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// calls counts calls of gRPC under the names and labels that go-grpc-middleware made
// usual. The series of each method are looked up once, and not for each call.
type calls struct {
	started  *prometheus.CounterVec // grpc_type, grpc_service, grpc_method
	handled  *prometheus.CounterVec // the same, and grpc_code
	received *prometheus.CounterVec // as started
	sent     *prometheus.CounterVec // as started

	// methods are those that are served, by their full name. They are set before the
	// first call.
	methods map[string]*method
}

// method are the labels of a method, and its series, each nil until it is counted.
type method struct {
	kind, service, name            string
	started, received, sent, okays series
}

// series is a counter of a vector. It is not there before it is counted.
type series struct {
	counter atomic.Pointer[prometheus.Counter]
}

// known is the counter, or nil if nobody has counted yet.
func (s *series) known() prometheus.Counter {
	if c := s.counter.Load(); c != nil {
		return *c
	}
	return nil
}

// is keeps the counter, and returns it.
func (s *series) is(c prometheus.Counter) prometheus.Counter {
	s.counter.Store(&c)
	return c
}

func newCalls(r prometheus.Registerer) *calls {
	labels := []string{"grpc_type", "grpc_service", "grpc_method"}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return promauto.With(r).NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	return &calls{
		started:  counter("grpc_server_started_total", "Total number of RPCs started on the server.", labels...),
		handled:  counter("grpc_server_handled_total", "Total number of RPCs completed on the server, regardless of success or failure.", append(labels, "grpc_code")...),
		received: counter("grpc_server_msg_received_total", "Total number of RPC stream messages received on the server.", labels...),
		sent:     counter("grpc_server_msg_sent_total", "Total number of gRPC stream messages sent by the server.", labels...),
	}
}

// serve takes the methods of a server before it serves.
func (c *calls) serve(services map[string]grpc.ServiceInfo) {
	c.methods = make(map[string]*method)
	for service, info := range services {
		for _, m := range info.Methods {
			kind := "unary"
			switch {
			case m.IsClientStream && m.IsServerStream:
				kind = "bidi_stream"
			case m.IsClientStream:
				kind = "client_stream"
			case m.IsServerStream:
				kind = "server_stream"
			}
			c.methods["/"+service+"/"+m.Name] = &method{kind: kind, service: service, name: m.Name}
		}
	}
}

// of is a method that is served.
func (c *calls) of(fullName string) *method {
	if m := c.methods[fullName]; m != nil {
		return m
	}
	service, name, _ := strings.Cut(strings.TrimPrefix(fullName, "/"), "/")
	return &method{kind: "unary", service: service, name: name} // gRPC knows no such
}

func (c *calls) count(s *series, in *prometheus.CounterVec, m *method) {
	known := s.known()
	if known == nil {
		known = s.is(in.WithLabelValues(m.kind, m.service, m.name))
	}
	known.Inc()
}

func (c *calls) start(m *method)   { c.count(&m.started, c.started, m) }
func (c *calls) receive(m *method) { c.count(&m.received, c.received, m) }
func (c *calls) send(m *method)    { c.count(&m.sent, c.sent, m) }

// end counts a call with what it answered.
func (c *calls) end(m *method, err error) {
	if err != nil {
		s, ok := status.FromError(err)
		if !ok { // as gRPC itself does
			s = status.FromContextError(err)
		}
		c.handled.WithLabelValues(m.kind, m.service, m.name, s.Code().String()).Inc()
		return
	}
	known := m.okays.known()
	if known == nil {
		known = m.okays.is(c.handled.WithLabelValues(m.kind, m.service, m.name, codes.OK.String()))
	}
	known.Inc()
}

// unary counts a call, and answers one whose handler panicked.
func (s *Server) unary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	m := s.calls.of(info.FullMethod)
	s.calls.start(m)
	s.calls.receive(m)
	answer, err := s.safely(ctx, request, handle)
	if err == nil {
		s.calls.send(m)
	}
	s.calls.end(m, err)
	return answer, err
}

func (s *Server) safely(ctx context.Context, request any, handle grpc.UnaryHandler) (_ any, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = s.recovered(ctx, p)
		}
	}()
	return handle(ctx, request)
}

// stream is unary for streams.
func (s *Server) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	m := s.calls.of(info.FullMethod)
	s.calls.start(m)
	err := s.safelyStream(srv, countedStream{stream, s.calls, m}, handle)
	s.calls.end(m, err)
	return err
}

func (s *Server) safelyStream(srv any, stream grpc.ServerStream, handle grpc.StreamHandler) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = s.recovered(stream.Context(), p)
		}
	}()
	return handle(srv, stream)
}

// countedStream counts its messages.
type countedStream struct {
	grpc.ServerStream
	calls *calls
	*method
}

// RecvMsg implements [grpc.ServerStream].
func (s countedStream) RecvMsg(into any) error {
	err := s.ServerStream.RecvMsg(into)
	if err == nil {
		s.calls.receive(s.method)
	}
	return err
}

// SendMsg implements [grpc.ServerStream].
func (s countedStream) SendMsg(m any) error {
	err := s.ServerStream.SendMsg(m)
	if err == nil {
		s.calls.send(s.method)
	}
	return err
}
