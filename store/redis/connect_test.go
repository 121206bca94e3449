package redis_test

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"weir/store"
	"weir/store/redis"
	"weir/store/storetest"
)

// A password that changes in its file is used by the next connections.
func TestAPasswordThatChangesIsReadAgain(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		r := oneOf(t, "d", bucket(t, 1000, time.Second))
		path := file(t, "first\n")
		change := func(password string) {
			t.Helper()
			server.MustDo(t, "ACL", "SETUSER", "weir", "resetpass", ">"+password)
			server.MustDo(t, "CLIENT", "KILL", "USER", "weir")
		}
		server.MustDo(t, strings.Fields("ACL SETUSER weir on "+storetest.Rights)...)
		change("first")
		s := openWith(t, redis.Options{URL: strings.Replace(server.URL, "unix://", "unix://weir@", 1), PasswordFile: path})
		decide(t, s, r)

		if err := os.WriteFile(path, []byte("second"), 0o600); err != nil {
			t.Fatal(err)
		}
		change("second")
		storetest.Eventually(t, "the new password is used", func() bool {
			_, err := s.Decide(storetest.Context(t), r)
			return err == nil
		})

		fails := func(want string) {
			t.Helper()
			storetest.Eventually(t, "it fails with "+want, func() bool {
				_, err := s.Decide(storetest.Context(t), r)
				if err == nil {
					return false
				}
				if text := err.Error(); !errors.Is(err, store.ErrUnavailable) || strings.Contains(text, "second") || strings.Contains(text, "third") {
					t.Fatalf("Decide: %v, want ErrUnavailable without a password", err)
				}
				return strings.Contains(err.Error(), want)
			})
		}
		change("third") // the file still has the second
		fails("WRONGPASS")
		if err := s.Ping(storetest.Context(t)); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "WRONGPASS") {
			t.Errorf("Ping with a wrong password: %v, want ErrUnavailable and WRONGPASS", err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		fails(filepath.Base(path))
		if err := os.WriteFile(path, []byte("third"), 0o600); err != nil {
			t.Fatal(err)
		}
		storetest.Eventually(t, "the third is used", func() bool {
			_, err := s.Decide(storetest.Context(t), r)
			return err == nil
		})
	})
}

// A server whose certificate nobody vouches for is not asked.
func TestAStrangersCertificateIsRefused(t *testing.T) {
	server := storetest.StartRedisTLS(t, storetest.AnyRedis(t), storetest.NewCertificate(t))
	for _, o := range []redis.Options{
		{URL: server.URL},
		{URL: server.URL, CAFile: storetest.NewCertificate(t).CA},
	} {
		s := openWith(t, o)
		storetest.Eventually(t, "Ping fails, and names the certificate", func() bool { // a busy machine may time out before
			err := s.Ping(storetest.Context(t))
			if !errors.Is(err, store.ErrUnavailable) {
				t.Fatalf("Ping: %v, want ErrUnavailable", err)
			}
			return strings.Contains(err.Error(), "certificate")
		})
		if _, err := s.Decide(storetest.Context(t), oneOf(t, "d", bucket(t, 1, time.Hour))); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("Decide: %v, want ErrUnavailable", err)
		}
	}
}

// Authorities that change in their file are those of the next connections.
func TestAuthoritiesThatChangeAreReadAgain(t *testing.T) {
	first, second := storetest.NewCertificate(t), storetest.NewCertificate(t)
	server := storetest.StartRedisTLS(t, storetest.AnyRedis(t), first)
	text, err := os.ReadFile(first.CA)
	if err != nil {
		t.Fatal(err)
	}
	path := file(t, string(text))
	s := openWith(t, redis.Options{URL: server.URL, CAFile: path})
	r := oneOf(t, "d", bucket(t, 1000, time.Second))
	decide(t, s, r)

	server.MustDo(t, "CONFIG", "SET", "tls-cert-file", second.Cert, "tls-key-file", second.Key, "tls-ca-cert-file", second.CA)
	server.MustDo(t, "CLIENT", "KILL", "TYPE", "normal")
	storetest.Eventually(t, "the second is not trusted yet", func() bool {
		_, err := s.Decide(storetest.Context(t), r)
		return err != nil && strings.Contains(err.Error(), "certificate")
	})
	if text, err = os.ReadFile(second.CA); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	storetest.Eventually(t, "the second is trusted", func() bool {
		_, err := s.Decide(storetest.Context(t), r)
		return err == nil
	})
}

// lines is a log that can be read while it is written.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), text)
}

// Each server that may evict keys is told of: when it is first reached, and when
// another has come in its place.
func TestEvictionIsToldOf(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		log := &lines{}
		r := oneOf(t, "d", bucket(t, 1000, time.Second))
		server.MustDo(t, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
		s := openWith(t, redis.Options{URL: server.URL, Logger: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
		decide(t, s, r)
		const warning = "level=WARN msg=\"redis may evict keys"
		storetest.Eventually(t, "a warning", func() bool { return log.count(warning) == 1 && log.count("maxmemory_policy=allkeys-lru") == 1 })

		// A connection more is no news; another policy is, and another server.
		again := func() {
			t.Helper()
			server.MustDo(t, "CLIENT", "KILL", "TYPE", "normal")
			storetest.Eventually(t, "it answers", func() bool {
				_, err := s.Decide(storetest.Context(t), r)
				return err == nil
			})
		}
		again()
		server.MustDo(t, "CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
		again()
		storetest.Eventually(t, "the other policy", func() bool { return log.count("maxmemory_policy=volatile-ttl") == 1 })
		server.MustDo(t, "CONFIG", "SET", "maxmemory-policy", "noeviction")
		again()
		server.Kill()
		server.Start(t)
		server.MustDo(t, "CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
		again()
		storetest.Eventually(t, "the other server", func() bool { return log.count("maxmemory_policy=volatile-ttl") == 2 })
		if n := log.count(warning); n != 3 {
			t.Errorf("%d warnings, want 3", n)
		}

		// Who may not ask says nothing that would alarm.
		quiet := &lines{}
		server.MustDo(t, strings.Fields("ACL SETUSER weir on nopass "+storetest.Rights+" -info")...)
		s = openWith(t, redis.Options{
			URL:    strings.Replace(server.URL, "unix://", "unix://weir:x@", 1),
			Logger: slog.New(slog.NewTextHandler(quiet, &slog.HandlerOptions{Level: slog.LevelDebug})),
		})
		decide(t, s, r)
		storetest.Eventually(t, "a note", func() bool { return quiet.count("level=DEBUG") > 0 })
		if n := quiet.count("level=WARN"); n > 0 {
			t.Errorf("%d warnings, want none", n)
		}
	})
}

func TestAPasswordIsInARegularFile(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := redis.Open(redis.Options{URL: "redis://127.0.0.1:1", PasswordFile: pipe})
	if err == nil || !strings.Contains(err.Error(), "is not a regular file") {
		t.Errorf("Open with a pipe as password file: %v, want that it is no regular file", err)
	}
}
