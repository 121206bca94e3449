package main

import (
	"fmt"
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
