package main

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"weir/client"
)

// observer shows to Prometheus what the client of weir does. Alert on
// weir_client_events_total{event="bypasses"}: then limits are not enforced.
type observer struct {
	events    *prometheus.CounterVec
	durations *prometheus.HistogramVec
	levels    *prometheus.GaugeVec
}

func newObserver(r prometheus.Registerer) observer {
	auto := promauto.With(r)
	o := observer{
		events: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_client_events_total", Help: "What the client of weir did, and with which result.",
		}, []string{"event", "result"}),
		durations: auto.NewHistogramVec(prometheus.HistogramOpts{
			Name: "weir_client_duration_seconds", Help: "How long that took.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30, 120},
		}, []string{"of"}),
		levels: auto.NewGaugeVec(prometheus.GaugeOpts{
			Name: "weir_client_level", Help: "Leases that are held, and releases that are pending.",
		}, []string{"of"}),
	}
	// What an alert watches begins at 0: an increase from nothing is none to Prometheus.
	o.events.WithLabelValues(string(client.Bypasses), client.ReasonServiceAway)
	return o
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

// measured measures requests, refused ones too, by their status.
func measured(r prometheus.Registerer, next http.Handler) http.Handler {
	return promhttp.InstrumentHandlerDuration(promauto.With(r).NewHistogramVec(prometheus.HistogramOpts{
		Name: "imageservice_request_duration_seconds", Help: "How long requests for images took.",
		Buckets: []float64{.001, .005, .025, .1, .5, 1, 2, 5, 10, 30, 60, 120},
	}, []string{"code"}), next)
}
