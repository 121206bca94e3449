package policy

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Load reads policy files. Each path is a file, or a folder whose *.yaml and
// *.yml files are read, but for dotfiles and folders in it; links to files are
// followed, as a Kubernetes ConfigMap needs it. Its error has a line for
// everything that is wrong in any file.
func Load(paths []string, o Options) (*Set, error) {
	if len(paths) == 0 {
		return nil, errors.New("policy: no policy file is given; name a file or a folder")
	}
	var errs []error
	var files []string
	seen := make(map[string]bool)
	for _, path := range paths {
		found, err := expand(path)
		if err != nil {
			errs = append(errs, err)
		}
		for _, f := range found {
			if !seen[f] {
				seen[f] = true
				files = append(files, f)
			}
		}
	}
	s := &Set{domains: make(map[string]*domain)}
	for _, f := range files {
		data, err := read(f)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		p := parse(f, data, o)
		name := p.domain.name
		if before := s.domains[name]; before != nil && name != "" {
			p.fail(p.domain.line, nil, fmt.Sprintf("domain %s is in %s:%d already; merge the two files or rename one", show(name), before.file, before.line))
		}
		if err := p.errors.err(); err != nil {
			errs = append(errs, err)
		}
		if name != "" && s.domains[name] == nil {
			// With its errors too, so that a domain that is there twice is told.
			s.add(p)
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return s, nil
}

// expand returns the policy files that a path means.
func expand(path string) ([]string, error) {
	path = filepath.Clean(path)
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("policy: %w; give a file or folder that can be read", err)
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, fmt.Errorf("policy: %w; give a file or folder that can be read", err)
	}
	var files []string
	for _, e := range entries {
		ext := filepath.Ext(e.Name())
		if strings.HasPrefix(e.Name(), ".") || ext != ".yaml" && ext != ".yml" {
			continue
		}
		file := filepath.Join(path, e.Name())
		info, err := os.Stat(file)
		switch {
		case err != nil:
			return nil, fmt.Errorf("policy: %w; remove or repair it", err)
		case info.IsDir():
		case !info.Mode().IsRegular():
			return nil, fmt.Errorf("policy: %s: it is not a regular file; remove it from the folder", file)
		default:
			files = append(files, file)
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("policy: %s: the folder has no policy file; add one that ends in .yaml or .yml", path)
	}
	return files, nil
}

// read returns the content of a file, or a little more than Parse takes.
func read(file string) (data []byte, err error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("policy: %w; give a file that can be read", err)
	}
	defer func() { _ = f.Close() }()
	data, err = io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("policy: %w; give a file that can be read", err)
	}
	return data, nil
}
