package policy

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// Files are policy files that are read again when they may have changed. A file
// that is wrong stays in force in its own last good version, and keeps no other
// from changing. A file that is taken out of a folder takes its domain with it; a
// path that leads nowhere is wrong, and what it led to stays in force. Only one
// goroutine may use a Files at a time.
type Files struct {
	paths   []string // clean, each once
	options Options
	listed  map[string][]found   // the files of a path, when it was read last
	known   map[string]fileState // of each file, as the last reading left it
	set     *Set
	wrong   string     // the text of the last error
	large   sync.Mutex // held while a large file is parsed
}

// Reading is what one reading of the files came to.
type Reading struct {
	// Set is the policies in force. It is nil until a good version of every file
	// has been found: the rest alone would leave some domains without limits.
	Set *Set
	// Err has a line for everything that is wrong now; nil if the files say what is
	// in force.
	Err error
	// Wrong is how many files, and paths as a whole, are not in force as they are.
	Wrong int
	// Changed: Set or Err is another than in the reading before.
	Changed bool
}

// fileState is one file, or a path as a whole, in one reading.
type fileState struct {
	file string // "" for a path as a whole
	err  error
	now  *parsed // what it says, good or not; nil if it could not be read
	last *parsed // its last good version, or nil
	use  *parsed // what is put in force, or nil
}

// NewFiles returns the files that the paths mean: see [Load]. It reads nothing yet.
func NewFiles(paths []string, o Options) *Files {
	f := &Files{options: o.withHashKey(), listed: make(map[string][]found)}
	seen := make(map[string]bool)
	for _, path := range paths {
		if path = filepath.Clean(path); !seen[path] {
			seen[path] = true
			f.paths = append(f.paths, path)
		}
	}
	return f
}

// Read reads all files. What has not changed is not parsed again.
func (f *Files) Read() Reading {
	all := f.files()
	oneFileADomain(all)

	var errs []error
	var inForce []*parsed
	complete := true
	f.known = make(map[string]fileState, len(all))
	for _, s := range all {
		f.known[s.file] = *s
		if s.err != nil {
			errs = append(errs, s.err)
		}
		if s.use == nil {
			complete = false
			continue
		}
		inForce = append(inForce, s.use)
	}

	out := Reading{Err: errors.Join(errs...), Wrong: len(errs)}
	text := ""
	if out.Err != nil {
		text = out.Err.Error()
	}
	out.Changed, f.wrong = text != f.wrong, text
	if next := newSet(inForce); f.set == nil && complete || f.set != nil && (f.set.version != next.version || !slices.Equal(f.set.files, next.files)) {
		f.set, out.Changed = next, true
	}
	out.Set = f.set
	return out
}

// files reads what the paths mean now.
func (f *Files) files() []*fileState {
	if len(f.paths) == 0 {
		return []*fileState{{err: errors.New("policy: no policy file is given; name a file or a folder")}}
	}
	var all []*fileState
	seen := make(map[string]bool)
	for _, path := range f.paths {
		files, err := expand(path)
		if err != nil {
			// What it had stays in force, as it was.
			all = append(all, &fileState{err: err})
			for _, x := range f.listed[path] {
				if !seen[x.file] {
					seen[x.file] = true
					good := f.known[x.file].use
					all = append(all, &fileState{file: x.file, last: good, use: good})
				}
			}
			continue
		}
		var unseen []found
		before := len(seen)
		for _, x := range files {
			if !seen[x.file] {
				seen[x.file] = true
				unseen = append(unseen, x)
			}
		}
		newcomers := false // that are wrong
		for _, s := range f.checkAll(unseen, before) {
			newcomers = newcomers || s.use == nil
			all = append(all, s)
		}
		// A file that is gone may be one of those, renamed or written anew.
		for _, x := range f.listed[path] {
			if good := f.known[x.file].use; newcomers && good != nil && !seen[x.file] {
				seen[x.file] = true
				all = append(all, &fileState{file: x.file, last: good, use: good})
				files = append(files, x)
			}
		}
		f.listed[path] = files
	}
	return all
}

const (
	maxReaders = 8       // files that are read at once
	largeFile  = 1 << 20 // of these only one is parsed at a time: it may take much memory
)

// checkAll is check of each file, of several at once; the answers are in their order.
// Before is how many files this reading has read already.
func (f *Files) checkAll(files []found, before int) []*fileState {
	states := make([]*fileState, len(files))
	var next atomic.Int64
	var progress sync.Mutex // guards done
	done := before
	var readers sync.WaitGroup
	for range min(maxReaders, runtime.GOMAXPROCS(0), len(files)) {
		readers.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(files)); i = next.Add(1) - 1 {
				states[i] = f.check(files[i])
				if f.options.Progress != nil {
					progress.Lock()
					done++
					f.options.Progress(done)
					progress.Unlock()
				}
			}
		})
	}
	readers.Wait()
	return states
}

// check reads one file, and parses it if it has changed.
func (f *Files) check(x found) *fileState {
	before := f.known[x.file]
	s := &fileState{file: x.file, err: x.err, last: before.use, use: before.use}
	if s.err != nil {
		return s
	}
	data, err := contents(x.file)
	if err != nil {
		s.err = err
		return s
	}
	switch sum := sha256.Sum256(data); {
	case before.now != nil && before.now.domain.sum == sum:
		s.now = before.now
	case before.use != nil && before.use.domain.sum == sum:
		s.now = before.use
	default:
		if len(data) > largeFile {
			f.large.Lock()
			defer f.large.Unlock()
		}
		s.now = parse(x.file, data, f.options)
	}
	if s.err = s.now.err; s.err == nil {
		s.use = s.now
	}
	return s
}

// oneFileADomain sees to it that no two files are in force with the same domain,
// and that each which wants another's is told so. The file that had the domain
// before keeps it, else the first; the other falls back to its last good version
// or, if it has none, out of force.
func oneFileADomain(all []*fileState) {
	for again := true; again; {
		again = false // ends: each turn leaves one more in its last version
		owner := make(map[string]*fileState)
		for _, s := range all {
			if s.use == nil {
				continue
			}
			name := s.use.domain.name
			loser := s
			switch had := s.last != nil && s.last.domain.name == name; {
			case owner[name] == nil:
				owner[name] = s
				continue
			case had: // then no other had
				loser, owner[name] = owner[name], s
			}
			loser.use, again = loser.last, true
		}
	}
	owner := make(map[string]*domain)
	for _, s := range all {
		if s.use != nil {
			owner[s.use.domain.name] = s.use.domain
		}
	}
	for _, s := range all {
		if s.now == nil || s.now.domain.name == "" {
			continue
		}
		d := s.now.domain
		switch other := owner[d.name]; {
		case other == nil:
			owner[d.name] = d // no file is in force with it: the first may have it
		case other.file != d.file:
			s.err = errors.Join(s.err, fmt.Errorf("policy: %s:%d: domain %s is in %s:%d already; merge the two files or rename one", d.file, d.line, show(d.name), other.file, other.line))
		}
	}
}
