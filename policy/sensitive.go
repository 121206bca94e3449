package policy

import (
	"strings"

	"go.yaml.in/yaml/v3"

	"weir/limit"
)

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

// mentionsSensitive reports whether any key of a document is sensitive, or nearly so
// (misspelt, or where it means nothing), and not plainly off, or a policy's key looks
// like that of a secret. Words are the keys that
// were looked at, and whether they mean it.
func mentionsSensitive(n *yaml.Node, words map[string]bool) bool {
	for i, c := range n.Content { // what aliases stand for is looked at where it is
		if n.Kind == yaml.MappingNode && i%2 == 0 {
			key := resolve(c).Value
			means, known := words[key]
			if !known {
				means = nearest(key, []string{"sensitive"}) != ""
				words[key] = means
			}
			value := resolve(n.Content[i+1])
			if on, ok := asFlag(value); means && (on || !ok) {
				return true
			}
			if key == "key" && looksSecret(value.Value) {
				return true
			}
		}
		if mentionsSensitive(c, words) {
			return true
		}
	}
	return false
}
