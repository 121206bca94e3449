package envoy

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"weir/limit"
	"weir/policy"
)

// Ask is what a RateLimitRequest asks for.
type Ask struct {
	// Request is what is to be decided: the descriptors without their reserved
	// entries. It has no descriptor if there is nothing to decide.
	Request policy.Request
	// Stream is the stream that the message is about, or "".
	Stream string
	// Usage is what that stream has used: descriptors to settle, each with its hits; and
	// UsageLease the lease that it was used under, or "".
	Usage      policy.Request
	UsageLease limit.LeaseID
	// Endings is the work that the message ends. The leases have the shape of lease
	// ids, and need not be of the message's domain.
	Endings []limit.Ending
	// places has one element for each descriptor of the message: its index in
	// Request.Descriptors, or -1 if it is not asked.
	places []int
}

// SetDomain has the domain of the message be an equal text.
func (a *Ask) SetDomain(domain string) {
	a.Request.Domain, a.Usage.Domain = domain, domain
	for i := range a.Endings {
		if e := &a.Endings[i]; e.Domain != "" { // it is that of the message
			e.Domain = domain
		}
	}
}

// Decoder reads messages, one after the other, and uses its memory again. The zero value
// is ready to use, by one goroutine at a time.
type Decoder struct {
	request request
	asked   []policy.Descriptor
	places  []int
}

// Read reads a message from the wire. It keeps nothing of it. An error is [ErrNoMessage],
// or means that the message has more than MaxFields or MaxParts.
func (r *Decoder) Read(message []byte) error { return r.request.read(message) }

// mostKept is how many descriptors and entries a Decoder keeps the memory of.
const mostKept = 64

// Forget lets go of the message, so that the Decoder may wait for the next one.
func (r *Decoder) Forget() {
	clear(r.request.entries)
	clear(r.asked)
	if cap(r.request.entries) > mostKept || cap(r.request.descriptors) > mostKept || cap(r.asked) > mostKept {
		*r = Decoder{}
	}
	r.request.domain = ""
}

// Decode tells what the message asks for that was read last, as long as it is not forgotten
// and no other is read; it is called once a message. Its texts are parts of one text, the whole message: whoever
// keeps one for long should keep a copy. Its errors are for the sender: they say what is wrong,
// where, and what to do, and repeat none of its texts. They are for
// INVALID_ARGUMENT.
func (r *Decoder) Decode() (Ask, error) {
	m := &r.request
	if err := CheckDomain(m.domain); err != nil {
		return Ask{}, err
	}
	if err := CheckDescriptors(len(m.descriptors)); err != nil {
		return Ask{}, err
	}
	for i, d := range m.descriptors {
		if err := CheckEntries(d.to - d.from); err != nil {
			return Ask{}, fmt.Errorf("descriptors[%d].%w", i, err)
		}
	}

	r.asked, r.places = r.asked[:0], r.places[:0]
	a := Ask{
		Request: policy.Request{Domain: m.domain, Hits: uint64(m.hits)},
		Usage:   policy.Request{Domain: m.domain},
	}
	for i := range m.descriptors {
		d := &m.descriptors[i]
		r.places = append(r.places, -1)
		var reserved reserved
		to := d.from // those that are not reserved move up
		for j, e := range m.entries[d.from:d.to] {
			if err := CheckKey(j, e.Key); err != nil {
				return Ask{}, fmt.Errorf("descriptors[%d].%w", i, err)
			}
			if !strings.HasPrefix(e.Key, limit.ReservedPrefix) {
				m.entries[to] = e
				to++
			} else if err := reserved.add(e.Key, e.Value); err != nil {
				return Ask{}, fmt.Errorf("descriptors[%d]: %w", i, err)
			}
		}
		own := m.entries[d.from:to:to]
		if reserved.stream != "" {
			if a.Stream != "" && a.Stream != reserved.stream {
				return Ask{}, fmt.Errorf("descriptors[%d]: %s is another than before; a message is about one stream", i, keyStream)
			}
			a.Stream = reserved.stream
		}
		switch {
		case reserved.event == eventRelease:
			ending, err := reserved.ending(m.domain)
			if err != nil {
				return Ask{}, fmt.Errorf("descriptors[%d]: %w", i, err)
			}
			if ending != (limit.Ending{}) {
				a.Endings = append(a.Endings, ending)
			}
			continue
		case reserved.event == eventUsage:
			id, err := reserved.usage(m.domain, d.hasHits, own)
			if err != nil {
				return Ask{}, fmt.Errorf("descriptors[%d]: %w", i, err)
			}
			if id != "" && a.UsageLease != "" && a.UsageLease != id {
				return Ask{}, fmt.Errorf("descriptors[%d]: %s is another than before; a message has the usage of one lease", i, keyLease)
			}
			a.UsageLease = cmp.Or(id, a.UsageLease)
		case len(own) == 0:
			continue
		}
		asked, err := d.decode(own)
		if err != nil {
			return Ask{}, fmt.Errorf("descriptors[%d].%w", i, err)
		}
		if reserved.event == eventUsage {
			a.Usage.Descriptors = append(a.Usage.Descriptors, asked)
			continue
		}
		r.places[i] = len(r.asked)
		r.asked = append(r.asked, asked)
	}
	a.Request.Descriptors, a.places = r.asked, r.places
	return a, nil
}

