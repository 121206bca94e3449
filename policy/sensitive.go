package policy

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"

	"weir/limit"
)

// hidden is what errors, warnings and Describe show instead of a value.
const hidden = "(sensitive)"

// maxPatterns is how many patterns a domain may have as keys of sensitive
// policies: each entry of a request is compared with all.
const maxPatterns = 1000

// keySet is a set of entry keys, given as keys and patterns. A nil set is empty.
type keySet struct {
	keys     map[string]bool // as written, patterns too
	patterns []string
}

func (s *keySet) add(key string) {
	if s.keys[key] {
		return
	}
	if s.keys == nil {
		s.keys = make(map[string]bool)
	}
	s.keys[key] = true
	if strings.Contains(key, "*") {
		s.patterns = append(s.patterns, key)
	}
}

// has reports whether the key is in the set, or may stand for one that is: as a
// pattern itself may, unless the set is empty.
func (s *keySet) has(key string) bool {
	return s != nil && len(s.keys) > 0 && (strings.Contains(key, "*") || s.names(key))
}

// names reports whether the key is in the set.
func (s *keySet) names(key string) bool {
	if s == nil {
		return false
	}
	if s.keys[key] {
		return true
	}
	for _, p := range s.patterns {
		if glob(p, key) {
			return true
		}
	}
	return false
}

// hide returns the subject with a digest in place of each value that must not be
// seen. It looks at the subject's keys, whatever the entries have met: so no such
// value gets into a key.
func (d *domain) hide(subject []limit.Entry) []limit.Entry {
	copied := false
	for i, e := range subject {
		if !d.sensitive.has(e.Key) {
			continue
		}
		if !copied {
			subject = append([]limit.Entry(nil), subject...)
			copied = true
		}
		subject[i] = limit.Hashed(e.Key, d.hasher.digest(d.name, e.Key, e.Value))
	}
	return subject
}

// hasher makes keyed digests. It may be used by many goroutines at once.
type hasher struct{ macs sync.Pool }

// mac is HMAC-SHA256 under the hasher's key. To make one costs more than to use it,
// so it is used again.
type mac struct {
	hash.Hash
	buf [256]byte
}

// newHasher returns the hasher of a key. Without one it takes a random key, so that
// nobody can guess values from digests.
func newHasher(key []byte) *hasher {
	own := append([]byte(nil), key...)
	if len(own) == 0 {
		own = make([]byte, sha256.Size)
		_, _ = rand.Read(own) // it never fails
	}
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

// mayBeSensitive returns the keys of all descriptors of a document that say
// sensitive, or mean to, before the file is read: no error may show their values.
// It takes in more rather than less.
func mayBeSensitive(doc *yaml.Node) *keySet {
	s := search{seen: make(map[*yaml.Node]mention), words: make(map[string]bool)}
	s.look(doc)
	if len(s.found.patterns) > maxPatterns {
		s.found.patterns = []string{"*"} // the file is refused, and this search would take long
	}
	return &s.found
}

// search looks at every map of a document once.
type search struct {
	seen  map[*yaml.Node]mention
	words map[string]bool // keys of maps: whether they mean sensitive
	found keySet
}

// mention is what a map says, by itself or by what is merged into it.
type mention struct {
	sensitive bool
	key       string
}

func (s *search) look(n *yaml.Node) mention {
	switch n.Kind {
	case yaml.AliasNode:
		return s.seen[n.Alias] // it stands before its alias, unless it is in itself
	case yaml.SequenceNode:
		for _, item := range n.Content {
			s.look(item)
		}
		return mention{}
	}
	if n.Kind != yaml.MappingNode {
		return mention{}
	}
	if m, again := s.seen[n]; again {
		return m
	}
	s.seen[n] = mention{} // so that what is in itself ends
	var m, merged mention
	var keys []string // one; more are a mistake
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, value := resolve(n.Content[i]), n.Content[i+1]
		inner := s.look(value)
		m.sensitive = m.sensitive || inner.sensitive // also where it means nothing
		switch {
		case name.Kind != yaml.ScalarNode:
			s.look(n.Content[i])
		case name.ShortTag() == "!!merge":
			merged.add(s.merge(value))
		case name.Value == "key" && resolve(value).Kind == yaml.ScalarNode:
			keys = append(keys, resolve(value).Value)
		case s.meansSensitive(name.Value) && !isOff(resolve(value)):
			m.sensitive = true
		}
	}
	m.sensitive = m.sensitive || merged.sensitive
	if len(keys) == 0 && merged.key != "" {
		keys = append(keys, merged.key)
	}
	if len(keys) > 0 {
		m.key = keys[len(keys)-1]
	}
	if m.sensitive {
		for _, key := range keys {
			s.found.add(key)
		}
	}
	s.seen[n] = m
	return m
}

// merge is what a map or a list of maps says that is merged into another.
func (s *search) merge(source *yaml.Node) mention {
	list := resolve(source)
	if list.Kind != yaml.SequenceNode {
		return s.look(source)
	}
	m, again := s.seen[list]
	if !again {
		s.seen[list] = mention{}
		for _, item := range list.Content {
			m.add(s.look(item))
		}
		s.seen[list] = m
	}
	return m
}

// add merges another map into m: of two keys the first counts.
func (m *mention) add(other mention) {
	m.sensitive = m.sensitive || other.sensitive
	if m.key == "" {
		m.key = other.key
	}
}

// meansSensitive reports whether a key is sensitive, or probably misspelled so.
func (s *search) meansSensitive(key string) bool {
	means, known := s.words[key]
	if !known {
		means = nearest(key, []string{"sensitive"}) != ""
		s.words[key] = means
	}
	return means
}

// isOff reports whether the value of a flag is plainly false.
func isOff(n *yaml.Node) bool {
	on, ok := asFlag(n)
	return ok && !on
}
