package redis

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
)

// startFake starts a server that answers a command with what reply returns, and closes
// the connection at "". A HELLO it does not know. It ends with the test.
func startFake(t *testing.T, reply func(command string, args []string) string) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	open := make(map[net.Conn]bool) // nil when it is to end
	var work sync.WaitGroup
	work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			if open == nil {
				mu.Unlock()
				_ = c.Close()
				return
			}
			open[c] = true
			mu.Unlock()
			work.Go(func() {
				defer func() {
					mu.Lock()
					delete(open, c)
					mu.Unlock()
					_ = c.Close()
				}()
				for r := bufio.NewReader(c); ; {
					args, err := readCommand(r)
					if err != nil {
						return
					}
					answer := "-ERR unknown command\r\n"
					if command := strings.ToLower(args[0]); command != "hello" {
						answer = reply(command, args[1:])
					}
					if _, err := io.WriteString(c, answer); err != nil || answer == "" {
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for c := range open {
			_ = c.Close()
		}
		open = nil
		mu.Unlock()
		work.Wait()
	})
	return l.Addr().String()
}

// readCommand reads an array of bulk strings.
func readCommand(r *bufio.Reader) ([]string, error) {
	var n int
	if _, err := fmt.Fscanf(r, "*%d\r\n", &n); err != nil || n < 1 {
		return nil, fmt.Errorf("%d arguments: %w", n, err)
	}
	args := make([]string, n)
	for i := range args {
		var size int
		if _, err := fmt.Fscanf(r, "$%d\r\n", &size); err != nil {
			return nil, err
		}
		text := make([]byte, size+2)
		if _, err := io.ReadFull(r, text); err != nil {
			return nil, err
		}
		args[i] = string(text[:size])
	}
	return args, nil
}
