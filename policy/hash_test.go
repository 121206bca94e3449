package policy

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"
	"sync"
	"testing"
)

// plainDigest is digest, as the standard library has it.
func plainDigest(key []byte, domain, name, value string) []byte {
	m := hmac.New(sha256.New, key)
	for _, text := range []string{domain, name} {
		_ = binary.Write(m, binary.BigEndian, uint64(len(text)))
	}
	_, _ = m.Write([]byte(domain + name + value))
	return m.Sum(nil)[:16]
}

func TestDigestIsHMAC(t *testing.T) {
	secret := []byte("a key of tests, 32 bytes at least")
	h := newHasher(secret)
	for _, value := range []string{"", "x", "\x00", strings.Repeat("é", 127), strings.Repeat("v", 255), strings.Repeat("v", 256), strings.Repeat("v", 257), strings.Repeat("long", 1<<16)} {
		got := h.digest("d", "k", value)
		if want := plainDigest(secret, "d", "k", value); !bytes.Equal(got[:], want) {
			t.Errorf("digest of %d bytes = %x, want %x", len(value), got, want)
		}
	}
}

func TestDigestTellsDomainKeyAndValueApart(t *testing.T) {
	seen := make(map[[16]byte]string)
	for _, h := range []*hasher{newHasher([]byte("one")), newHasher([]byte("other"))} {
		for _, texts := range [][3]string{{"a", "b", "c"}, {"ab", "", "c"}, {"", "ab", "c"}, {"a", "", "bc"}, {"", "", "abc"}, {"a", "bc", ""}, {"a", "c", "b"}} {
			d := h.digest(texts[0], texts[1], texts[2])
			if before, twice := seen[d]; twice {
				t.Errorf("the digest of %q is that of %s too", texts, before)
			}
			seen[d] = fmt.Sprintf("%q", texts)
		}
	}
}

func TestManyMayHashAtOnce(t *testing.T) {
	h := newHasher([]byte("key"))
	want := make([][16]byte, 100)
	for i := range want {
		want[i] = h.digest("d", "k", fmt.Sprint(i))
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for i := range want {
				if got := h.digest("d", "k", fmt.Sprint(i)); got != want[i] {
					t.Errorf("digest of %d = %x, want %x", i, got, want[i])
				}
			}
		})
	}
	all.Wait()
}
