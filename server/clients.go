package server

import (
	"crypto/x509"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// Clients is a list of names that client certificates may have. Use [ParseClients].
type Clients []clientName

// clientName is one name, or all that a pattern means.
type clientName struct {
	kind   nameKind
	text   string // of a pattern without its star
	prefix bool   // a URI below text
	label  bool   // a host name that is one label before text
}

type nameKind int

const (
	hostName nameKind = iota
	uriName
	ipName
)

// ParseClients reads names: a URI (it has ://), which may end in /* for all below it;
// an IP address; or the name of a host, which may begin with *. for any one label.
func ParseClients(names []string) (Clients, error) {
	var all Clients
	for _, name := range names {
		c, err := parseClient(name)
		if err != nil {
			return nil, fmt.Errorf("%q %w", name, err)
		}
		all = append(all, c)
	}
	return all, nil
}

func parseClient(name string) (clientName, error) {
	if name == "" {
		return clientName{}, fmt.Errorf("is no name; give a URI, a host's name or an IP address, as in the certificate")
	}
	if ip, err := netip.ParseAddr(name); err == nil {
		return clientName{kind: ipName, text: ip.Unmap().String()}, nil
	}
	if strings.Contains(name, "://") {
		c := clientName{kind: uriName, text: name}
		if text, ok := strings.CutSuffix(name, "/*"); ok {
			c.text, c.prefix = text+"/", true
		}
		u, err := url.Parse(c.text)
		switch {
		case strings.Contains(c.text, "*"):
			return c, fmt.Errorf("has a * elsewhere than in a last /*; write a URI, or one that ends in /*")
		case err != nil || u.Scheme == "" || u.Host == "":
			return c, fmt.Errorf("is no URI with a host, such as spiffe://example.org/edge or spiffe://example.org/edge/*")
		}
		return c, nil
	}
	c := clientName{text: lower(name)}
	if text, ok := strings.CutPrefix(c.text, "*"); ok && strings.HasPrefix(text, ".") {
		c.text, c.label = text, true
	}
	for label := range strings.SplitSeq(strings.TrimPrefix(c.text, "."), ".") {
		if label == "" || strings.ContainsFunc(label, func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '_'
		}) {
			return c, fmt.Errorf("is no name of a host, such as edge.example.org or *.example.org")
		}
	}
	return c, nil
}

// lower is the text in small letters: as names of hosts are compared, ASCII alone.
func lower(name string) string {
	return strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, name)
}

// Have reports whether a certificate has one of the names. Its subject is no name:
// RFC 6125 calls that past use.
func (c Clients) Have(cert *x509.Certificate) bool {
	return slices.ContainsFunc(c, func(n clientName) bool {
		switch n.kind {
		case uriName:
			return slices.ContainsFunc(cert.URIs, func(u *url.URL) bool { return n.meansURI(u.String()) })
		case ipName:
			for _, b := range cert.IPAddresses {
				if ip, ok := netip.AddrFromSlice(b); ok && ip.Unmap().String() == n.text {
					return true
				}
			}
			return false
		case hostName:
			return slices.ContainsFunc(cert.DNSNames, n.meansHost)
		}
		return false
	})
}

func (n clientName) meansURI(uri string) bool {
	if !n.prefix {
		return uri == n.text
	}
	below, ok := strings.CutPrefix(uri, n.text)
	if !ok {
		return false
	}
	// What has no plain path might mean another place.
	for segment := range strings.SplitSeq(below, "/") {
		if segment == "" || segment == "." || segment == ".." || strings.ContainsAny(segment, "?#%") {
			return false
		}
	}
	return true
}

func (n clientName) meansHost(name string) bool {
	name = lower(name)
	if !n.label {
		return name == n.text
	}
	label, ok := strings.CutSuffix(name, n.text)
	return ok && label != "" && !strings.Contains(label, ".")
}

// Names are those of a certificate that a list may have.
func Names(cert *x509.Certificate) []string {
	list := slices.Clone(cert.DNSNames)
	for _, ip := range cert.IPAddresses {
		list = append(list, ip.String())
	}
	for _, u := range cert.URIs {
		list = append(list, u.String())
	}
	return list
}
