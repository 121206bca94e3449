package server_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/encoding/protojson"

	"weir/envoy"
	"weir/store/storetest"
)

// post sends a body to /json.
func (s *service) post(t testing.TB, body string) *http.Response {
	t.Helper()
	w := httptest.NewRecorder()
	s.HTTP(s.registry).ServeHTTP(w, httptest.NewRequestWithContext(storetest.Context(t), http.MethodPost, "/json", strings.NewReader(body)))
	return w.Result()
}

// postText is the code of an answer, and the answer in the notation of ask.
func postText(t testing.TB, r *http.Response) string {
	t.Helper()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprint(r.StatusCode)
	if r.StatusCode != http.StatusOK && r.StatusCode != http.StatusTooManyRequests {
		return text
	}
	if got := r.Header.Get("Content-Type"); got != "application/json" {
		t.Errorf("Content-Type is %q, want application/json", got)
	}
	m := &rls.RateLimitResponse{}
	if err := protojson.Unmarshal(body, m); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return text + " " + answerText(m)
}

func TestJSONDecides(t *testing.T) {
	s := serve(t, `
domain: d
descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 5}}
  - {key: lane, concurrency: {max_in_flight: 1, lease: 1m}}
  - {key: pool, concurrency: {max_in_flight: 1, lease: 1m}, reject_as: pool}
  - {key: trial, token_bucket: {capacity: 1, refill: 1/d}, shadow_mode: true}
`)
	for _, test := range []struct{ name, body, want string }{
		{"one descriptor", `{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"1"}]}]}`, "200 OK [OK 4]"},
		{"in snake case, with hits", `{"domain":"d","hits_addend":2,"descriptors":[{"entries":[{"key":"a","value":"1"}]}]}`, "200 OK [OK 2]"},
		{"in camel case, with hits", `{"domain":"d","hitsAddend":2,"descriptors":[{"entries":[{"key":"a","value":"1"}]}]}`, "200 OK [OK 0]"},
		{"over the limit", `{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"1"}]},{"entries":[{"key":"a","value":"2"}]}]}`, "429 OVER [OVER 0][OK 5]"},
		{"an override", `{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"3"}],"limit":{"requests_per_unit":3,"unit":"HOUR"}}]}`, "200 OK [OK 2]"},
		{"a pool", `{"domain":"d","descriptors":[{"entries":[{"key":"pool","value":"1"}]}]}`, "200 OK [OK 0]"},
		{"a full pool", `{"domain":"d","descriptors":[{"entries":[{"key":"pool","value":"1"}]}]}`, "429 OVER [OVER 0]"},
		{"a shadow", `{"domain":"d","descriptors":[{"entries":[{"key":"trial","value":"1"}],"hitsAddend":"9"}]}`, "200 OK [OK nil]"},
		{"no match", `{"domain":"d","descriptors":[{"entries":[{"key":"b","value":"\\\"{{{"}]}]}`, "200 OK [OK nil]"},
		{"another domain", `{"domain":"e","descriptors":[{"entries":[{"key":"a","value":"1"}]}]}`, "200 OK [OK nil]"},
		{"as many descriptors as may be", `{"domain":"e","descriptors":[` + many(1024, `{"entries":[`+many(64, `{"key":"b"}`)+`]}`) + `]}`, "200 OK " + strings.Repeat("[OK nil]", 1024)},

		// Nothing of these is decided.
		{"nothing", "", "400"},
		{"broken JSON", `}`, "400"},
		{"cut off", `{"domain":"d","descriptors":[{"entries":[{"key":"a","val`, "400"},
		{"two messages", `{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"4"}]}]}{}`, "400"},
		{"an unknown field", `{"domain":"d","dominion":1,"descriptors":[{"entries":[{"key":"a","value":"4"}]}]}`, "400"},
		{"no UTF-8", `{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"` + "\xff\xfe" + `"}]}]}`, "400"},
		{"no UTF-8 in a field's name", `{"domain":"d","` + "\xff" + strings.Repeat("x", 500) + `":1}`, "400"},
		{"no object", `null`, "400"},
		{"an empty message", `{}`, "400"},
		{"no domain", `{"descriptors":[{"entries":[{"key":"a","value":"4"}]}]}`, "400"},
		{"no descriptors", `{"domain":"d"}`, "400"},
		{"no entries", `{"domain":"d","descriptors":[{}]}`, "400"},
		{"a null descriptor", `{"domain":"d","descriptors":[null]}`, "400"},
		{"an empty key", `{"domain":"d","descriptors":[{"entries":[{"value":"4"}]}]}`, "400"},
		{"negative hits", `{"domain":"d","hitsAddend":-1,"descriptors":[{"entries":[{"key":"a","value":"4"}]}]}`, "400"},
		{"R05: an override of unit UNKNOWN", `{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"4"}],"limit":{"requestsPerUnit":3,"unit":"UNKNOWN"}}]}`, "400"},
		{"R05: an override without a unit", `{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"4"}],"limit":{"requestsPerUnit":3}}]}`, "400"},
		{"R05: an override of unit 99", `{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"4"}],"limit":{"requestsPerUnit":3,"unit":99}}]}`, "400"},
		{"an override of a unit that is none", `{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"4"}],"limit":{"requestsPerUnit":3,"unit":"FORTNIGHT"}}]}`, "400"},
		{"too many descriptors", `{"domain":"d","descriptors":[` + many(1025, `{"entries":[{"key":"a","value":"4"}]}`) + `]}`, "400"},
		{"too many entries", `{"domain":"d","descriptors":[{"entries":[` + many(65, `{"key":"a"}`) + `]}]}`, "400"},
		{"a million empty descriptors", `{"domain":"d","descriptors":[` + many(1_000_000, `{}`) + `]}`, "400"},
		{"a million empty entries", `{"domain":"d","descriptors":[{"entries":[` + many(1_000_000, `{}`) + `]}]}`, "400"},
		{"four million brackets", strings.Repeat(`[`, 4_000_000), "400"},
		{"a release of nothing", `{"domain":"d","descriptors":[{"entries":[{"key":"weir.event","value":"release"}]}]}`, "400"},
		{"usage of no stream", `{"domain":"d","descriptors":[{"entries":[{"key":"weir.event","value":"usage"},{"key":"a","value":"4"}]}]}`, "400"},
		{"a body as large as may be", ofSize(4 << 20), "200 OK [OK nil]"},
		{"a larger body", ofSize(4<<20 + 1), "413"},

		{"afterwards", `{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"4"}]}]}`, "200 OK [OK 4]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := postText(t, s.post(t, test.body)); got != test.want {
				t.Errorf("%.200s = %.200s, want %.200s", test.body, got, test.want)
			}
		})
	}
	s.expectMetrics(t, "afterwards", map[string]float64{
		`weir_decisions_total{domain="d",verdict="admitted"}`: 9,
		`weir_decisions_total{domain="d",verdict="refused"}`:  2,
	})
}

