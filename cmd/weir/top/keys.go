package top

// key is what somebody pressed.
type key int

const (
	keyNone key = iota
	keyQuit
	keyPause
	keyUp
	keyDown
	keyPageUp
	keyPageDown
	keyHome
	keyEnd
)

// sequences are keys as terminals send them.
var sequences = map[string]key{
	"q": keyQuit, "Q": keyQuit, "\x03": keyQuit, "\x04": keyQuit, // Ctrl-C and Ctrl-D
	"p": keyPause, " ": keyPause, "k": keyUp, "j": keyDown, "g": keyHome, "G": keyEnd,
	"\x1b[A": keyUp, "\x1bOA": keyUp, "\x1b[B": keyDown, "\x1bOB": keyDown, "\x1b[5~": keyPageUp, "\x1b[6~": keyPageDown,
	"\x1b[H": keyHome, "\x1bOH": keyHome, "\x1b[1~": keyHome, "\x1b[F": keyEnd, "\x1bOF": keyEnd, "\x1b[4~": keyEnd,
}

// keyReader finds keys in what a terminal sends, byte by byte. The zero value is ready.
type keyReader struct{ begun []byte } // a sequence that is not yet whole

// longest is more bytes than any known sequence has.
const longest = 16

// next returns the key that ends with b, or keyNone.
func (r *keyReader) next(b byte) key {
	switch n := len(r.begun); {
	case b == '\x1b':
		r.begun = append(r.begun[:0], b)
		return keyNone
	case n == 0:
		return sequences[string(b)]
	case n == 1 && b != '[' && b != 'O': // Escape, and then another key
		r.begun = r.begun[:0]
		return sequences[string(b)]
	}
	r.begun = append(r.begun, b)
	// A sequence ends with a letter or ~.
	if n := len(r.begun); n > 2 && b >= '@' && b <= '~' || n == longest {
		k := sequences[string(r.begun)]
		r.begun = r.begun[:0]
		return k
	}
	return keyNone
}
