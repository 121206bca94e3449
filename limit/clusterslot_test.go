package limit_test

import (
	"testing"

	"weir/limit"
)

// As CLUSTER KEYSLOT says. The slots of real keys are asked of Redis in store/redis.
func TestSlotsAreThoseOfRedisCluster(t *testing.T) {
	for key, want := range map[string]int{
		"123456789": 0x31C3, // the check value of CRC16/XMODEM
		"":          0, "foo": 12182, "a{foo}b": 12182, "{}foo": 9500, "foo{{bar}}zap": 4015, "foo{bar}{zap}": 5061,
	} {
		if got := limit.KeySlot(key); got != want {
			t.Errorf("KeySlot(%q) = %d, want %d", key, got, want)
		}
	}
	if got := limit.ClusterSlot("foo"); got != 12182 {
		t.Errorf("ClusterSlot(foo) = %d, want 12182", got)
	}
}
