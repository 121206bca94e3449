package redis

import (
	"context"
	"time"
)

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

// Busy has the server do nothing else for so long, by a call that waits as a decision
// does.
func Busy(ctx context.Context, s *Store, d time.Duration) error {
	c := newCall(busy)
	c.silence, c.args = s.silence, []any{d.Microseconds()}
	_, err := s.do(ctx, c)
	return err
}

var busy = newScript(`
local function now() local t = redis.call('TIME'); return t[1] * 1000000 + t[2] end
local till = now() + ARGV[1]
while now() < till do end
return 1`)
