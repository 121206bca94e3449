// Package main is the demo: it asks for images as clients would, stops and kills what docker-compose.yml runs,
// and says what it sees. It ends with 1 as soon as that is not what weir promises.
package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// patience is how long the demo waits for what must happen soon: containers that start, mostly.
const patience = 30 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		os.Exit(1)
	}
}

// run plays all acts, one after the other.
func run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	l, err := readLimits("demo/policy.yaml")
	if err != nil {
		return err
	}
	began := time.Now()
	d := &demo{limits: l, run: rand.Text()[:4]}
	if err := d.open(ctx); err != nil {
		return err
	}
	say("An account: %d tokens, one more each %v, %d jobs at once. All together: %d jobs at once. A lease: %v.", l.tokens, l.refill, l.lane, l.pool, l.lease)
	for _, act := range []struct {
		title string
		play  func(context.Context) error
	}{
		{"A burst, and then a steady pace", d.burst},
		{"The lane of an account is full", d.laneFull},
		{"The pool is full", d.poolFull},
		{"The service crashes", d.serviceCrashes},
		{"Envoy crashes", d.envoyCrashes},
		{"A replica of weir crashes", d.replicaCrashes},
		{"Redis is away", d.redisAway},
	} {
		fmt.Printf("\n%s\n", act.title)
		if err := act.play(ctx); err != nil {
			if ctx.Err() != nil {
				err = fmt.Errorf("%w (%w)", err, context.Cause(ctx))
			}
			return fmt.Errorf("%s: %w", act.title, err)
		}
	}
	fmt.Printf("\nAll was as promised, in %v. It still runs: http://%s is Prometheus; docker compose down stops it.\n", round(time.Since(began)), d.prometheus)
	return nil
}

// say prints what was seen.
func say(format string, args ...any) { fmt.Printf("  "+format+"\n", args...) }

// round makes durations readable.
func round(d time.Duration) time.Duration {
	if d < time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(100 * time.Millisecond)
}

// until waits for a condition, and asks every 50 ms. Its error is the last that the
// condition had in time.
func until(ctx context.Context, within time.Duration, condition func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		err := condition(ctx)
		if err == nil {
			return nil
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("after %v: %w", within, last)
		}
	}
}

// pause waits for a time.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
