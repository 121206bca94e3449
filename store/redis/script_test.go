package redis_test

import (
	"testing"

	"weir/store/redis"
	"weir/store/storetest"
)

// What a script is given and replies arrives as it is: all numbers that are exact, and texts
// of every length and byte.
func TestNumbersAndTextsPassThroughRedisUnchanged(t *testing.T) {
	each(t, func(t *testing.T, server *storetest.Redis) {
		s, _ := open(t, server, nil)
		if err := redis.Echo(storetest.Context(t), s); err != nil {
			t.Error(err)
		}
	})
}
