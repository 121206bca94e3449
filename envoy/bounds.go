package envoy

import (
	"errors"
	"fmt"
)

// What a request may have at most, whatever its protocol.
const (
	MaxDomain      = 256  // bytes of the domain
	MaxDescriptors = 1024 // in a message
	MaxEntries     = 64   // in a descriptor, reserved ones included
	maxStream      = 256  // bytes of a stream's id
)

// CheckDomain returns what is wrong with the domain of a request, for its sender.
func CheckDomain(domain string) error {
	switch n := len(domain); {
	case n == 0:
		// rls.proto: "All rate limit requests must specify a domain."
		return errors.New("domain is empty; set it to the domain of a policy")
	case n > MaxDomain:
		return fmt.Errorf("domain has %d bytes; use at most %d", n, MaxDomain)
	}
	return nil
}

// CheckDescriptors returns what is wrong with the number of descriptors of a
// request, for its sender.
func CheckDescriptors(n int) error {
	switch {
	case n == 0:
		// rls.proto: "All rate limit requests must specify at least one
		// RateLimitDescriptor."
		return errors.New("descriptors is empty; send at least one")
	case n > MaxDescriptors:
		return fmt.Errorf("descriptors has %d elements; send at most %d", n, MaxDescriptors)
	}
	return nil
}

// CheckEntries returns what is wrong with the number of entries of a descriptor,
// for its sender.
func CheckEntries(n int) error {
	switch {
	case n == 0:
		return errors.New("entries is empty; send at least one entry")
	case n > MaxEntries:
		return fmt.Errorf("entries has %d elements; send at most %d", n, MaxEntries)
	}
	return nil
}

// CheckKey returns what is wrong with the key of entry i, for its sender.
func CheckKey(i int, key string) error {
	if key == "" {
		return fmt.Errorf("entries[%d].key is empty; give every entry a key", i)
	}
	return nil
}
