package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// readEvery is how often policy files are read without a sign of change: not
	// every file system and every kind of link gives one.
	readEvery = 3 * time.Second
	// Files often change by several steps: they are read when nothing has happened
	// for quietFor, and at the latest after busyFor.
	quietFor = 50 * time.Millisecond
	busyFor  = 500 * time.Millisecond
)

// watch calls read at once, whenever what the paths mean may have changed, and on
// SIGHUP, until ctx ends.
func watch(ctx context.Context, paths []string, log *slog.Logger, read func()) {
	hangUp := make(chan os.Signal, 1)
	signal.Notify(hangUp, syscall.SIGHUP)
	defer signal.Stop(hangUp)
	poll := time.NewTicker(readEvery)
	defer poll.Stop()

	var events chan fsnotify.Event // nil without a watcher: they never come
	var errs chan error
	w, err := fsnotify.NewWatcher()
	if err != nil {
		log.WarnContext(ctx, "policy files cannot be watched: they are read all the same, at intervals", "every", readEvery, "err", err)
	} else {
		events, errs = w.Events, w.Errors
		defer func() { _ = w.Close() }()
	}
	for first := true; ; first = false {
		watched := places(paths)
		if w != nil {
			follow(w, watched)
		}
		if first { // what changed before it was watched
			read()
		}
		select {
		case <-ctx.Done():
			return
		case <-poll.C:
		case <-hangUp:
			log.InfoContext(ctx, "SIGHUP: reading the policy files")
		case err := <-errs: // events may have been lost
			log.DebugContext(ctx, "policy files are read, since a watch failed", "err", err)
		case e := <-events:
			if !watched.mean(e.Name) {
				continue
			}
			settle(ctx, events)
		}
		read()
	}
}

// settle waits until no more events come.
func settle(ctx context.Context, events <-chan fsnotify.Event) {
	most := time.NewTimer(busyFor)
	defer most.Stop()
	for {
		quiet := time.NewTimer(quietFor)
		select {
		case <-events:
			quiet.Stop()
			continue
		case <-quiet.C:
		case <-most.C:
		case <-ctx.Done():
		}
		quiet.Stop()
		return
	}
}

// watched are the places in which a change of policy files shows.
type watched struct {
	names   map[string]bool // of files and folders that were named, links followed too
	folders map[string]bool // whose content is policy files
}

func places(paths []string) watched {
	w := watched{make(map[string]bool), make(map[string]bool)}
	for _, path := range paths {
		names := []string{filepath.Clean(path)}
		if real, err := filepath.EvalSymlinks(path); err == nil {
			names = append(names, real)
		}
		for _, name := range names {
			w.names[name] = true
			if info, err := os.Stat(name); err == nil && info.IsDir() {
				w.folders[name] = true
			}
		}
	}
	return w
}

// mean reports whether a change of name may be one of the policies. Names that
// begin with two dots are how Kubernetes puts a new version into a folder.
func (w watched) mean(name string) bool {
	name = filepath.Clean(name)
	return w.names[name] || w.folders[filepath.Dir(name)] || strings.HasPrefix(filepath.Base(name), "..")
}

// follow has w watch the folders, and those in which the names are, and nothing
// else. What cannot be watched is read at intervals.
func follow(w *fsnotify.Watcher, places watched) {
	dirs := make(map[string]bool)
	for name := range places.names {
		dirs[filepath.Dir(name)] = true
	}
	for name := range places.folders {
		dirs[name] = true
	}
	for _, dir := range w.WatchList() {
		if !dirs[dir] {
			_ = w.Remove(dir) // it may be gone
		}
	}
	for dir := range dirs {
		_ = w.Add(dir)
	}
}