// many is text n times, with commas.
func many(n int, text string) string { return strings.TrimSuffix(strings.Repeat(text+",", n), ",") }

// ofSize is a message of n bytes.
func ofSize(n int) string {
	const start, end = `{"domain":"d","descriptors":[{"entries":[{"key":"b","value":"`, `"}]}]}`
	return start + strings.Repeat("x", n-len(start)-len(end)) + end
}

// The answer's headers are HTTP's, but for the content type, and its metadata tells
// a lane from a pool.
func TestJSONTellsARefusalInFull(t *testing.T) {
	s := newService(t, envoy.Options{RateLimitHeaders: true})
	s.setPolicy(t, lanePolicy)
	for _, test := range []struct{ key, class, reason string }{{"pool", "pool", "pool_full"}, {"day", "lane", "window_full"}} {
		body := `{"domain":"d","descriptors":[{"entries":[{"key":"` + test.key + `","value":"images"}],"hitsAddend":5}]}`
		r := s.post(t, body)
		if r.StatusCode != http.StatusOK || r.Header.Get("Ratelimit") == "" || r.Header.Get("Retry-After") != "" {
			t.Errorf("%s: %d %v, want 200, a ratelimit header and no retry-after", test.key, r.StatusCode, r.Header)
		}
		r = s.post(t, body)
		text, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		m := &rls.RateLimitResponse{}
		if err := protojson.Unmarshal(text, m); err != nil {
			t.Fatal(err)
		}
		fields := m.GetDynamicMetadata().GetFields()
		if r.StatusCode != http.StatusTooManyRequests || fields["reject_class"].GetStringValue() != test.class || fields["reason"].GetStringValue() != test.reason {
			t.Errorf("%s: %d %v, want 429, %s, %s", test.key, r.StatusCode, fields, test.class, test.reason)
		}
		for _, h := range m.GetResponseHeadersToAdd() {
			if got := r.Header.Get(h.GetKey()); h.GetKey() != "content-type" && got != h.GetValue() {
				t.Errorf("%s: header %s is %q, want %q", test.key, h.GetKey(), got, h.GetValue())
			}
		}
		if got := r.Header.Values("Content-Type"); len(got) != 1 || got[0] != "application/json" || r.Header.Get("Retry-After") == "" {
			t.Errorf("%s: headers are %v, want one content-type, and retry-after", test.key, r.Header)
		}
	}
}

