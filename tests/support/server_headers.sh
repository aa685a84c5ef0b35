#!/usr/bin/env bash
# Unpacks the headers of those PostgreSQL servers that came without them (Debian keeps them in a package that wants
# LLVM), without installing anything, and prints a pg_config for each, a colon between them: a value for
# TUSKLINE_PG_CONFIG. It answers with the headers' place and the server's own; what cannot be had is named on stderr.
#
#   usage: tests/support/server_headers.sh [FOLDER]      the servers: the system's 15, and those of other_majors.sh
set -euo pipefail
target=${1:-/var/tmp/tuskline-$(id -u)/headers}
majors=/var/tmp/tuskline-$(id -u)/majors
servers=(15:bookworm:/usr 13:bullseye:"$majors/13-bullseye/usr" 17:trixie:"$majors/17-trixie/usr" 18:forky:"$majors/18-forky/usr")
found=()
mkdir -p "$target"
chmod 755 "$(dirname "$target")" "$target"
mirror=$(apt-get indextargets --format '$(REPO_URI) $(LABEL)' 'Created-By: Packages' 2>/dev/null |
  awk '$2 == "Debian" && !seen++ {print $1}') || mirror=

unpack() { # major, suite, folder
  local apt
  apt=$(mktemp -d)
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
  : >"$apt/status"
  echo "deb $mirror $2 main" >"$apt/sources.list"
  local options=(-o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=- -o Dir::Cache="$apt/cache"
    -o Dir::State::lists="$apt/lists" -o Dir::State::status="$apt/status" -o APT::Sandbox::User=
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false)
  if apt-get "${options[@]}" -qq update &&
    (cd "$apt" && apt-get "${options[@]}" -qq download "postgresql-server-dev-$1" libpq-dev); then
    for package in "$apt"/*.deb; do dpkg-deb --extract "$package" "$3"; done
  fi
  rm -rf "$apt"
}

write_pg_config() { # major, folder of headers, prefix of the server
  local lib=$3/lib/postgresql/$1/lib headers=$2/usr/include/postgresql
  cat >"$2/pg_config" <<SCRIPT
#!/bin/sh
case \${1:-} in
  --bindir) echo '$3/lib/postgresql/$1/bin' ;;
  --pkglibdir) echo '$lib' ;;
  --sharedir) echo '$3/share/postgresql/$1' ;;
  --pgxs) echo '$lib/pgxs/src/makefiles/pgxs.mk' ;;
  --includedir | --pkgincludedir) echo '$headers' ;;
  --includedir-server) echo '$headers/$1/server' ;;
  *) exec '$3/lib/postgresql/$1/bin/pg_config' "\$@" ;;
esac
SCRIPT
  chmod 755 "$2/pg_config"
}

for each in "${servers[@]}"; do
  IFS=: read -r major suite prefix <<<"$each"
  [ -x "$prefix/lib/postgresql/$major/bin/postgres" ] || continue
  [ -d "/usr/include/postgresql/$major/server" ] && [ "$prefix" = /usr ] && continue # its own pg_config will do
  root=$target/$major
  if [ ! -d "$root" ] && [ -n "$mirror" ]; then
    echo "PostgreSQL $major: unpacking its headers from $suite" >&2
    new=$(mktemp -d "$target/.new.XXXXXX")
    unpack "$major" "$suite" "$new" >&2 || true
    if [ -f "$new/usr/include/postgresql/$major/server/postgres.h" ]; then
      chmod -R a+rX "$new"
      mv "$new" "$root"
    else
      rm -rf "$new"
    fi
  fi
  if [ -d "$root" ]; then
    write_pg_config "$major" "$root" "$prefix"
    found+=("$root/pg_config")
  else
    echo "PostgreSQL $major: its headers cannot be had from Debian $suite" >&2
  fi
done
(IFS=:; echo "${found[*]:-}")
