// Package main imitates a service that makes images: each request is a job that takes a while. It has no
// limits of its own, and counts how many it is asked to do at once.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s := service{accounts: map[string]*account{}}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /images", s.work)
	mux.HandleFunc("POST /done", s.done)
	mux.HandleFunc("GET /counts", s.counts)
	mux.HandleFunc("DELETE /counts", s.forget)
	server := &http.Server{Addr: ":9000", Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	if err := server.ListenAndServe(); ctx.Err() == nil {
		_, _ = fmt.Fprintf(os.Stderr, "imageservice: %v\n", err)
		os.Exit(1)
	}
}

// service counts the jobs that run.
type service struct {
	mu       sync.Mutex
	accounts map[string]*account // that have jobs
	seen     counts
}

// account is one whose jobs run.
type account struct {
	jobs int
	done chan struct{} // a value ends a job
}

// counts is what the service has seen since it was last asked to forget.
type counts struct {
	Begun    int `json:"begun"`
	InFlight int `json:"in_flight"`
	// MostInFlight and MostOfOneAccount are maxima.
	MostInFlight     int `json:"most_in_flight"`
	MostOfOneAccount int `json:"most_of_one_account"`
}

// work does a job of the length that is asked for: POST /images?work=2s.
func (s *service) work(w http.ResponseWriter, r *http.Request) {
	length, err := time.ParseDuration(r.URL.Query().Get("work"))
	if err != nil {
		http.Error(w, "work: "+err.Error(), http.StatusBadRequest)
		return
	}
	name := r.Header.Get("x-account")
	done := s.start(name)
	defer s.end(name) // before the response ends
	select {
	case <-time.After(length):
	case <-done:
	case <-r.Context().Done(): // whoever asked has gone
		return
	}
	_, _ = fmt.Fprintln(w, "an image")
}

// done ends a job of an account before its time: POST /done?account=alice.
func (s *service) done(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	a := s.accounts[r.URL.Query().Get("account")]
	s.mu.Unlock()
	if a == nil {
		http.Error(w, "no job of that account runs", http.StatusNotFound)
		return
	}
	select {
	case a.done <- struct{}{}:
	case <-r.Context().Done():
	}
}

func (s *service) start(name string) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen.Begun++
	s.seen.InFlight++
	s.seen.MostInFlight = max(s.seen.MostInFlight, s.seen.InFlight)
	if name == "" {
		return nil // nobody's
	}
	a := s.accounts[name]
	if a == nil {
		a = &account{done: make(chan struct{})}
		s.accounts[name] = a
	}
	a.jobs++
	s.seen.MostOfOneAccount = max(s.seen.MostOfOneAccount, a.jobs)
	return a.done
}

func (s *service) end(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen.InFlight--
	a := s.accounts[name]
	if a == nil {
		return
	}
	a.jobs--
	if a.jobs == 0 {
		delete(s.accounts, name)
	}
}

func (s *service) counts(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	seen := s.seen
	s.mu.Unlock()
	w.Header().Set("content-type", "application/json")
	_ = json.NewEncoder(w).Encode(seen) // who has gone does not need it
}

// forget starts the counts anew, with what runs now.
func (s *service) forget(http.ResponseWriter, *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = counts{InFlight: s.seen.InFlight, MostInFlight: s.seen.InFlight}
	for _, a := range s.accounts {
		s.seen.MostOfOneAccount = max(s.seen.MostOfOneAccount, a.jobs)
	}
}
