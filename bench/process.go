package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// usage is what has been used up to a moment.
type usage struct {
	at                       time.Time
	cpu, redisCPU, generator time.Duration
	machine                  time.Duration // by all processes and the kernel, in ticks of 10 ms
	commands                 commands
}

func usageOf(t target) (u usage, err error) {
	if t.redis != "" {
		if u.commands, err = countCommands(t.redis); err != nil {
			return u, err
		}
		if u.redisCPU, err = cpuTime(t.redisPID); err != nil {
			return u, err
		}
	}
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return u, err
	}
	if u.machine, err = busy(string(stat)); err != nil {
		return u, err
	}
	if u.generator, err = cpuTime(os.Getpid()); err != nil {
		return u, err
	}
	u.at = time.Now()
	u.cpu, err = cpuTime(t.pid)
	return u, err
}

// busy reads the CPU time of all processes and of the kernel from /proc/stat.
func busy(stat string) (time.Duration, error) {
	line, _, _ := strings.Cut(stat, "\n")
	f := strings.Fields(line)
	if len(f) < 8 || f[0] != "cpu" {
		return 0, fmt.Errorf("/proc/stat begins with %q, not with the CPUs' times", line)
	}
	var ticks int64
	for _, i := range []int{1, 2, 3, 6, 7} { // user, nice, system, irq, softirq; not idle and iowait
		n, err := strconv.ParseInt(f[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil // USER_HZ is 100 on every Linux that Go runs on
}

// residentMemory of a process, in bytes.
func residentMemory(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, err
	}
	var size, resident int64 // in pages
	if _, err := fmt.Sscan(string(text), &size, &resident); err != nil {
		return 0, fmt.Errorf("/proc/%d/statm: %w", pid, err)
	}
	return resident * int64(os.Getpagesize()), nil
}

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
	n, err := redisInfo(address, "memory", "used_memory")
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(n, 10, 64)
}

// redisInfo is a field of a section of INFO.
func redisInfo(address, section, field string) (string, error) {
	info, err := redis(address, "INFO "+section)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(value), nil
		}
	}
	return "", fmt.Errorf("redis at %s tells no %s", address, field)
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
	n, err := parseCommands(info)
	if err != nil {
		return commands{}, fmt.Errorf("redis at %s: commandstats: %w", address, err)
	}
	return n, nil
}

func parseCommands(info string) (n commands, err error) {
	for line := range strings.Lines(info) {
		name, counts, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
		if !ok {
			continue
		}
		counts, _, _ = strings.Cut(counts, ",")
		calls, err := strconv.ParseInt(counts, 10, 64)
		if err != nil {
			return commands{}, err
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
