package redis

import (
	"context"
	"errors"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"weir/store"
)

// do sends c to the node of its keys and waits for the answer, or until ctx ends. A
// call that is known not to have run is tried again, as docs/decisions/0006-retries.md
// says; one that may have run never is. It is freed.
func (s *Store) do(ctx context.Context, c *call) (unpacker, error) {
	defer c.free()
	key := ""
	if len(c.keys) > 0 {
		key = c.keys[0]
	}
	n := s.routes.node(key)
	var since time.Time // when c was first not served
	for try := 0; ; try++ {
		var reply unpacker
		var err error
		if n == nil {
			err = s.routes.missing()
		} else if reply, err = n.pipes.do(ctx, c); err == nil {
			return reply, nil
		}
		next := s.routes.after(n, key, err)
		if !c.alone && hasPrefix(err, "NOPERM") {
			next = step{retry: true, atOnce: true, node: n}
		}
		// It may be its slot alone that is not served: the server is well then.
		if notServing(err) {
			if since.IsZero() {
				since = time.Now()
			}
			next.retry = next.retry && time.Since(since) <= s.routes.connector.patience
		}
		if !next.retry || (!next.atOnce || try > 1) && !pause(ctx, pauseBefore(try)) {
			return unpacker{}, classify(err)
		}
		if n = next.node; n == nil {
			n = s.routes.node(key)
		}
		c.alone = c.alone || aboutKeys(err) // those of others it may have been about
		c.again()
		c.asking = next.asking
	}
}

// aboutKeys reports whether err is about some of the keys of a script call, which has not run:
// those of one call in it, and maybe not of the others.
func aboutKeys(err error) bool { return hasPrefix(err, "TRYAGAIN", "NOPERM") }

// step is what to do after a call has failed.
type step struct {
	retry  bool
	atOnce bool
	node   *node // nil: whichever serves the keys then
	asking bool
}

// after says what to do after n, or none if it is nil, has failed a call with err.
func (r *routes) after(n *node, key string, err error) step {
	switch {
	case n == nil:
		r.doubt()
		return step{retry: r.searching() || r.node(key) != nil} // or found meanwhile
	case errors.Is(err, errClosed): // it was dropped meanwhile, or all are closed
		return step{retry: r.node(key) != n, atOnce: true}
	case errors.Is(err, store.ErrUnavailable): // the time is over
		r.doubt()
		return step{}
	case unsent(err), notServing(err):
		r.doubt()
		return step{retry: !n.pipes.health.lasting()}
	case hasPrefix(err, "TRYAGAIN"): // some of its keys have been moved already
		return step{retry: true}
	}
	if next, moved := r.moved(key, n, err); moved {
		return step{retry: true, atOnce: true, node: next}
	}
	if host, ask := goredis.IsAskError(err); ask && r.sharded() {
		return step{retry: true, atOnce: true, node: r.at(told(host, n.host)), asking: true}
	}
	var reply goredis.Error
	if !errors.As(err, &reply) {
		r.doubt() // the connection was lost
	}
	return step{}
}

// again reports whether to ask once more, outside of the pipes, what failed with err
// for the nth time; it pauses before.
func (s *Store) again(ctx context.Context, err error, n int) bool {
	if _, moved := goredis.IsMovedError(err); moved && s.routes.sharded() {
		return n < 3
	}
	return errors.Is(err, errNoNode) && (n < 3 || s.routes.searching()) && pause(ctx, pauseBefore(n))
}

// pause waits for d. It reports false, at once, if ctx would end before.
func pause(ctx context.Context, d time.Duration) bool {
	if end, ok := ctx.Deadline(); ok && time.Until(end) <= d {
		return false
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
