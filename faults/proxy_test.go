package faults

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
)

// proxy is the network between a replica and its Redis.
type proxy struct {
	*toxiproxy.Proxy
	t testing.TB
}

func newProxy(t testing.TB, upstream string) *proxy {
	t.Helper()
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(prometheus.NewRegistry()), zerolog.Nop())
	p := &proxy{toxiproxy.NewProxy(server, "redis", "127.0.0.1:0", upstream), t}
	p.start()
	t.Cleanup(func() { p.Stop() })
	return p
}

// start listens, after cut too, where it listened before.
func (p *proxy) start() {
	p.t.Helper()
	if err := p.Start(); err != nil {
		p.t.Fatal(err)
	}
}

// cut closes all connections, and lets none in.
func (p *proxy) cut() { p.Stop() }

// to has the network be so towards Redis ("upstream") or from there ("downstream"): kind
// is one of toxiproxy's toxics.
func (p *proxy) to(stream, kind string, attributes map[string]int) {
	p.t.Helper()
	text, err := json.Marshal(map[string]any{"name": kind + stream, "type": kind, "stream": stream, "attributes": attributes})
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := p.Toxics.AddToxicJson(strings.NewReader(string(text))); err != nil {
		p.t.Fatal(err)
	}
}

// heal ends what to began.
func (p *proxy) heal() { p.Toxics.ResetToxics(context.Background()) }
