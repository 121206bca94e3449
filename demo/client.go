package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// client uses each connection once: what it talks to is killed now and then.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// demo is the client of the service, and who kills it.
type demo struct {
	limits
	run string // makes accounts new in each run
	// Addresses.
	envoy, imageservice, prometheus string
}

// answer is what a client sees.
type answer struct {
	status     int
	limited    bool // weir decided, and had its store: Envoy tells how the limits stand
	retryAfter time.Duration
	body       string
	at         time.Time
	err        error // no answer came
}

// name is what an account is called in this run.
func (d *demo) name(account string) string { return account + "-" + d.run }

// ask asks for one image. Without an account it meets the pool alone.
func (d *demo) ask(ctx context.Context, account string, work time.Duration) answer {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+d.envoy+"/images?work="+work.String(), http.NoBody)
	if err != nil {
		return answer{err: err, at: time.Now()}
	}
	if account != "" {
		r.Header.Set("x-account", d.name(account))
	}
	response, err := client.Do(r)
	if err != nil {
		return answer{err: err, at: time.Now()}
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<16))
	a := answer{
		status:  response.StatusCode,
		limited: response.Header.Get("x-ratelimit-limit") != "",
		body:    strings.TrimSpace(string(body)),
		at:      time.Now(),
		err:     err,
	}
	if s := response.Header.Get("retry-after"); s != "" {
		a.retryAfter, err = time.ParseDuration(s + "s")
		if err != nil && a.err == nil {
			a.err = fmt.Errorf("retry-after: %w", err)
		}
	}
	return a
}

// jobs are those of an account that run.
type jobs struct {
	account string
	answers <-chan answer // when they end
}

// start asks for n images at once that take a minute, and waits until the service works at them.
func (d *demo) start(ctx context.Context, account string, n int) (jobs, error) {
	before, err := d.seen(ctx, http.MethodGet)
	if err != nil {
		return jobs{}, err
	}
	answers := make(chan answer, n)
	for range n {
		go func() { answers <- d.ask(ctx, account, time.Minute) }() // it ends with ctx at the latest
	}
	return jobs{account, answers}, until(ctx, soon, func(ctx context.Context) error {
		c, err := d.seen(ctx, http.MethodGet)
		if err == nil && c.Begun < before.Begun+n {
			err = fmt.Errorf("%d of %s's %d jobs have begun", c.Begun-before.Begun, account, n)
		}
		return err
	})
}

// finish has the service finish n of them, whose clients must get their images.
func (d *demo) finish(ctx context.Context, running jobs, n int, limited bool) error {
	for range n {
		if _, err := d.service(ctx, http.MethodPost, "/done?account="+d.name(running.account)); err != nil {
			return err
		}
	}
	for range n {
		if a := <-running.answers; !a.is(http.StatusOK) || a.limited != limited {
			return a.unexpected(fmt.Sprintf("a job of %s that was admitted (limited: %t)", running.account, limited))
		}
	}
	return nil
}

// Whether weir could limit a request.
const (
	limited   = true
	unlimited = false
)

// is reports whether the answer came, and with this status.
func (a answer) is(status int) bool { return a.err == nil && a.status == status }

// passed reports whether weir decided, within all limits, that the work may start.
func (a answer) passed() bool { return a.is(http.StatusOK) && a.limited }

// refused checks that an answer is a refusal as it should be, and prints it.
func (a answer) refused(who string, status int) error {
	if !a.is(status) || a.retryAfter < time.Second || !strings.Contains(a.body, `"retry_after_ms":`) {
		return a.unexpected(fmt.Sprintf("%s: want %d, retry-after and the reason; it", who, status))
	}
	say("%s: %d, retry-after: %.0f, and why:", who, a.status, a.retryAfter.Seconds())
	say("  %s", a.body)
	return nil
}

// unexpected tells what was seen instead.
func (a answer) unexpected(who string) error {
	if a.err != nil {
		return fmt.Errorf("%s got no answer: %w", who, a.err)
	}
	note := ""
	if !a.limited {
		note = ", without limits"
	}
	return fmt.Errorf("%s got %d%s: %s", who, a.status, note, a.body)
}
