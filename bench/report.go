package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"runtime"
	"strings"
	"time"
)

// report is a whole run, as it is written and kept.
type report struct {
	Date         time.Time     `json:"date"`
	CPUs         int           `json:"cpus"`
	CPU          string        `json:"cpu"` // its model
	Go           string        `json:"go"`
	Redis        string        `json:"redis,omitempty"`
	Builds       []build       `json:"builds"`
	Seconds      float64       `json:"seconds"` // of each measurement
	Measurements []measurement `json:"measurements"`
}

// build is one build of weir: how the servers are named, and what git says of it.
type build struct {
	Label   string `json:"label"`
	Version string `json:"version"`
}

// measurement is all rounds of a scenario on one server.
type measurement struct {
	Scenario     string   `json:"scenario"`
	Asked        string   `json:"asked"`           // the scenario without how many ask, or how often
	Server       string   `json:"server"`          // floor, memory, redis, …
	Build        string   `json:"build,omitempty"` // the label of one of several builds
	Callers      int      `json:"callers,omitempty"`
	Rate         float64  `json:"rate,omitempty"`          // of an open loop
	SubjectBytes float64  `json:"subject_bytes,omitempty"` // of Redis, or of the process without one
	Median       result   `json:"median"`
	Rounds       []result `json:"rounds"`
}

func newReport(o options, servers []target) (report, error) {
	r := report{
		Date: time.Now().UTC().Truncate(time.Second), CPUs: runtime.NumCPU(), CPU: "unknown",
		Go: strings.TrimPrefix(runtime.Version(), "go"), Builds: o.builds, Seconds: o.seconds,
	}
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(info)) {
			if name, model, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				r.CPU = strings.TrimSpace(model)
				break
			}
		}
	}
	for _, t := range servers {
		if t.redis != "" {
			version, err := redisInfo(t.redis, "server", "redis_version")
			if err != nil {
				return report{}, err
			}
			r.Redis = version
		}
	}
	return r, nil
}

// about says in one line where and of what the run was.
func (r report) about() string {
	text := fmt.Sprintf("%s: %d CPUs (%s) for the generator, the server and Redis; Redis %s; Go %s; weir",
		r.Date.Format(time.DateOnly), r.CPUs, r.CPU, r.Redis, r.Go)
	for i, b := range r.Builds {
		if i > 0 {
			text += ","
		}
		text += " " + b.Version
		if len(r.Builds) > 1 {
			text += " as @" + b.Label
		}
	}
	return text
}

// write writes r to a file, a line for each measurement, so that what is kept stays
// readable in a diff.
func (r report) write(path string) error {
	var out bytes.Buffer
	lines := r.Measurements
	r.Measurements = []measurement{}
	head, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	out.Write(bytes.TrimSuffix(head, []byte("[]\n}")))
	out.WriteString("[")
	for i, m := range lines {
		line, err := json.Marshal(m.rounded())
		if err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
		if i > 0 {
			out.WriteByte(',')
		}
		out.WriteString("\n    ")
		out.Write(line)
	}
	out.WriteString("\n  ]\n}\n")
	return os.WriteFile(path, out.Bytes(), 0o644)
}

// rounded returns m with four digits of each number: more are noise.
func (m measurement) rounded() measurement {
	m.Rate, m.SubjectBytes = significant(m.Rate), significant(m.SubjectBytes)
	m.Rounds = append([]result(nil), m.Rounds...)
	for i := range m.Rounds {
		for _, v := range m.Rounds[i].values() {
			*v = significant(*v)
		}
	}
	for _, v := range m.Median.values() {
		*v = significant(*v)
	}
	return m
}

// significant rounds to four significant digits.
func significant(v float64) float64 {
	if v == 0 {
		return 0
	}
	scale := math.Pow(10, 3-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*scale) / scale
}

// readReport reads what write has written. Without a path, or without a file, it
// returns nil.
func readReport(path string) (*report, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var r report
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return nil, fmt.Errorf("%s is no result of make bench: %w", path, err)
	}
	return &r, nil
}
