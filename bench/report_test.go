package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestAReportReadsAsItWasWritten(t *testing.T) {
	want := report{
		Date: time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC), CPUs: 2, CPU: "some CPU", Go: "1.26", Redis: "7.0.15",
		Builds: []build{{"weir", "abc"}}, Seconds: 2,
		Measurements: []measurement{
			measured("one bucket, 64 callers", "floor", 1, 1, 1),
			measured("one bucket, 64 callers", "redis", 1.5, .61, .62),
		},
	}
	path := filepath.Join(t.TempDir(), "r.json")
	if err := want.write(path); err != nil {
		t.Fatal(err)
	}
	got, err := readReport(path)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(*got, want) {
		t.Errorf("got  %+v\nwant %+v", *got, want)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), `"scenario"`); n != 2 || strings.Count(string(text), "\n    {\"scenario\"") != n {
		t.Errorf("not a line for each of %d measurements:\n%s", n, text)
	}
}

func TestAReportWithoutMeasurementsReadsToo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r.json")
	if err := (report{CPUs: 2}).write(path); err != nil {
		t.Fatal(err)
	}
	if got, err := readReport(path); err != nil || got.CPUs != 2 || len(got.Measurements) != 0 {
		t.Errorf("readReport = %+v, %v", got, err)
	}
}

func TestNothingKeptIsNoErrorAndAnythingElseIs(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{"", filepath.Join(dir, "none.json")} {
		if got, err := readReport(path); got != nil || err != nil {
			t.Errorf("readReport(%q) = %v, %v; want nothing", path, got, err)
		}
	}
	path := filepath.Join(dir, "other.json")
	if err := os.WriteFile(path, []byte(`{"unknown": 1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readReport(path); err == nil || !strings.Contains(err.Error(), "no result of make bench") {
		t.Errorf("readReport of another file: %v", err)
	}
}

func TestFourDigitsAreWritten(t *testing.T) {
	for _, test := range [][2]float64{{0, 0}, {1, 1}, {44_391.7, 44_390}, {.123456, .1235}, {-1234.56, -1235}, {999_999, 1_000_000}, {1e-9, 1e-9}} {
		if got := significant(test[0]); got-test[1] > 1e-12 || test[1]-got > 1e-12 {
			t.Errorf("significant(%v) = %v, want %v", test[0], got, test[1])
		}
	}
	m := measured("s", "redis", 1.23456, .123456)
	if m.rounded(); m.Rounds[0].OfFloor != .123456 {
		t.Error("rounded changed what it was called on")
	}
}

func TestARowHasAsManyCellsAsTheHeader(t *testing.T) {
	servers := []target{{name: "floor"}, {name: "memory@HEAD~20"}}
	lines := strings.Split(header(servers), "\n")
	m := measured("one bucket, 64 callers", "memory", 1, 1)
	m.Build, m.Asked = "HEAD~20", "one bucket"
	m.Median.RedisCPU, m.SubjectBytes = 1, 100
	lines = append(lines, row(m, servers))
	for _, line := range lines {
		if strings.Count(line, "|") != strings.Count(lines[0], "|") || len([]rune(line)) != len([]rune(lines[0])) {
			t.Errorf("the table is crooked:\n%s", strings.Join(lines, "\n"))
			break
		}
	}
}
