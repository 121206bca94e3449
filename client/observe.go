package client

import "time"

// Observer is told what a client does, in words that are metrics of Prometheus and
// OpenTelemetry alike: see the examples. All words come from this package, the service
// and the policies, never from requests. Its methods are called by many goroutines,
// some of them under a lock: they must return at once, and not call the client.
type Observer interface {
	// Count adds one to a counter, under a word as its one label.
	Count(c Counter, word string)
	// Took adds a duration to a histogram.
	Took(h Histogram, d time.Duration)
	// Level adds change, which may be negative, to a gauge.
	Level(g Gauge, change int)
}

// Counter is the name of what is counted.
type Counter string

// What is counted, and the words.
const (
	// Acquires by how they ended: admitted, lane, pool, error. Each ask of a Wait counts.
	Acquires Counter = "acquires"
	// Bypasses by their reason: decisions without the service's store, or without the
	// service: [ReasonServiceAway]. Alert on any.
	Bypasses Counter = "bypasses"
	// Retries by why: lost (an answer), refused (Wait asks again), release (sent again),
	// abandoned (what may have been granted to nobody is asked for, to be released).
	Retries Counter = "retries"
	// GaveUp by why Wait asked no more: attempts, deadline, budget; or why a Queue took
	// no job: queue_full.
	GaveUp Counter = "gave_up"
	// Releases by what they found: released, not_held, expired, or gave_up: the service
	// never heard of it.
	Releases Counter = "releases"
	// Renewals by what they found: renewed, lost, unavailable.
	Renewals Counter = "renewals"
	// Lost leases by how: ended (the service says so), expired (no renewal reached it).
	Lost Counter = "lost_leases"
	// Settlements of usage by what they found: settled, already_settled, late,
	// not_reserved; refused (they can't be told); unavailable (the last try did not reach
	// the service's store, and there is no further one).
	Settlements Counter = "settlements"
)

// Histogram is the name of a duration.
type Histogram string

// What is measured.
const (
	// AcquireDuration is how long one Acquire took, with what was sent again.
	AcquireDuration Histogram = "acquire"
	// QueueWait is how long a job of a Queue waited before its work began.
	QueueWait Histogram = "queue_wait"
)

// Gauge is the name of a level.
type Gauge string

// What has a level.
const (
	// LeasesHeld are those that this client renews.
	LeasesHeld Gauge = "leases_held"
	// ReleasesPending are those that the service has not heard of yet.
	ReleasesPending Gauge = "releases_pending"
	// QueueDepth are jobs whose work has not begun.
	QueueDepth Gauge = "queue_depth"
	// QueueWorking are jobs whose work is going on.
	QueueWorking Gauge = "queue_working"
)

// nobody observes nothing.
type nobody struct{}

func (nobody) Count(Counter, string)         {}
func (nobody) Took(Histogram, time.Duration) {}
func (nobody) Level(Gauge, int)              {}
