package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// profile runs one scenario on one server, and writes to the folder o.profile what
// the server's admin port tells: cpu.pb.gz of the window, and all allocations until
// its begin and its end, allocs-before.pb.gz and allocs.pb.gz.
func profile(o options, servers []target, s scenario, window time.Duration) error {
	if len(servers) != 1 || servers[0].name == floorName {
		return errors.New("name the one server to profile")
	}
	t := servers[0]
	if _, err := s.prepare(t); err != nil {
		return err
	}
	l, err := s.load(t)
	if err != nil {
		return err
	}
	seconds := int(math.Ceil(window.Seconds()))
	ctx, cancel := context.WithTimeout(context.Background(), window+time.Minute)
	defer cancel()
	fetch := func(page, file string) error {
		return download(ctx, "http://"+o.admin+"/debug/pprof/"+page, filepath.Join(o.profile, file))
	}
	// Allocations are known up to the last collection: gc=1 has one run.
	const allocations = "heap?gc=1"
	cpu := make(chan error, 1)
	begin := func() error {
		err := fetch(allocations, "allocs-before.pb.gz")
		go func() { cpu <- fetch(fmt.Sprintf("profile?seconds=%d", seconds), "cpu.pb.gz") }()
		return err
	}
	end := func() error { return errors.Join(<-cpu, fetch(allocations, "allocs.pb.gz")) }
	var d decided
	if s.rate > 0 {
		d, err = l.open(s.rate, window, begin, end)
	} else {
		d, err = l.closed(window, begin, end)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", s.title(), err)
	}
	fmt.Printf("%s on %s: %d decisions in about %d s\n", s.title(), t.name, len(d.latencies), seconds)
	return nil
}

func download(ctx context.Context, url, path string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, answer.Status)
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, answer.Body)
	return errors.Join(err, f.Close())
}
