// Package main measures rate-limit services beside a gRPC server that does
// nothing: one after the other, round after round, so that what else the machine
// does falls on all of them. scripts/bench.sh starts them and runs it.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

const (
	domain       = "ai" // of policy.yaml
	accounts     = 10_000
	idleAccounts = 100_000
)

func main() {
	callers := flag.String("callers", "1 8 64 256", "how many callers ask at once")
	window := flag.Float64("seconds", 2, "of each measurement")
	rounds := flag.Int("rounds", 3, "measurements of each server")
	flag.Parse()
	if err := run(flag.Args(), *callers, time.Duration(*window*float64(time.Second)), *rounds); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(args []string, callers string, window time.Duration, rounds int) error {
	servers, err := targets(args)
	if err != nil {
		return err
	}
	list, err := scenarios(callers)
	switch {
	case err != nil:
		return err
	case window <= 0 || rounds < 1:
		return fmt.Errorf("%d rounds of %v measure nothing; both must be above 0", rounds, window)
	}
	for _, t := range servers {
		if t.redis != "" {
			if err := idle(t); err != nil {
				return fmt.Errorf("%s: %w", t.name, err)
			}
		}
	}
	fmt.Println(header)
	for _, s := range list {
		if err := s.compare(servers, window, rounds); err != nil {
			return fmt.Errorf("%s, %d callers: %w", s.name, s.callers, err)
		}
	}
	return nil
}

// target is a server to measure.
type target struct {
	name    string
	address string // of its gRPC port
	pid     int
	// Its Redis; "" and 0 without one.
	redis    string
	redisPID int
}

// targets reads NAME,ADDRESS,PID[,REDIS-ADDRESS,REDIS-PID] from the command line,
// the floor first.
func targets(args []string) ([]target, error) {
	var list []target
	for _, arg := range args {
		f := strings.Split(arg, ",")
		if len(f) != 3 && len(f) != 5 {
			return nil, fmt.Errorf("%q is not NAME,ADDRESS,PID[,REDIS-ADDRESS,REDIS-PID]", arg)
		}
		t := target{name: f[0], address: f[1]}
		var err, err2 error
		t.pid, err = strconv.Atoi(f[2])
		if len(f) == 5 {
			t.redis = f[3]
			t.redisPID, err2 = strconv.Atoi(f[4])
		}
		if err := errors.Join(err, err2); err != nil {
			return nil, fmt.Errorf("%q: %w", arg, err)
		}
		list = append(list, t)
	}
	if len(list) < 2 {
		return nil, errors.New("name two servers or more, the floor first")
	}
	return list, nil
}
