//go:build unix

package top

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/term"
)

// terminal is one that sends each key at once and shows nothing of it.
type terminal struct {
	out     *os.File
	in      *os.File
	before  *term.State
	resized chan os.Signal
	keys    chan key // closed when the terminal is gone
	quit    chan struct{}
	reading sync.WaitGroup
}

// openTerminal takes the terminal over; close gives it back.
func openTerminal(out *os.File) (*terminal, error) {
	// Not stdin, which the shell may share: of its own file a read ends with Close.
	in, err := os.OpenFile("/dev/tty", os.O_RDWR|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("there is no terminal to read keys from: %w; use --once", err)
	}
	var before *term.State
	err = control(in, func(fd int) (err error) {
		before, err = term.MakeRaw(fd)
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("the terminal does not send single keys: %w; use --once", err), in.Close())
	}
	t := &terminal{out: out, in: in, before: before, resized: make(chan os.Signal, 1), keys: make(chan key), quit: make(chan struct{})}
	signal.Notify(t.resized, syscall.SIGWINCH)
	if _, err := io.WriteString(out, enter); err != nil {
		return nil, errors.Join(err, t.close())
	}
	t.reading.Go(t.read)
	return t, nil
}

// read sends keys until the terminal is closed or gone.
func (t *terminal) read() {
	defer close(t.keys)
	var r keyReader
	buffer := make([]byte, 64)
	for {
		n, err := t.in.Read(buffer)
		for _, b := range buffer[:n] {
			k := r.next(b)
			if k == keyNone {
				continue
			}
			select {
			case t.keys <- k:
			case <-t.quit:
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// close leaves the terminal as it was.
func (t *terminal) close() error {
	signal.Stop(t.resized)
	_, written := io.WriteString(t.out, leave)
	restored := control(t.in, func(fd int) error { return term.Restore(fd, t.before) })
	close(t.quit)
	closed := t.in.Close() // ends the read
	t.reading.Wait()
	return errors.Join(written, restored, closed)
}

// control runs f with the descriptor of a file. (Fd would have its reads block, so that
// Close ended none.)
func control(file *os.File, f func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = f(int(fd)) })
	return errors.Join(err, failed)
}
