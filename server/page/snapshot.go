package page

import "time"

// Snapshot is the picture that the page shows, and /status.json tells: of one replica,
// but for what is in flight, which the store counts over all of them. Counts are since
// the replica's start, and rates of the last 10 to 15 seconds, where nothing else is said.
type Snapshot struct {
	At      time.Time `json:"at"`
	Started time.Time `json:"started"`
	// Host is the replica's, and Version that of weir; "" if they are not known.
	Host    string `json:"host"`
	Version string `json:"version"`
	// Status is that of /healthz: ok, degraded, not_ready or draining.
	Status string `json:"status"`
	// Headline is the worst of Problems in words, or says that all is well.
	Headline Problem `json:"headline"`
	// Problems say in words what is wrong, the worst first; empty if all is well.
	Problems []Problem `json:"problems"`
	Store    Store     `json:"store"`
	Bypassed Bypassed  `json:"bypassed"`
	Domains  []Domain  `json:"domains"`
	// MoreLimits is how many limits are left out of Domains, beyond [MaxLimits].
	MoreLimits int `json:"more_limits"`
	// Unknown are requests for domains that no policy has: nothing limits them.
	Unknown  Unknown  `json:"unknown_domain"`
	Latency  Latency  `json:"latency"`
	Policies Policies `json:"policies"`
	// Refused are the subjects that were refused most often, the first most.
	Refused []Subject `json:"refused"`
}

// MaxLimits is how many limits a snapshot has at most, over all domains.
const MaxLimits = 200

// Problem is something that is wrong, or was just now.
type Problem struct {
	Level string `json:"level"` // bad, warn, note (it is over, or to be known); of Headline also ok
	Text  string `json:"text"`
}

// Store is the health of the store.
type Store struct {
	// Kind is redis, or memory: the state is in this process alone.
	Kind string `json:"kind"`
	// Address is where Redis is, without user and password; "" in memory.
	Address string `json:"address,omitempty"`
	// State is up, away, or not_found if it has never answered.
	State string `json:"state"`
	// Since is when it came into that state.
	Since time.Time `json:"since"`
	// Silent: it does not answer at all. Away without it, calls fail now and then.
	Silent bool `json:"silent"`
	// Breakers are those that are open, so that the store is not asked.
	Breakers []Breaker `json:"breakers"`
	// Outage is the one that is, or else the last; nil if there was none.
	Outage *Outage `json:"outage,omitempty"`
	// LastHour are the outages of the last hour that are over, and LateLastHour the
	// times in which it answered, and failed some calls; nil if there were none.
	LastHour     *Outages `json:"last_hour,omitempty"`
	LateLastHour *Outages `json:"late_last_hour,omitempty"`
	// Erring, if not nil: it has answered decisions with errors alone since then.
	Erring *Outage `json:"erring,omitempty"`
	// LastError is the last call that failed; nil if none did.
	LastError *StoreError `json:"last_error,omitempty"`
}

// Breaker is an open breaker, which keeps calls for a domain from the store.
type Breaker struct {
	Domain string    `json:"domain"`
	Since  time.Time `json:"since"`
}

// Outage is a time without the store.
type Outage struct {
	From time.Time `json:"from"`
	To   time.Time `json:"to,omitzero"` // zero: it goes on
	// Late: it answered, and failed some calls.
	Late bool `json:"late"`
	Counts
}

// Outages are a number of them.
type Outages struct {
	Number  int       `json:"number"`
	Seconds float64   `json:"seconds"` // in all
	To      time.Time `json:"to"`      // the end of the last
	Counts
}

// StoreError is a call of the store that failed.
type StoreError struct {
	At time.Time `json:"at"`
	// Reason is store_timeout, store_unavailable, store_error, or hurried: its caller had
	// too little time left.
	Reason string `json:"reason"`
	// Word is the first of Redis's answer, as OOM or READONLY; "" without one.
	Word string `json:"word"`
}

// Counts are requests that were decided without the store.
type Counts struct {
	Unchecked int64 `json:"unchecked"` // a limit of theirs was not looked at, and they passed
	Local     int64 `json:"local"`     // by the shares of this replica, admitted or refused
	Refused   int64 `json:"refused"`   // since nobody knew better
}

// Total is the sum of the three.
func (c Counts) Total() int64 { return c.Unchecked + c.Local + c.Refused }

// Plus is the sum of both.
func (c Counts) Plus(d Counts) Counts {
	return Counts{c.Unchecked + d.Unchecked, c.Local + d.Local, c.Refused + d.Refused}
}

// Minus is what came since the counts were before.
func (c Counts) Minus(before Counts) Counts {
	return Counts{c.Unchecked - before.Unchecked, c.Local - before.Local, c.Refused - before.Refused}
}

// Bypassed are the requests that this replica decided without the store.
type Bypassed struct {
	PerSecond float64 `json:"per_second"` // of the last 5 seconds
	// LastMinute are those of the last 60 seconds.
	LastMinute Counts `json:"last_minute"`
	Today      Counts `json:"today"` // since midnight, UTC, or the start
	Total      Counts `json:"total"`
	// At is when the last was; zero: none was.
	At time.Time `json:"at,omitzero"`
}

