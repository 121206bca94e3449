// Package envoy translates Envoy's rate limit messages to weir's types and back.
// It is pure: it reads no clock and does no I/O.
package envoy
