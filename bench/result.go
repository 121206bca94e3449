package main

import (
	"errors"
	"math"
	"slices"
	"time"
)

// result is one measurement of a server, or the medians of several.
type result struct {
	PerSecond float64 `json:"per_second"` // decisions that ended
	// Of a decision; in an open loop from when it was due.
	P50  float64 `json:"p50_us"`
	P99  float64 `json:"p99_us"`
	P999 float64 `json:"p999_us"`
	// CPU seconds for 100,000 decisions.
	CPU          float64 `json:"cpu_s_per_100k"`
	RedisCPU     float64 `json:"redis_cpu_s_per_100k,omitempty"`
	GeneratorCPU float64 `json:"generator_cpu_s_per_100k"`
	// Of one decision: commands that Redis got, and that its scripts ran.
	Sent      float64 `json:"redis_commands,omitempty"`
	InScripts float64 `json:"redis_commands_in_scripts,omitempty"`
	// Shares of the decisions: made without the store; due, and never ended.
	Bypassed   float64 `json:"bypassed,omitempty"`
	Unfinished float64 `json:"unfinished,omitempty"`
	// CPUs that the rest of the machine kept busy: noise.
	OtherCPUs float64 `json:"other_cpus"`

	// Ratios to what the floor had in the same round.
	OfFloor         float64 `json:"of_floor"`
	P99OfFloor      float64 `json:"p99_of_floor"`
	CPUOfFloor      float64 `json:"cpu_of_floor"`
	RedisCPUOfFloor float64 `json:"redis_cpu_of_floor,omitempty"` // of the floor's own CPU: it has no Redis
}

// values are the numbers of r.
func (r *result) values() []*float64 {
	return []*float64{
		&r.PerSecond, &r.P50, &r.P99, &r.P999, &r.CPU, &r.RedisCPU, &r.GeneratorCPU, &r.Sent, &r.InScripts,
		&r.Bypassed, &r.Unfinished, &r.OtherCPUs, &r.OfFloor, &r.P99OfFloor, &r.CPUOfFloor, &r.RedisCPUOfFloor,
	}
}

// besides sets the ratios to the floor's result.
func (r *result) besides(floor result) {
	ratio := func(a, b float64) float64 {
		if b == 0 {
			return 0
		}
		return a / b
	}
	r.OfFloor = ratio(r.PerSecond, floor.PerSecond)
	r.P99OfFloor = ratio(r.P99, floor.P99)
	r.CPUOfFloor = ratio(r.CPU, floor.CPU)
	r.RedisCPUOfFloor = ratio(r.RedisCPU, floor.CPU)
}

// medians returns the median of each number over one or more rounds.
func medians(rounds []result) result {
	var m result
	for i, v := range m.values() {
		all := make([]float64, len(rounds))
		for j := range rounds {
			all[j] = *rounds[j].values()[i]
		}
		*v = median(all)
	}
	return m
}

// median sorts values, of which there is at least one.
func median(values []float64) float64 {
	slices.Sort(values)
	return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
}

// quantile of sorted values, of which there is at least one: the smallest that at
// least a share q of them does not exceed.
func quantile(sorted []time.Duration, q float64) time.Duration {
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

// measure lets the callers of l ask t for a window, at a rate if that is not 0.
func measure(t target, l *load, rate float64, window time.Duration) (result, error) {
	var begin, end usage
	from := func() (err error) { begin, err = usageOf(t); return err }
	to := func() (err error) { end, err = usageOf(t); return err }
	var d decided
	var err error
	if rate > 0 {
		d, err = l.open(rate, window, from, to)
	} else {
		d, err = l.closed(window, from, to)
	}
	switch {
	case err != nil:
		return result{}, err
	case len(d.latencies) == 0 || d.ended == 0:
		return result{}, errors.New("no decision ended within the window: make it longer")
	}
	return summary(d, begin, end), nil
}

// summary is a result without its ratios.
func summary(d decided, begin, end usage) result {
	slices.Sort(d.latencies)
	micros := func(q float64) float64 { return float64(quantile(d.latencies, q)) / float64(time.Microsecond) }
	n := float64(d.ended)
	per100k := func(begin, end time.Duration) float64 { return (end - begin).Seconds() / n * 100_000 }
	seconds := end.at.Sub(begin.at).Seconds()
	known := (end.cpu - begin.cpu) + (end.redisCPU - begin.redisCPU) + (end.generator - begin.generator)
	return result{
		PerSecond:    n / seconds,
		P50:          micros(.5),
		P99:          micros(.99),
		P999:         micros(.999),
		CPU:          per100k(begin.cpu, end.cpu),
		RedisCPU:     per100k(begin.redisCPU, end.redisCPU),
		GeneratorCPU: per100k(begin.generator, end.generator),
		Sent:         float64(end.commands.sent-begin.commands.sent) / n,
		InScripts:    float64(end.commands.inScripts-begin.commands.inScripts) / n,
		Bypassed:     float64(d.bypassed) / float64(len(d.latencies)),
		Unfinished:   float64(d.unfinished) / float64(len(d.latencies)),
		OtherCPUs:    max(0, (end.machine-begin.machine-known).Seconds()/seconds),
	}
}
