package main

import (
	"io"
	"net/http"
	"strings"
	"sync"
)

// fake is a vendor that does what it is asked once for each Idempotency-Key. A job that
// says "busy" is told at first to come again in 2 s, and one that begins with
// "hold" is not answered at first.
type fake struct {
	arrived func(r *http.Request) // called for each, if set

	mu   sync.Mutex
	seen map[string]int // arrivals, by key
	done map[string]int // what was done, by key
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	if f.arrived != nil {
		f.arrived(r)
	}
	key := r.Header.Get("Idempotency-Key")
	f.mu.Lock()
	if f.seen == nil {
		f.seen, f.done = make(map[string]int), make(map[string]int)
	}
	f.seen[key]++
	first := f.seen[key] == 1
	f.mu.Unlock()

	switch {
	case first && string(text) == "busy":
		w.Header().Set("Retry-After", "2")
		w.WriteHeader(http.StatusTooManyRequests)
		return
	case first && strings.HasPrefix(string(text), "hold"):
		<-r.Context().Done()
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.done[key] == 0 {
		f.done[key]++
	}
}
