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
)

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
