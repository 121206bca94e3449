package client_test

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"weir/client"
)

// observer shows a client to Prometheus. With OpenTelemetry it has an Int64Counter, a
// Float64Histogram and an Int64UpDownCounter instead, and the labels are attributes.
type observer struct {
	events    *prometheus.CounterVec
	durations *prometheus.HistogramVec
	levels    *prometheus.GaugeVec
}

func newObserver(r prometheus.Registerer) observer {
	auto := promauto.With(r)
	return observer{
		events: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_client_events_total", Help: "What a client of weir did, and with which result.",
		}, []string{"event", "result"}),
		durations: auto.NewHistogramVec(prometheus.HistogramOpts{
			Name: "weir_client_duration_seconds", Help: "How long that took, and how long jobs waited.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30, 120},
		}, []string{"of"}),
		levels: auto.NewGaugeVec(prometheus.GaugeOpts{
			Name: "weir_client_level", Help: "Leases that are held, releases that are pending, jobs that wait or work.",
		}, []string{"of"}),
	}
}

func (o observer) Count(c client.Counter, word string) {
	o.events.WithLabelValues(string(c), word).Inc()
}

func (o observer) Took(h client.Histogram, d time.Duration) {
	o.durations.WithLabelValues(string(h)).Observe(d.Seconds())
}

func (o observer) Level(g client.Gauge, change int) {
	o.levels.WithLabelValues(string(g)).Add(float64(change))
}

func ExampleObserver() {
	conn, stop := examplesService()
	defer stop()
	registry := prometheus.NewRegistry()
	limits := client.New(conn, client.Options{Domain: "inference", Observer: newObserver(registry)})
	defer limits.Close()

	lease, err := limits.Acquire(context.Background(), client.Ask(client.Describe("account", "alice")))
	if err != nil {
		fmt.Println(err)
	}
	lease.Release(context.Background())
	families, err := registry.Gather()
	if err != nil {
		fmt.Println(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			fmt.Print(f.GetName())
			for _, l := range m.GetLabel() {
				fmt.Printf(" %s=%s", l.GetName(), l.GetValue())
			}
			if c := m.GetCounter(); c != nil {
				fmt.Print(" ", c.GetValue())
			}
			if g := m.GetGauge(); g != nil {
				fmt.Print(" ", g.GetValue())
			}
			fmt.Println()
		}
	}
	// Output:
	// weir_client_duration_seconds of=acquire
	// weir_client_events_total event=acquires result=admitted 1
	// weir_client_events_total event=releases result=released 1
	// weir_client_level of=leases_held 0
}
