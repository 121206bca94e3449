package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/term"

	"weir/server"
)

// operator are the flags of commands that speak to the admin port of a running service.
type operator struct {
	Admin   string        `env:"WEIR_ADMIN" default:"127.0.0.1:6070" placeholder:"HOST[:PORT]" help:"The service's admin address, its --admin-listen (${default})."`
	Timeout time.Duration `default:"5s" help:"How long to wait for each answer (${default})."`
	clientTLS
}

// maxAnswer is the longest answer that is read, in bytes.
const maxAnswer = 64 << 20

// get asks a page, and reads its answer into out.
func (o operator) get(ctx context.Context, path string, query url.Values, out any) error {
	return o.ask(ctx, http.MethodGet, path+"?"+query.Encode(), nil, out)
}

// post sends a body to a page, and reads its answer into out.
func (o operator) post(ctx context.Context, path string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	return o.ask(ctx, http.MethodPost, path, body, out)
}

// adminPort is the port of --admin-listen's default.
const adminPort = "6070"

// normalize makes Admin a host and a port: people write it as an URL, or without the port.
func (o *operator) normalize() error {
	addr := strings.TrimSuffix(strings.TrimPrefix(o.Admin, "http://"), "/")
	if rest, ok := strings.CutPrefix(addr, "https://"); ok {
		addr, o.TLS = rest, true
	}
	if addr == "" || strings.Contains(addr, "/") {
		return o.noAddress()
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil { // it has no port
		host, port = strings.TrimSuffix(strings.TrimPrefix(addr, "["), "]"), adminPort
	}
	if host == "" {
		host = "127.0.0.1"
	}
	o.Admin = net.JoinHostPort(host, port)
	return nil
}

func (o operator) noAddress() error {
	return fmt.Errorf("--admin %q is no HOST:PORT; give the address of --admin-listen of weir serve, by default 127.0.0.1:%s", o.Admin, adminPort)
}

func (o operator) ask(ctx context.Context, method, path string, body []byte, out any) error {
	if err := o.normalize(); err != nil {
		return err
	}
	config, err := o.config()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	scheme := "http"
	transport := &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}
	if config != nil {
		scheme = "https"
	} else {
		transport.DialContext = dialHTTP
	}
	request, err := http.NewRequestWithContext(ctx, method, scheme+"://"+o.Admin+path, bytes.NewReader(body))
	if err != nil {
		return o.noAddress()
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	answer, err := transport.RoundTrip(request)
	if err != nil {
		return o.unreachable(err)
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err != nil {
		return o.unreachable(err)
	}
	if answer.StatusCode != http.StatusOK {
		said := strings.TrimSpace(string(text))
		switch {
		case strings.Contains(said, "HTTP request to an HTTPS server"):
			said += "; the service has --admin-clients, so its admin port wants --ca-file, and --cert-file and --key-file of one of them"
		case answer.StatusCode == http.StatusNotFound, answer.StatusCode == http.StatusMethodNotAllowed:
			said += "; is --admin the admin port of a weir as new as this one? (the address of its --admin-listen, not of --http-listen)"
		}
		return fmt.Errorf("%s: %s (%d)", o.Admin, said, answer.StatusCode)
	}
	if err := json.Unmarshal(text, out); err != nil {
		return fmt.Errorf("%s: its answer is not understood; is --admin the admin port of a weir as new as this one?", o.Admin)
	}
	return nil
}

// errNotHTTP is the error of a connection on which something else than HTTP/1 comes.
var errNotHTTP = errors.New("not HTTP")

// dialHTTP connects, and fails with [errNotHTTP] as soon as something else comes: a gRPC port speaks first, in
// HTTP/2, and net/http would print that.
func dialHTTP(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &httpConn{Conn: conn}, nil
}

// httpConn is a connection whose first byte must be that of HTTP/1.
type httpConn struct {
	net.Conn
	begun bool // of the one goroutine that reads
}

func (c *httpConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && !c.begun {
		if b[0] != 'H' {
			return 0, errNotHTTP
		}
		c.begun = true
	}
	return n, err
}

// unreachable is the error of a service that does not answer, with what to look at.
func (o operator) unreachable(err error) error {
	var remedy string
	switch {
	case errors.As(err, new(tls.RecordHeaderError)):
		remedy = "the admin port speaks TLS only with --admin-clients of weir serve: leave out https://, --tls and the files of TLS"
	case errors.Is(err, errNotHTTP), !o.isTLS() && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)):
		return fmt.Errorf("%s: it does not answer in HTTP, as the gRPC port does; give --admin the address of --admin-listen of weir serve, by default 127.0.0.1:%s, not of --grpc-listen", o.Admin, adminPort)
	case o.isTLS():
		remedy = "does the service have --admin-clients, and are --admin, --ca-file, --server-name, --cert-file and --key-file right?"
	default:
		remedy = "the admin port listens where weir serve has --admin-listen, by default on 127.0.0.1:6070 of its own machine: ask from there, or have it listen elsewhere and name who may ask by --admin-clients"
	}
	return fmt.Errorf("%s: %w; %s", o.Admin, err, remedy)
}

// adminDescriptors reads the values of -d.
func adminDescriptors(texts []string) ([]server.AdminDescriptor, error) {
	parsed, err := parseDescriptors(texts)
	if err != nil {
		return nil, err
	}
	list := make([]server.AdminDescriptor, len(parsed))
	for i, d := range parsed {
		for _, e := range d.GetEntries() {
			list[i].Entries = append(list[i].Entries, server.AdminEntry{Key: e.GetKey(), Value: e.GetValue()})
		}
	}
	return list, nil
}

// notePatterns says of each -d with a * that it is none: policies have patterns, subjects do not.
func (c console) notePatterns(descriptors []string) {
	for _, d := range descriptors {
		if strings.Contains(d, "*") {
			_, _ = fmt.Fprintf(c.stderr, "note: -d %s means the one subject that is written so: * is no pattern here\n", d)
		}
	}
}

// confirm asks the person at the terminal. Without one it fails, and says that yes, a flag, is
// there for scripts.
func (c console) confirm(question string) (bool, error) {
	if !term.IsTerminal(int(os.Stdin.Fd())) {
		return false, errors.New("there is no terminal to ask at; add --yes if you are sure")
	}
	if _, err := fmt.Fprintf(c.stderr, "%s [y/N] ", question); err != nil {
		return false, err
	}
	type input struct {
		line string
		err  error
	}
	said := make(chan input, 1)
	go func() { // nothing can end its reading but an answer, or the end of this process
		line, err := bufio.NewReader(os.Stdin).ReadString('\n')
		said <- input{line, err}
	}()
	select {
	case <-c.ctx.Done():
		return false, errors.New("interrupted: nothing was done")
	case in := <-said:
		if in.err != nil && !errors.Is(in.err, io.EOF) {
			return false, in.err
		}
		line := strings.ToLower(strings.TrimSpace(in.line))
		return line == "y" || line == "yes", nil
	}
}

// printJSON writes v for machines.
func printJSON(w io.Writer, v any) error {
	out := json.NewEncoder(w)
	out.SetIndent("", "  ")
	out.SetEscapeHTML(false)
	return out.Encode(v)
}
