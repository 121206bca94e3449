// Package main is weir, the command: the service, and what asks it from a shell.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"
)

// Exit codes. 1 is an answer of no: refused, or a policy file that is wrong.
const (
	exitOK    = 0
	exitNo    = 1
	exitError = 2
)

type command struct {
	Serve      serveCommand      `cmd:"" help:"Run the service."`
	Check      checkCommand      `cmd:"" help:"Read policy files, and print what was understood or all that is wrong."`
	Decide     decideCommand     `cmd:"" help:"Ask a running service whether work may start. Exit 0: admitted, 1: refused, 2: error."`
	Inspect    inspectCommand    `cmd:"" help:"Show how limits stand, and who holds their slots. It takes nothing."`
	Release    releaseCommand    `cmd:"" help:"End leases, and print what each was: RELEASED, NOT_HELD or EXPIRED."`
	Renew      renewCommand      `cmd:"" help:"Renew leases, and print what became of each: RENEWED or LOST."`
	Reconcile  reconcileCommand  `cmd:"" help:"Settle what a lease reserved by what was used in truth."`
	Explain    explainCommand    `cmd:"" help:"Say which policies a request meets, level by level, and why it would be refused now. For operators."`
	Leases     leasesCommand     `cmd:"" help:"Show who holds what, and end leases. For operators: it asks the admin port."`
	Reset      resetCommand      `cmd:"" help:"Forget the state of a subject: full buckets, no hits, free slots. For operators."`
	Health     healthCommand     `cmd:"" help:"Ask a running service whether it serves. Exit 0: it does, 1: it does not."`
	Top        topCommand        `cmd:"" help:"Show the status of a running service in the terminal, live."`
	Completion completionCommand `cmd:"" help:"Print the script by which a shell completes commands and flags."`
	Version    versionCommand    `cmd:"" help:"Print the version."`

	VersionFlag kong.VersionFlag `name:"version" help:"Print the version and exit."`
}

const description = `weir decides whether work may start: token buckets, windows and in-flight slots, in one atomic decision, for Envoy and other gRPC services.

Try it: weir serve --policy examples/policy.yaml, and in another shell: weir decide --domain inference -d account=alice`

// console is where a command reads its end from and writes to.
type console struct {
	ctx            context.Context
	stdout, stderr io.Writer
}

// exit ends a command with a code and without a message.
type exit int

func (e exit) Error() string { return fmt.Sprintf("exit %d", int(e)) }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends it at once
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the whole command: it returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var c command
	exited := false
	code := exitOK
	parser, err := kong.New(&c,
		kong.Name("weir"),
		kong.Description(description),
		kong.Writers(stdout, stderr),
		kong.Vars{"version": versionLine()},
		kong.Exit(func(n int) { exited, code = true, n }), // after --help and --version
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
	)
	if err != nil {
		panic(err) // the struct above is wrong
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	parsed, err := parser.Parse(args)
	switch {
	case exited:
		return code
	case err != nil:
		_, _ = fmt.Fprintf(stderr, "weir: %v; see %s --help\n", err, commandOf(err))
		return exitError
	}
	err = parsed.Run(console{ctx: ctx, stdout: stdout, stderr: stderr})
	var e exit
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &e):
		return int(e)
	}
	_, _ = fmt.Fprintf(stderr, "weir: %v\n", err)
	return exitError
}

// commandOf is the command that a wrong command line was meant for, as far as it was understood.
func commandOf(err error) string {
	var parse *kong.ParseError
	if errors.As(err, &parse) && parse.Context != nil {
		if selected := parse.Context.Selected(); selected != nil {
			return selected.FullPath()
		}
	}
	return "weir"
}
