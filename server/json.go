package server

import (
	"errors"
	"io"
	"net/http"
	"regexp"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
)

// shouldRateLimit is ShouldRateLimit for those who speak HTTP, as
// envoyproxy/ratelimit has it: messages are protojson, and the code is 200 if the
// request is admitted and 429 if not, whatever its class, which stands in the
// metadata.
func (s *Server) shouldRateLimit(w http.ResponseWriter, r *http.Request) {
	answer, err := s.answerJSON(w, r)
	if err != nil {
		http.Error(w, status.Convert(err).Message(), httpCode(err))
		return
	}
	body, err := protojson.Marshal(answer)
	if err != nil { // values of requests may be no UTF-8; they are in no answer
		http.Error(w, "the answer cannot be written", http.StatusInternalServerError)
		return
	}
	for _, h := range answer.GetResponseHeadersToAdd() {
		w.Header().Add(h.GetKey(), h.GetValue())
	}
	w.Header().Set("Content-Type", "application/json") // not that of the answer's raw_body
	if answer.GetOverallCode() == rls.RateLimitResponse_OVER_LIMIT {
		w.WriteHeader(http.StatusTooManyRequests)
	}
	_, _ = w.Write(body) // the client has gone
}

// answerJSON decides the request of a body. Its error is a gRPC status.
func (s *Server) answerJSON(w http.ResponseWriter, r *http.Request) (*rls.RateLimitResponse, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxMessage))
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		return nil, status.Errorf(codes.ResourceExhausted, "the body has more than %d bytes", maxMessage)
	case err != nil:
		return nil, toStatus(badRequestf("the body cannot be read"))
	}
	if err := countObjects(body); err != nil {
		return nil, toStatus(err)
	}
	m := &rls.RateLimitRequest{}
	if err := protojson.Unmarshal(body, m); err != nil {
		return nil, toStatus(badRequestf("the body is no RateLimitRequest in JSON%s", place(err)))
	}
	return rateLimit{Server: s}.message(r.Context(), m)
}

// place is where an error of the decoder says that it is, if it does. The rest of what
// it says quotes the body.
func place(err error) string {
	if at := jsonPlace.FindStringSubmatch(err.Error()); at != nil {
		return ", at line " + at[1]
	}
	return ""
}

var jsonPlace = regexp.MustCompile(`\(line (\d+:\d+)\)`)

// countObjects is countFields for JSON: it refuses a body with too many parts
// before they are decoded. Objects in the outermost are descriptors, and those
// below their entries and limits. What is no JSON is left to the decoder.
func countObjects(body []byte) error {
	depth, descriptors, entries := 0, 0, 0
	text := false
	for i := 0; i < len(body); i++ {
		switch c := body[i]; {
		case text && c == '\\':
			i++
		case c == '"':
			text = !text
		case text:
		case c == '}':
			depth--
		case c == '{':
			switch depth++; {
			case depth == 2:
				descriptors++
			case depth > 2:
				entries++
			}
			if descriptors > maxFields {
				return tooManyFields()
			}
			if entries > maxEntries {
				return tooManyEntries()
			}
		}
	}
	return nil
}

// httpCode is where a gRPC status becomes an HTTP one.
func httpCode(err error) int {
	switch status.Code(err) {
	case codes.OK:
		return http.StatusOK
	case codes.InvalidArgument:
		return http.StatusBadRequest
	case codes.ResourceExhausted:
		return http.StatusRequestEntityTooLarge
	case codes.Unavailable:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}
