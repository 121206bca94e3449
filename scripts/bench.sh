#!/usr/bin/env bash
#
# bench.sh measures builds of weir, each in memory and on a Redis of its own, beside a
# gRPC server that does nothing (bench/floor), and prints a table, and how it compares
# with what was kept. All servers are on loopback, on free ports, and end with it.
#
#   BENCH_BUILDS    checkouts (directories) and git revisions to build, in turn (this one)
#   BENCH_SECONDS   of each measurement (2)
#   BENCH_ROUNDS    how often each server is measured; the table has the medians (3)
#   BENCH_CALLERS   how many callers ask for one bucket at once, in turn ("1 8 64 256")
#   BENCH_RATE      decisions a second of the open loop at a fixed rate (2000)
#   BENCH_ONLY      regular expression of the scenarios to measure (all)
#   BENCH_JSON      a file for all results
#   BENCH_KEEP      not empty: they become the kept result, bench/kept.json
#
# bench.sh profile runs one scenario on this checkout's weir, and takes profiles of it.
#
#   SCENARIO   its name in the table ("one bucket")
#   CALLERS    how many ask at once (64)
#   STORE      redis or memory (redis)
#   BENCH_SECONDS (10), BENCH_RATE (of "one bucket, open")
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=$(mktemp -d)
readonly root dir
readonly kept=$root/bench/kept.json
declare -A pids=() # of the servers, by name

main() {
  local redis_server
  redis_server=${WEIR_REDIS7:-$(type -P redis-server || true)}
  [[ -n $redis_server ]] || die "no redis-server on PATH; name one: make bench WEIR_REDIS7=/path/to/redis-server"
  case ${1:-compare} in
    compare) compare ;;
    profile) profile ;;
    *) die "$1 is neither compare nor profile" ;;
  esac
}

