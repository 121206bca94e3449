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
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"golang.org/x/term"

	"weir/server"
)

// operator are the flags of commands that speak to the admin port of a running service.
type operator struct {
	Admin   string        `env:"WEIR_ADMIN" default:"127.0.0.1:6070" placeholder:"HOST:PORT" help:"The service's admin address, its --admin-listen (${default})."`
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

func (o operator) ask(ctx context.Context, method, path string, body []byte, out any) error {
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
	}
	request, err := http.NewRequestWithContext(ctx, method, scheme+"://"+o.Admin+path, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("--admin %s: it is no HOST:PORT", o.Admin)
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

// unreachable is the error of a service that does not answer, with what to look at.
func (o operator) unreachable(err error) error {
	var remedy string
	switch {
	case errors.As(err, new(tls.RecordHeaderError)):
		remedy = "the admin port speaks TLS only with --admin-clients of weir serve: leave out --tls and the files of TLS"
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

// confirm asks the person at the terminal. Without one it fails, and says that yes, a flag, is
// there for scripts.
func (c console) confirm(question string) (bool, error) {
	if !term.IsTerminal(int(os.Stdin.Fd())) {
		return false, errors.New("there is no terminal to ask at; add --yes if you are sure")
	}
	if _, err := fmt.Fprintf(c.stderr, "%s [y/N] ", question); err != nil {
		return false, err
	}
	line, err := bufio.NewReader(os.Stdin).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	line = strings.ToLower(strings.TrimSpace(line))
	return line == "y" || line == "yes", nil
}

// printJSON writes v for machines.
func printJSON(w io.Writer, v any) error {
	out := json.NewEncoder(w)
	out.SetIndent("", "  ")
	out.SetEscapeHTML(false)
	return out.Encode(v)
}
