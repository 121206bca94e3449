package main

import (
	"strings"
	"testing"
	"time"
)

func TestProgressIsToldOnceItTakesASecond(t *testing.T) {
	var b strings.Builder
	now := time.Unix(0, 0)
	p := progress{to: &b, now: func() time.Time { return now }, began: now}
	for i := range 13 { // one each 100 ms
		p.files(i)
		now = now.Add(100 * time.Millisecond)
	}
	p.done()
	if got, want := b.String(), "\rreading: 10 files\x1b[K\rreading: 12 files\x1b[K\r\x1b[K"; got != want {
		t.Errorf("it told %q, want %q", got, want)
	}

	b.Reset()
	p = progress{to: &b, now: func() time.Time { return now }, began: now}
	p.files(1)
	p.done()
	if b.Len() > 0 {
		t.Errorf("it told %q of what took no time, want nothing", b.String())
	}
}

func TestProgressIsNotToldWhereNobodyLooks(t *testing.T) {
	now := time.Unix(0, 0)
	p := progress{now: func() time.Time { return now.Add(time.Hour) }, began: now}
	p.files(1) // and does not panic
	p.done()
	if !p.told.IsZero() {
		t.Error("it told something")
	}
}
