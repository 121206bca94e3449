package policy

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Load reads policy files once. Each path is a file, or a folder whose *.yaml and
// *.yml files are read, but for dotfiles and folders in it; links to files are
// followed, as a Kubernetes ConfigMap needs it. Its error has a line for
// everything that is wrong in any file.
func Load(paths []string, o Options) (*Set, error) {
	r := NewFiles(paths, o).Read()
	if r.Err != nil {
		return nil, r.Err
	}
	return r.Set, nil
}

// found is a file that a path means.
type found struct {
	file string
	err  error // why it can't be read
	pipe bool  // it is no regular file
}

// expand returns the policy files that a path means. An error is about the path
// as a whole.
func expand(path string) ([]found, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("policy: %w; give a file or folder that can be read", err)
	}
	if !info.IsDir() {
		return []found{{file: path, pipe: !info.Mode().IsRegular()}}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, fmt.Errorf("policy: %w; give a file or folder that can be read", err)
	}
	var files []found
	for _, e := range entries {
		ext := filepath.Ext(e.Name())
		if strings.HasPrefix(e.Name(), ".") || ext != ".yaml" && ext != ".yml" {
			continue
		}
		f := found{file: filepath.Join(path, e.Name())}
		info, err := os.Stat(f.file)
		switch {
		case err != nil:
			f.err = fmt.Errorf("policy: %w; remove or repair it", err)
		case info.IsDir():
			continue
		case !info.Mode().IsRegular():
			f.err = fmt.Errorf("policy: %s: it is not a regular file; remove it from the folder", f.file)
		}
		files = append(files, f)
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
