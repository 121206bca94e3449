package server_test

import (
	"crypto/x509"
	"net"
	"net/url"
	"strings"
	"testing"

	"weir/server"
)

// named is a certificate with these names: URIs have ://.
func named(t *testing.T, names ...string) *x509.Certificate {
	t.Helper()
	c := &x509.Certificate{}
	for _, name := range names {
		switch ip := net.ParseIP(name); {
		case ip != nil:
			c.IPAddresses = append(c.IPAddresses, ip)
		case strings.Contains(name, "://"):
			u, err := url.Parse(name)
			if err != nil {
				t.Fatal(err)
			}
			c.URIs = append(c.URIs, u)
		default:
			c.DNSNames = append(c.DNSNames, name)
		}
	}
	return c
}

func TestAListHasTheNamesThatItSays(t *testing.T) {
	for _, tt := range []struct {
		list string // separated by spaces
		yes  []string
		no   []string
	}{
		{
			"edge.example.org",
			[]string{"edge.example.org", "EDGE.Example.ORG"},
			[]string{"a.edge.example.org", "edge.example.org.evil.org", "edge.example.or", "xedge.example.org", "*.example.org", "spiffe://edge.example.org/x", "edge.example.org."},
		},
		{
			"*.example.org",
			[]string{"edge.example.org", "Jobs.example.org"},
			[]string{"example.org", ".example.org", "a.b.example.org", "edge.example.org.evil.org", "edgeexample.org"},
		},
		{
			"spiffe://example.org/ns/edge/sa/envoy",
			[]string{"spiffe://example.org/ns/edge/sa/envoy"},
			[]string{
				"spiffe://example.org/ns/edge/sa/envoy2", "spiffe://example.org/ns/edge/sa/envoy/x", "spiffe://example.org/ns/edge/sa/Envoy",
				"spiffe://example.org/ns/edge/sa/envoy?x", "spiffe://evil.org/ns/edge/sa/envoy", "spiffe://example.org/ns/edge/sa",
			},
		},
		{
			"spiffe://example.org/ns/edge/*",
			[]string{"spiffe://example.org/ns/edge/sa", "spiffe://example.org/ns/edge/sa/envoy"},
			[]string{
				"spiffe://example.org/ns/edge", "spiffe://example.org/ns/edge/", "spiffe://example.org/ns/edge2/sa", "spiffe://example.org/ns/edge//sa",
				"spiffe://example.org/ns/edge/../jobs", "spiffe://example.org/ns/edge/./sa", "spiffe://example.org/ns/edge/%2e%2e/jobs", "spiffe://example.org/ns/edge/sa?x=y",
				"spiffe://example.org.evil.org/ns/edge/sa", "spiffe://example.org@evil.org/ns/edge/sa", "https://example.org/ns/edge/sa",
			},
		},
		{"10.0.0.7", []string{"10.0.0.7", "::ffff:10.0.0.7"}, []string{"10.0.0.8"}},
		{"2001:db8::7", []string{"2001:0db8:0:0::7"}, []string{"2001:db8::8"}},
		{"a.example.org spiffe://b/c", []string{"a.example.org", "spiffe://b/c"}, []string{"b.example.org", "b"}},
	} {
		list, err := server.ParseClients(strings.Fields(tt.list))
		if err != nil {
			t.Errorf("ParseClients(%q): %v", tt.list, err)
			continue
		}
		for want, names := range map[bool][]string{true: tt.yes, false: tt.no} {
			for _, name := range names {
				if got := list.Have(named(t, name)); got != want {
					t.Errorf("%q has %q: %v, want %v", tt.list, name, got, want)
				}
				if got := list.Have(named(t, "x.example", name, "spiffe://x/y", "192.0.2.1")); got != want {
					t.Errorf("%q has %q among others: %v, want %v", tt.list, name, got, want)
				}
			}
		}
		subject := named(t)
		subject.Subject.CommonName = tt.yes[0]
		subject.EmailAddresses = []string{tt.yes[0]}
		if list.Have(subject) {
			t.Errorf("%q has a subject of that name, want names (SAN) alone", tt.list)
		}
	}
}

func TestAListThatCannotBeMeantIsWrong(t *testing.T) {
	for name, want := range map[string]string{
		"":                        `"" is no name; give a URI, a host's name or an IP address, as in the certificate`,
		"*":                       `"*" is no name of a host, such as edge.example.org or *.example.org`,
		"*.":                      `"*." is no name of a host`,
		"a.*.org":                 `"a.*.org" is no name of a host`,
		"edge*.example.org":       `is no name of a host`,
		"*.*.org":                 `is no name of a host`,
		"edge.example.org.":       `is no name of a host`,
		"edge.example.org:8081":   `is no name of a host`,
		"10.0.0.0/8":              `is no name of a host`,
		"CN=edge":                 `is no name of a host`,
		" edge":                   `is no name of a host`,
		"édge.example.org":        `is no name of a host`,
		"spiffe://*":              `is no URI with a host, such as spiffe://example.org/edge or spiffe://example.org/edge/*`,
		"spiffe://*/edge":         `has a * elsewhere than in a last /*`,
		"spiffe://a/*/b":          `has a * elsewhere than in a last /*`,
		"spiffe://a/b*":           `has a * elsewhere than in a last /*`,
		"spiffe:///edge":          `is no URI with a host`,
		"spiffe:///*":             `is no URI with a host`,
		"://a":                    `is no URI with a host`,
		"spiffe://a b":            `is no URI with a host`,
		"spiffe://example.org/%z": `is no URI with a host`,
	} {
		if list, err := server.ParseClients([]string{"good.example.org", name}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ParseClients(%q) = %v, %v, want an error with %q", name, list, err, want)
		}
	}
}
