package redis_test

import (
	"strings"
	"testing"
	"time"

	"weir/limit"
	"weir/store/storetest"
)

// All keys of a domain are in the slot that weir tells: Redis itself is asked.
func TestEveryKeyIsInItsDomainsSlot(t *testing.T) {
	server := storetest.StartRedis(t, storetest.AnyRedis(t), "--cluster-enabled", "yes", "--cluster-port", storetest.FreePort(t))
	_, client := open(t, server, nil)
	day := limit.Window{Max: 1, Unit: limit.Day, Multiplier: 1}
	for _, domain := range []string{"inference", "d", "a}b{c", "{}", "}", "{", "%7D", "a:b,c=d", "grün", "\x00\n\x7f#", "{a}{b}", strings.Repeat("{", 85)} {
		want := limit.ClusterSlot(domain)
		subject := []limit.Entry{{Key: "k{x}", Value: "{y}"}, limit.Hashed("s", [16]byte{1})}
		id := limit.NewLeaseID(domain, [16]byte{1})
		for _, key := range []string{
			limit.Key(domain, bucket(t, 1, time.Second), subject), limit.Key(domain, day, subject), limit.Key(domain, lane(t, 1, time.Minute), subject),
			limit.LeaseKey(id), limit.LeasesKey(domain), limit.StreamKey(domain, "{s}"), limit.UsageKey(domain, "{s}"),
		} {
			got, err := client.ClusterKeySlot(storetest.Context(t), key).Result()
			if err != nil || got != int64(want) {
				t.Errorf("CLUSTER KEYSLOT %q = %d, %v, want ClusterSlot(%q) = %d", key, got, err, domain, want)
			}
		}
		if id.Domain() != domain {
			t.Errorf("the domain of %q is %q, want %q", id, id.Domain(), domain)
		}
	}
}
