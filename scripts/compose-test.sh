#!/usr/bin/env bash
#
# Runs docker-compose.yml and `make demo` where no Docker runs and no image can be pulled. It needs root, and Linux x86_64.
#
# Debian's Docker runs in namespaces of its own, so that its networks, ports, mounts and processes are nobody else's and
# end with it. In place of the images that would be pulled it finds others of the same names, which this script makes
# around the programs of the tests, Debian's Prometheus and the Go that is here:
#
#   golang              the Go of this machine: it builds the real Dockerfiles, with modules that are there already
#   envoyproxy/envoy    1.40.0, with busybox as its shell
#   redis               8.2.3
#   prom/prometheus     2.42, older than the one that is named
#
# Docker is 20.10, with its classic builder instead of BuildKit; compose is the one of tools/compose. What this does not
# show is what the pulled images bring beside their programs: users, entrypoints, folders.
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root tools=$root/.cache/tools
# shellcheck source=scripts/debian.sh
source "$root/scripts/debian.sh"

readonly unpacked=$tools/docker-20.10 # Debian's packages
readonly gobuild=$tools/compose-gobuild gomod=$tools/compose-gomod # caches of the Go in the stand-in
goroot=$(go env GOROOT)
readonly goroot
readonly limit=600 # seconds, for what runs in the namespaces

main() {
  [[ $(uname -sm) == "Linux x86_64" ]] || die "it is for Linux x86_64; elsewhere run docker compose itself: make demo"
  [[ $(id -u) == 0 ]] || die "it needs root, for a Docker of its own; with a Docker that runs: make demo"
  mkdir -p "$tools"
  tmp=$(mktemp -d "${TMPDIR:-/tmp}/weir-compose.XXXXXX")
  trap tidy EXIT
  unpack
  build
  # In the foreground, so that Ctrl-C reaches it; what is left at the end is killed with its first process.
  timeout --foreground --kill-after=10 $limit \
    unshare --mount --net --pid --ipc --fork --kill-child --mount-proc "${BASH_SOURCE[0]}" inside "$tmp" "$SECONDS"
}

# tidy removes what is left: files, and empty cgroups.
tidy() {
  find /sys/fs/cgroup -depth -type d -path "*/$(cgroup)*" -exec rmdir {} + 2>/dev/null || true
  rm -rf "$tmp"
}

cgroup() { basename "$tmp"; }

# unpack puts Debian's packages in place, if they are not there yet.
unpack() {
  local dir
  [[ -e $unpacked/complete ]] && return
  say "fetching Debian's Docker"
  dir=$(mktemp -d "$tmp/deb.XXXXXX")
  debian "$dir" docker.io containerd runc iptables prometheus busybox-static || die "this needs Debian's packages, and the network, once"
  compgen -G "$dir/docker.io_20.10.*.deb" >/dev/null || die "Debian 12's Docker 20.10 is wanted, and apt-get brought $(basename "$dir"/docker.io_*.deb)"
  ln -s xtables-nft-multi "$dir/root/usr/sbin/iptables"
  rm -rf "$unpacked"
  mv "$dir/root" "$unpacked"
  touch "$unpacked/complete" # or it is fetched again
}

# build does what needs the network or a cache: inside there is neither.
build() {
  local modules
  say "building weir"
  modules=$(go env GOMODCACHE)
  go -C "$root" mod download
  GOMODCACHE=$gomod GOPROXY=file://$modules/cache/download GOSUMDB=off GOFLAGS=-modcacherw go -C "$root" mod download
  GOCACHE=$gobuild CGO_ENABLED=0 go -C "$root" build -trimpath -buildvcs=false -o /dev/null ./cmd/weir ./demo/imageservice
}

