package faults

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"weir/store/storetest"
)

// oneRedis is a single server, with further flags. It is what a world stands on if its
// fault does not say.
func oneRedis(flags ...string) func(*world) {
	return func(w *world) {
		w.redis = storetest.StartRedisTCP(w.t, w.bin, flags...)
		w.url = w.redis.URL
	}
}

// redisWithTLS is a server that speaks TLS only, with a user of few rights.
func redisWithTLS(w *world) {
	certificate := storetest.NewCertificate(w.t)
	w.redis = storetest.StartRedisTLS(w.t, w.bin, certificate)
	w.redis.MustDo(w.t, append([]string{"ACL", "SETUSER", "weir", "on", ">secret"}, strings.Fields(storetest.Rights)...)...)
	w.url = strings.Replace(w.redis.URL, "://", "://weir@", 1)
	w.ca = filepath.Join(w.t.TempDir(), "ca.pem")
	w.trust(certificate)
	password := filepath.Join(w.t.TempDir(), "password")
	if err := os.WriteFile(password, []byte("secret"), 0o600); err != nil {
		w.t.Fatal(err)
	}
	w.flags = []string{"--redis-ca-file", w.ca, "--redis-password-file", password}
}

// trust has weir's file of authorities name those of some certificates.
func (w *world) trust(certificates ...storetest.Certificate) {
	w.t.Helper()
	var all []byte
	for _, c := range certificates {
		text, err := os.ReadFile(c.CA)
		if err != nil {
			w.t.Fatal(err)
		}
		all = append(all, text...)
	}
	if err := os.WriteFile(w.ca+".new", all, 0o600); err != nil {
		w.t.Fatal(err)
	}
	if err := os.Rename(w.ca+".new", w.ca); err != nil {
		w.t.Fatal(err)
	}
}

// renewCertificate gives Redis another certificate, of another authority, and cuts the
// connections that were made with the old one.
func (w *world) renewCertificate() {
	renewed := storetest.NewCertificate(w.t)
	w.trust(renewed)
	w.redis.MustDo(w.t, "CONFIG", "SET", "tls-cert-file", renewed.Cert, "tls-key-file", renewed.Key, "tls-ca-cert-file", renewed.CA)
	w.redis.MustDo(w.t, "CLIENT", "KILL", "USER", "weir")
}

func sentinels(w *world) {
	w.sentinel = storetest.StartSentinel(w.t, w.bin, "")
	w.url = w.sentinel.URL
}

// isPrimary reports whether a sentinel takes r for the primary.
func isPrimary(sentinel, r *storetest.Redis) bool {
	told, err := sentinel.Do("SENTINEL", "GET-MASTER-ADDR-BY-NAME", storetest.SentinelName)
	return err == nil && strings.ReplaceAll(told, "\n", ":") == r.Addr()
}

// cluster is one of three nodes; redis is that of the last domain.
func cluster(w *world) {
	w.cluster = storetest.StartCluster(w.t, w.bin, 3)
	w.url = w.cluster.URL
	w.redis = w.cluster.Nodes[w.cluster.Owner(domains[len(domains)-1])]
}

// clock is that of a Redis, and can be set.
type clock struct{ path string }

// onAClock is a single server whose clock the test sets.
func onAClock(w *world) {
	w.clock = &clock{filepath.Join(w.t.TempDir(), "clock")}
	w.clock.set(w.t, 0)
	w.bin = preloaded(w.t, w.bin, "clock", "WEIR_CLOCK="+w.clock.path)
	oneRedis()(w)
}

// preloaded is bin with a library of testdata before all others.
func preloaded(t testing.TB, bin, library, environment string) string {
	t.Helper()
	dir := t.TempDir()
	shared, wrapper := filepath.Join(dir, library+".so"), filepath.Join(dir, "redis")
	if out, err := exec.Command("gcc", "-shared", "-fPIC", "-O", "-o", shared, filepath.Join("testdata", library+".c")).CombinedOutput(); err != nil {
		t.Fatalf("gcc, which the race detector needs too: %v\n%s", err, out)
	}
	text := fmt.Sprintf("#!/bin/sh\nexec env 'LD_PRELOAD=%s' '%s' '%s' \"$@\"\n", shared, environment, bin)
	if err := os.WriteFile(wrapper, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	return wrapper
}

// set shifts the clock by d from the machine's.
func (c *clock) set(t testing.TB, d time.Duration) {
	t.Helper()
	// It is mapped, so it is written in place, and at once.
	f, err := os.OpenFile(c.path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(binary.NativeEndian.AppendUint64(nil, uint64(d.Microseconds()))); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}
