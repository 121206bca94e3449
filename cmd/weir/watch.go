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

// hangUps returns what gets something on SIGHUP, which otherwise ends the process,
// until stop is called.
func hangUps() (signals <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGHUP)
	return c, func() { signal.Stop(c) }
}

// watch calls read at once, whenever what the paths mean may have changed, and on
// hangUp, until ctx ends.
func watch(ctx context.Context, paths []string, hangUp <-chan os.Signal, log *slog.Logger, read func()) {
	w := watcher{log: log, hangUp: hangUp, poll: time.NewTicker(readEvery)}
	defer w.poll.Stop()
	files, err := fsnotify.NewWatcher()
	if err != nil {
		log.WarnContext(ctx, "policy files cannot be watched: they are read all the same, at intervals", "every", readEvery, "err", err)
	} else {
		w.events, w.errs = files.Events, files.Errors
		defer func() { _ = files.Close() }()
	}
	for {
		places := find(paths)
		if files != nil {
			follow(files, places)
		}
		read()
		if !w.wait(ctx, places) {
			return
		}
	}
}

// watcher is what tells of changes.
type watcher struct {
	log    *slog.Logger
	hangUp <-chan os.Signal
	poll   *time.Ticker
	// Of the file system; nil, from which nothing comes, if it cannot be watched.
	events chan fsnotify.Event
	errs   chan error
}

// wait returns when the policies may have changed, or false when ctx has ended.
func (w watcher) wait(ctx context.Context, places places) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-w.poll.C:
			return true
		case <-w.hangUp:
			w.log.InfoContext(ctx, "SIGHUP: reading the policy files")
			return true
		case err := <-w.errs: // events may have been lost
			w.log.DebugContext(ctx, "policy files are read, since a watch failed", "err", err)
			return true
		case e := <-w.events:
			if places.mean(e.Name) {
				settle(ctx, w.events)
				return true
			}
		}
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

// places are where a change of policy files shows.
type places struct {
	names   map[string]bool // of files and folders that were named, links followed too
	folders map[string]bool // whose content is policy files
}

func find(paths []string) places {
	p := places{make(map[string]bool), make(map[string]bool)}
	for _, path := range paths {
		names := []string{filepath.Clean(path)}
		if real, err := filepath.EvalSymlinks(path); err == nil {
			names = append(names, real)
		}
		for _, name := range names {
			p.names[name] = true
			if info, err := os.Stat(name); err == nil && info.IsDir() {
				p.folders[name] = true
			}
		}
	}
	return p
}

// mean reports whether a change of name may be one of the policies. Names that
// begin with two dots are how Kubernetes puts a new version into a folder.
func (p places) mean(name string) bool {
	name = filepath.Clean(name)
	ext := filepath.Ext(name)
	return p.names[name] || p.folders[filepath.Dir(name)] && (ext == ".yaml" || ext == ".yml") || strings.HasPrefix(filepath.Base(name), "..")
}

// follow has w watch the folders, and those in which the names are, and nothing
// else. What cannot be watched is read at intervals.
func follow(w *fsnotify.Watcher, places places) {
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
