#!/usr/bin/env bash
# Makes a container image from a PostgreSQL that is installed on this machine (Debian's layout) and the
# shared libraries it uses, where the official image cannot be pulled. It takes the same variables as the
# official one (see entrypoint.sh).
#
#   bash tests/support/image/build.sh 15 tuskline-test-postgres:15
set -euo pipefail
major=$1 tag=$2
here=$(cd "$(dirname "$0")" && pwd)
server=/usr/lib/postgresql/$major
share=/usr/share/postgresql/$major
[ -x "$server/bin/postgres" ] || { echo "PostgreSQL $major is not installed in $server" >&2; exit 1; }
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

mkdir -p "$root"/{bin,dev,etc,proc,run,sys,tmp,usr/bin,usr/local/bin,var/lib/postgresql,var/run/postgresql}
chmod 1777 "$root/tmp"
take() { # as files: a link's target need not come along
  for path; do
    mkdir -p "$root$(dirname "$path")"
    cp -aL "$path" "$root$path"
  done
}
take "$server" "$share" /usr/share/zoneinfo
rm -rf "$root$server"/lib/{bitcode,llvmjit*}
ln -sf bash "$root/bin/sh"
programs=()
for name in bash cat chmod chown env id ls mkdir mktemp rm setpriv sleep; do
  programs+=("$(command -v "$name")")
done
for program in "${programs[@]}"; do cp -L "$program" "$root/bin/"; done
libraries=$(find "$server" \( -name '*.so' -o -path '*/bin/*' \) -type f ! -name 'llvmjit*' -print0 |
  xargs -0 ldd "${programs[@]}" 2>/dev/null | sed -nE 's/^\s+(\S+ => )?(\/\S+) .*/\2/p' | sort -u || true)
for library in $libraries; do take "$library"; done
printf 'root:x:0:0::/:/bin/sh\npostgres:x:999:999::/var/lib/postgresql:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\npostgres:x:999:\n' >"$root/etc/group"
printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
cp "$here/entrypoint.sh" "$root/usr/local/bin/entrypoint.sh"
chmod 755 "$root/usr/local/bin/entrypoint.sh"
chmod -R a+rX "$root"

tar -C "$root" --owner=0 --group=0 -c . | docker import \
  --change "ENV PATH=$server/bin:/usr/local/bin:/usr/bin:/bin" \
  --change 'ENV PGDATA=/var/lib/postgresql/data' \
  --change 'ENTRYPOINT ["/usr/local/bin/entrypoint.sh"]' \
  --change 'CMD ["postgres"]' \
  --change 'EXPOSE 5432' - "$tag" >/dev/null
echo "$tag: $(docker image inspect -f '{{.Size}}' "$tag" | awk '{printf "%d MB", $1 / 1e6}')"
