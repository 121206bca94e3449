package server

import (
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weir/envoy"
	"weir/limit"
	"weir/policy"
)

// maxAdminBody is the longest body of a request on the admin port, in bytes: more than 1000
// lease ids have.
const maxAdminBody = 1 << 20

// localOnly refuses a name other than localhost in Host, of a port that is open to all who reach
// it: a site whose name was made to mean this address is no other site to a browser.
func localOnly(pages http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isLocalName(r.Host) {
			http.Error(w, "call the admin port by its IP address or as localhost, not by another name; or name who may call it by --admin-clients", http.StatusForbidden)
			return
		}
		pages.ServeHTTP(w, r)
	})
}

// answerJSON is a page that answers in JSON.
func answerJSON(answer func(*http.Request) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
				http.Error(w, "send JSON, with Content-Type: application/json", http.StatusUnsupportedMediaType)
				return
			}
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxAdminBody)
		value, err := answer(r)
		if err != nil {
			err = toStatus(err)
			http.Error(w, status.Convert(err).Message(), httpCode(err))
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store") // lease ids are in it
		out := json.NewEncoder(w)
		out.SetEscapeHTML(false)
		_ = out.Encode(value) // the client has gone
	})
}

// isLocalName reports whether the host of a request is an address, or localhost.
func isLocalName(hostport string) bool {
	host, _, err := net.SplitHostPort(hostport)
	if err != nil {
		host = strings.TrimSuffix(strings.TrimPrefix(hostport, "["), "]")
	}
	_, err = netip.ParseAddr(host)
	return err == nil || strings.EqualFold(host, "localhost")
}

// readJSON reads the body of r into v, strictly.
func readJSON(r *http.Request, v any) error {
	in := json.NewDecoder(r.Body)
	in.DisallowUnknownFields()
	err := in.Decode(v)
	if err == nil {
		if _, end := in.Token(); end == nil || !errors.Is(end, io.EOF) {
			err = errors.New("something stands behind the object")
		}
	}
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		return status.Errorf(codes.ResourceExhausted, "the body has more than %d bytes", maxAdminBody)
	case err != nil:
		return badRequestf("the body is not what this page reads: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	return nil
}

// The bodies of the admin port. Durations are in whole milliseconds.
type (
	// AdminEntry is a key and a value of a descriptor.
	AdminEntry struct {
		Key   string `json:"key"`
		Value string `json:"value"`
	}
	// AdminDescriptor is one descriptor of a request.
	AdminDescriptor struct {
		Entries []AdminEntry `json:"entries"`
		Hits    *uint64      `json:"hits,omitempty"` // nil: the request's. Only /explain looks at it.
	}
)

// adminRequest is the policy's view of a request of the admin port. Entries that speak to weir
// are left out. An error is the caller's.
func adminRequest(domain string, descriptors []AdminDescriptor) (policy.Request, error) {
	r := policy.Request{Domain: domain, Descriptors: make([]policy.Descriptor, len(descriptors))}
	if err := envoy.CheckDomain(domain); err != nil {
		return r, badRequest{err}
	}
	if err := envoy.CheckDescriptors(len(descriptors)); err != nil {
		return r, badRequest{err}
	}
	for i, d := range descriptors {
		if err := envoy.CheckEntries(len(d.Entries)); err != nil {
			return r, badRequestf("descriptors[%d].%w", i, err)
		}
		for j, e := range d.Entries {
			if err := envoy.CheckKey(j, e.Key); err != nil {
				return r, badRequestf("descriptors[%d].%w", i, err)
			}
			if !strings.HasPrefix(e.Key, limit.ReservedPrefix) {
				r.Descriptors[i].Entries = append(r.Descriptors[i].Entries, limit.Entry{Key: e.Key, Value: e.Value})
			}
		}
		if d.Hits != nil {
			r.Descriptors[i].Hits, r.Descriptors[i].HasHits = *d.Hits, true
		}
	}
	return r, nil
}

// adminPolicies are the policies in force, if they know the domain. An error says what to do.
func (s *Server) adminPolicies(domain string) (*policy.Set, error) {
	set := s.policies()
	switch {
	case set == nil:
		return nil, errNoPolicy
	case !set.Has(domain):
		return nil, badRequestf("no policy has the domain %q; there are: %s", domain, few(set.Domains()))
	}
	return set, nil
}

// few are names for an error: the first ten.
func few(names []string) string {
	const most = 10
	more := ""
	if len(names) > most {
		names, more = names[:most], ", …"
	}
	return strings.Join(names, ", ") + more
}
