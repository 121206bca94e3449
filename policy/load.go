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
}

// expand returns the policy files that a path means. An error is about the path
// as a whole.
func expand(path string) ([]found, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("policy: %w; give a file or folder that can be read", err)
	}
	if !info.IsDir() {
		return []found{{path, regular(path, info)}}, nil
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
		file := filepath.Join(path, e.Name())
		info, err := os.Stat(file)
		switch {
		case err != nil:
			files = append(files, found{file, fmt.Errorf("policy: %w; remove or repair it", err)})
		case !info.IsDir():
			files = append(files, found{file, regular(file, info)})
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("policy: %s: the folder has no policy file; add one that ends in .yaml or .yml", path)
	}
	return files, nil
}

// regular refuses what is no regular file: to open a pipe may wait for ever.
func regular(file string, info os.FileInfo) error {
	if info.Mode().IsRegular() {
		return nil
	}
	return fmt.Errorf("policy: %s: it is not a regular file; put a regular file in its place", file)
}

// contents is the text of a file, or a little more than Parse takes.
func contents(file string) (data []byte, err error) {
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
