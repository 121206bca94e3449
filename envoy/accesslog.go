package envoy

import (
	logpb "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"

	"weir/limit"
)

// streamHeader is the request header in which Envoy names the stream, as the
// reference configuration has it.
const streamHeader = "x-weir-stream"

// filterName is under which Envoy keeps the metadata of our answers.
const filterName = "envoy.filters.http.ratelimit"

// LogEntry is what an entry of Envoy's access log tells about leases.
type LogEntry struct {
	// Ending is the work that has ended; only of an entry of the end of a stream, and
	// the zero value if it is known to hold nothing.
	Ending limit.Ending
	// Renew is a lease whose stream goes on, or "".
	Renew limit.LeaseID
}

// DecodeLog reads an entry of the access log of a domain. It never has a tombstone:
// an entry may come long after its stream.
func DecodeLog(domain string, entry *logpb.HTTPAccessLogEntry) LogEntry {
	common := entry.GetCommonProperties()
	told := common.GetMetadata().GetFilterMetadata()[filterName].GetFields()
	lease, err := limit.ParseLeaseID(told["lease_id"].GetStringValue())
	if err != nil {
		lease = ""
	}
	switch common.GetAccessLogType() {
	case logpb.AccessLogType_DownstreamEnd:
	case logpb.AccessLogType_DownstreamPeriodic:
		return LogEntry{Renew: lease}
	default:
		return LogEntry{}
	}
	early := endedEarly(entry.GetResponse().GetResponseCodeDetails())
	stream := entry.GetRequest().GetRequestHeaders()[streamHeader]
	switch {
	case lease != "":
		return LogEntry{Ending: limit.Ending{Lease: lease, Early: early}}
	case told["verdict"] != nil, stream == "", len(stream) > maxStream:
		return LogEntry{} // our answer is there, and had no lease
	}
	return LogEntry{Ending: limit.Ending{Domain: domain, Stream: stream, Early: early}}
}
