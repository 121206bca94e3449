package policy

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"weir/limit"
)

// lint warns of what is valid, and probably not meant.
func (p *parser) lint() {
	l := linter{parser: p, harmless: make(map[string]bool)}
	for n := range p.domain.policies() {
		if n.harmless {
			l.harmless[n.key] = true
		}
	}
	if p.domain.name == "unknown" {
		p.warnings.add(p.domain.line, nil, "requests of domains that no policy has are counted as unknown in metrics, and would be mixed with those of this one; choose another name")
	}
	if len(p.domain.root.children) == 0 {
		p.warnings.add(p.domain.line, nil, "the domain has no policies, so nothing is limited; is the file whole?")
	}
	l.children(&p.domain.root, nil)
	l.unknownNames()
}

type linter struct {
	*parser
	harmless map[string]bool // keys that need no warning of their look, or have had it
}

func (l *linter) children(parent *node, at *path) {
	for i, n := range parent.children {
		here := &path{up: at, key: n.key, value: n.value, index: i}
		l.credential(n, here)
		l.chargedTwice(n, here)
		l.coarse(n, here)
		l.reservedInVain(n, here)
		l.withoutEffect(n, here)
		if by := l.hiddenBy(parent, n); by != nil {
			l.warnings.add(n.line, here, unreachable(n, by))
			continue // nor to what is below it
		}
		l.children(n, here)
	}
}

func unreachable(n, by *node) string {
	if n.isPattern() {
		return fmt.Sprintf("no request gets here, but for one whose text is the pattern itself: line %d takes all that this matches; move this one before it, or remove one", by.line)
	}
	return fmt.Sprintf("no request gets here: line %d takes all that this matches; remove one", by.line)
}

// hiddenBy returns the sibling that takes all that n matches, or nil. An exact value
// is looked up first, so nothing hides it; a wildcard gives way to those before it,
// and a key alone to all of them. (The text of a pattern as it is, with its stars,
// is found before any pattern is.)
func (l *linter) hiddenBy(parent, n *node) *node {
	if n.value != "" && !n.isPattern() {
		return nil
	}
	// A star in the text of n can only be taken by one of the wildcard's, so that this text
	// tells it for all that n matches. Any value is as one that has nothing: only stars take
	// that.
	by := parent.wildcard(limit.Entry{Key: n.key, Value: n.value})
	if n.isPattern() && by.place >= n.place {
		return nil // its own text leads to it: those after it do not hide it
	}
	return by
}

// chargedTwice warns of a window that is to be charged when the work is done, beside
// a concurrency: each charge would take one more slot.
func (l *linter) chargedTwice(n *node, at *path) {
	slots, charged := false, false
	for i := range n.rules {
		switch r := n.rules[i].check.Limit.(type) {
		case limit.Concurrency:
			slots = true
		case limit.Window:
			charged = charged || r.ChargeOver
		case limit.TokenBucket:
		}
	}
	if slots && charged {
		l.warnings.add(n.line, at, "rate_limit.on_over: charge stands beside concurrency, and a charge when the work is done would take one more slot unless its descriptor has weir.event: usage; see to that, or give the window a key of its own")
	}
}

// fewSliding is below how many requests the one that a sliding window withholds from a
// steady demand is more than a tenth.
const fewSliding = 10

// coarse warns of a sliding window of few requests.
func (l *linter) coarse(n *node, at *path) {
	for i := range n.rules {
		w, ok := n.rules[i].check.Limit.(limit.Window)
		if !ok || !w.Sliding || w.Max == 0 || w.Max >= fewSliding {
			continue
		}
		gets := fmt.Sprintf("%d in a window", w.Max-1)
		if w.Max == 1 {
			gets = "1 in two windows"
		}
		l.warnings.add(n.line, at, fmt.Sprintf("rate_limit.window: sliding with requests_per_unit: %d admits %s of a steady demand, since what is left of a request counts as one; use a token_bucket if that is too few", w.Max, gets))
	}
}

