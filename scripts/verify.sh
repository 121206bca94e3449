#!/usr/bin/env bash
#
# Checks that what is kept beside the source agrees with it: go.mod and go.sum,
# generated code, format. It changes nothing. `make verify` runs it, and names
# the folder of the Go tools in BIN.
set -euo pipefail

: "${BIN:?run it by: make verify}"

failed=0
tmp=$(mktemp -d)
readonly tmp
trap 'rm -rf "$tmp"' EXIT

# check REMEDY COMMAND... runs the command, and says what to do when it fails.
check() {
  echo "verify: ${*:2}"
  "${@:2}" && return
  echo "verify: failed; to mend it: $1" >&2
  failed=1
}

# named: every test that a page names exists.
named() {
  local name missing=0
  for name in $(grep -ohE '`(Test|Fuzz)[A-Za-z0-9]+`' docs/*.md docs/decisions/*.md README.md | tr -d '`' | sort -u); do
    grep -rqE "^func $name\\(" --include='*_test.go' . || { echo "no test $name" >&2; missing=1; }
  done
  return $missing
}

for mod in go.mod bench/go.mod tools/*/go.mod; do
  dir=$(dirname "$mod")
  check "(cd $dir && go mod tidy)" go -C "$dir" mod tidy -diff
done
check "make generate" "$BIN/buf" generate --output "$tmp"
check "make generate" diff -ru --exclude='*.proto' proto "$tmp/proto"
check "name a test that exists" named
check "make fmt" "$BIN/golangci-lint" fmt --diff

exit $failed
