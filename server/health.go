package server

import (
	"encoding/json"
	"net/http"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	weirv1 "weir/proto/weir/v1"
)

// services are the names that gRPC health knows; "" is the whole server, and
// ratelimit what envoyproxy/ratelimit's users ask for.
var services = []string{"", "ratelimit", rls.RateLimitService_ServiceDesc.ServiceName, weirv1.LeaseService_ServiceDesc.ServiceName}

// ready: policies are loaded, the store has been found, and the server is not
// about to stop. A store that goes away later makes it degraded, not unready, unless
// that is asked for: the main path goes on. It is away then if it does not answer a look,
// or keeps a breaker open: a call that fails now and then is no reason to leave.
func (s *Server) ready() bool {
	lost := s.mustHave && (s.storeLost.Load() || s.breakers.someOpen())
	return s.policies() != nil && s.storeFound.Load() && !s.draining.Load() && !lost
}

func (s *Server) reportHealth() {
	s.reporting.Lock()
	defer s.reporting.Unlock()
	status := healthpb.HealthCheckResponse_NOT_SERVING
	if s.ready() {
		status = healthpb.HealthCheckResponse_SERVING
	}
	for _, name := range services {
		s.health.SetServingStatus(name, status)
	}
}

// Health is what /healthz tells.
type Health struct {
	// Status is ok, degraded (the store is away: decisions are bypassed),
	// not_ready or draining. The HTTP code is 200 for the first two, else 503.
	Status string `json:"status"`
	// Policies says whether policies are loaded, and of which domains.
	Policies bool     `json:"policies_loaded"`
	Domains  []string `json:"domains,omitempty"`
	// Policy is which they are, and what is wrong with the files.
	Policy PolicyHealth `json:"policy"`
	// Store is up, away, or not_found if it has never answered.
	Store string `json:"store"`
}

// PolicyHealth is what /healthz tells of the policy files.
type PolicyHealth struct {
	// Version of the policies in force, that replicas with the same files share;
	// empty without any.
	Version string `json:"version,omitempty"`
	// LoadedAt is when they came into force, and AgeSeconds how long ago that was.
	LoadedAt   time.Time `json:"loaded_at,omitzero"`
	AgeSeconds int64     `json:"age_seconds"`
	// Wrong is how many files are not in force as they are, and Errors why: the
	// first lines of what is wrong with them.
	Wrong  int      `json:"wrong_files"`
	Errors []string `json:"errors,omitempty"`
}

func (s *Server) policyHealth() PolicyHealth {
	l := s.loaded.Load()
	h := PolicyHealth{Wrong: l.wrong, Errors: l.problems[:min(len(l.problems), toldProblems)]}
	if l.set != nil {
		h.Version, h.LoadedAt = l.set.Version(), l.at.UTC().Truncate(time.Second)
		h.AgeSeconds = int64(time.Since(l.at).Seconds())
	}
	return h
}

func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	h := Health{Policy: s.policyHealth()}
	if set := s.policies(); set != nil {
		h.Policies, h.Domains = true, set.Domains()
	}
	h.Status, h.Store = s.state()
	code := http.StatusOK
	if h.Status == "draining" || h.Status == "not_ready" {
		code = http.StatusServiceUnavailable
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(h) // the client has gone
}

// state is the Status and the Store of [Health].
func (s *Server) state() (status, store string) {
	switch {
	case !s.storeFound.Load():
		store = "not_found"
	case s.storeAway.Load():
		store = "away"
	default:
		store = "up"
	}
	switch {
	case s.draining.Load():
		return "draining", store
	case !s.ready():
		return "not_ready", store
	case store != "up":
		return "degraded", store
	}
	return "ok", store
}
