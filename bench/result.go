package main

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// result is one measurement of a server.
type result struct {
	perSecond float64
	ofFloor   float64       // ratio of perSecond to the floor's, in the same round
	p50, p99  time.Duration // of a decision
	// For 100,000 decisions, in seconds.
	cpu, redisCPU float64
	// For one decision: commands that Redis got, and that its scripts ran.
	sent, inScripts float64
	bypassed        float64 // share of the decisions that were made without the store
}

// measure lets the callers of l ask t for a window.
func measure(t target, l *load, window time.Duration) (result, error) {
	var begin, end usage
	d, err := l.run(window,
		func() (err error) { begin, err = usageOf(t); return err },
		func() (err error) { end, err = usageOf(t); return err })
	switch {
	case err != nil:
		return result{}, err
	case len(d.latencies) == 0:
		return result{}, errors.New("no decision ended within the window")
	}
	slices.Sort(d.latencies)
	quantile := func(q float64) time.Duration { return d.latencies[int(q*float64(len(d.latencies)-1))] }
	n := float64(len(d.latencies))
	return result{
		perSecond: n / end.at.Sub(begin.at).Seconds(),
		p50:       quantile(.5),
		p99:       quantile(.99),
		cpu:       (end.cpu - begin.cpu).Seconds() / n * 100_000,
		redisCPU:  (end.redisCPU - begin.redisCPU).Seconds() / n * 100_000,
		sent:      float64(end.commands.sent-begin.commands.sent) / n,
		inScripts: float64(end.commands.inScripts-begin.commands.inScripts) / n,
		bypassed:  float64(d.bypassed) / n,
	}, nil
}

// usage is what the processes of a server have used up to a moment.
type usage struct {
	at            time.Time
	cpu, redisCPU time.Duration
	commands      commands
}

func usageOf(t target) (u usage, err error) {
	if t.redis != "" {
		if u.commands, err = countCommands(t.redis); err != nil {
			return u, err
		}
		if u.redisCPU, err = cpuTime(t.redisPID); err != nil {
			return u, err
		}
	}
	u.at = time.Now()
	u.cpu, err = cpuTime(t.pid)
	return u, err
}

const header = `| asked                      | callers | server | decisions/s | of floor | p50 µs | p99 µs | CPU s/100k | Redis CPU s/100k | commands (in scripts) |
|----------------------------|--------:|--------|------------:|---------:|-------:|-------:|-----------:|-----------------:|----------------------:|`

// row is the medians of results, to stand under header.
func row(s scenario, t target, results []result) string {
	median := func(value func(r result) float64) float64 {
		values := make([]float64, len(results))
		for i, r := range results {
			values[i] = value(r)
		}
		slices.Sort(values)
		return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
	}
	micros := func(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
	text := fmt.Sprintf("| %-26s | %7d | %-6s | %11.0f | %8.2f | %6.0f | %6.0f | %10.2f |", s.name, s.callers, t.name,
		median(func(r result) float64 { return r.perSecond }),
		median(func(r result) float64 { return r.ofFloor }),
		median(func(r result) float64 { return micros(r.p50) }),
		median(func(r result) float64 { return micros(r.p99) }),
		median(func(r result) float64 { return r.cpu }))
	if t.redis == "" {
		return text + fmt.Sprintf(" %16s | %21s |", "", "")
	}
	commands := fmt.Sprintf("%.2f (%.1f)",
		median(func(r result) float64 { return r.sent }),
		median(func(r result) float64 { return r.inScripts }))
	text += fmt.Sprintf(" %16.2f | %21s |", median(func(r result) float64 { return r.redisCPU }), commands)
	if b := median(func(r result) float64 { return r.bypassed }); b > 0 {
		text += fmt.Sprintf(" %.2f %% bypassed Redis", 100*b)
	}
	return text
}
