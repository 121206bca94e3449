package main

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
)

// What the text of a hash key may have, in bytes.
const (
	minHashKey = 32
	maxHashKey = 4096
)

const makeHashKey = "make one by openssl rand -hex 32"

// readHashKey returns the secret under which values of sensitive policies are
// hashed: a file's text without the end of its last line. No error shows any of it.
func readHashKey(path string) ([]byte, error) {
	// Nothing may wait here: a pipe would, for somebody who writes into it.
	info, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("--hash-key-file: %w; %s", err, makeHashKey)
	}
	if err != nil {
		return nil, fmt.Errorf("--hash-key-file: %w; give a file that can be read", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxHashKey+2 { // with the end of a line
		return nil, fmt.Errorf("--hash-key-file: %s is not a regular file of at most %d bytes; %s", path, maxHashKey, makeHashKey)
	}
	key, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--hash-key-file: %w; give a file that can be read", err)
	}
	key = bytes.TrimSuffix(bytes.TrimSuffix(key, []byte("\n")), []byte("\r"))
	switch {
	case len(key) < minHashKey:
		return nil, fmt.Errorf("--hash-key-file: %s has %d bytes, and must have at least %d; %s", path, len(key), minHashKey, makeHashKey)
	case len(key) > maxHashKey:
		return nil, fmt.Errorf("--hash-key-file: %s has more than %d bytes; %s", path, maxHashKey, makeHashKey)
	}
	return key, nil
}

// fingerprint tells whether two replicas have the same hash key, and nothing else
// about it.
func fingerprint(key []byte) string {
	mac := hmac.New(sha256.New, key)
	_, _ = mac.Write([]byte("weir hash key fingerprint")) // a hash never fails
	return hex.EncodeToString(mac.Sum(nil)[:4])
}