# compare measures all builds.
compare() {
  local builds label of flags=() servers=() address i
  read -ra builds <<<"${BENCH_BUILDS:-$root}"
  if [[ -n ${BENCH_KEEP:-} ]]; then
    ((${#builds[@]} == 1)) || die "results of several builds can't be kept: keep one"
    [[ -z ${BENCH_ONLY:-} ]] || die "results of some scenarios can't be kept: keep all"
  fi
  CGO_ENABLED=0 go -C "$root/bench" build -trimpath -ldflags '-s -w' -o "$dir/" . ./floor
  start floor "$dir/floor"
  address=$(address floor)
  servers+=("floor,$address,${pids[floor]}")
  for i in "${!builds[@]}"; do
    build "$i" "${builds[i]}"
    label=$(label "${builds[i]}")
    flags+=(-build "$label=$version")
    of=
    ((${#builds[@]} == 1)) || of=@$label
    start_redis "redis$i"
    start_weir "$i" memory
    start_weir "$i" redis --redis "redis://$redis"
    address=$(address "memory$i")
    servers+=("memory$of,$address,${pids[memory$i]}")
    address=$(address "redis-weir$i")
    servers+=("redis$of,$address,${pids[redis-weir$i]},$redis,${pids[redis$i]}")
  done

  local json=${BENCH_JSON:-$dir/results.json}
  generate -callers "${BENCH_CALLERS:-1 8 64 256}" -seconds "${BENCH_SECONDS:-2}" -rounds "${BENCH_ROUNDS:-3}" \
    -rate "${BENCH_RATE:-2000}" -only "${BENCH_ONLY:-}" -json "$json" -kept "$kept" "${flags[@]}" "${servers[@]}"
  if [[ -n ${BENCH_KEEP:-} ]]; then
    cp "$json" "$kept"
    echo "kept in bench/kept.json"
  fi
}

# generate runs the load generator, in the background, so that a signal ends it at
# once.
generate() {
  "$dir/bench" "$@" &
  pids[bench]=$!
  wait "${pids[bench]}"
  unset 'pids[bench]'
}

# build I WHAT builds weir from a checkout or a git revision, and sets version to what
# git says of it.
build() {
  local source=$2
  if [[ -d $2 ]]; then
    source=$(cd "$2" && pwd)
    version=$(git -C "$source" describe --tags --always --dirty --abbrev=12 2>/dev/null || echo unknown)
  else
    version=$(git -C "$root" rev-parse --verify --quiet --short=12 "$2^{commit}") ||
      die "BENCH_BUILDS: $2 is neither a directory nor a commit of this repository"
    source=$dir/source$1
    mkdir "$source"
    git -C "$root" archive "$version" | tar -x -C "$source"
  fi
  [[ -d $source/cmd/weir ]] || die "BENCH_BUILDS: $2 is no checkout of weir: it has no cmd/weir"
  CGO_ENABLED=0 go -C "$source" build -trimpath -buildvcs=false -ldflags '-s -w' -o "$dir/weir$1" ./cmd/weir
}

# label WHAT prints what the servers of a build are named by: a revision as it was
# given, a directory by its name.
label() {
  local text=$1
  [[ ! -d $1 ]] || text=$(cd "$1" && basename "$PWD")
  tr -c 'A-Za-z0-9~^./_\n-' _ <<<"$text"
}

# start NAME COMMAND... runs a server, with its output in a file.
start() {
  "${@:2}" >"$dir/$1.log" 2>&1 &
  pids[$1]=$!
}

# start_weir I STORE FLAG... serves the benchmark's policy with build I. It waits longer
# for Redis than weir does by default: the callers leave it little CPU, and an answer
# that was not decided is worth nothing here.
start_weir() {
  local name=$2$1
  [[ $2 != redis ]] || name=redis-weir$1
  start "$name" "$dir/weir$1" serve --policy "$root/bench/policy.yaml" --store-timeout 1s \
    --grpc-listen 127.0.0.1:0 --http-listen 127.0.0.1:0 --admin-listen "${admin:-}" "${@:3}"
}

# start_redis NAME starts a Redis that keeps nothing on disk, and sets redis to its
# address. Which port is free is known only by trying.
start_redis() {
  local port
  for _ in {1..20}; do
    port=$((20000 + RANDOM % 10000))
    start "$1" "$redis_server" --port "$port" --bind 127.0.0.1 --save '' --appendonly no --dir "$dir"
    if wait_for "$1" 'Ready to accept connections'; then
      redis=127.0.0.1:$port
      return
    fi
  done
  die "redis-server does not start"
}

# address NAME [LISTENER] prints the address on which a server says that it listens.
address() {
  local listener=${2:-grpc}
  wait_for "$1" "listening .*$listener="
  sed -n "s/.*listening .*$listener=\([^ ]*\).*/\1/p" "$dir/$1.log"
}

# wait_for NAME PATTERN waits until a server has logged it. It fails after ten
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

# profile puts CPU and allocations of one scenario under .cache/profile, and prints
# what takes most.
profile() {
  local out=$root/.cache/profile admin=127.0.0.1:0 scenario=${SCENARIO:-one bucket} callers=${CALLERS:-64}
  local store=${STORE:-redis} seconds=${BENCH_SECONDS:-10} target weir admin_address grpc
  [[ $store == redis || $store == memory ]] || die "STORE=$store is neither redis nor memory"
  mkdir -p "$out"
  rm -f "$out"/{cpu,allocs,allocs-before}.pb.gz "$out/perf.data"
  CGO_ENABLED=0 go -C "$root/bench" build -trimpath -ldflags '-s -w' -o "$dir/" .
  build 0 "$root"
  if [[ $store == redis ]]; then
    start_redis redis0
    start_weir 0 redis --redis "redis://$redis"
    weir=redis-weir0
  else
    start_weir 0 memory
    weir=memory0
  fi
  grpc=$(address "$weir")
  admin_address=$(address "$weir" admin)
  target=$store,$grpc,${pids[$weir]}
  [[ $store == memory ]] || target+=,$redis,${pids[redis0]}

  if [[ $store == redis ]]; then start_perf; fi
  generate -profile "$out" -admin "$admin_address" -scenario "$scenario" -callers "$callers" \
    -rate "${BENCH_RATE:-2000}" -seconds "$seconds" "$target"
  cp "$dir/weir0" "$out/weir"
  echo
  go tool pprof -top -nodecount=30 "$out/weir" "$out/cpu.pb.gz"
  echo
  go tool pprof -top -nodecount=30 -sample_index=alloc_space -base "$out/allocs-before.pb.gz" "$out/weir" "$out/allocs.pb.gz"
  if [[ $store == redis ]]; then
    echo
    profile_redis
  fi
  echo "more: go tool pprof -http=: .cache/profile/cpu.pb.gz"
}

# start_perf has perf look at Redis, if it can.
start_perf() {
  if ! type -P perf >/dev/null; then
    echo "bench: no perf on PATH: no profile of Redis" >&2
    return
  fi
  start perf perf record -g -o "$out/perf.data" -p "${pids[redis0]}"
}

# profile_redis ends perf, and prints what it saw.
profile_redis() {
  [[ -n ${pids[perf]:-} ]] || return 0
  kill -INT "${pids[perf]}" 2>/dev/null || true
  wait "${pids[perf]}" || true # it ends by the signal
  unset 'pids[perf]'
  if [[ ! -s $out/perf.data ]]; then
    echo "bench: no profile of Redis, since perf says:" >&2
    cat "$dir/perf.log" >&2
    return
  fi
  echo "Redis, by perf:"
  perf report -i "$out/perf.data" --no-children --stdio -g none --percent-limit 1 2>/dev/null | grep -E '^ +[0-9]'
}

die() {
  echo "bench: $*" >&2
  exit 1
}

# stop ends the servers and removes what was built.
stop() {
  trap - EXIT
  ((${#pids[@]} == 0)) || kill "${pids[@]}" 2>/dev/null || true # some may have ended
  wait
  rm -rf "$dir"
}

trap stop EXIT
trap 'exit 130' INT TERM
main "$@"
