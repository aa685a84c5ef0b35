#!/bin/sh
# Makes a Debian package of an installed extension, in the current folder, and prints its name.
#
#   usage: deb.sh FOLDER MAJOR LIBRARY       FOLDER: what `make install DESTDIR=` made; LIBRARY: the library's path in it
set -eu
folder=$1 major=$2 library=$3
here=$(dirname "$0")
case $library in
/usr/lib/postgresql/"$major"/lib/*) ;;
*)
  echo "this server is not Debian's: its libraries are in ${library%/*}" >&2
  exit 1
  ;;
esac
version=$(sed -n "s/^default_version = '\(.*\)'$/\1/p" "$here/tuskline.control")
package=postgresql-$major-tuskline
# The newest C library that any of its symbols asks for.
libc=$(grep -ao 'GLIBC_[0-9.]*' "$folder$library" | sed 's/GLIBC_//' | sort -Vu | tail -n 1)
mkdir -p "$folder/DEBIAN" "$folder/usr/share/doc/$package"
cp "$here/../LICENSE" "$folder/usr/share/doc/$package/copyright"
find "$folder" -type d -exec chmod 755 {} +
find "$folder" -type f -exec chmod 644 {} +
cat >"$folder/DEBIAN/control" <<CONTROL
Package: $package
Version: $version-1
Architecture: $(dpkg --print-architecture)
Maintainer: The Tuskline developers
Section: database
Priority: optional
Depends: postgresql-$major, libc6 (>= ${libc:-2.17})
Installed-Size: $(du -ks "$folder/usr" | cut -f 1)
Description: copies of logical replication slots on standbys, for PostgreSQL $major
 The extension tuskline lets a standby of PostgreSQL $major have copies of its primary's logical
 replication slots, proven to be whole, which their clients go on from after a promotion. Its
 library is an output plugin, too, that ends a transaction only when the standbys have it.
CONTROL
(cd "$folder" && find usr -type f -print0 | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
dpkg-deb --build --root-owner-group "$folder" . >/dev/null
echo "${package}_$version-1_$(dpkg --print-architecture).deb"
