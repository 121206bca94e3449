package storetest

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Authority signs certificates for a test.
type Authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

// NewAuthority makes an authority of a test's own.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	key, cert := sign(t, &x509.Certificate{
		SerialNumber: serial(t), Subject: pkix.Name{CommonName: "weir's tests " + rand.Text()},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, nil, nil)
	return &Authority{key, cert}
}

func serial(t testing.TB) *big.Int {
	t.Helper()
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 64))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Pair is a certificate and its key.
type Pair struct {
	Leaf *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Issue makes a certificate, for servers and clients, with names: URIs (with ://), IP
// addresses, and names of hosts. Changes are made before it is signed.
func (a *Authority) Issue(t testing.TB, names []string, changes ...func(*x509.Certificate)) Pair {
	t.Helper()
	c := &x509.Certificate{
		SerialNumber: serial(t), Subject: pkix.Name{CommonName: "a subject that nobody looks at"},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, name := range names {
		if ip, err := netip.ParseAddr(name); err == nil {
			c.IPAddresses = append(c.IPAddresses, net.IP(ip.AsSlice()))
		} else if strings.Contains(name, "://") {
			uri, err := url.Parse(name)
			if err != nil {
				t.Fatal(err)
			}
			c.URIs = append(c.URIs, uri)
		} else {
			c.DNSNames = append(c.DNSNames, name)
		}
	}
	for _, change := range changes {
		change(c)
	}
	key, cert := sign(t, c, a.cert, a.key)
	return Pair{cert, key}
}

// TLS is the pair as crypto/tls takes it.
func (p Pair) TLS() tls.Certificate {
	return tls.Certificate{Certificate: [][]byte{p.Leaf.Raw}, PrivateKey: p.key, Leaf: p.Leaf}
}

// PEM are the texts of the certificate and of its key.
func (p Pair) PEM(t testing.TB) (cert, key []byte) {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(p.key)
	if err != nil {
		t.Fatal(err)
	}
	return certPEM(p.Leaf), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// Write writes the pair into two files of a folder, as those who renew certificates
// should: a reader finds the old file or the new one.
func (p Pair) Write(t testing.TB, dir string) (certFile, keyFile string) {
	t.Helper()
	cert, key := p.PEM(t)
	certFile, keyFile = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	Replace(t, keyFile, key)
	Replace(t, certFile, cert)
	return certFile, keyFile
}

// PEM is the text of the certificates of authorities.
func (a *Authority) PEM(others ...*Authority) []byte {
	text := certPEM(a.cert)
	for _, o := range others {
		text = append(text, certPEM(o.cert)...)
	}
	return text
}

// Write writes the authority's certificate into a file of a folder.
func (a *Authority) Write(t testing.TB, dir string) (caFile string) {
	t.Helper()
	caFile = filepath.Join(dir, "ca.crt")
	Replace(t, caFile, a.PEM())
	return caFile
}

// Pool trusts the authority.
func (a *Authority) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return pool
}

func certPEM(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
}

// Replace puts a file in the place of another at once.
func Replace(t testing.TB, path string, text []byte) {
	t.Helper()
	next := path + ".next"
	if err := os.WriteFile(next, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, path); err != nil {
		t.Fatal(err)
	}
}
