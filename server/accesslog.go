package server

import (
	"context"
	"errors"
	"io"
	"sync"

	als "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"

	"weir/envoy"
	"weir/limit"
)

// accessLog is Envoy's AccessLogService: the second way by which the end of a stream
// releases what it holds, and how long streams renew it.
type accessLog struct {
	als.UnimplementedAccessLogServiceServer
	*Server
}

// StreamAccessLogs reads the log of one of Envoy's workers until it ends. Nothing is
// ever answered.
func (s accessLog) StreamAccessLogs(stream als.AccessLogService_StreamAccessLogsServer) error {
	messages := make(chan *als.StreamAccessLogsMessage)
	ended := make(chan error, 1)
	go func() { // until the stream has ended, which it does with this handler
		for {
			m, err := stream.Recv()
			if err != nil {
				ended <- err
				return
			}
			select {
			case messages <- m:
			case <-stream.Context().Done():
				return
			}
		}
	}()
	var who *als.StreamAccessLogsMessage_Identifier // in the first message
	var wrong error                                 // with the log
	work := tasks{free: make(chan struct{}, atOnce), panicked: func(p any) { _ = s.recovered(stream.Context(), p) }}
	defer work.Wait()
	for {
		select {
		case m := <-messages:
			if id := m.GetIdentifier(); id != nil {
				who = id
			}
			s.read(stream.Context(), &work, who.GetLogName(), m)
			continue
		case err := <-ended:
			if errors.Is(err, io.EOF) {
				return nil
			}
			wrong = err
		case <-stream.Context().Done():
		}
		select {
		case m := <-messages: // one that had come already
			s.read(stream.Context(), &work, who.GetLogName(), m)
		default:
		}
		if !errors.Is(context.Cause(stream.Context()), errEnding) && !s.draining.Load() {
			// As when an Envoy dies: what it held waits for other signs, or for its expiry.
			s.metrics.brokenLogs.Inc()
			s.log.InfoContext(stream.Context(), "an access log broke off: if its Envoy has died, its leases wait for their expiry",
				"node", who.GetNode().GetId(), "domain", s.label(who.GetLogName()), "err", wrong)
		}
		return wrong
	}
}

// read does what the entries of a message say. Envoy sends each by itself, and those that
// wait for the store hold up no other: signs of life that are late renew nothing. It
// waits only for the first of atOnce.
func (s accessLog) read(ctx context.Context, work *tasks, domain string, m *als.StreamAccessLogsMessage) {
	for _, entry := range m.GetHttpLogs().GetLogEntry() {
		e := envoy.DecodeLog(domain, entry)
		switch {
		case e.Ending != (limit.Ending{}) && (e.Ending.Lease == "" || e.Ending.Lease.Domain() == domain):
			work.start(func() {
				ctx, cancel := detach(ctx)
				defer cancel()
				_, _ = s.release(ctx, e.Ending, byAccessLog) // counted; it comes by the release filter too, or expires
				s.count(domain, "end")
			})
		case e.Renew != "" && e.Renew.Domain() == domain:
			work.start(func() {
				ctx, cancel := detach(ctx)
				defer cancel()
				_, _ = s.renew(ctx, limit.Extension{Lease: e.Renew, OfStream: true}) // counted; the next sign of life comes soon
				s.count(domain, "renewal")
			})
		default:
			s.count(domain, "ignored")
		}
	}
}

func (s accessLog) count(domain, kind string) {
	s.metrics.logEntries.WithLabelValues(s.label(domain), kind).Inc()
}

// tasks are goroutines, as many at once as fit into free.
type tasks struct {
	sync.WaitGroup
	free     chan struct{}
	panicked func(any) // is told of one that panicked
}

// start runs f when there is room.
func (t *tasks) start(f func()) {
	t.free <- struct{}{}
	t.Go(func() {
		defer func() {
			if p := recover(); p != nil {
				t.panicked(p)
			}
			<-t.free
		}()
		f()
	})
}
