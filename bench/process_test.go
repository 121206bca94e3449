package main

import (
	"os"
	"strings"
	"testing"
	"time"
)

func TestBusyIsWithoutIdleAndWaitingTime(t *testing.T) {
	got, err := busy("cpu  100 20 3 90000 800 4 50 7 0 0\ncpu0 1 2 3\n")
	if want := 1770 * time.Millisecond; got != want || err != nil {
		t.Errorf("busy = %v, %v; want %v", got, err, want)
	}
	for _, text := range []string{"", "intr 1 2 3", "cpu 1 2", "cpu a b c d e f g h"} {
		if _, err := busy(text); err == nil {
			t.Errorf("busy(%q) is no error", text)
		}
	}
}

func TestAProcessTellsWhatItUses(t *testing.T) {
	if n, err := residentMemory(os.Getpid()); n <= 0 || err != nil {
		t.Errorf("residentMemory of this process = %d, %v", n, err)
	}
	if d, err := cpuTime(os.Getpid()); d <= 0 || err != nil {
		t.Errorf("cpuTime of this process = %v, %v", d, err)
	}
	if _, err := cpuTime(maxPID); err == nil || !strings.Contains(err.Error(), "process 4194304") {
		t.Errorf("cpuTime of no process: %v", err)
	}
}
