#!/usr/bin/env bash
#
# fuzz.sh TIME runs every fuzz target of this module for TIME, one after the other.
# A failing input is written to the package's testdata/fuzz, to be committed with its fix.
set -euo pipefail
shopt -s inherit_errexit

readonly fuzztime=${1:?usage: fuzz.sh TIME}

log=$(mktemp)
readonly log
trap 'rm -f "$log"' EXIT

main() {
  local all package target
  all=$(targets)
  [[ -n $all ]] || echo "fuzz: there is no fuzz target"
  while read -r package target; do
    echo "fuzz: $package $target"
    run "$package" "$target"
  done <<<"$all"
}

# targets prints "package target" for every fuzz target: `go test -list` names a
# package's targets, and then the package.
targets() {
  go test -list '^Fuzz' ./... >"$log" || { cat "$log" >&2; return 1; }
  awk '/^Fuzz/ { names[n++] = $1; next } { for (i = 0; i < n; i++) print $2, names[i]; n = 0 }' "$log"
}

# run PACKAGE TARGET. Up to Go 1.26 the engine now and then takes the end of TIME
# for a failure of the target (go.dev/issue/75804); that one is run once more.
run() {
  fuzz "$@" && return
  if grep -q '^ *context deadline exceeded$' "$log" && ! grep -q 'Failing input written' "$log"; then
    echo "fuzz: $2 met go.dev/issue/75804; once more"
    fuzz "$@" && return
  fi
  echo "fuzz: $2 failed" >&2
  exit 1
}

fuzz() {
  go test -run '^$' -fuzz "^$2\$" -fuzztime "$fuzztime" -fuzzminimizetime 20x "$1" </dev/null 2>&1 | tee "$log"
}

main
