package top

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/term"

	"weir/server/page"
)

// Options say what is shown and how.
type Options struct {
	// Addr is what the one that is asked is called.
	Addr string
	// Ask returns how it stands. It must end with its context.
	Ask func(context.Context) (*page.Snapshot, error)
	// Colours shows what is wrong in colours too, and not by words alone.
	Colours bool
}

// Once asks and writes one picture, as plain text.
func Once(ctx context.Context, to io.Writer, o Options) error {
	s, err := o.Ask(ctx)
	if err != nil {
		return err
	}
	head, rest := view{addr: o.Addr, now: s.At, seen: s}.lines()
	var b strings.Builder
	for _, l := range append(head, rest...) {
		l.write(&b, 0, false)
		b.WriteByte('\n')
	}
	_, err = io.WriteString(to, b.String())
	return err
}

// The sequences that a terminal obeys.
const (
	// enter: another screen, no cursor, and long lines are cut.
	enter = "\x1b[?1049h\x1b[?25l\x1b[?7l"
	leave = "\x1b[?7h\x1b[?25h\x1b[?1049l"
	// begin goes to the top, endLine clears what is left of a line, and end of the screen.
	begin, endLine, end = "\x1b[H", "\x1b[K", "\x1b[J"
)

// help is the last line of the screen.
const help = "q quit   p pause   ↑ ↓ PgUp PgDn scroll"

// Live shows the picture until somebody presses q or ctx ends, which is no error. The
// terminal is then as it was, also if it panics.
func Live(ctx context.Context, out *os.File, o Options) (err error) {
	t, err := openTerminal(out)
	if err != nil {
		return err
	}
	defer func() {
		if restored := t.close(); err == nil {
			err = restored
		}
	}()
	ctx, cancel := context.WithCancel(ctx)
	s := screen{terminal: t, options: o, v: view{addr: o.Addr, now: time.Now()}}
	answers := make(chan answer, 1)
	done := make(chan struct{})
	go func() { // ends with ctx
		defer close(done)
		s.options.poll(ctx, answers)
	}()
	defer func() { cancel(); <-done }()
	return s.run(ctx, answers)
}

// answer is one of Ask.
type answer struct {
	seen *page.Snapshot
	err  error
}

// poll asks until ctx ends.
func (o Options) poll(ctx context.Context, to chan<- answer) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		seen, err := o.Ask(ctx)
		select {
		case to <- answer{seen, err}:
		case <-ctx.Done():
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// screen is the picture as far as it fits.
type screen struct {
	terminal *terminal
	options  Options
	v        view
	from     int // the first line of the rest that is shown
	page     int // how many are
}

func (s *screen) run(ctx context.Context, answers <-chan answer) error {
	for {
		if err := s.draw(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case a := <-answers:
			s.take(a, time.Now())
		case <-s.terminal.resized:
		case k, ok := <-s.terminal.keys:
			if !ok || k == keyQuit {
				return nil
			}
			s.press(k)
		}
	}
}

// take shows an answer, unless it is paused.
func (s *screen) take(a answer, now time.Time) {
	if s.v.paused {
		return
	}
	s.v.now = now
	switch {
	case a.err == nil:
		s.v.seen, s.v.err = a.seen, nil
	case s.v.err == nil:
		s.v.err, s.v.silent = a.err, now
	default:
		s.v.err = a.err
	}
}

func (s *screen) press(k key) {
	switch k {
	case keyPause:
		s.v.paused = !s.v.paused
	case keyUp:
		s.from--
	case keyDown:
		s.from++
	case keyPageUp:
		s.from -= s.page
	case keyPageDown:
		s.from += s.page
	case keyHome:
		s.from = 0
	case keyEnd:
		s.from = 1 << 30
	case keyNone, keyQuit:
	}
}

// draw writes the whole screen at once, so that it does not flicker.
func (s *screen) draw() error {
	width, height, err := term.GetSize(int(s.terminal.out.Fd()))
	if err != nil || width <= 0 || height <= 0 {
		width, height = 80, 24
	}
	_, err = io.WriteString(s.terminal.out, begin+s.picture(width, height))
	return err
}

// picture is what is drawn, and moves from to where there is something to see.
func (s *screen) picture(width, height int) string {
	head, rest := s.v.lines()
	head, rest = wrapped(head, width), wrapped(rest, width)
	head = head[:min(len(head), max(1, height-1))]
	s.page = max(0, height-len(head)-1)
	s.from = max(0, min(s.from, len(rest)-s.page))
	shown := rest[s.from:min(len(rest), s.from+s.page)]
	last := line{{help, dim}}
	if below := len(rest) - s.from - len(shown); below > 0 || s.from > 0 {
		last = append(last, span{fmt.Sprintf("   %d lines above, %d below", s.from, below), note})
	}
	lines := append(append([]line{}, head...), shown...)
	for len(lines) < height-1 {
		lines = append(lines, nil)
	}
	if height > 1 {
		lines = append(lines, last)
	}
	var b strings.Builder
	for i, l := range lines {
		if i > 0 {
			b.WriteString("\r\n")
		}
		l.write(&b, width, s.options.Colours)
		b.WriteString(endLine)
	}
	return b.String() + end
}
