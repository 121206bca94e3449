#!/usr/bin/env bash
#
# Checks that what is kept beside the source agrees with it: go.mod and go.sum,
# generated code, format, what the pages of docs/ name, and how the demo differs. It changes nothing. `make verify` runs it, and names
# the folder of the Go tools in BIN.
set -euo pipefail
shopt -s inherit_errexit

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

# named: every test that a page names exists. (bash exits on no error in what check
# calls, so an empty list must be told.)
named() {
  local names name missing=0
  names=$(grep -ohE '`(Test|Fuzz)[A-Za-z0-9]+`' docs/*.md docs/decisions/*.md README.md | tr -d '`' | sort -u) || { echo "no page names a test" >&2; return 1; }
  for name in $names; do
    git grep -qE --untracked "^func $name\\(" -- '*_test.go' || { echo "no test $name" >&2; missing=1; }
  done
  return $missing
}

# told: every case (R01, C01, T01) that is cited has a row in docs/cases.md, and every
# sentence (S1) its number in docs/semantics.md.
told() {
  local cited number missing=0
  cited=$(git grep -ohwE --untracked '[RCT][0-9]{2}|S[0-9]{1,2}' -- '*.go' '*.lua' '*.txt' '*.txtar' ':!*.pb.go' | sort -u) || { echo "no case is cited" >&2; return 1; }
  for number in $cited; do
    grep -qE "^\| $number \||\($number\)" docs/cases.md docs/semantics.md || { echo "$number is not told" >&2; missing=1; }
  done
  return $missing
}

# differs: every line of demo/envoy.sed finds what it changes in envoy/envoy.yaml.
differs() {
  local line missing=0
  while read -r line; do
    ! sed -e "$line" envoy/envoy.yaml | cmp -s - envoy/envoy.yaml || { echo "demo/envoy.sed: $line: it changes nothing" >&2; missing=1; }
  done < <(grep -v -e '^#' -e '^$' demo/envoy.sed)
  ! sed -f demo/envoy.sed envoy/envoy.yaml | grep -E '127\.0\.0\.1, port_value: ([^9]|9[^9])' || { echo "demo/envoy.sed: it leaves these addresses" >&2; missing=1; }
  return $missing
}

for mod in go.mod bench/go.mod tools/*/go.mod; do
  dir=$(dirname "$mod")
  check "(cd $dir && go mod tidy)" go -C "$dir" mod tidy -diff
done
check "make generate" "$BIN/buf" generate --output "$tmp"
check "make generate" diff -ru --exclude='*.proto' proto "$tmp/proto"
check "name a test that exists" named
check "add a row to docs/cases.md, or a number to docs/semantics.md" told
check "change demo/envoy.sed with envoy/envoy.yaml" differs
check "make fmt" "$BIN/golangci-lint" fmt --diff

exit $failed
