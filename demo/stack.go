package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os/exec"
	"strconv"
	"strings"
)

// docker runs a command of docker, and returns what it printed.
func docker(ctx context.Context, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	c := exec.CommandContext(ctx, "docker", args...)
	c.Stdout, c.Stderr = &stdout, &stderr
	if err := c.Run(); err != nil {
		return "", fmt.Errorf("docker %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(stdout.String()), nil
}

// address is where a service is published.
func address(ctx context.Context, service, port string) (string, error) {
	a, err := docker(ctx, "compose", "port", service, port)
	if err == nil && (a == "" || strings.HasSuffix(a, ":0")) {
		err = fmt.Errorf("%s does not run", service)
	}
	return a, err
}

// open finds the services, and waits until Envoy, weir with its store, and the image service are all there: until
// several requests in a row have met limits, since there are several replicas.
func (d *demo) open(ctx context.Context) error {
	for _, s := range []struct {
		address       *string
		service, port string
	}{{&d.envoy, "envoy", "10000"}, {&d.imageservice, "imageservice", "9000"}, {&d.prometheus, "prometheus", "9090"}} {
		var err error
		if *s.address, err = address(ctx, s.service, s.port); err != nil {
			return fmt.Errorf("%w; start all with: docker compose up --build --detach --wait", err)
		}
	}
	const enough = 20
	passed := 0
	return until(ctx, patience, func(ctx context.Context) error {
		for ; passed < enough; passed++ {
			if a := d.ask(ctx, "", 0); !a.passed() {
				passed = 0
				return a.unexpected("a request")
			}
		}
		return nil
	})
}

// replicas are the containers of weir that run.
func replicas(ctx context.Context) ([]string, error) {
	ids, err := docker(ctx, "compose", "ps", "--quiet", "weir")
	if err == nil && ids == "" {
		err = errors.New("no replica of weir runs")
	}
	return strings.Fields(ids), err
}

// counts are what the image service has seen.
type counts struct {
	Begun            int `json:"begun"`
	MostInFlight     int `json:"most_in_flight"`
	MostOfOneAccount int `json:"most_of_one_account"`
}

// seen asks for the counts: GET tells them, and DELETE counts anew.
func (d *demo) seen(ctx context.Context, method string) (counts, error) {
	var c counts
	body, err := d.service(ctx, method, "/counts")
	if err == nil && method == http.MethodGet {
		err = json.Unmarshal(body, &c)
	}
	return c, err
}

// service asks the image service itself, past Envoy.
func (d *demo) service(ctx context.Context, method, path string) ([]byte, error) {
	return page(ctx, method, "http://"+d.imageservice+path)
}

// page returns what a page says.
func page(ctx context.Context, method, url string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, url, http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(r)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, response.Status, body)
	}
	return body, err
}

// metric asks Prometheus for a number.
func (d *demo) metric(ctx context.Context, query string) (float64, error) {
	body, err := page(ctx, http.MethodGet, "http://"+d.prometheus+"/api/v1/query?query="+url.QueryEscape(query))
	if err != nil {
		return 0, err
	}
	var answer struct {
		Data struct {
			Result []struct {
				Value [2]any // a time, and the number as text
			}
		}
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return 0, fmt.Errorf("prometheus: %w", err)
	}
	if len(answer.Data.Result) != 1 {
		return 0, fmt.Errorf("prometheus does not know %s", query)
	}
	text, _ := answer.Data.Result[0].Value[1].(string)
	return strconv.ParseFloat(text, 64)
}

// measures waits until a number in Prometheus is large enough.
func (d *demo) measures(ctx context.Context, query string, want float64) error {
	return until(ctx, patience, func(ctx context.Context) error {
		got, err := d.metric(ctx, query)
		if err == nil && got < want {
			err = fmt.Errorf("%s is %v, want %v or more", query, got, want)
		}
		return err
	})
}
