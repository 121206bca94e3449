package redis

import (
	"context"
	"fmt"
	"strings"
	"time"

	"weir/limit"
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

// Waiting is how many calls wait for a connection.
func (s *Store) Waiting() int {
	return s.Load().Waiting
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
  local till = now() + select(2, cmsgpack.unpack(ARGV[i]))
  while now() < till do end
  replies[i - 1] = cmsgpack.pack({1})
end
return replies`)

// Echo has a script reply what it was given, and returns an error if that is not the same.
func Echo(ctx context.Context, s *Store) error {
	numbers := []int64{0, 1, 31, 32, 127, 128, 255, 256, 1 << 15, 1<<16 - 1, 1 << 16, 1 << 31, 1<<32 - 1, 1 << 32, limit.MaxExact, -1, -32, -33, -128, -129, -1 << 15, -1 << 31, -1<<31 - 1, -limit.MaxExact}
	var texts []string
	for _, n := range []int{0, 1, 31, 32, 255, 256, 65_535, 65_536} {
		texts = append(texts, strings.Repeat("\x00", n), strings.Repeat("\xff", n))
	}
	c := newCall(newScript("#!lua\n"+source("common")+"return each(function(_, ...) return list(...) end)"), "d")
	c.args.ints(numbers...)
	for _, text := range texts {
		c.args.string(text)
	}
	u, err := s.do(ctx, c)
	if err != nil {
		return err
	}
	if n, keys := u.array(), u.int(); n != 1+len(numbers)+len(texts) || keys != 1 {
		return fmt.Errorf("an array of %d with %d keys", n, keys)
	}
	for _, want := range numbers {
		if got := u.int(); got != want {
			return fmt.Errorf("%d is %d", want, got)
		}
	}
	for _, want := range texts {
		if got := u.text(); got != want {
			return fmt.Errorf("a text of %d bytes is one of %d", len(want), len(got))
		}
	}
	return u.end()
}
