package server

import (
	"net/http"
	"net/http/pprof"
)

// Admin returns what only operators may see: the policies in force, and
// profiles. Operators are those of [Access.Admin], if it has anybody; if not, all who
// reach the port.
func (s *Server) Admin() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /rlconfig", s.rlconfig)
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	if s.access == nil || len(s.access.Admin) == 0 {
		return mux
	}
	return s.guardPage(areaAdmin, mux)
}

func (s *Server) rlconfig(w http.ResponseWriter, _ *http.Request) {
	set := s.policies()
	if set == nil {
		http.Error(w, errNoPolicy.Error(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_ = set.Describe(w) // the client has gone
}
