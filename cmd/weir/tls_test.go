package main

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"weir/store/storetest"
)

// files are those of an identity, in a folder.
type files struct {
	cert, key, ca string
	log           bytes.Buffer
	registry      *prometheus.Registry
	authority     *storetest.Authority
	pair          storetest.Pair
}

func newFiles(t *testing.T) *files {
	t.Helper()
	dir := t.TempDir()
	f := &files{registry: prometheus.NewRegistry(), authority: storetest.NewAuthority(t)}
	f.pair = f.authority.Issue(t, []string{"weir.example.org", "127.0.0.1", "spiffe://example.org/weir"})
	f.cert, f.key = f.pair.Write(t, dir)
	f.ca = f.authority.Write(t, dir)
	return f
}

func (f *files) open(t *testing.T) (*identity, error) {
	t.Helper()
	return newIdentity(t.Context(), f.cert, f.key, f.ca, slog.New(slog.NewTextHandler(&f.log, nil)), f.registry)
}

// serial is that of the certificate in force.
func (i *identity) serial() string { return i.inForce.Load().certificate.Leaf.SerialNumber.Text(16) }

func (i *identity) trusts(p storetest.Pair) bool {
	_, err := p.Leaf.Verify(x509.VerifyOptions{Roots: i.inForce.Load().clients, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err == nil
}

func expired(c *x509.Certificate) {
	c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
}

func future(c *x509.Certificate) {
	c.NotBefore, c.NotAfter = time.Now().Add(time.Hour), time.Now().Add(2*time.Hour)
}

// wrongs are all that can be wrong with the files: what to do to good ones, and what is
// said of it. CERT, KEY and CA are their paths.
var wrongs = []struct {
	name  string
	spoil func(t *testing.T, f *files)
	want  string
}{
	{"no certificate file", func(t *testing.T, f *files) { remove(t, f.cert) }, "--tls-cert-file: stat CERT: no such file or directory; give a file that can be read"},
	{"no key file", func(t *testing.T, f *files) { remove(t, f.key) }, "--tls-key-file: stat KEY: no such file or directory; give a file that can be read"},
	{"no client CA file", func(t *testing.T, f *files) { remove(t, f.ca) }, "--tls-client-ca-file: stat CA: no such file or directory; give a file that can be read"},
	{"an empty certificate", func(t *testing.T, f *files) { storetest.Replace(t, f.cert, nil) }, "--tls-cert-file CERT, --tls-key-file KEY: tls: failed to find any PEM data in certificate input; give a certificate in PEM"},
	{"another's key", func(t *testing.T, f *files) {
		_, key := f.authority.Issue(t, nil).PEM(t)
		storetest.Replace(t, f.key, key)
	}, "tls: private key does not match public key"},
	{"half a key", func(t *testing.T, f *files) {
		_, key := f.pair.PEM(t)
		storetest.Replace(t, f.key, key[:len(key)/2])
	}, "--tls-key-file KEY: tls: failed to find any PEM data in key input"},
	{"a key with a passphrase", func(t *testing.T, f *files) {
		storetest.Replace(t, f.key, pem.EncodeToMemory(&pem.Block{Type: "ENCRYPTED PRIVATE KEY", Bytes: []byte("s3cr3tM4rk")}))
	}, "its key without a passphrase"},
	{"an expired certificate", func(t *testing.T, f *files) { f.reissue(t, expired) }, "--tls-cert-file CERT has expired, on 2"},
	{"one of the future", func(t *testing.T, f *files) { f.reissue(t, future) }, "--tls-cert-file CERT is not valid before 2"},
	{"no authority", func(t *testing.T, f *files) { storetest.Replace(t, f.ca, []byte("\n")) }, "--tls-client-ca-file CA: there is no certificate in it; give those of authorities, in PEM"},
	{"a key among the authorities", func(t *testing.T, f *files) {
		_, key := f.pair.PEM(t)
		storetest.Replace(t, f.ca, append(f.authority.PEM(), key...))
	}, "--tls-client-ca-file CA: there is something else in it than certificates"},
	{"a broken authority", func(t *testing.T, f *files) {
		storetest.Replace(t, f.ca, append(f.authority.PEM(), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("s3cr3tM4rk")})...))
	}, "--tls-client-ca-file CA: certificate 2: x509: "},
	{"half an authority", func(t *testing.T, f *files) {
		text := f.authority.PEM(storetest.NewAuthority(t))
		storetest.Replace(t, f.ca, text[:len(text)-40])
	}, "--tls-client-ca-file CA: 1 of 2 pieces of PEM can be read"},
	{"nothing but expired authorities", func(t *testing.T, f *files) {
		cert, _ := f.authority.Issue(t, nil, expired).PEM(t)
		storetest.Replace(t, f.ca, cert)
	}, "--tls-client-ca-file CA has nothing that has not expired; renew it"},
	{"a pipe", func(t *testing.T, f *files) {
		remove(t, f.key)
		if err := syscall.Mkfifo(f.key, 0o600); err != nil {
			t.Fatal(err)
		}
	}, "--tls-key-file: KEY is not a regular file of at most 1048576 bytes; give one in PEM"},
	{"a large file", func(t *testing.T, f *files) { storetest.Replace(t, f.ca, make([]byte, maxTLSFile+1)) }, "--tls-client-ca-file: CA is not a regular file of at most 1048576 bytes"},
	{"two wrong at once", func(t *testing.T, f *files) { remove(t, f.cert); remove(t, f.key) }, "no such file or directory; give a file that can be read\n--tls-key-file: "},
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

// reissue writes another certificate of the same names.
func (f *files) reissue(t *testing.T, changes ...func(*x509.Certificate)) {
	t.Helper()
	f.pair = f.authority.Issue(t, []string{"weir.example.org"}, changes...)
	f.pair.Write(t, filepath.Dir(f.cert))
}

func (f *files) told(text string) string {
	return strings.NewReplacer("CERT", f.cert, "KEY", f.key, "CA", f.ca).Replace(text)
}

// secret tells whether a text shows any of a key.
func (f *files) secret(t *testing.T, text string) bool {
	t.Helper()
	_, key := f.pair.PEM(t)
	block, _ := pem.Decode(key)
	for line := range strings.Lines(string(key)) {
		if len(line) > 30 && !strings.HasPrefix(line, "---") && strings.Contains(text, line[:20]) {
			return true
		}
	}
	return strings.Contains(text, string(block.Bytes[:16])) || strings.Contains(text, "s3cr3tM4rk")
}

func TestWrongFilesOfTLSAreToldAtTheStart(t *testing.T) {
	for _, w := range wrongs {
		t.Run(w.name, func(t *testing.T) {
			f := newFiles(t)
			w.spoil(t, f)
			_, err := f.open(t)
			if err == nil || !strings.Contains(err.Error(), f.told(w.want)) {
				t.Fatalf("%v, want %q", err, f.told(w.want))
			}
			if f.secret(t, err.Error()) {
				t.Errorf("%v shows some of the key", err)
			}
		})
	}
}

func TestWhatIsWrongLeavesInForceWhatWasGood(t *testing.T) {
	for _, w := range wrongs {
		t.Run(w.name, func(t *testing.T) {
			f := newFiles(t)
			i, err := f.open(t)
			if err != nil {
				t.Fatal(err)
			}
			first, client := i.serial(), f.pair
			w.spoil(t, f)
			for range 3 { // as it is looked at again and again
				i.read(t.Context())
			}
			if got := i.serial(); got != first {
				t.Errorf("serial %s is in force, want %s still", got, first)
			}
			if !i.trusts(client) {
				t.Error("clients are not trusted any more")
			}
			part, other := "certificate", "client_ca"
			if strings.Contains(w.want, "--tls-client-ca-file") {
				part, other = other, part
			}
			f.expect(t, part, 1, 1)
			f.expect(t, other, 0, 0)
			text := f.log.String()
			if n := strings.Count(text, "level=ERROR"); n != 1 || !strings.Contains(text, `msg="a file of TLS is wrong: what was good before stays in force" err=`) {
				t.Errorf("%d errors are logged, want one:\n%s", n, text)
			}
			if f.secret(t, text) {
				t.Errorf("the log shows some of the key:\n%s", text)
			}

			// And then all is good again.
			if info, err := os.Stat(f.key); err == nil && !info.Mode().IsRegular() {
				remove(t, f.key)
			}
			f.reissue(t)
			storetest.Replace(t, f.ca, f.authority.PEM(storetest.NewAuthority(t)))
			i.read(t.Context())
			if got := i.serial(); got != f.pair.Leaf.SerialNumber.Text(16) {
				t.Errorf("serial %s is in force, want the new one", got)
			}
			f.expect(t, part, 0, 1)
			f.expect(t, other, 0, 0)
		})
	}
}

// values are those of all series, by their names and labels.
func (f *files) values(t *testing.T) map[string]float64 {
	t.Helper()
	got := make(map[string]float64)
	families, err := f.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			name := family.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			got[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return got
}

// expect checks what the metrics say of a part: whether it is wrong, and how often it was.
func (f *files) expect(t *testing.T, part string, wrong, wrongs int) {
	t.Helper()
	got := f.values(t)
	if got["weir_tls_file_wrong "+part] != float64(wrong) || got["weir_tls_loads_total "+part+" wrong"] != float64(wrongs) {
		t.Errorf("of %s: %v, want wrong %d, and %d wrong loads", part, got, wrong, wrongs)
	}
}

// A certificate that is in force and expires is told of, once.
func TestACertificateThatExpiresIsTold(t *testing.T) {
	f := newFiles(t)
	i, err := f.open(t)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := testutil.GatherAndCount(f.registry, "weir_tls_certificate_not_after_timestamp_seconds"); err != nil || n != 2 {
		t.Errorf("%d ends are told (%v), want that of the certificate and of the authorities", n, err)
	}
	f.expect(t, "certificate", 0, 0)
	i.now = func() time.Time { return time.Now().Add(2 * time.Hour) }
	for range 3 {
		i.read(t.Context())
	}
	f.expect(t, "certificate", 1, 1)
	f.expect(t, "client_ca", 1, 1)
	if text := f.log.String(); strings.Count(text, "has expired") != 1 || strings.Count(text, "has nothing that has not expired") != 1 {
		t.Errorf("the log should tell each once:\n%s", text)
	}
}

func TestTheEndOfACertificateIsThatOfItsChain(t *testing.T) {
	f := newFiles(t)
	soon := time.Now().Add(20 * time.Minute).Truncate(time.Second)
	intermediate, _ := f.authority.Issue(t, nil, func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), soon }).PEM(t)
	cert, _ := f.pair.PEM(t)
	storetest.Replace(t, f.cert, append(cert, intermediate...))
	if _, err := f.open(t); err != nil {
		t.Fatal(err)
	}
	if got := f.values(t)["weir_tls_certificate_not_after_timestamp_seconds certificate"]; got != float64(soon.Unix()) {
		t.Errorf("it ends at %.0f, want %d", got, soon.Unix())
	}
}

func TestMetricsOfTLSAreNamedAsPrometheusWantsThem(t *testing.T) {
	f := newFiles(t)
	if _, err := f.open(t); err != nil {
		t.Fatal(err)
	}
	newHandshakes(slog.New(slog.DiscardHandler), f.registry)
	problems, err := testutil.GatherAndLint(f.registry)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
}
