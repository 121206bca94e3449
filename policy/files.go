package policy

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"path/filepath"
)

// Files are policy files that are read again when they may have changed. A file
// that is wrong stays in force in its own last good version, and keeps no other
// from changing; one that is taken away takes its domain with it. Only one
// goroutine may use a Files at a time.
type Files struct {
	paths   []string // clean, each once
	options Options
	listed  map[string][]found // the files of a path, when it was read last
	good    map[string]*parser // the last good version of each file
	set     *Set
	wrong   string // the text of the last error
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

// reading is one file, or a path as a whole, in one reading.
type reading struct {
	file string
	err  error
	now  *parser // what it says, if it was parsed anew: with its errors
	last *parser // its last good version, or nil
	use  *parser // what is put in force, or nil
}

// NewFiles returns the files that the paths mean: see [Load]. It reads nothing yet.
func NewFiles(paths []string, o Options) *Files {
	f := &Files{options: o, listed: make(map[string][]found)}
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
	all := f.readAll()
	oneFileADomain(all)

	var errs []error
	var parsed []*parser
	complete := true
	good := make(map[string]*parser, len(all))
	for _, r := range all {
		if r.err != nil {
			errs = append(errs, r.err)
		}
		if r.use == nil {
			complete = false
			continue
		}
		good[r.file] = r.use
		parsed = append(parsed, r.use)
	}
	f.good = good

	out := Reading{Err: errors.Join(errs...), Wrong: len(errs)}
	text := ""
	if out.Err != nil {
		text = out.Err.Error()
	}
	out.Changed, f.wrong = text != f.wrong, text
	if next := newSet(parsed); f.set == nil && complete || f.set != nil && f.set.version != next.version {
		f.set, out.Changed = next, true
	}
	out.Set = f.set
	return out
}

// readAll reads what the paths mean now.
func (f *Files) readAll() []*reading {
	if len(f.paths) == 0 {
		return []*reading{{err: errors.New("policy: no policy file is given; name a file or a folder")}}
	}
	var all []*reading
	seen := make(map[string]bool)
	for _, path := range f.paths {
		files, err := expand(path)
		if err != nil {
			// What it had stays in force, as it was.
			all = append(all, &reading{file: path, err: err})
			for _, x := range f.listed[path] {
				if !seen[x.file] {
					seen[x.file] = true
					all = append(all, &reading{file: x.file, last: f.good[x.file], use: f.good[x.file]})
				}
			}
			continue
		}
		f.listed[path] = files
		for _, x := range files {
			if !seen[x.file] {
				seen[x.file] = true
				all = append(all, f.read(x))
			}
		}
	}
	return all
}

// read reads one file.
func (f *Files) read(x found) *reading {
	last := f.good[x.file]
	r := &reading{file: x.file, err: x.err, last: last, use: last}
	if x.err != nil || last != nil && x.pipe { // a pipe gives what it has once
		return r
	}
	data, err := read(x.file)
	if err != nil {
		r.err = err
		return r
	}
	if last != nil && last.domain.sum == sha256.Sum256(data) {
		return r
	}
	r.now = parse(x.file, data, f.options)
	if r.err = r.now.errors.err(); r.err == nil {
		r.use = r.now
	}
	return r
}

// oneFileADomain sees to it that no two files are in force with the same domain.
// The file that had it before keeps it, else the first; the other is wrong, and
// falls back to its last good version or, if it has none, out of force.
func oneFileADomain(all []*reading) {
	for conflict := true; conflict; {
		conflict = false
		owner := make(map[string]*reading)
		for _, r := range all {
			if r.use == nil {
				continue
			}
			other := owner[r.use.domain.name]
			if other == nil {
				owner[r.use.domain.name] = r
				continue
			}
			conflict = true
			if r.use == r.last && other.use != other.last {
				r, other = other, r
			}
			d := r.use.domain
			r.err = errors.Join(r.err, fmt.Errorf("policy: %s:%d: %s", d.file, d.line, other.use.domain.taken()))
			if r.use == r.last {
				r.last = nil
			}
			r.use = r.last
			break
		}
	}
	// The files that have other errors too are told all of them at once.
	first := make(map[string]*parser)
	for _, r := range all {
		p := r.now
		if p == nil || p.domain.name == "" {
			continue
		}
		before := first[p.domain.name]
		switch {
		case before == nil:
			first[p.domain.name] = p
		case len(p.errors.list) > 0:
			p.fail(p.domain.line, nil, before.domain.taken())
			r.err = p.errors.err()
		}
	}
}

// taken says that a domain which another file wants is d.
func (d *domain) taken() string {
	return fmt.Sprintf("domain %s is in %s:%d already; merge the two files or rename one", show(d.name), d.file, d.line)
}
