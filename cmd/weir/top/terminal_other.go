//go:build !unix

package top

import (
	"errors"
	"os"
)

type terminal struct {
	out     *os.File
	resized chan os.Signal
	keys    chan key
}

func openTerminal(*os.File) (*terminal, error) {
	return nil, errors.New("there is no live view on this system; use --once")
}

func (t *terminal) close() error { return nil }
