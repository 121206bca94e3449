// Package main is a service that makes images, which asks weir before it begins: accounts
// have an allowance and three jobs at once, and all of them share a pool. It is an example
// of package client; README.md tells how to run it.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"
)

type command struct {
	Serve  serve  `cmd:"" help:"Make images, if weir says that the work may start. Run several."`
	Submit submit `cmd:"" help:"Have the images of a folder of jobs made, and be patient as the service asks for."`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	parsed := kong.Parse(&command{}, kong.Name("imageservice"), kong.BindTo(ctx, (*context.Context)(nil)))
	parsed.FatalIfErrorf(parsed.Run())
}
