#!/usr/bin/env bash
#
# bench.sh measures weir, in memory and on a Redis of its own, beside a gRPC
# server that does nothing (bench/floor), and prints a table. All of them are on
# loopback, on free ports, and end with it.
#
#   BENCH_SECONDS   of each measurement (2)
#   BENCH_ROUNDS    how often each server is measured; the table has the medians (3)
#   BENCH_CALLERS   how many callers ask at once, in turn ("1 8 64 256")
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=$(mktemp -d)
readonly root dir
declare -A pids # of the servers, by name

main() {
  local program redis floor memory shared
  program=${WEIR_REDIS7:-$(type -P redis-server || true)}
  [[ -n $program ]] || die "no redis-server on PATH; name one: make bench WEIR_REDIS7=/path/to/redis-server"

  CGO_ENABLED=0 go -C "$root" build -trimpath -ldflags '-s -w' -o "$dir/weir" ./cmd/weir
  CGO_ENABLED=0 go -C "$root/bench" build -trimpath -ldflags '-s -w' -o "$dir/" . ./floor

  start floor "$dir/floor"
  start_weir memory
  start_redis "$program"
  start_weir shared --redis "redis://$redis"
  floor=$(address floor)
  memory=$(address memory)
  shared=$(address shared)

  echo "$(nproc) CPUs for the generator, the server and Redis; $("$program" --version | cut -d ' ' -f 1-3); $(go env GOVERSION)"
  # In the background, so that a signal ends it at once.
  "$dir/bench" \
    -callers "${BENCH_CALLERS:-1 8 64 256}" -seconds "${BENCH_SECONDS:-2}" -rounds "${BENCH_ROUNDS:-3}" \
    "floor,$floor,${pids[floor]}" \
    "memory,$memory,${pids[memory]}" \
    "redis,$shared,${pids[shared]},$redis,${pids[redis]}" &
  pids[bench]=$!
  wait "${pids[bench]}"
}

# start NAME COMMAND... runs a server, with its output in a file.
start() {
  "${@:2}" >"$dir/$1.log" 2>&1 &
  pids[$1]=$!
}

# start_weir NAME FLAG... serves the benchmark's policy. It waits longer for Redis
# than weir does by default: the callers leave it little CPU, and an answer that
# was not decided is worth nothing here.
start_weir() {
  start "$1" "$dir/weir" serve --policy "$root/bench/policy.yaml" --store-timeout 1s \
    --grpc-listen 127.0.0.1:0 --http-listen 127.0.0.1:0 --admin-listen '' "${@:2}"
}

# start_redis PROGRAM starts a Redis that keeps nothing on disk, and sets redis to
# its address. Which port is free is known only by trying.
start_redis() {
  local port
  for _ in {1..20}; do
    port=$((20000 + RANDOM % 10000))
    start redis "$1" --port "$port" --bind 127.0.0.1 --save '' --appendonly no --dir "$dir"
    if wait_for redis 'Ready to accept connections'; then
      redis=127.0.0.1:$port
      return
    fi
  done
  die "redis-server does not start"
}

# address NAME prints the address on which a server says that it listens.
address() {
  wait_for "$1" 'listening grpc='
  sed -n 's/.*listening grpc=\([^ ]*\).*/\1/p' "$dir/$1.log"
}

# wait_for NAME TEXT waits until a server has logged the text. It fails after ten
# seconds, or when the server has ended.
wait_for() {
  for _ in {1..200}; do
    grep -qs "$2" "$dir/$1.log" && return
    kill -0 "${pids[$1]}" 2>/dev/null || break
    sleep 0.05
  done
  echo "bench: $1 does not start:" >&2
  cat "$dir/$1.log" >&2
  return 1
}

# stop ends the servers and removes what was built.
stop() {
  trap - EXIT
  ((${#pids[@]} == 0)) || kill "${pids[@]}" 2>/dev/null || true # some may have ended
  wait
  rm -rf "$dir"
}

die() {
  echo "bench: $*" >&2
  exit 1
}

trap stop EXIT
trap 'exit 130' INT TERM
main
