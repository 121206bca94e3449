package server

import (
	"time"

	"weir/server/page"
)

// TakeSnapshot takes one of now, and not the last that the page took.
func (s *Server) TakeSnapshot() *page.Snapshot { return s.snapshot() }

// TakeSample reads the counters, as for the history.
func (s *Server) TakeSample() { s.count(time.Now()) }
