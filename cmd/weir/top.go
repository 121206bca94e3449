package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/term"

	"weir/cmd/weir/top"
	"weir/server/page"
)

type topCommand struct {
	HTTP    string        `name:"http" env:"WEIR_HTTP" default:"127.0.0.1:8080" placeholder:"HOST:PORT" help:"The service's HTTP address (${default})."`
	Once    bool          `help:"Print one picture as plain text, and end; so it does where the output is no terminal."`
	Timeout time.Duration `default:"2s" help:"How long to wait for an answer (${default})."`
	clientTLS
}

// Help is shown by weir top --help.
func (c *topCommand) Help() string {
	return `Example: weir top --http 127.0.0.1:8080

It shows the status page in the terminal, once a second: what is wrong, the store, what passed unchecked, each limit, latency, and who is refused most. While weir does not answer it says since when, and goes on when it is back.

q quits, p pauses; arrows, PgUp and PgDn scroll. Colours are left out with NO_COLOR.

Exit 0: it was shown, 2: error, with --once also that weir did not answer.`
}

// Run shows the status until somebody has seen enough.
func (c *topCommand) Run(con console) error {
	c.HTTP = strings.TrimSuffix(strings.TrimPrefix(c.HTTP, "http://"), "/") // as people copy it
	if addr, ok := strings.CutPrefix(c.HTTP, "https://"); ok {
		c.HTTP, c.TLS = addr, true
	}
	config, err := c.config()
	if err != nil {
		return err
	}
	transport := &http.Transport{TLSClientConfig: config}
	defer transport.CloseIdleConnections()
	client := &http.Client{
		Transport:     transport,
		Timeout:       c.Timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	o := top.Options{Addr: c.HTTP, Ask: func(ctx context.Context) (*page.Snapshot, error) { return c.ask(ctx, client, config) }}
	out, isFile := con.stdout.(*os.File)
	if c.Once || !isFile || !term.IsTerminal(int(out.Fd())) {
		return top.Once(con.ctx, con.stdout, o)
	}
	o.Colours = os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	// Whatever ends it, the terminal is as it was.
	ctx, stop := signal.NotifyContext(con.ctx, syscall.SIGHUP, syscall.SIGQUIT)
	defer stop()
	return top.Live(ctx, out, o)
}

// maxStatus is more bytes than /status.json has.
const maxStatus = 8 << 20

// ask reads /status.json.
func (c *topCommand) ask(ctx context.Context, client *http.Client, config *tls.Config) (*page.Snapshot, error) {
	scheme := "http://"
	if config != nil {
		scheme = "https://"
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+c.HTTP+"/status.json", nil)
	if err != nil {
		return nil, fmt.Errorf("--http %q: %w; write HOST:PORT", c.HTTP, err)
	}
	answer, err := client.Do(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; is --http right, and does it want --tls?", c.HTTP, errors.Unwrap(err))
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxStatus))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.HTTP, err)
	}
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s; is it a weir, and is --http its HTTP address?", c.HTTP, strings.ToLower(answer.Status))
	}
	s := new(page.Snapshot)
	if err := json.Unmarshal(text, s); err != nil {
		return nil, fmt.Errorf("%s: it does not answer as weir does: %w; is --http its HTTP address?", c.HTTP, err)
	}
	return s, nil
}
