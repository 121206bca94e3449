package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"weir/client"
)

// lookEvery is how often to look for the jobs of workers that died, and for new ones.
const lookEvery = 500 * time.Millisecond

// callTimeout is how long the vendor may take.
const callTimeout = 30 * time.Second

// worker is one process that does jobs. A job is a file, so that it outlives any process.
type worker struct {
	limits    *client.Client
	queue     *client.Queue
	vendor    string // URL
	jobs      string // folder
	perMinute int
	log       *slog.Logger

	mine  map[string]bool // jobs that wait or work here
	ended chan string     // those that do so no more
}

// run does jobs until there is none. When ctx ends, it finishes what it has begun.
func (w *worker) run(ctx context.Context) error {
	for _, folder := range []string{"done", "failed"} {
		if err := os.MkdirAll(filepath.Join(filepath.Dir(w.jobs), folder), 0o750); err != nil {
			return err
		}
	}
	w.mine = make(map[string]bool)
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for ctx.Err() == nil {
		files, err := os.ReadDir(w.jobs)
		if err != nil {
			return err
		}
		if len(files) == 0 {
			break
		}
		// In any order, so that the processes seldom want the same one.
		rand.Shuffle(len(files), func(i, k int) { files[i], files[k] = files[k], files[i] })
		for _, f := range files {
			err := w.take(ctx, f.Name())
			if err == nil {
				continue
			}
			if !errors.Is(err, client.ErrQueueFull) {
				w.log.WarnContext(ctx, "a job cannot be taken now", "job", f.Name(), "err", err)
			}
			break
		}
		select {
		case name := <-w.ended:
			delete(w.mine, name)
		case <-look.C:
		case <-ctx.Done():
		}
	}
	for len(w.mine) > 0 {
		delete(w.mine, <-w.ended)
	}
	return w.queue.Close(context.WithoutCancel(ctx))
}

// take puts a job into the queue, unless somebody has it.
func (w *worker) take(ctx context.Context, name string) error {
	if w.mine[name] {
		return nil
	}
	claim, err := w.limits.Acquire(ctx, client.Ask(client.Describe("job", name)))
	if limited, ok := errors.AsType[*client.LimitedError](err); ok && limited.Reason == "lane_full" {
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(w.jobs, name)); err != nil { // it was done meanwhile
		claim.Release(ctx)
		return nil
	}
	// While it waits and works the claim is renewed. If it is lost all the same, the job is
	// somebody else's, and ends here.
	err = w.queue.Go(claim.Context(context.WithoutCancel(ctx)), "acme", client.Ask(client.Describe("vendor", "acme")),
		func(ctx context.Context, call *client.Lease) error { return w.do(ctx, call, name) },
		func(err error) {
			if err != nil {
				w.log.InfoContext(ctx, "a job is not done, and stays", "job", name, "err", err)
			}
			claim.Release(ctx)
			w.ended <- name
		})
	if err != nil {
		claim.Release(ctx)
		return err
	}
	w.mine[name] = true
	return nil
}

// do does a job by one call to the vendor, which the quota has admitted. If it returns an
// error the job stays, and is taken again by anybody.
func (w *worker) do(ctx context.Context, call *client.Lease, name string) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	text, err := os.ReadFile(filepath.Join(w.jobs, name))
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, w.vendor, bytes.NewReader(text))
	if err != nil {
		return err
	}
	r.GetBody = nil // or net/http would call again by itself, without a token
	// Who dies after the call and before the job is put away calls again, by another worker.
	r.Header.Set("Idempotency-Key", name)
	r.Header.Set("User-Agent", fmt.Sprintf("worker %d", os.Getpid()))
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	_ = answer.Body.Close()
	switch {
	case answer.StatusCode == http.StatusTooManyRequests:
		// The vendor counts by another window, or others use the quota too. What it says
		// holds for all workers: as many tokens are owed as would come until then.
		wait := retryAfter(answer.Header)
		owed := math.Ceil(wait.Minutes() * float64(w.perMinute))
		call.Use("calls", 1+uint64(owed))
		return fmt.Errorf("the vendor asks to wait for %v", wait)
	case answer.StatusCode >= 500:
		return fmt.Errorf("the vendor answers %s", answer.Status)
	case answer.StatusCode >= 400:
		return w.put(name, "failed") // it would fail again
	}
	return w.put(name, "done")
}

func (w *worker) put(name, folder string) error {
	return os.Rename(filepath.Join(w.jobs, name), filepath.Join(filepath.Dir(w.jobs), folder, name))
}

// retryAfter is how long the vendor asks to wait: seconds, or a date, by its own clock. 1 s
// if it does not say, and at most an hour.
func retryAfter(h http.Header) time.Duration {
	text := h.Get("Retry-After")
	if seconds, err := strconv.ParseUint(text, 10, 32); err == nil {
		return min(time.Duration(seconds)*time.Second, time.Hour)
	}
	then, err := http.ParseTime(text)
	now, err2 := http.ParseTime(h.Get("Date"))
	if err != nil || err2 != nil {
		return time.Second
	}
	return min(max(0, then.Sub(now)), time.Hour)
}
