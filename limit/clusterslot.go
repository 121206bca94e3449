package limit

import "strings"

// clusterSlots is how many slots a Redis Cluster has.
const clusterSlots = 16384

// ClusterSlot is the slot of Redis Cluster, 0..16383, that all keys of the domain are in.
func ClusterSlot(domain string) int { return KeySlot(LeasesKey(domain)) }

// KeySlot is the slot of a key in a Redis Cluster: the CRC16 (XMODEM) of what is in
// its first braces, if anything is, as the Redis Cluster specification has it.
func KeySlot(key string) int {
	if _, after, found := strings.Cut(key, "{"); found {
		if tag, _, found := strings.Cut(after, "}"); found && tag != "" {
			key = tag
		}
	}
	var crc uint16
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int(crc) % clusterSlots
}
