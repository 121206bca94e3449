package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
)

// listeners are the sockets of the service; admin may be nil.
type listeners struct{ grpc, http, admin net.Listener }

func (c *serveCommand) listen(ctx context.Context) (l listeners, err error) {
	defer func() {
		if err != nil {
			for _, open := range []net.Listener{l.grpc, l.http, l.admin} {
				if open != nil {
					_ = open.Close()
				}
			}
		}
	}()
	if l.grpc, err = listen(ctx, "--grpc-listen", c.GRPCListen); err != nil {
		return l, err
	}
	if l.http, err = listen(ctx, "--http-listen", c.HTTPListen); err != nil {
		return l, err
	}
	if c.AdminListen != "" {
		l.admin, err = listen(ctx, "--admin-listen", c.AdminListen)
	}
	return l, err
}

func listen(ctx context.Context, flag, addr string) (net.Listener, error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s is in use; stop what listens there, or choose another address with %s", addr, flag)
	case err != nil:
		return nil, fmt.Errorf("%s %s: %w", flag, addr, err)
	}
	return l, nil
}
