package server

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/pprof"
	"strings"
)

// Admin returns what only operators may see: the policies in force, and
// profiles. Operators are those of [Access.Admin], if it has anybody; if not, all who
// reach the port.
func (s *Server) Admin() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /rlconfig", s.rlconfig)
	if s.logLevel != nil {
		mux.HandleFunc("GET /loglevel", s.tellLogLevel)
		mux.HandleFunc("PUT /loglevel", s.changeLogLevel)
	}
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	if s.access == nil || len(s.access.Admin) == 0 {
		return mux
	}
	return s.guardPage(areaAdmin, mux)
}

func (s *Server) tellLogLevel(w http.ResponseWriter, _ *http.Request) {
	_, _ = fmt.Fprintln(w, strings.ToLower(s.logLevel.Level().String())) // the client has gone
}

func (s *Server) changeLogLevel(w http.ResponseWriter, r *http.Request) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(r.FormValue("level"))); err != nil {
		http.Error(w, "level must be debug, info, warn or error, as in /loglevel?level=debug", http.StatusBadRequest)
		return
	}
	old := s.logLevel.Level()
	s.logLevel.Set(level)
	s.log.WarnContext(r.Context(), "log level changed", "from", old, "to", level)
	s.tellLogLevel(w, r)
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
