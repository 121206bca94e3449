package main

import (
	"fmt"
	"strings"
)

// nameWidth is what the longest of the servers' names takes.
func nameWidth(servers []target) int {
	width := len("server")
	for _, t := range servers {
		width = max(width, len(t.name))
	}
	return width
}

// header is the first two lines of the table of medians.
func header(servers []target) string {
	width := nameWidth(servers)
	first := fmt.Sprintf("| %-25s | %-11s | %-*s | decisions/s | of floor | p50 µs | p99 µs (of floor) | p99.9 µs | CPU s/100k (of floor) | Redis CPU s/100k | commands (in scripts) | bytes/subject |",
		"asked", "by", width, "server")
	var second strings.Builder
	for i, cell := range strings.Split(strings.Trim(first, "|"), "|") {
		end := ":"
		if i < 3 {
			end = "-"
		}
		second.WriteString("|" + strings.Repeat("-", len([]rune(cell))-1) + end)
	}
	return first + "\n" + second.String() + "|"
}

// row is a line of the table.
func row(m measurement, servers []target) string {
	name := m.Server
	if m.Build != "" {
		name += "@" + m.Build
	}
	by := fmt.Sprintf("%.0f/s", m.Rate)
	if m.Rate == 0 {
		by = fmt.Sprintf("%d callers", m.Callers)
	}
	r := m.Median
	var redis, commands, size string
	if r.RedisCPU > 0 {
		redis, commands = fmt.Sprintf("%.2f", r.RedisCPU), fmt.Sprintf("%.2f (%.1f)", r.Sent, r.InScripts)
	}
	if m.SubjectBytes > 0 {
		size = fmt.Sprintf("%.0f", m.SubjectBytes)
	}
	text := fmt.Sprintf("| %-25s | %11s | %-*s | %11.0f | %8.2f | %6.0f | %17s | %8.0f | %21s | %16s | %21s | %13s |",
		m.Asked, by, nameWidth(servers), name, r.PerSecond, r.OfFloor, r.P50, fmt.Sprintf("%.0f (%.2f)", r.P99, r.P99OfFloor), r.P999,
		fmt.Sprintf("%.2f (%.2f)", r.CPU, r.CPUOfFloor), redis, commands, size)
	if r.Unfinished > 0 {
		text += fmt.Sprintf(" %.2f %% of what was due never ended", 100*r.Unfinished)
	}
	if r.Bypassed > 0 {
		text += fmt.Sprintf(" %.2f %% bypassed Redis", 100*r.Bypassed)
	}
	if r.OtherCPUs > noisy {
		text += fmt.Sprintf(" noisy: others used %.1f CPUs", r.OtherCPUs)
	}
	return text
}

// noisy is how many CPUs others may use before a row says so. The kernel's work for
// the network is among it.
const noisy = 0.3