// decode reads what is not in the entries.
func (d *asSent) decode(entries []limit.Entry) (policy.Descriptor, error) {
	window, err := d.override()
	if err != nil {
		return policy.Descriptor{}, fmt.Errorf("limit: %w", err)
	}
	return policy.Descriptor{
		Entries: entries,
		// ratelimit.proto: "If set the value will override the request level
		// hits_addend."
		Hits:     d.hits,
		HasHits:  d.hasHits,
		Negative: d.negative,
		Override: window,
	}, nil
}

const (
	keyEvent   = limit.ReservedPrefix + "event"
	keyLease   = limit.ReservedPrefix + "lease_id"
	keyStream  = limit.ReservedPrefix + "stream_id"
	keyOutcome = limit.ReservedPrefix + "outcome"
	keyVerdict = limit.ReservedPrefix + "verdict"
)

const (
	eventAcquire = "acquire"
	eventRelease = "release"
	eventUsage   = "usage"
)

// reserved is what a descriptor's reserved entries say.
type reserved struct {
	event, lease, stream, outcome, verdict string
}

// add notes one reserved entry. Keys that it doesn't know are left to later
// versions, and an empty value says nothing.
func (r *reserved) add(key, value string) error {
	var into *string
	switch key {
	case keyEvent:
		switch value {
		case eventAcquire, eventRelease, eventUsage:
		default:
			return fmt.Errorf("%s is unknown; use one of %s, %s, %s", keyEvent, eventAcquire, eventRelease, eventUsage)
		}
		into = &r.event
	case keyLease:
		into = &r.lease
	case keyStream:
		if len(value) > maxStream {
			return fmt.Errorf("%s has %d bytes; use at most %d", keyStream, len(value), maxStream)
		}
		into = &r.stream
	case keyOutcome:
		into = &r.outcome
	case keyVerdict:
		into = &r.verdict
	default:
		return nil
	}
	if *into != "" {
		return fmt.Errorf("%s stands twice; send it once a descriptor", key)
	}
	*into = value
	return nil
}