func TestJSONReleases(t *testing.T) {
	s := serve(t, lanePolicy)
	id := acquire(t, s.leases, typed("pool", "images")).GetLease().GetId()
	body := func(domain, id string) string {
		return `{"domain":"` + domain + `","descriptors":[{"entries":[{"key":"weir.event","value":"release"},{"key":"weir.lease_id","value":"` + id + `"},{"key":"weir.outcome","value":"ok"}]}]}`
	}
	for _, b := range []string{body("other", id), body("d", strings.Repeat("A", 22)+".d")} {
		if got := postText(t, s.post(t, b)); got != "200 OK [OK nil]" {
			t.Errorf("%s = %s", b, got)
		}
	}
	if acquire(t, s.leases, typed("pool", "images")).GetAdmitted() {
		t.Error("another lease's release freed the pool")
	}
	if got := postText(t, s.post(t, body("d", "nonsense"))); got != "400" {
		t.Errorf("a release of nonsense = %s, want 400", got)
	}
	if got := postText(t, s.post(t, body("d", id))); got != "200 OK [OK nil]" {
		t.Errorf("a release = %s", got)
	}
	if !acquire(t, s.leases, typed("pool", "images")).GetAdmitted() {
		t.Error("a release by /json freed nothing")
	}
}

func TestJSONWantsPOSTAndPolicies(t *testing.T) {
	s := newService(t, envoy.Options{})
	if got := postText(t, s.post(t, `{"domain":"d","descriptors":[{"entries":[{"key":"a"}]}]}`)); got != "503" {
		t.Errorf("without policies = %s, want 503", got)
	}
	for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodDelete} {
		w := httptest.NewRecorder()
		s.HTTP(s.registry).ServeHTTP(w, httptest.NewRequest(method, "/json", nil))
		if w.Code != http.StatusMethodNotAllowed || w.Header().Get("Allow") != "POST" {
			t.Errorf("%s = %d, Allow %q, want 405, POST", method, w.Code, w.Header().Get("Allow"))
		}
	}
}

// A decision without the store is an admission that says so; a release asks to be
// sent again.
func TestJSONWithoutTheStoreAdmitsAndSaysSo(t *testing.T) {
	redis := storetest.StartRedisTCP(t, storetest.AnyRedis(t))
	redis.Kill()
	r := newReplica(t, outagePolicy, "--redis", redis.URL, "--store-timeout", "100ms")
	post := func(body string) *http.Response {
		t.Helper()
		answer, err := http.Post("http://"+r.HTTP+"/json", "", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = answer.Body.Close() })
		return answer
	}
	if got := postText(t, post(`{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"1"}]}]}`)); got != "200 OK [OK nil]" {
		t.Errorf("a decision = %s, want an admission", got)
	}
	if got := r.bypassed(t, "a"); got != 1 {
		t.Errorf("%v checks were bypassed, want 1", got)
	}
	release := `{"domain":"d","descriptors":[{"entries":[{"key":"weir.event","value":"release"},{"key":"weir.lease_id","value":"AAAAAAAAAAAAAAAAAAAAAA.d"}]}]}`
	if got := postText(t, post(release)); got != "503" {
		t.Errorf("a release = %s, want 503", got)
	}
	redis.Start(t)
	r.ready(t)
	storetest.Eventually(t, "a release is answered", func() bool { return postText(t, post(release)) == "200 OK [OK nil]" })
}

// FuzzJSON: any body has an answer or an error of the sender's, and what is no
// message decides nothing.
func FuzzJSON(f *testing.F) {
	for _, body := range []string{
		"", "{}", `{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"\\"{}"}],"hitsAddend":"3","limit":{"unit":99}}]}`,
		`{"domain":"d","hits_addend":4294967295,"descriptors":[{"entries":[{"key":"lane","value":"\u0000"}],"isNegativeHits":true},null]}`,
		`{"domain":"d","descriptors":[{"entries":[{"key":"weir.event","value":"release"},{"key":"weir.lease_id","value":"AAAAAAAAAAAAAAAAAAAAAA.d"}]}]}`,
		`{{{{"[}}]`,
	} {
		f.Add([]byte(body))
	}
	s := serve(f, fuzzPolicy)
	f.Fuzz(func(t *testing.T, body []byte) {
		s.clock.Advance(48 * time.Hour)
		m := &rls.RateLimitRequest{}
		bad := protojson.Unmarshal(body, m) != nil
		switch r := s.post(t, string(body)); r.StatusCode {
		case http.StatusOK, http.StatusTooManyRequests:
			if bad || m.GetDomain() == "" || len(m.GetDescriptors()) == 0 {
				t.Errorf("%q has an answer", body)
			}
			if got := postText(t, r); strings.Count(got, "[") != len(m.GetDescriptors()) {
				t.Errorf("%q = %s, want a status for each descriptor", body, got)
			}
		case http.StatusBadRequest, http.StatusRequestEntityTooLarge:
		default:
			t.Errorf("%q = %d", body, r.StatusCode)
		}
	})
}
