package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/term"

	"weir/policy"
)

type checkCommand struct {
	Files         []string      `arg:"" name:"file" help:"Policy files, or folders of files (*.yaml, *.yml)."`
	Lenient       bool          `help:"Let pass, with a warning, what envoyproxy/ratelimit accepts by mistake."`
	FatalWarnings bool          `help:"Exit with 1 if there are warnings."`
	Envoy         []string      `sep:"none" placeholder:"FILE" help:"Envoy's configuration (YAML or JSON), to be compared with the policies. Repeat it, if listeners and routes are in several files."`
	MaxWait       time.Duration `default:"2ms" help:"What weir serve is run with (${default}); for --envoy."`
	StoreTimeout  time.Duration `default:"10ms" help:"What weir serve is run with (${default}); for --envoy."`
}

// Help is shown by weir check --help.
func (c *checkCommand) Help() string {
	return `Example: weir check --fatal-warnings policies/ --envoy envoy.yaml

Errors are what cannot be loaded; warnings are what can be, and is probably not meant: policies that no request reaches, keys that look like secrets and are not sensitive, reservations that are settled too late, a charge beside concurrency, replaces of a name that no limit has, a domain named unknown, keys without effect, and with --lenient what is let pass.

With --envoy also what in Envoy does not go with them: descriptors that no policy meets, leases shorter than the timeout of their route, slots that nothing gives back, filters with a wrong domain or too short a timeout. Of Envoy's configuration only that is looked at; envoy --mode validate does the rest.

Exit 0: fine, 1: a file is wrong (or, with --fatal-warnings, has warnings), 2: the command line is.`
}

// Run prints what was understood of the files, or all that is wrong with them.
func (c *checkCommand) Run(con console) error {
	p := progress{now: time.Now, began: time.Now()}
	if f, ok := con.stderr.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.to = f
	}
	set, err := policy.Load(c.Files, policy.Options{Lenient: c.Lenient, Progress: p.files})
	p.done()
	if err != nil {
		_, _ = fmt.Fprintln(con.stderr, err)
		return exit(exitNo)
	}
	warnings := set.Warnings()
	if len(c.Envoy) > 0 {
		more, err := set.LintEnvoy(c.Envoy, policy.EnvoyOptions{MaxWait: c.MaxWait, StoreTimeout: c.StoreTimeout})
		if err != nil {
			_, _ = fmt.Fprintln(con.stderr, err)
			return exit(exitNo)
		}
		warnings = append(warnings, more...)
	}
	for _, warning := range warnings {
		_, _ = fmt.Fprintf(con.stderr, "warning: %s\n", warning)
	}
	if err := set.Describe(con.stdout); err != nil {
		return err
	}
	if c.FatalWarnings && len(warnings) > 0 {
		return exit(exitNo)
	}
	return nil
}

// progress tells on a terminal how many files have been read, once that takes a second.
type progress struct {
	to    io.Writer // nil: it is no terminal
	now   func() time.Time
	began time.Time
	told  time.Time // when it told last; zero: never
}

func (p *progress) files(n int) {
	now := p.now()
	if p.to == nil || now.Sub(p.began) < time.Second || now.Sub(p.told) < time.Second/5 {
		return
	}
	p.told = now
	_, _ = fmt.Fprintf(p.to, "\rreading: %d files\x1b[K", n) // what it can't tell, the end tells
}

// done takes away what was told.
func (p *progress) done() {
	if !p.told.IsZero() {
		_, _ = io.WriteString(p.to, "\r\x1b[K")
	}
}
