package limit_test

import (
	"testing"

	"weir/limit"
)

// The first is the check value of CRC16/XMODEM. The slots of real keys are asked
// of Redis in store/redis.
func TestClusterSlot(t *testing.T) {
	for domain, want := range map[string]int{"123456789": 0x31C3, "foo": 12182, "": 0} {
		if got := limit.ClusterSlot(domain); got != want {
			t.Errorf("Slot(%q) = %d, want %d", domain, got, want)
		}
	}
}
