package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"weir/server"
)

// maxTLSFile bounds what is read of a file of certificates, in bytes.
const maxTLSFile = 1 << 20

// identity is a certificate, its key, and the authorities of clients, which are read
// again while the service runs. What is wrong leaves in force what was good. Use
// [newIdentity].
type identity struct {
	certFile, keyFile string
	clientCAFile      string // "": callers need no certificate
	now               func() time.Time
	log               *slog.Logger
	metrics           identityMetrics

	// Of the last look, which only one goroutine may take at a time: what was found,
	// good or bad.
	lastCertificate, lastAuthorities string

	inForce atomic.Pointer[material]
}

// material is what handshakes use. It does not change.
type material struct {
	certificate tls.Certificate
	clients     *x509.CertPool // nil: callers need no certificate
}

type identityMetrics struct {
	loads    *prometheus.CounterVec // file, result
	wrong    *prometheus.GaugeVec   // file
	notAfter *prometheus.GaugeVec   // file
}

// The words for the two parts of an identity.
const (
	ofCertificate = "certificate"
	ofClientCA    = "client_ca"
)

func newIdentityMetrics(r prometheus.Registerer) identityMetrics {
	f := promauto.With(r)
	return identityMetrics{
		loads: f.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_tls_loads_total",
			Help: "Files of TLS that were found changed, by result: loaded, or wrong, which leaves in force what was good.",
		}, []string{"file", "result"}),
		wrong: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "weir_tls_file_wrong",
			Help: "1 while a file of TLS is not in force as it is, since something is wrong with it, or has expired.",
		}, []string{"file"}),
		notAfter: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "weir_tls_certificate_not_after_timestamp_seconds",
			Help: "When what is in force expires: the certificate, or one of its chain; of client_ca the last of the authorities, after which no client gets in.",
		}, []string{"file"}),
	}
}

// newIdentity reads the files for the first time. Its errors are for who starts the
// service.
func newIdentity(ctx context.Context, certFile, keyFile, clientCAFile string, log *slog.Logger, r prometheus.Registerer) (*identity, error) {
	i := &identity{certFile: certFile, keyFile: keyFile, clientCAFile: clientCAFile, now: time.Now, log: log}
	_, _, certErr := i.readCertificate()
	_, _, caErr := i.readAuthorities()
	if err := errors.Join(certErr, caErr); err != nil {
		return nil, err
	}
	i.metrics = newIdentityMetrics(r)
	i.inForce.Store(&material{})
	i.read(ctx)
	return i, nil
}

// files are those to watch.
func (i *identity) files() []string {
	if i == nil {
		return nil
	}
	files := []string{i.certFile, i.keyFile}
	if i.clientCAFile != "" {
		files = append(files, i.clientCAFile)
	}
	return files
}

// read looks at the files, and puts in force what has changed and is good. What was
// told once is not told again.
func (i *identity) read(ctx context.Context) {
	if i == nil {
		return
	}
	next := *i.inForce.Load()
	pair, state, err := i.readCertificate()
	if i.changed(ctx, ofCertificate, &i.lastCertificate, state, err) {
		next.certificate = pair
		end := pair.Leaf.NotAfter
		for _, der := range pair.Certificate[1:] {
			if c, err := x509.ParseCertificate(der); err == nil && c.NotAfter.Before(end) {
				end = c.NotAfter
			}
		}
		i.metrics.notAfter.WithLabelValues(ofCertificate).Set(float64(end.Unix()))
		i.log.InfoContext(ctx, "certificate", "file", i.certFile, "serial", pair.Leaf.SerialNumber.Text(16),
			"names", server.Names(pair.Leaf), "not_after", pair.Leaf.NotAfter)
	}
	if i.clientCAFile != "" {
		authorities, state, err := i.readAuthorities()
		if i.changed(ctx, ofClientCA, &i.lastAuthorities, state, err) {
			next.clients = x509.NewCertPool()
			var end time.Time
			for _, c := range authorities {
				next.clients.AddCert(c)
				if c.NotAfter.After(end) {
					end = c.NotAfter
				}
			}
			i.metrics.notAfter.WithLabelValues(ofClientCA).Set(float64(end.Unix()))
			i.log.InfoContext(ctx, "authorities of clients", "file", i.clientCAFile, "certificates", len(authorities), "not_after", end)
		}
	}
	i.inForce.Store(&next)
}

// changed tells whether what was found is new and good, and counts and logs what is
// new. last is what was found before, and becomes what is found now.
func (i *identity) changed(ctx context.Context, file string, last *string, state string, err error) bool {
	if err != nil {
		state += err.Error()
	}
	if state == *last {
		return false
	}
	*last = state
	if err != nil {
		i.metrics.loads.WithLabelValues(file, "wrong").Inc()
		i.metrics.wrong.WithLabelValues(file).Set(1)
		i.log.ErrorContext(ctx, "a file of TLS is wrong: what was good before stays in force", "err", err)
		return false
	}
	i.metrics.loads.WithLabelValues(file, "loaded").Inc()
	i.metrics.loads.WithLabelValues(file, "wrong")
	i.metrics.wrong.WithLabelValues(file).Set(0)
	return true
}

