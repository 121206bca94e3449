package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v7"
)

type submit struct {
	Folder   string        `arg:"" type:"existingdir" help:"It has a folder for each account, with jobs like NAME.job: one line as work=2s. Their images are put beside them."`
	Services []string      `name:"service" default:"http://127.0.0.1:9000" help:"Instances of the service, asked in turn."`
	Workers  int           `default:"3" help:"Jobs of an account at once: as many as it has slots. More are only more to refuse."`
	Depth    int           `default:"1000" help:"How many jobs of an account to take on; the others wait in the folder for the next run."`
	Attempts uint          `default:"10" help:"How often to ask for an image at most."`
	Deadline time.Duration `default:"2m" help:"How long to ask for it altogether."`
}

const (
	missingRetryAfter = time.Second
	maxJitter         = 250 * time.Millisecond // so that not all come at once
	maxImage          = 10 << 20               // bytes
)

// Run has the images made. The folder is the queue: a job is in it until its image is, so
// that nothing is lost when this program ends, or gives up. Then it is an error, and
// another run goes on where this one ended.
func (s *submit) Run(ctx context.Context) error {
	folders, err := filepath.Glob(filepath.Join(s.Folder, "*"))
	if err != nil {
		return err
	}
	var workers sync.WaitGroup
	var left atomic.Int64
	for _, folder := range folders {
		jobs, err := filepath.Glob(filepath.Join(folder, "*.job"))
		if err != nil {
			return err
		}
		left.Add(int64(len(jobs)))
		queue := make(chan string, len(jobs))
		for _, job := range jobs[:min(s.Depth, len(jobs))] {
			queue <- job
		}
		close(queue)
		for range s.Workers {
			workers.Go(func() {
				for job := range queue {
					if err := s.make(ctx, http.DefaultClient, filepath.Base(folder), job); err != nil {
						_, _ = fmt.Fprintf(os.Stderr, "%s stays: %v\n", job, err)
						continue
					}
					left.Add(-1)
				}
			})
		}
	}
	workers.Wait()
	if n := left.Load(); n > 0 {
		return fmt.Errorf("%d jobs are left: run it again", n)
	}
	return nil
}

// make has one image made, and then removes the job.
func (s *submit) make(ctx context.Context, c *http.Client, account, job string) error {
	query, err := os.ReadFile(job)
	if err != nil {
		return err
	}
	image, err := s.ask(ctx, c, account, strings.TrimSpace(string(query)))
	if err != nil {
		return err
	}
	name := strings.TrimSuffix(job, ".job") + ".image"
	if err := os.WriteFile(name+".new", image, 0o600); err != nil {
		return err
	}
	if err := os.Rename(name+".new", name); err != nil {
		return err
	}
	return os.Remove(job)
}

// ask asks for an image until there is one: after a refusal when Retry-After is over and
// some jitter, within Attempts and Deadline, and only if that can help.
func (s *submit) ask(ctx context.Context, c *http.Client, account, query string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, s.Deadline)
	defer cancel()
	service := rand.IntN(len(s.Services))
	image, err := backoff.Retry(ctx, func() ([]byte, error) {
		service = (service + 1) % len(s.Services)
		return try(ctx, c, s.Services[service]+"/images?"+query, account)
	}, backoff.WithMaxTries(s.Attempts), backoff.WithMaxElapsedTime(s.Deadline))
	if gaveUp := backoff.AsRetryError(err); gaveUp != nil {
		return nil, gaveUp.LastErr
	}
	return image, err
}

// try asks once. Its error is one of backoff, which says whether and when to ask again.
func try(ctx context.Context, c *http.Client, url, account string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, http.NoBody)
	if err != nil {
		return nil, backoff.Permanent(err)
	}
	request.Header.Set("X-Account", account)
	response, err := c.Do(request)
	if err != nil { // an instance that is gone: the next may be there
		return nil, backoff.RetryAfter(wait(""), err)
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxImage))
	if err != nil {
		return nil, backoff.RetryAfter(wait(""), err)
	}
	switch response.StatusCode {
	case http.StatusOK:
		return body, nil
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		var problem struct {
			Title, Detail string
			Retryable     *bool
		}
		_ = json.Unmarshal(body, &problem) // what is no problem of weir is retried
		err := fmt.Errorf("%s: %s %s", response.Status, problem.Title, problem.Detail)
		if problem.Retryable != nil && !*problem.Retryable {
			return nil, backoff.Permanent(err)
		}
		return nil, backoff.RetryAfter(wait(response.Header.Get("Retry-After")), err)
	}
	return nil, backoff.Permanent(errors.New(response.Status))
}

// wait is how long to wait after a Retry-After, which weir tells in seconds.
func wait(retryAfter string) time.Duration {
	d := missingRetryAfter
	if seconds, err := strconv.ParseUint(retryAfter, 10, 32); err == nil {
		d = time.Duration(seconds) * time.Second
	}
	return d + rand.N(maxJitter+1)
}
