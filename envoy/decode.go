package envoy

import (
	"errors"
	"fmt"
	"strings"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"weir/limit"
	"weir/policy"
)

// ErrNotSupported is in the chain of Decode's error if the message is right and
// asks for what this version does not have.
var ErrNotSupported = errors.New("not supported by this version")

// Ask is what a RateLimitRequest asks for.
type Ask struct {
	// Request is what is to be decided: the descriptors without their reserved
	// entries. It has no descriptor if there is nothing to decide.
	Request policy.Request
	// Releases are the leases that the message ends. They have the shape of lease
	// ids, and need not be of the message's domain.
	Releases []limit.LeaseID
	// places has one element for each descriptor of the message: its index in
	// Request.Descriptors, or -1 if it is not asked.
	places []int
}

// Decode reads a message. Its errors are for the sender: they say what is wrong,
// where, and what to do, and repeat none of its texts. They are for
// INVALID_ARGUMENT, but for those that wrap ErrNotSupported.
func Decode(m *rls.RateLimitRequest) (Ask, error) {
	descriptors := m.GetDescriptors()
	if err := CheckDomain(m.GetDomain()); err != nil {
		return Ask{}, err
	}
	if err := CheckDescriptors(len(descriptors)); err != nil {
		return Ask{}, err
	}
	total := 0
	for i, d := range descriptors {
		if err := CheckEntries(len(d.GetEntries())); err != nil {
			return Ask{}, fmt.Errorf("descriptors[%d].%w", i, err)
		}
		total += len(d.GetEntries())
	}

	a := Ask{
		Request: policy.Request{
			Domain:      m.GetDomain(),
			Hits:        uint64(m.GetHitsAddend()),
			Descriptors: make([]policy.Descriptor, 0, len(descriptors)),
		},
		places: make([]int, len(descriptors)),
	}
	entries := make([]limit.Entry, 0, total) // of all descriptors, one after the other
	for i, d := range descriptors {
		a.places[i] = -1
		from := len(entries)
		var r reserved
		for j, e := range d.GetEntries() {
			key := e.GetKey()
			if err := CheckKey(j, key); err != nil {
				return Ask{}, fmt.Errorf("descriptors[%d].%w", i, err)
			}
			if !strings.HasPrefix(key, limit.ReservedPrefix) {
				entries = append(entries, limit.Entry{Key: key, Value: e.GetValue()})
			} else if err := r.add(key, e.GetValue()); err != nil {
				return Ask{}, fmt.Errorf("descriptors[%d]: %w", i, err)
			}
		}
		if r.event == eventRelease {
			release, err := r.release()
			if err != nil {
				return Ask{}, fmt.Errorf("descriptors[%d]: %w", i, err)
			}
			a.Releases = append(a.Releases, release)
			entries = entries[:from]
			continue
		}
		if len(entries) == from {
			continue
		}
		window, err := override(d.GetLimit())
		if err != nil {
			return Ask{}, fmt.Errorf("descriptors[%d].limit: %w", i, err)
		}
		a.places[i] = len(a.Request.Descriptors)
		a.Request.Descriptors = append(a.Request.Descriptors, policy.Descriptor{
			Entries: entries[from:len(entries):len(entries)],
			// ratelimit.proto: "If set the value will override the request level
			// hits_addend."
			Hits:     d.GetHitsAddend().GetValue(),
			HasHits:  d.GetHitsAddend() != nil,
			Negative: d.GetIsNegativeHits(),
			Override: window,
		})
	}
	return a, nil
}

const (
	keyEvent = limit.ReservedPrefix + "event"
	keyLease = limit.ReservedPrefix + "lease_id"
)

const (
	eventAcquire = "acquire"
	eventRelease = "release"
	eventUsage   = "usage"
)

// reserved is what a descriptor's reserved entries say.
type reserved struct {
	event, lease string
}

// add notes one reserved entry. Keys that it doesn't know are left to later
// versions.
func (r *reserved) add(key, value string) error {
	switch key {
	case keyEvent:
		if r.event != "" {
			return errors.New(keyEvent + " stands twice; send one event a descriptor")
		}
		switch value {
		case eventAcquire, eventRelease:
		case eventUsage:
			return fmt.Errorf("%s %s is %w; charge with an ordinary descriptor", keyEvent, eventUsage, ErrNotSupported)
		default:
			return fmt.Errorf("%s is unknown; use one of %s, %s, %s", keyEvent, eventAcquire, eventRelease, eventUsage)
		}
		r.event = value
	case keyLease:
		if r.lease != "" {
			return errors.New(keyLease + " stands twice; send one release a descriptor")
		}
		r.lease = value
	}
	return nil
}

// release is the release that the entries ask for. An empty lease id is none: an
// Envoy without a lease in its metadata may send one.
func (r *reserved) release() (limit.LeaseID, error) {
	if r.lease == "" {
		return "", fmt.Errorf("release by stream id is %w; send %s", ErrNotSupported, keyLease)
	}
	id, err := limit.ParseLeaseID(r.lease)
	if err != nil {
		return "", fmt.Errorf("%s: %w; send back the id of the answer that granted the lease", keyLease, err)
	}
	return id, nil
}

// override reads the limit that a descriptor brings along; nil for none.
func override(l *ratelimit.RateLimitDescriptor_RateLimitOverride) (*limit.Window, error) {
	if l == nil {
		return nil, nil
	}
	var unit limit.Unit
	switch l.GetUnit() {
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
		return nil, fmt.Errorf("unit %d is no unit of time; use one of SECOND, MINUTE, HOUR, DAY, MONTH, YEAR", l.GetUnit())
	}
	multiplier := int64(l.GetUnitMultiplier().GetValue())
	if multiplier == 0 {
		// ratelimit.proto: "If not specified, defaults to 1."
		multiplier = 1
	}
	w, err := limit.NewWindow(int64(l.GetRequestsPerUnit()), unit, multiplier)
	if err != nil {
		return nil, err
	}
	return &w, nil
}
