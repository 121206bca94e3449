package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"weir/policy"
	"weir/store/storetest"
)

// A change is read whatever way it comes about. One that no event tells of (here:
// where a link in a folder of policies leads) is read in 3 s.
func TestAChangeOfThePolicyFilesIsRead(t *testing.T) {
	for _, c := range []struct {
		name   string
		path   string // in the test's folder, in which first/a.yaml and second/a.yaml are
		setUp  func(t *testing.T, dir string)
		change func(t *testing.T, dir string)
	}{
		{"written in place", "first/a.yaml", nil, func(t *testing.T, dir string) { write(t, dir, "first/a.yaml", "domain: second") }},
		{"another renamed over it", "first/a.yaml", nil, func(t *testing.T, dir string) { rename(t, dir, "second/a.yaml", "first/a.yaml") }},
		{"a folder", "first", nil, func(t *testing.T, dir string) { rename(t, dir, "second/a.yaml", "first/a.yaml") }},
		{"a folder renamed over it", "first", nil, func(t *testing.T, dir string) {
			rename(t, dir, "first", "away")
			rename(t, dir, "second", "first")
		}},
		{
			"a link to a folder",
			"link",
			func(t *testing.T, dir string) { link(t, dir, "first", "link") },
			func(t *testing.T, dir string) {
				link(t, dir, "second", "new")
				rename(t, dir, "new", "link")
			},
		},
		{
			"a file behind a link", "link.yaml",
			func(t *testing.T, dir string) { link(t, dir, "first/a.yaml", "link.yaml") },
			func(t *testing.T, dir string) { write(t, dir, "first/a.yaml", "domain: second") },
		},
		{
			"a file behind a link in a folder", "links",
			func(t *testing.T, dir string) {
				write(t, dir, "links/.keep", "")
				link(t, dir, "../first/a.yaml", "links/a.yaml")
			},
			func(t *testing.T, dir string) { write(t, dir, "first/a.yaml", "domain: second") },
		},
		{"a file that comes later", "third.yaml", nil, func(t *testing.T, dir string) { rename(t, dir, "second/a.yaml", "third.yaml") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			write(t, dir, "first/a.yaml", "domain: first")
			write(t, dir, "second/a.yaml", "domain: second")
			if c.setUp != nil {
				c.setUp(t, dir)
			}
			paths := []string{filepath.Join(dir, c.path)}
			files := policy.NewFiles(paths, policy.Options{})
			watched, found := make(chan struct{}), make(chan struct{})
			ctx, stop := context.WithCancel(context.Background())
			var watching sync.WaitGroup
			watching.Go(func() {
				var began, ended sync.Once
				watch(ctx, paths, nil, slog.New(slog.DiscardHandler), func() {
					if r := files.Read(); r.Set != nil && r.Set.Has("second") {
						ended.Do(func() { close(found) })
					}
					began.Do(func() { close(watched) })
				})
			})
			<-watched
			c.change(t, dir)
			select {
			case <-found:
			case <-time.After(storetest.Deadline):
				t.Error("the change was not read")
			}
			stop()
			watching.Wait()
		})
	}
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func rename(t *testing.T, dir, from, to string) {
	t.Helper()
	if err := os.Rename(filepath.Join(dir, from), filepath.Join(dir, to)); err != nil {
		t.Fatal(err)
	}
}

func link(t *testing.T, dir, to, name string) {
	t.Helper()
	if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}
