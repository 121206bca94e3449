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
func TestAHashKeyFromAPipeIsWhatHasBeenWrittenIntoIt(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readHashKey(pipe); err == nil || !strings.Contains(err.Error(), "0 bytes") {
		t.Errorf("readHashKey of a pipe without a writer said %v, want that it has 0 bytes", err)
	}
}
