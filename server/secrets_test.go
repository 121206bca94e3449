package server_test

import (
	"bytes"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/status"

	"weir/server/servertest"
	"weir/store/storetest"
)

// The passwords, the hash key and the keys of TLS are seen nowhere: not in the list of
// processes, logs (gRPC's own too), metrics, pages and answers, whatever is wrong with
// their files.
func TestNobodySeesTheSecretsOfTheService(t *testing.T) {
	// The library says more than weir does.
	t.Setenv("GRPC_GO_LOG_SEVERITY_LEVEL", "info")
	t.Setenv("GRPC_GO_LOG_VERBOSITY_LEVEL", "99")
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		storetest.Replace(t, path, []byte(text))
		return path
	}
	const password, urlPassword, hashKey = "P4ssw0rdInAFile", "P4ssw0rdInTheUrl", "H4shK3yH4shK3yH4shK3yH4shK3yH4shK3y"
	secrets := []string{password, urlPassword, hashKey}
	keyText := func(key []byte) {
		block, _ := pem.Decode(key)
		for line := range strings.Lines(string(key)) {
			if !strings.HasPrefix(line, "-----") {
				secrets = append(secrets, strings.TrimSpace(line)[:30])
			}
		}
		secrets = append(secrets, string(block.Bytes[:20]), hex.EncodeToString(block.Bytes[40:60]))
	}

	redis := storetest.StartRedis(t, storetest.AnyRedis(t))
	client := redisClient(t, redis)
	for user, p := range map[string]string{"infile": password, "inurl": urlPassword} {
		if err := client.Do(t.Context(), "ACL", "SETUSER", user, "on", ">"+p, "~*", "+@all").Err(); err != nil {
			t.Fatal(err)
		}
	}
	at := func(credentials string) string {
		return strings.Replace(redis.URL, "unix://", "unix://"+credentials+"@", 1)
	}

	var seen strings.Builder
	look := func(s *secured) {
		t.Helper()
		for _, name := range []string{"cmdline", "comm"} {
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", s.PID(), name))
			if err != nil {
				t.Fatal(err)
			}
			seen.Write(bytes.ReplaceAll(text, []byte{0}, []byte{' '}))
		}
		for _, page := range []string{"/metrics", "/healthz", "/status.json"} {
			_, body := s.Get(t, page)
			seen.WriteString(body)
		}
		for _, page := range []string{
			"/rlconfig", "/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/goroutine?debug=2", "/debug/pprof/heap?debug=1", "/debug/pprof/allocs?debug=1",
		} {
			r, err := http.Get("http://" + s.Admin + page)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(&seen, r.Body); err != nil {
				t.Fatal(err)
			}
			_ = r.Body.Close()
		}
		seen.WriteString(s.Log())
	}

	hash := file("hash.key", hashKey+"\n")
	s := startTLS(t, true, []string{"tests.example.org"}, "--log-level", "debug", "--hash-key-file", hash,
		"--redis", at("infile"), "--redis-password-file", file("password", password+"\n"))
	_, key := s.first.PEM(t)
	keyText(key)
	storetest.Eventually(t, "weir is ready", func() bool { return metricOf(t, s.Process, "weir_ready") == 1 })
	s.calls(t, s.TLS)
	_, err := check(storetest.Context(t), s.dial(t, s.as(t))) // without a certificate
	seen.WriteString(status.Convert(err).Message())
	look(s)

	// A key of another certificate, half a key, and a key where the certificate should be.
	wrong := s.server.Issue(t, nil)
	_, other := wrong.PEM(t)
	keyText(other)
	wrongs := 0
	for path, text := range map[string][]byte{"tls.key": other, "tls.crt": other} {
		for _, half := range []int{len(text), len(text) / 2} {
			storetest.Replace(t, filepath.Join(s.dir, path), text[:half])
			wrongs++
			storetest.Eventually(t, "the file is seen", func() bool {
				return metricOf(t, s.Process, `weir_tls_loads_total{file="certificate",result="wrong"}`) >= float64(wrongs)
			})
		}
	}
	storetest.Replace(t, filepath.Join(s.dir, "ca.crt"), other)
	storetest.Eventually(t, "the file is seen", func() bool { return metricOf(t, s.Process, `weir_tls_file_wrong{file="client_ca"}`) == 1 })

	// Another password than Redis has, and new connections.
	if err := client.Do(t.Context(), "ACL", "SETUSER", "infile", "resetpass", ">another").Err(); err != nil {
		t.Fatal(err)
	}
	if err := client.Do(t.Context(), "CLIENT", "KILL", "SKIPME", "yes").Err(); err != nil {
		t.Fatal(err)
	}
	storetest.Eventually(t, "Redis turns weir away", func() bool { return metricOf(t, s.Process, "weir_store_up") == 0 })
	s.calls(t, s.TLS)
	look(s)

	// And a password in the environment, which only root and weir's own user can read.
	t.Setenv("WEIR_REDIS", at("inurl:"+urlPassword))
	p := &secured{Process: servertest.Start(t, tlsPolicy, "--log-level", "debug")}
	storetest.Eventually(t, "weir is ready", func() bool { return metricOf(t, p.Process, "weir_ready") == 1 })
	redis.Kill()
	storetest.Eventually(t, "the store is away", func() bool { return metricOf(t, p.Process, "weir_store_up") == 0 })
	look(p)

	all := seen.String()
	// What is there shows that the search would find.
	for _, want := range []string{hash, "fingerprint=", "a file of TLS is wrong", "store failed", "weir_tls_file_wrong", "goroutine ", "token_bucket"} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is nowhere to be seen", want)
		}
	}
	for i, secret := range secrets {
		if at := strings.Index(all, secret); at >= 0 {
			t.Errorf("secret %d is seen: %s", i, strconv.Quote(all[max(0, at-300):min(len(all), at+100)]))
		}
	}
}