// Unknown are requests for domains that no policy has.
type Unknown struct {
	Total  float64 `json:"total"`
	Lately float64 `json:"last_minute"`
}

// Domain is a domain of the policies.
type Domain struct {
	Name              string  `json:"name"`
	File              string  `json:"file"`
	Admitted          float64 `json:"admitted"`
	Refused           float64 `json:"refused"`
	AdmittedPerSecond float64 `json:"admitted_per_second"`
	RefusedPerSecond  float64 `json:"refused_per_second"`
	// LeasesHeld is over all replicas; nil if it is not known.
	LeasesHeld *int64 `json:"leases_held"`
	// LeasesExpired were found by this replica, and ExpiredLately in the last 5 minutes.
	LeasesExpired float64 `json:"leases_expired"`
	ExpiredLately float64 `json:"leases_expired_lately"`
	Limits        []Limit `json:"limits"`
}

// Limit is a limit of a domain. Limits of one name and one kind are one.
type Limit struct {
	Name string `json:"name"`
	Kind string `json:"kind"` // token_bucket, rate_limit or concurrency; "" of overrides
	// Capacity is what it allows each subject: tokens, requests in a window, or slots.
	Capacity int64 `json:"capacity"`
	Shadow   bool  `json:"shadow"`
	// Pools are those of a concurrency whose subjects the policies name, each with its own
	// slots, in the order of the files; and Pool is the fullest of them. Nil: it is none.
	Pools []Pool `json:"pools,omitempty"`
	Pool  *Pool  `json:"pool,omitempty"`
	// Checks by their result. Over did not pass, and the request was not refused for it.
	Passed      float64 `json:"passed"`
	Refused     float64 `json:"refused"`
	Over        float64 `json:"over"`
	WouldRefuse float64 `json:"would_refuse"` // in shadow
	Bypassed    float64 `json:"bypassed"`

	PassedPerSecond   float64 `json:"passed_per_second"`
	RefusedPerSecond  float64 `json:"refused_per_second"`
	WouldRefuseLately float64 `json:"would_refuse_last_minute"`
	// RetryAfter is what those who were refused were told last; nil: nobody was.
	RetryAfter *RetryAfter `json:"retry_after,omitempty"`
}

// Pool is what is in flight of a limit, over all replicas.
type Pool struct {
	Subject  string `json:"subject"`   // as in [Subject]
	InFlight *int64 `json:"in_flight"` // nil: not known
	Capacity int64  `json:"capacity"`
	// At is when the store told InFlight: it is old while the store is away.
	At time.Time `json:"at,omitzero"`
	// Old: the store did not tell it just now.
	Old bool `json:"old"`
}

// Full reports whether nothing is left, as far as is known.
func (p *Pool) Full() bool { return p != nil && p.InFlight != nil && *p.InFlight >= p.Capacity }

// Fullest is the pool that has the largest part of its slots taken, the first if none is
// known; nil without pools.
func Fullest(pools []Pool) (worst *Pool) {
	part := func(p *Pool) float64 {
		if p.InFlight == nil {
			return -1
		}
		return float64(*p.InFlight) / float64(p.Capacity)
	}
	for i := range pools {
		if worst == nil || part(&pools[i]) > part(worst) {
			worst = &pools[i]
		}
	}
	return worst
}

// RetryAfter is what was handed out.
type RetryAfter struct {
	Last  float64   `json:"last_seconds"`
	Mean  float64   `json:"mean_seconds"`
	Count int64     `json:"count"`
	At    time.Time `json:"at"` // the last
}

// Latency is how long decisions took, and calls of the store, each 5 seconds of the last
// 5 minutes.
type Latency struct {
	Decisions Percentiles `json:"decisions"`
	Store     Percentiles `json:"store"`
}

// Percentiles are in milliseconds, one for each of Times, the ends of the intervals; nil
// where there was nothing. They are read from a histogram, so that they are about right.
type Percentiles struct {
	Count float64 `json:"count"` // of what took its time, in all intervals
	// All are over all intervals: p50, p95 and p99; empty if there was nothing.
	All   []float64  `json:"all"`
	Times []int64    `json:"times"` // seconds since the epoch
	P50   []*float64 `json:"p50"`
	P95   []*float64 `json:"p95"`
	P99   []*float64 `json:"p99"`
}

// Policies are the policy files.
type Policies struct {
	Version  string    `json:"version"` // "" if none are loaded
	LoadedAt time.Time `json:"loaded_at,omitzero"`
	Wrong    int       `json:"wrong_files"` // now
	// Errors are the first lines of what was wrong at the last load that failed, and
	// FailedAt when that was; zero: none did.
	Errors   []string  `json:"errors"`
	FailedAt time.Time `json:"failed_at,omitzero"`
}

// Subject is one that was refused.
type Subject struct {
	Domain string `json:"domain"`
	Limit  string `json:"limit"`
	// Subject is as in the keys of the store: key=value,key=value, with the digests of
	// values that are sensitive, or long. Each value has at most 64 characters.
	Subject string `json:"subject"`
	// Count is of refusals, and at most Over of these may be another subject's.
	Count int64     `json:"count"`
	Over  int64     `json:"over"`
	Last  time.Time `json:"last"`
}
