package server

import (
	"context"
	"errors"
	"io"

	logpb "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
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
	for {
		select {
		case m := <-messages:
			if id := m.GetIdentifier(); id != nil {
				who = id
			}
			s.read(stream.Context(), who.GetLogName(), m)
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
			s.read(stream.Context(), who.GetLogName(), m)
		default:
		}
		if !s.draining.Load() {
			// As when an Envoy dies: what it held waits for other signs, or for its expiry.
			s.metrics.brokenLogs.Inc()
			s.log.InfoContext(stream.Context(), "an access log broke off: if its Envoy has died, its leases wait for their expiry",
				"node", who.GetNode().GetId(), "domain", label(s.policies(), who.GetLogName()), "err", wrong)
		}
		return wrong
	}
}

// read does what the entries of a message say.
func (s accessLog) read(ctx context.Context, domain string, m *als.StreamAccessLogsMessage) {
	each(m.GetHttpLogs().GetLogEntry(), func(_ int, entry *logpb.HTTPAccessLogEntry) {
		ctx, cancel := detach(ctx)
		defer cancel()
		e := envoy.DecodeLog(domain, entry)
		kind := "ignored"
		switch {
		case e.Ending != (limit.Ending{}) && (e.Ending.Lease == "" || e.Ending.Lease.Domain() == domain):
			kind = "end"
			_, _ = s.release(ctx, e.Ending) // counted; it comes by the release filter too, or expires
		case e.Renew != "" && e.Renew.Domain() == domain:
			kind = "renewal"
			_, _ = s.renew(ctx, e.Renew) // counted; the next sign of life comes soon
		}
		s.metrics.logEntries.WithLabelValues(label(s.policies(), domain), kind).Inc()
	})
}
