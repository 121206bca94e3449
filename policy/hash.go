package policy

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"sync"
)

// withHashKey returns the options with a random hash key if there is none and none
// is needed. Who parses more than once must draw it once: under another key all
// counters of sensitive values begin anew.
func (o Options) withHashKey() Options {
	if len(o.HashKey) == 0 && !o.NeedHashKey {
		o.HashKey = make([]byte, sha256.Size)
		_, _ = rand.Read(o.HashKey) // it never fails
	}
	return o
}

// hasher makes keyed digests. It may be used by many goroutines at once.
type hasher struct{ macs sync.Pool }

// mac is HMAC-SHA256 under the hasher's key. To make one costs more than to use it,
// so it is used again.
type mac struct {
	hash.Hash
	buf [256]byte
}

// newHasher returns the hasher of a key.
func newHasher(key []byte) *hasher {
	own := bytes.Clone(key)
	return &hasher{macs: sync.Pool{New: func() any { return &mac{Hash: hmac.New(sha256.New, own)} }}}
}

// digest is the first half of the HMAC of the three texts. Two lengths before them
// tell where each ends.
func (h *hasher) digest(domain, key, value string) (d [16]byte) {
	m, _ := h.macs.Get().(*mac)
	lengths := binary.BigEndian.AppendUint64(m.buf[:0], uint64(len(domain)))
	lengths = binary.BigEndian.AppendUint64(lengths, uint64(len(key)))
	_, _ = m.Write(lengths) // a hash never fails
	m.writeString(domain)
	m.writeString(key)
	m.writeString(value)
	copy(d[:], m.Sum(m.buf[:0]))
	m.Reset()
	h.macs.Put(m)
	return d
}

// writeString is Write without a copy of the whole text.
func (m *mac) writeString(s string) {
	for len(s) > 0 {
		n := copy(m.buf[:], s)
		_, _ = m.Write(m.buf[:n])
		s = s[n:]
	}
}