// reservedInVain warns of reservations that cannot be settled as long as they say,
// and of those that end the lease of a slot early.
func (l *linter) reservedInVain(n *node, at *path) {
	lease := time.Duration(0) // of the slots beside it; 0: there are none
	for i := range n.rules {
		if c, ok := n.rules[i].check.Limit.(limit.Concurrency); ok {
			lease = c.Lease
		}
	}
	for i := range n.rules {
		c := &n.rules[i].check
		if c.Reserve == 0 {
			continue
		}
		label := "token_bucket"
		if w, ok := c.Limit.(limit.Window); ok {
			label = "rate_limit"
			if w.Max == 0 {
				continue // it charges nothing: told elsewhere
			}
			life, what := w.Length(), "its window"
			if w.Sliding {
				life, what = 2*w.Length(), "its window and the next"
			}
			if c.Reserve > life {
				l.warnings.add(n.line, at, fmt.Sprintf("rate_limit.reserve: %s is longer than %s, %s, and usage that comes later settles nothing; write a shorter time, or a longer unit", shortTime(c.Reserve), what, shortTime(life)))
			}
		}
		switch {
		case lease == 0:
		case c.Reserve > lease:
			l.warnings.add(n.line, at, fmt.Sprintf("%s.reserve: %s is longer than concurrency.lease: %s beside it, and the lease of both lives as long as the shorter: what is not released or renewed by then is not settled; write the same time for both", label, shortTime(c.Reserve), shortTime(lease)))
		case c.Reserve < lease:
			l.warnings.add(n.line, at, fmt.Sprintf("%s.reserve: %s is shorter than concurrency.lease: %s beside it, and the lease of both lives as long as the shorter: the slot is free by then too; write the same time for both", label, shortTime(c.Reserve), shortTime(lease)))
		}
	}
}

// withoutEffect warns of what is said of limits that are not there, or of a ban.
func (l *linter) withoutEffect(n *node, at *path) {
	limits := 0
	for i := range n.rules {
		c := &n.rules[i].check
		if c.Limit != nil {
			limits++
		}
		w, ok := c.Limit.(limit.Window)
		if !ok || w.Max > 0 {
			continue
		}
		for _, vain := range []struct {
			there bool
			text  string
		}{{w.Sliding, "window: sliding"}, {c.Reserve > 0, "reserve"}} {
			if vain.there {
				l.warnings.add(n.line, at, fmt.Sprintf("rate_limit.%s has no effect on a ban (requests_per_unit: 0); remove it, or write how many requests a unit has", vain.text))
			}
		}
	}
	if n.ownFailure && limits == 0 {
		text := "failure_mode and local_fraction have no effect on a policy without limits"
		if len(n.children) > 0 {
			text += ", and do not hold for those below it"
		}
		l.warnings.add(n.line, at, text+", but for a limit that a request brings itself; give them to the policies that have limits, or to the whole domain")
	}
}

// credential warns of a key that looks like one of a secret, once a key.
func (l *linter) credential(n *node, at *path) {
	if l.harmless[n.key] || l.domain.sensitive.names(n.key) || !looksSecret(n.key) {
		return
	}
	l.harmless[n.key] = true
	l.warnings.add(n.line, at, "the key looks like that of a secret, and its values are stored and shown as they are; write sensitive: true, or false if they are no secrets")
}

// unknownNames warns of replaces of a name that no limit has.
func (l *linter) unknownNames() {
	named := make(map[string]bool)
	for n := range l.domain.policies() {
		for i := range n.rules {
			named[n.rules[i].explicit] = true
		}
	}
	for _, r := range l.replacers {
		for _, name := range r.replaces {
			if !named[name] {
				l.warnings.add(r.line, r.at, fmt.Sprintf("%s.replaces: no limit of this domain has name: %s; give it to the one that is meant, or remove it", r.label, show(name)))
			}
		}
	}
}

// Words of keys whose values are secrets, each also as two words.
var (
	secretWords = []string{
		"apikey", "apikeys", "xapikey", "sessionid", "accesskey", "secretkey", "privatekey", "secret", "secrets", "password", "passwd", "passphrase", "pwd",
		"bearer", "jwt", "credential", "credentials",
	}
	// lastWords count only at the end of a key: token_type and cookie_consent are no
	// secrets.
	lastWords = []string{"token", "accesstoken", "authtoken", "refreshtoken", "sessiontoken", "cookie", "authorization"}
)

// looksSecret reports whether one of the key's words says that its values are
// secrets.
func looksSecret(key string) bool {
	words := wordsOf(key)
	before := ""
	for i, w := range words {
		if slices.Contains(secretWords, w) || slices.Contains(secretWords, before+w) || i == len(words)-1 && slices.Contains(lastWords, w) {
			return true
		}
		before = w
	}
	return false
}

// wordsOf splits a key into its words, in lower case: at what is no letter or digit,
// before a capital after a small letter, and before the last of several capitals if
// a small letter follows (HTTPServer).
func wordsOf(key string) []string {
	var spaced strings.Builder
	letters := []rune(key)
	for i, r := range letters {
		if i > 0 && unicode.IsUpper(r) {
			before, last := letters[i-1], i == len(letters)-1
			if unicode.IsLower(before) || unicode.IsUpper(before) && !last && unicode.IsLower(letters[i+1]) {
				spaced.WriteByte(' ')
			}
		}
		spaced.WriteRune(unicode.ToLower(r))
	}
	return strings.FieldsFunc(spaced.String(), func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
}