// readCertificate reads the certificate and its key; state tells whether they are
// the same as before. No error shows any of the key.
func (i *identity) readCertificate() (pair tls.Certificate, state string, err error) {
	cert, certErr := readTLSFile("--tls-cert-file", i.certFile)
	key, keyErr := readTLSFile("--tls-key-file", i.keyFile)
	state = digest(cert, key)
	if err := errors.Join(certErr, keyErr); err != nil {
		return pair, state, err
	}
	pair, err = parsePair("--tls-cert-file "+i.certFile, "--tls-key-file "+i.keyFile, cert, key)
	if err != nil {
		return pair, state, err
	}
	switch now, leaf := i.now(), pair.Leaf; {
	case now.After(leaf.NotAfter):
		return pair, state, fmt.Errorf("--tls-cert-file %s has expired, on %s; renew it", i.certFile, told(leaf.NotAfter))
	case now.Before(leaf.NotBefore):
		return pair, state, fmt.Errorf("--tls-cert-file %s is not valid before %s; is the clock of this machine right?", i.certFile, told(leaf.NotBefore))
	}
	return pair, state, nil
}

// parsePair reads a certificate and its key. No error shows any of the key.
func parsePair(certFlag, keyFlag string, cert, key []byte) (tls.Certificate, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return pair, fmt.Errorf("%s, %s: %w; give a certificate in PEM, its intermediate authorities behind it, and its key without a passphrase", certFlag, keyFlag, err)
	}
	return pair, nil
}

// readAuthorities reads the authorities of clients, none if there is no file.
func (i *identity) readAuthorities() (authorities []*x509.Certificate, state string, err error) {
	if i.clientCAFile == "" {
		return nil, "", nil
	}
	text, err := readTLSFile("--tls-client-ca-file", i.clientCAFile)
	state = digest(text)
	if err != nil {
		return nil, state, err
	}
	authorities, err = parseAuthorities(text)
	if err != nil {
		return nil, state, fmt.Errorf("--tls-client-ca-file %s: %w", i.clientCAFile, err)
	}
	for _, c := range authorities {
		if i.now().Before(c.NotAfter) {
			return authorities, state, nil
		}
	}
	return nil, state, fmt.Errorf("--tls-client-ca-file %s has nothing that has not expired; renew it", i.clientCAFile)
}

// parseAuthorities reads certificates in PEM, and nothing else beside them: one that
// is left out would turn its clients away later.
func parseAuthorities(text []byte) ([]*x509.Certificate, error) {
	var all []*x509.Certificate
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			return nil, errors.New("there is something else in it than certificates; give those of authorities, in PEM")
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w; give those of authorities, in PEM", len(all)+1, err)
		}
		all = append(all, c)
	}
	if n := bytes.Count(text, []byte("-----BEGIN ")); n != len(all) {
		return nil, fmt.Errorf("%d of %d pieces of PEM can be read; give certificates of authorities, in PEM", len(all), n)
	}
	if len(all) == 0 {
		return nil, errors.New("there is no certificate in it; give those of authorities, in PEM")
	}
	return all, nil
}

// readTLSFile reads a file that a flag names. A pipe would wait for somebody who
// writes into it.
func readTLSFile(flag, path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err == nil && (!info.Mode().IsRegular() || info.Size() > maxTLSFile) {
		return nil, fmt.Errorf("%s: %s is not a regular file of at most %d bytes; give one in PEM", flag, path, maxTLSFile)
	}
	var text []byte
	if err == nil {
		text, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w; give a file that can be read", flag, err)
	}
	return text, nil
}

// digest tells files apart.
func digest(files ...[]byte) string {
	h := sha256.New()
	for _, f := range files {
		sum := sha256.Sum256(f)
		_, _ = h.Write(sum[:]) // a hash never fails
	}
	return string(h.Sum(nil))
}

func told(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// config is TLS as one port speaks it, with what is in force at each handshake; auth
// is what is asked of clients, if there are authorities for them.
func (i *identity) config(auth tls.ClientAuthType, protocol string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: []string{protocol},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			m := i.inForce.Load()
			c := &tls.Config{
				MinVersion:   tls.VersionTLS12,
				NextProtos:   []string{protocol},
				Certificates: []tls.Certificate{m.certificate},
				// A session that is resumed is not asked for its certificate again: it would
				// outlive an authority that was taken out. Connections here last, so
				// resuming gains nothing.
				SessionTicketsDisabled: true,
			}
			if m.clients != nil {
				c.ClientAuth, c.ClientCAs = auth, m.clients
			}
			return c, nil
		},
	}
}
