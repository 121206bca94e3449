package main

import (
	"fmt"

	"weir/policy"
)

type checkCommand struct {
	Files         []string `arg:"" name:"file" help:"Policy files, or folders of files (*.yaml, *.yml)."`
	Lenient       bool     `help:"Let pass, with a warning, what envoyproxy/ratelimit accepts by mistake."`
	FatalWarnings bool     `help:"Exit with 1 if there are warnings."`
}

// Help is shown by weir check --help.
func (c *checkCommand) Help() string {
	return `Errors are what cannot be loaded; warnings are what can be, and is probably not meant: policies that no request reaches, keys that look like secrets and are not sensitive, a charge beside concurrency, replaces of a name that no limit has, a domain named unknown, keys without effect, and with --lenient what is let pass. Exit 0: fine, 1: a file is wrong (or, with --fatal-warnings, has warnings), 2: the command line is.`
}

// Run prints what was understood of the files, or all that is wrong with them.
func (c *checkCommand) Run(con console) error {
	set, err := policy.Load(c.Files, policy.Options{Lenient: c.Lenient})
	if err != nil {
		_, _ = fmt.Fprintln(con.stderr, err)
		return exit(exitNo)
	}
	for _, warning := range set.Warnings() {
		_, _ = fmt.Fprintf(con.stderr, "warning: %s\n", warning)
	}
	if err := set.Describe(con.stdout); err != nil {
		return err
	}
	if c.FatalWarnings && len(set.Warnings()) > 0 {
		return exit(exitNo)
	}
	return nil
}
