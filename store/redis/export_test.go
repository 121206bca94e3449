package redis

// MinReplyTimeout is how long whoever waits for a server that hangs waits at least.
const MinReplyTimeout = minReplyTimeout

// OpenChanged returns a store whose scripts are changed, as those of another
// version of weir would be.
func OpenChanged(o Options, change func(source string) string) (*Store, error) {
	s, err := Open(o)
	if err != nil {
		return nil, err
	}
	s.scripts = newScripts(change)
	return s, nil
}
