package main

import (
	"fmt"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
)

// Set by the linker: see the Makefile.
var (
	version = "unreleased"
	commit  = ""
	date    = "" // of the commit
)

type versionCommand struct{}

// Help is shown by weir version --help.
func (versionCommand) Help() string { return `Example: weir version` }

// Run prints one line.
func (versionCommand) Run(con console) error {
	_, err := fmt.Fprintln(con.stdout, versionLine())
	return err
}

func versionLine() string {
	return fmt.Sprintf("weir %s %s %s/%s", versionText(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

func versionText() string {
	if commit == "" {
		return version
	}
	return fmt.Sprintf("%s (%s, %s)", version, commit, date)
}

// buildInfo is the version as a metric.
func buildInfo() prometheus.Collector {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "weir_build_info", Help: "1, with the version as labels."}, []string{"version", "commit", "go"})
	g.WithLabelValues(version, commit, runtime.Version()).Set(1)
	return g
}
