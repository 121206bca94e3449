package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cpuTime is the CPU time that a process has used so far. It is not counted in
// ticks, as that of /proc is.
func cpuTime(pid int) (time.Duration, error) {
	var t unix.Timespec
	// clock_getcpuclockid(3): the clock of a process is ~pid, shifted, with
	// CPUCLOCK_SCHED in the lowest bits.
	const sched = 2
	if err := unix.ClockGettime(int32(^pid<<3|sched), &t); err != nil {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// redis sends one command and returns the text that answers it.
func redis(address, command string) (string, error) {
	text, err := ask(address, command)
	if err != nil {
		return "", fmt.Errorf("redis at %s: %s: %w", address, command, err)
	}
	return text, nil
}

func ask(address, command string) (string, error) {
	c, err := net.DialTimeout("tcp", address, time.Second)
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintf(c, "%s\r\n", command); err != nil {
		return "", err
	}
	r := bufio.NewReader(c)
	line, err := r.ReadString('\n')
	if err != nil {
		return "", err
	}
	line = strings.TrimSpace(line)
	if strings.HasPrefix(line, "-") || line == "" {
		return "", errors.New(line)
	}
	size, ok := strings.CutPrefix(line, "$")
	if !ok { // no bulk string: one line, after a character that says its type
		return line[1:], nil
	}
	n, err := strconv.Atoi(size)
	if err != nil {
		return "", err
	}
	bulk := make([]byte, n)
	_, err = io.ReadFull(r, bulk)
	return string(bulk), err
}

// usedMemory is Redis's used_memory, in bytes.
func usedMemory(address string) (int64, error) {
	info, err := redis(address, "INFO memory")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(info) {
		if n, ok := strings.CutPrefix(line, "used_memory:"); ok {
			return strconv.ParseInt(strings.TrimSpace(n), 10, 64)
		}
	}
	return 0, fmt.Errorf("redis at %s tells no used_memory", address)
}

// commands is how many commands Redis has run.
type commands struct{ sent, inScripts int64 }

// countCommands counts by INFO commandstats, which does not tell who called: what
// clients of weir's send themselves is known by name, the rest runs in scripts.
func countCommands(address string) (commands, error) {
	info, err := redis(address, "INFO commandstats")
	if err != nil {
		return commands{}, err
	}
	var n commands
	for line := range strings.Lines(info) {
		name, counts, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
		if !ok {
			continue
		}
		calls, err := strconv.ParseInt(counts[:strings.IndexByte(counts, ',')], 10, 64)
		if err != nil {
			return commands{}, fmt.Errorf("redis at %s: commandstats: %w", address, err)
		}
		switch name, _, _ = strings.Cut(name, "|"); name {
		case "info": // this one
		case "evalsha", "eval", "fcall", "ping", "hello", "client", "script":
			n.sent += calls
		default:
			n.inScripts += calls
		}
	}
	return n, nil
}
