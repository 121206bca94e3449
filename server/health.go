package server

import (
	"encoding/json"
	"net/http"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	weirv1 "weir/proto/weir/v1"
)

// services are the names that gRPC health knows; "" is the whole server, and
// ratelimit what envoyproxy/ratelimit's users ask for.
var services = []string{"", "ratelimit", rls.RateLimitService_ServiceDesc.ServiceName, weirv1.LeaseService_ServiceDesc.ServiceName}

// ready: policies are loaded, the store has been found, and the server is not
// about to stop. A store that goes away later makes it degraded, not unready:
// the main path goes on.
func (s *Server) ready() bool {
	return s.policies.Load() != nil && s.storeFound.Load() && !s.draining.Load()
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
	// Store is up, away, or not_found if it has never answered.
	Store string `json:"store"`
}

func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	h := Health{Status: "ok", Store: "up"}
	if set := s.policies.Load(); set != nil {
		h.Policies, h.Domains = true, set.Domains()
	}
	switch {
	case !s.storeFound.Load():
		h.Store = "not_found"
	case s.storeAway.Load():
		h.Store = "away"
	}
	code := http.StatusOK
	switch {
	case s.draining.Load():
		h.Status, code = "draining", http.StatusServiceUnavailable
	case !s.ready():
		h.Status, code = "not_ready", http.StatusServiceUnavailable
	case h.Store != "up":
		h.Status = "degraded"
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(h) // the client has gone
}
