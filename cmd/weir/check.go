package main

import (
	"fmt"

	"weir/policy"
)

type checkCommand struct {
	Files   []string `arg:"" name:"file" help:"Policy files, or folders of files (*.yaml, *.yml)."`
	Lenient bool     `help:"Let pass, with a warning, what envoyproxy/ratelimit accepts by mistake."`
}

// Help is shown by weir check --help.
func (c *checkCommand) Help() string {
	return `Exit 0: the files can be used, perhaps with warnings; 1: they cannot; 2: error in the command line.`
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
	return set.Describe(con.stdout)
}
