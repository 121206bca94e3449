package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestHashKeyIsTheTextWithoutTheEndOfItsLastLine(t *testing.T) {
	text := strings.Repeat("k", 32)
	for _, c := range []struct{ content, want string }{
		{text, text},
		{text + "\n", text},
		{text + "\r\n", text},
		{text + "\n\n", text + "\n"},
		{" " + text + "\n", " " + text},
		{strings.Repeat("k", 4096) + "\r\n", strings.Repeat("k", 4096)},
		{strings.Repeat("k", 4097), ""},
		{strings.Repeat("k", 1<<20), ""},
		{text[1:] + "\n", ""},
		{"", ""},
	} {
		file := filepath.Join(t.TempDir(), "key")
		if err := os.WriteFile(file, []byte(c.content), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := readHashKey(file)
		if string(got) != c.want || (err == nil) != (c.want != "") {
			t.Errorf("readHashKey of %d bytes = %d bytes, %v, want %d bytes", len(c.content), len(got), err, len(c.want))
		}
		if err != nil && strings.Contains(err.Error(), "kkkk") {
			t.Errorf("readHashKey said %v, which shows the key", err)
		}
	}
}

// Nothing may wait before the service listens: not for somebody who never writes.
func TestAHashKeyIsInARegularFile(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	writer, err := os.OpenFile(pipe, os.O_RDWR, 0) // Linux does not wait for a reader then
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = writer.Close() }()
	if _, err := readHashKey(pipe); err == nil || !strings.Contains(err.Error(), "is not a regular file") {
		t.Errorf("readHashKey of a pipe said %v, want that it is no regular file", err)
	}
}
