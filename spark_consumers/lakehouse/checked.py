"""A table's own files, compared with their checksums where their bytes are about to be used.

Iceberg makes new manifests of old ones, and its files are read here without Hadoop's verification: what is damaged
would go on with checksums that are right. So a writer asks before each of its commits, and before it lets files go.
"""

from collections.abc import Iterator
from pathlib import Path

from spark_consumers.lakehouse import avro, checksums
from spark_consumers.lakehouse.iceberg_files import local


class Checked:
    """What one writer has compared. Raises `CorruptError`, also for a file that is gone."""

    def __init__(self) -> None:
        #: By file: what the file system said of it then.
        self._seen: dict[str, tuple[int, ...]] = {}

    def snapshot(self, manifest_list: Path) -> None:
        """The manifest list of a snapshot and its manifests: small ones each time, and large ones once."""
        checksums.check(manifest_list)
        for manifest in manifests_of(manifest_list):
            if manifest.exists() and manifest.stat().st_size > checksums.SMALL:
                self._once(manifest)
            else:
                checksums.check(manifest)

    def all_manifests(self, table: Path) -> None:
        """Those of all snapshots, each once for as long as it stays the same file."""
        for sums in (table / "metadata").glob(".*.avro.crc"):
            file = checksums.file_of(sums)
            if file is not None:
                self._once(file)

    def _once(self, file: Path) -> None:
        try:
            found = file.stat()
        except FileNotFoundError:
            if checksums.sums_of(file).exists():
                checksums.check(file)
            return
        known = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        if self._seen.get(str(file)) != known:
            checksums.check(file)
            self._seen[str(file)] = known


def manifests_of(manifest_list: Path) -> Iterator[Path]:
    """The manifests of a snapshot. Raises `CorruptError`."""
    for row in avro.rows(manifest_list):
        yield local(row["manifest_path"])
