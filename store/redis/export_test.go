package redis

import (
	"context"
	"time"
)

// MinReplyTimeout is how long whoever waits for a server that hangs waits at least.
const MinReplyTimeout = minReplyTimeout

// MaxOut is how many calls the connections of a server take at most.
const MaxOut = connections * maxBatch

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

// Waiting is how many calls of a single server wait for a connection.
func (s *Store) Waiting() int {
	p := s.routes.node("").pipes
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.waiting)
}

// Busy has the server do nothing else for so long, by a call that waits as a decision
// does.
func Busy(ctx context.Context, s *Store, d time.Duration) error {
	c := newCall(busy)
	c.silence = s.silence
	c.args.int(d.Microseconds())
	_, err := s.do(ctx, c)
	return err
}

var busy = newScript(`
local function now() local t = redis.call('TIME'); return t[1] * 1000000 + t[2] end
local replies = {}
for i = 2, #ARGV do
  local till = now() + cmsgpack.unpack(ARGV[i])[2]
  while now() < till do end
  replies[i - 1] = cmsgpack.pack({1})
end
return replies`)
