#!/usr/bin/env bash
# Unpacks Debian's postgresql-17-pg-failover-slots into a folder, without installing anything, and prints its version and
# the folder of its library, which goes into dynamic_library_path. The server for it is that of other_majors.sh.
#
#   usage: benchmarks/failover_slots.sh FOLDER           FOLDER: one that the server's account can enter
set -euo pipefail
target=$1 suite=trixie package=postgresql-17-pg-failover-slots
mkdir -p "$target"
chmod 755 "$target"
if ! compgen -G "$target/*.version" >/dev/null; then
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(LABEL)' 'Created-By: Packages' |
    awk '$2 == "Debian" && !seen++ {print $1}')
  [ -n "$mirror" ] || { echo "no Debian mirror to have $package from" >&2; exit 1; }
  apt=$(mktemp -d)
  trap 'rm -rf "$apt"' EXIT
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
  : >"$apt/status"
  echo "deb $mirror $suite main" >"$apt/sources.list"
  options=(-o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=- -o Dir::Cache="$apt/cache"
    -o Dir::State::lists="$apt/lists" -o Dir::State::status="$apt/status" -o APT::Sandbox::User=
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false)
  apt-get "${options[@]}" -qq update >&2
  (cd "$apt" && apt-get "${options[@]}" -qq download "$package" >&2)
  dpkg-deb --extract "$apt/$package"_*.deb "$target"
  chmod -R a+rX "$target"
  dpkg-deb --field "$apt/$package"_*.deb Version >"$target/peer.version"
fi
echo "$(cat "$target"/*.version) $target/usr/lib/postgresql/17/lib"
