package server

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"weir/policy"
	"weir/store/memory"
)

// BenchmarkSetPolicy is what taking in the policies of 10,000 domains costs a server, when it
// starts and when one of them has changed.
func BenchmarkSetPolicy(b *testing.B) {
	dir := b.TempDir()
	for i := range 10_000 {
		file := fmt.Sprintf("domain: d%d\ndescriptors:\n  - key: account\n    token_bucket: {capacity: 10, refill: 1/s}\n    concurrency: {max_in_flight: 4, lease: 60s}\n", i)
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("d%d.yaml", i)), []byte(file), 0o600); err != nil {
			b.Fatal(err)
		}
	}
	set, err := policy.Load([]string{dir}, policy.Options{})
	if err != nil {
		b.Fatal(err)
	}
	serve := func() (*Server, func()) {
		store := memory.New(memory.Options{})
		s := New(Options{Store: store, Instant: true, Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry()})
		s.SetPolicy(b.Context(), policy.Reading{Set: set})
		return s, func() { s.Close(); _ = store.Close() }
	}
	b.Run("at the start", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, stop := serve()
			b.StopTimer()
			stop()
			b.StartTimer()
		}
	})
	b.Run("again", func(b *testing.B) {
		s, stop := serve()
		defer stop()
		again := *set
		sets := []*policy.Set{&again, set}
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			s.SetPolicy(b.Context(), policy.Reading{Set: sets[i%2]})
		}
	})
}
