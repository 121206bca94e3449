package limit

import "strings"

// ClusterSlot is the slot of Redis Cluster, 0..16383, that all keys of the domain are in.
func ClusterSlot(domain string) int {
	// The hash tag is what stands between the braces of a key: CRC16 (XMODEM) of it,
	// as in the Redis Cluster specification.
	var tag strings.Builder
	escape(&tag, domain, len(domain))
	crc := uint16(0)
	for _, c := range []byte(tag.String()) {
		crc ^= uint16(c) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int(crc % 16384)
}
