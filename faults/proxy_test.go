package faults

import (
	"bytes"
	"context"
	"encoding/json"
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

// what is the attribute of a toxic.
var what = map[string]string{"latency": "latency", "timeout": "timeout", "reset_peer": "timeout", "slow_close": "delay", "limit_data": "bytes"}

// to has the network be so towards Redis ("upstream") or from there ("downstream"): kind
// is one of toxiproxy's toxics, and n its milliseconds or bytes.
func (p *proxy) to(stream, kind string, n int) {
	p.t.Helper()
	text, err := json.Marshal(map[string]any{"name": kind + stream, "type": kind, "stream": stream, "attributes": map[string]int{what[kind]: n}})
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := p.Toxics.AddToxicJson(bytes.NewReader(text)); err != nil {
		p.t.Fatal(err)
	}
}

// heal ends what to began.
func (p *proxy) heal() { p.Toxics.ResetToxics(context.Background()) }
