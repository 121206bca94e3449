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

// profile runs one scenario on one server, and meanwhile writes to the folder
// o.profile what the server's admin port tells: cpu.pb.gz, and allocs.pb.gz with the
// allocations of the window alone.
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
	fetched := make(chan error, 2)
	fetch := func(page, file string) {
		fetched <- download(ctx, fmt.Sprintf("http://%s/debug/pprof/%s?seconds=%d", o.admin, page, seconds), filepath.Join(o.profile, file))
	}
	begin := func() error {
		go fetch("profile", "cpu.pb.gz")
		go fetch("allocs", "allocs.pb.gz")
		return nil
	}
	end := func() error { return errors.Join(<-fetched, <-fetched) }
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
