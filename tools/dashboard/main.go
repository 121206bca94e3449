// Command dashboard checks a Grafana dashboard without Grafana: it decodes it as strictly as
// Grafana's own schemas are, which have every field of the dashboard, of the panels that weir
// uses, and of Prometheus' queries.
//
//	go run . FILE
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/bargauge"
	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/statetimeline"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: dashboard FILE")
		os.Exit(2)
	}
	if err := check(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("the dashboard is right")
}

func check(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	known := cog.NewRuntime()
	known.RegisterPanelcfgVariant(bargauge.VariantConfig())
	known.RegisterPanelcfgVariant(stat.VariantConfig())
	known.RegisterPanelcfgVariant(statetimeline.VariantConfig())
	known.RegisterPanelcfgVariant(timeseries.VariantConfig())
	known.RegisterDataqueryVariant(prometheus.VariantConfig())
	var d dashboard.Dashboard
	if err := d.UnmarshalJSONStrict(text); err != nil && err.Error() != "" { // of no errors it makes an empty one
		return fmt.Errorf("%s: %w", file, err)
	}
	// Of a panel of another type the options could be anything.
	var panels struct{ Panels []struct{ Type string } }
	if err := json.Unmarshal(text, &panels); err != nil {
		return err
	}
	for _, p := range panels.Panels {
		if _, ok := known.ConfigForPanelcfgVariant(p.Type); !ok && p.Type != "row" {
			return fmt.Errorf("%s: a panel of type %q, which this command does not know: register it", file, p.Type)
		}
	}
	return nil
}
