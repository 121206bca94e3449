package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// metric is one number by which results are compared: a ratio to the floor of the
// same round, so that the machine cancels out.
type metric struct {
	name  string
	value func(r result) float64
	more  bool // is better
	// Whether it tells something of closed and of open loops.
	closed, open bool
}

var metrics = []metric{
	{"decisions", func(r result) float64 { return r.OfFloor }, true, true, false},
	{"CPU", func(r result) float64 { return r.CPUOfFloor }, false, true, true},
	{"Redis CPU", func(r result) float64 { return r.RedisCPUOfFloor }, false, true, true},
	{"p99", func(r result) float64 { return r.P99OfFloor }, false, false, true},
}

// change is how one metric of a scenario on a server has changed.
type change struct {
	scenario, server, metric string
	before, now              float64 // medians
	// By more than the rounds differ among themselves, before or now.
	worse, better bool
}

// ratio of now to before.
func (c change) ratio() float64 { return c.now / c.before }

// compare pairs what was measured before and is measured now, in the order of now.
// The floor is not compared, for all else is compared to it.
func compare(before, now []measurement) []change {
	var list []change
	for _, n := range now {
		i := slices.IndexFunc(before, func(b measurement) bool { return b.Scenario == n.Scenario && b.Server == n.Server })
		if n.Server == floorName || i < 0 {
			continue
		}
		b := before[i]
		for _, m := range metrics {
			if n.Rate > 0 && !m.open || n.Rate == 0 && !m.closed {
				continue
			}
			c := change{scenario: n.Scenario, server: n.Server, metric: m.name, before: m.value(b.Median), now: m.value(n.Median)}
			if c.before == 0 || c.now == 0 {
				continue
			}
			// One round has no spread, so that it tells nothing.
			if len(b.Rounds) > 1 && len(n.Rounds) > 1 {
				gain := c.now - c.before
				if !m.more {
					gain = -gain
				}
				spread := max(m.spread(b.Rounds), m.spread(n.Rounds))
				c.worse, c.better = gain < -spread, gain > spread
			}
			list = append(list, c)
		}
	}
	return list
}

// spread is how far the metric's highest and lowest rounds are apart.
func (m metric) spread(rounds []result) float64 {
	low, high := m.value(rounds[0]), m.value(rounds[0])
	for _, r := range rounds {
		low, high = min(low, m.value(r)), max(high, m.value(r))
	}
	return high - low
}

// compareAll prints how the builds of a run compare with its first, and the last of
// them with what was kept, if it was.
func compareAll(w io.Writer, r report, kept *report) {
	of := func(label string) []measurement {
		return slices.DeleteFunc(slices.Clone(r.Measurements), func(m measurement) bool { return m.Build != label })
	}
	label := ""
	if len(r.Builds) > 1 {
		first := r.Builds[0]
		for _, b := range r.Builds[1:] {
			printChanges(w, fmt.Sprintf("@%s (%s) beside @%s (%s)", b.Label, b.Version, first.Label, first.Version), compare(of(first.Label), of(b.Label)))
		}
		label = r.Builds[len(r.Builds)-1].Label
	}
	if kept == nil {
		_, _ = fmt.Fprintln(w, "\nNo result is kept to compare with: make bench-keep keeps one.")
		return
	}
	title := "beside the kept result: " + kept.about()
	if kept.CPUs != r.CPUs || kept.CPU != r.CPU || kept.Redis != r.Redis || kept.Go != r.Go {
		title += "\n(another machine, Redis or Go: even ratios may differ for that)"
	}
	printChanges(w, title, compare(kept.Measurements, of(label)))
}

// printChanges prints a table in which + and ! mark what is better and worse.
func printChanges(w io.Writer, title string, list []change) {
	var text strings.Builder
	fmt.Fprintf(&text, "\n%s\n\n", title)
	text.WriteString("| asked                               | server | ratio to the floor's | before |    now | now/before |   |\n")
	text.WriteString("|-------------------------------------|--------|----------------------|-------:|-------:|-----------:|---|\n")
	worse := 0
	for _, c := range list {
		mark := " "
		switch {
		case c.worse:
			mark = "!"
			worse++
		case c.better:
			mark = "+"
		}
		fmt.Fprintf(&text, "| %-35s | %-6s | %-20s | %6.2f | %6.2f | %10.2f | %s |\n", c.scenario, c.server, c.metric, c.before, c.now, c.ratio(), mark)
	}
	fmt.Fprintf(&text, "\n%d of %d are worse by more than the rounds differ (!).\n", worse, len(list))
	_, _ = io.WriteString(w, text.String())
}
