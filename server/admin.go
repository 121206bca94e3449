package server

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/pprof"
	"strings"
)

// Admin returns what only operators may see and do: the policies in force, profiles, who holds
// what, and to forget it. Operators are those of [Access.Admin], if it has anybody; if not, all who
// reach the port. A page of another site, which an operator's browser shows, can change nothing.
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
	for pattern, answer := range map[string]func(*http.Request) (any, error){
		"GET /leases":          s.adminLeases,
		"POST /leases/release": s.adminRelease,
		"POST /reset":          s.adminReset,
		"POST /explain":        s.adminExplain,
	} {
		mux.Handle(pattern, answerJSON(answer))
	}
	guarded := http.NewCrossOriginProtection().Handler(mux)
	if s.access == nil || len(s.access.Admin) == 0 {
		return localOnly(guarded)
	}
	return s.guardPage(areaAdmin, guarded)
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