// ending is the work that the entries end, or nothing if it is known to hold none.
func (r *reserved) ending(domain string) (limit.Ending, error) {
	early := endedEarly(r.outcome)
	switch {
	case r.lease != "":
		id, err := limit.ParseLeaseID(r.lease)
		if err != nil {
			return limit.Ending{}, fmt.Errorf("%s: %w; send back the id of the answer that granted the lease", keyLease, err)
		}
		return limit.Ending{Lease: id, Early: early}, nil
	case r.verdict != "": // Envoy got our answer, and there was no lease in it
		return limit.Ending{}, nil
	case r.stream == "":
		return limit.Ending{}, fmt.Errorf("a release names neither a lease nor a stream; send %s or %s", keyLease, keyStream)
	}
	// A request that we refused holds nothing, and none comes behind it.
	return limit.Ending{Domain: domain, Stream: r.stream, Early: early, Tombstone: r.outcome != "request_rate_limited"}, nil
}

// usage reads a descriptor of usage: under which lease it was used, if it says so. The
// stream finds a lease of the domain, too.
func (r *reserved) usage(domain string, hasHits bool, own []limit.Entry) (limit.LeaseID, error) {
	switch {
	case r.stream == "":
		return "", fmt.Errorf("usage names no stream, so that it could be charged twice; send %s", keyStream)
	case len(own) == 0:
		return "", errors.New("usage has no entries of its own; send those of the limits to settle")
	case !hasHits:
		return "", errors.New("usage has no hits_addend of its own; send how much was used")
	case r.lease == "":
		return "", nil
	}
	id, err := limit.ParseLeaseID(r.lease)
	if err != nil {
		return "", fmt.Errorf("%s: %w; send back the id of the answer that granted the lease", keyLease, err)
	}
	if id.Domain() != domain {
		return "", fmt.Errorf("%s is of another domain; send its usage there", keyLease)
	}
	return id, nil
}

// unknown is the outcome of a stream of which Envoy does not say how it ended, as of one
// that its client reset with NO_ERROR. envoy.yaml has the word.
const unknown = "unknown"

// endedEarly reports whether a stream with this outcome, which is Envoy's
// response_code_details, may have ended before its upstream did: its client left or broke
// the protocol, or Envoy's patience was over. A client must find no way to leave without
// that, so its part is told by what all such words begin with.
func endedEarly(outcome string) bool {
	switch outcome {
	case unknown, "response_timeout", "stream_idle_timeout", "max_duration_timeout", "duration_timeout", "request_overall_timeout",
		"upstream_per_try_timeout", "upstream_per_try_idle_timeout", "upstream_max_stream_duration_reached", "response_payload_too_large":
		return true
	}
	return slices.ContainsFunc(ofDownstream, func(prefix string) bool { return strings.HasPrefix(outcome, prefix) })
}

var ofDownstream = []string{"downstream_", "http1.", "http2.", "http3.", "codec_error", "overload"}

// override reads the limit that a descriptor brings along; nil for none.
func (d *asSent) override() (*limit.Window, error) {
	if !d.hasLimit {
		return nil, nil
	}
	var unit limit.Unit
	switch typev3.RateLimitUnit(d.limit.unit) {
	case typev3.RateLimitUnit_SECOND:
		unit = limit.Second
	case typev3.RateLimitUnit_MINUTE:
		unit = limit.Minute
	case typev3.RateLimitUnit_HOUR:
		unit = limit.Hour
	case typev3.RateLimitUnit_DAY:
		unit = limit.Day
	case typev3.RateLimitUnit_MONTH:
		unit = limit.Month
	case typev3.RateLimitUnit_YEAR:
		unit = limit.Year
	default: // UNKNOWN too: no window can be made of it
		return nil, fmt.Errorf("unit %d is no unit of time; use one of SECOND, MINUTE, HOUR, DAY, MONTH, YEAR", typev3.RateLimitUnit(d.limit.unit))
	}
	multiplier := int64(d.limit.multiplier)
	if multiplier == 0 {
		// ratelimit.proto: "If not specified, defaults to 1."
		multiplier = 1
	}
	w, err := limit.NewWindow(int64(d.limit.perUnit), unit, multiplier)
	if err != nil {
		return nil, err
	}
	return &w, nil
}
