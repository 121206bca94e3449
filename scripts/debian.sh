# For scripts to source: programs of Debian, without root, and without installing them.

# debian DIR PACKAGE... unpacks packages, and the libraries that they ask for, into
# DIR/root. It works in DIR, which must be new.
debian() {
  local dir=$1 package deb
  local packages=("${@:2}")
  type -P apt-get dpkg-deb >/dev/null || { echo "no apt-get to fetch Debian's ${packages[*]}" >&2; return 1; }

  # Lists and a cache of our own: root's may be empty, and are not ours to fill.
  mkdir -p "$dir"/state/lists/partial "$dir"/cache/archives/partial
  local opts=(-qq -o "Dir::State=$dir/state" -o "Dir::Cache=$dir/cache"
    -o Dir::State::status=/var/lib/dpkg/status -o "APT::Sandbox::User=$(id -un)")
  (
    cd "$dir"
    apt-get "${opts[@]}" update || exit 1
    # shellcheck disable=SC2046 # one word a package
    apt-get "${opts[@]}" download "${packages[@]}" $(for package in "${packages[@]}"; do libraries "$package" "${opts[@]}"; done | sort -u)
  ) >&2 || { echo "apt-get could not fetch Debian's ${packages[*]}" >&2; return 1; }
  for deb in "$dir"/*.deb; do
    dpkg-deb -x "$deb" "$dir/root" || return 1
  done
}

# debian_whole DIR PACKAGE... is debian for programs that need much: it unpacks all that the
# packages depend on and this machine lacks.
debian_whole() {
  local dir=$1 deb
  local packages=("${@:2}")
  type -P apt-get dpkg-deb >/dev/null || { echo "no apt-get to fetch Debian's ${packages[*]}" >&2; return 1; }
  mkdir -p "$dir"/state/lists/partial "$dir"/cache/archives/partial
  local opts=(-qq -o "Dir::State=$dir/state" -o "Dir::Cache=$dir/cache"
    -o Dir::State::status=/var/lib/dpkg/status -o "APT::Sandbox::User=$(id -un)" -o Debug::NoLocking=1)
  {
    apt-get "${opts[@]}" update &&
      apt-get "${opts[@]}" install --yes --no-install-recommends --download-only "${packages[@]}"
  } >&2 || { echo "apt-get could not fetch Debian's ${packages[*]}" >&2; return 1; }
  for deb in "$dir"/cache/archives/*.deb; do
    dpkg-deb -x "$deb" "$dir/root" || return 1
  done
}

# libraries PACKAGE APT-OPTION... prints the libraries that PACKAGE depends on, but libc.
libraries() {
  apt-cache "${@:2}" depends "$1" | awk '$1 == "Depends:" && $2 ~ /^(lib|lua-)/ && $2 != "libc6" && $2 !~ /^libjs-/ { print $2 }'
}