# stand_ins makes the root folder of each image, under $tmp/images.
stand_ins() {
  local images=$tmp/images name from to
  with_shell "$images/envoy"
  program "$images/envoy" "$WEIR_ENVOY" usr/local/bin/envoy
  program "$images/redis" "$WEIR_REDIS8" usr/local/bin/redis-server
  program "$images/prometheus" "$unpacked/usr/bin/prometheus" bin/prometheus
  mkdir -m 777 "$images/prometheus/prometheus"

  # Go, the modules of go.mod, and what it has built before.
  with_shell "$images/golang"
  while read -r from to; do
    mkdir -p "$images/golang/$to"
    mount -o bind,ro "$from" "$images/golang/$to"
  done <<<"$goroot usr/local/go
$gomod go/pkg/mod
$gobuild root/.cache/go-build
/etc/ssl/certs etc/ssl/certs"
}

# with_shell DIR puts busybox there, and /tmp.
with_shell() {
  mkdir -p "$1"/{bin,tmp}
  chmod 1777 "$1/tmp"
  cp "$unpacked/bin/busybox" "$1/bin/"
  local name
  for name in sh sed; do ln -s busybox "$1/bin/$name"; done
}

# program DIR FROM TO copies a program, and its libraries.
program() {
  mkdir -p "$1/$(dirname "$3")"
  cp -L "$2" "$1/$3"
  local lib
  ldd "$2" | grep -oE '/[^ ]+' | while read -r lib; do
    mkdir -p "$1$(dirname "$lib")"
    cp -L "$lib" "$1$lib"
  done
}

# inside TMP SECONDS is what runs in the namespaces.
inside() {
  tmp=$1 SECONDS=$2
  trap 'exit 130' INT TERM
  export LD_LIBRARY_PATH=$unpacked/usr/lib/x86_64-linux-gnu XTABLES_LIBDIR=$unpacked/usr/lib/x86_64-linux-gnu/xtables
  export PATH=$unpacked/usr/sbin:$unpacked/usr/bin:$PATH
  export DOCKER_HOST=unix://$tmp/docker.sock DOCKER_CONFIG=$tmp/config DOCKER_BUILDKIT=0
  mkdir -p "$DOCKER_CONFIG/cli-plugins"
  ln -s "$tools/bin/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
  "$unpacked/bin/busybox" ip link set lo up

  say "starting dockerd"
  dockerd --host "$DOCKER_HOST" --data-root "$tmp/data" --exec-root "$tmp/exec" --pidfile "$tmp/dockerd.pid" \
    --cgroup-parent "/$(cgroup)" >"$tmp/dockerd.log" 2>&1 &
  local dockerd=$!
  until docker version >/dev/null 2>&1; do
    kill -0 $dockerd 2>/dev/null || { tail -n 5 "$tmp/dockerd.log" >&2; die "dockerd does not run here"; }
    read -rt 0.1 <> <(:) || true
  done

  say "making stand-in images"
  # shellcheck source=/dev/null
  source "$tools/env.sh"
  stand_ins
  image envoy envoyproxy/envoy
  image redis redis
  image prometheus prom/prometheus --change 'ENTRYPOINT ["/bin/prometheus"]' --change 'WORKDIR /prometheus' --change 'USER 65534'
  image golang golang --change 'ENV PATH=/usr/local/go/bin:/bin GOPATH=/go GOPROXY=off GOTOOLCHAIN=local GOFLAGS=-mod=mod HOME=/root'
  say "running make demo"
  cd "$root"
  if ! make demo; then
    docker compose ps --all >&2
    docker compose logs --tail 100 >&2
    die "the demo failed"
  fi
  say "stopping"
  docker compose down --volumes --timeout 5
  kill $dockerd
  wait $dockerd || true
}

# image DIR NAME OPTION... imports a folder as the image that the repository names so.
image() {
  local name
  name=$(grep -ohE "(image:|FROM) $2:[^ ]+" "$root/docker-compose.yml" "$root/Dockerfile" | head -n 1)
  [[ -n $name ]] || die "nothing names an image $2"
  tar -C "$tmp/images/$1" --exclude=./usr/local/go/{api,doc,test,src/cmd} --exclude='./usr/local/go/*_test.go' -c . | docker import "${@:3}" - "${name##* }" >/dev/null
}

say() { printf "compose-test: %3d s: %s\n" "$SECONDS" "$*" >&2; }

die() {
  say "$*"
  exit 1
}

if [[ ${1:-} == inside ]]; then inside "${@:2}"; else main; fi
