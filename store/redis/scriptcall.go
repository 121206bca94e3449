package redis

import (
	"context"
	"fmt"

	goredis "github.com/redis/go-redis/v9"

	"weir/limit"
)

// maxKeys is how many keys the calls of one script call have, but for one alone that has
// more: Redis does nothing else meanwhile.
const maxKeys = 512

// scriptCall is calls that go as one script call.
type scriptCall struct {
	calls  []*call
	keys   int
	source bool // the script is called by its source, not by its digest
	cmd    *goredis.Cmd
}

// MarshalBinary returns what names the script. go-redis asks for it when it has a
// connection and writes the call: before that nothing was sent, whatever failed.
func (s *scriptCall) MarshalBinary() ([]byte, error) {
	for _, c := range s.calls {
		c.sent = true
	}
	if s.source {
		return s.calls[0].script.source, nil
	}
	return s.calls[0].script.sha, nil
}

// takes reports whether c may join. Of a cluster all keys of a script call are in one slot.
func (s *scriptCall) takes(c *call, sharded bool) bool {
	first := s.calls[0]
	return c.script == first.script && !c.alone && !first.alone && !c.asking && !first.asking && s.keys+len(c.keys) <= maxKeys &&
		(!sharded || len(c.keys) > 0 && len(first.keys) > 0 && limit.KeySlot(c.keys[0]) == limit.KeySlot(first.keys[0]))
}

func (s *scriptCall) add(c *call) {
	s.calls = append(s.calls, c)
	s.keys += len(c.keys)
}

// command makes the command of the call, at the scripts' time now.
func (s *scriptCall) command(ctx context.Context, now string) *goredis.Cmd {
	name := "evalsha"
	if s.source {
		name = "eval"
	}
	args := make([]any, 0, 4+s.keys+len(s.calls))
	args = append(args, name, s, s.keys)
	for _, c := range s.calls {
		for _, k := range c.keys {
			args = append(args, k)
		}
	}
	args = append(args, now)
	for _, c := range s.calls {
		args = append(args, c.args.item(len(c.keys)))
	}
	s.cmd = goredis.NewCmd(ctx, args...)
	return s.cmd
}

// answer gives each call its part of the reply.
func (s *scriptCall) answer() {
	reply, err := s.cmd.Result()
	items, _ := reply.([]any)
	if err == nil && len(items) != len(s.calls) {
		err = fmt.Errorf("a script replied to %d of %d calls", len(items), len(s.calls))
	}
	for i, c := range s.calls {
		c.reply, c.err = unpacker{}, err
		if err != nil {
			continue
		}
		text, _ := items[i].(string)
		if c.reply.rest = text; c.reply.isText() {
			c.err = scriptError(c.reply.text())
		}
	}
}

// scriptError is what a script says was wrong with one call of several.
type scriptError string

// Error is Redis's text.
func (e scriptError) Error() string { return string(e) }

// RedisError makes it one of [goredis.Error].
func (scriptError) RedisError() {}
