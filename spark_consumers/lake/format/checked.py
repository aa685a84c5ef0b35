"""Compares a table's own files with their checksums before their bytes are used.

Iceberg derives new manifests from old ones, and its files are read here without Hadoop's verification: damaged content
would be written again with a correct checksum. So a writer checks before each commit, and before it removes files.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spark_consumers.lake.format import avro, checksums
from spark_consumers.lake.format.object_seals import MANIFESTS, Manifests
from spark_consumers.lake.store.place import ObjectPlace, Place, place


class Checked:
    """What one writer has compared. Raises `CorruptError`, also for a file that is gone."""

    def __init__(self) -> None:
        self._manifests = Manifests()
        #: By folder and name: what the file system said of the file then.
        self._seen: dict[Place, dict[str, tuple[int, ...]]] = {}

    def snapshot(self, manifest_list: Place, summary: Mapping[str, Any]) -> None:
        """The manifest list of a snapshot and its manifests: small ones each time, and large ones and objects once."""
        if isinstance(manifest_list, ObjectPlace):
            self._manifests.check(manifest_list, summary)
            return
        checksums.check(manifest_list)
        for manifest in manifests_of(manifest_list):
            if manifest.exists() and manifest.stat().st_size > checksums.SMALL:
                self._once(manifest)
            else:
                checksums.check(manifest)

    def sum_of(self, manifest_list: Place) -> dict[str, str]:
        """What the summary of a snapshot in a bucket, which is about to be added, has besides."""
        return {MANIFESTS: self._manifests.sum(manifest_list)}

    def all_manifests(self, table: Place) -> None:
        """Those of all snapshots, each once for as long as it stays the same file."""
        if isinstance(table, ObjectPlace):
            return
        folder, there = table / "metadata", set()
        for sums in folder.glob(".*.avro.crc"):
            file = checksums.file_of(sums)
            if file is not None:
                self._once(file)
                there.add(file.name)
        # Each epoch makes some, and retention removes as many.
        for name in self._seen.get(folder, {}).keys() - there:
            del self._seen[folder][name]

    def forget(self, table: Place) -> None:
        """Compare all of this table's files again."""
        self._seen.pop(table / "metadata", None)
        self._manifests = Manifests()

    def _once(self, file: Place) -> None:
        assert isinstance(file, Path)
        try:
            found = file.stat()
        except FileNotFoundError:
            if checksums.sums_of(file).exists():
                checksums.check(file)
            return
        known = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        seen = self._seen.setdefault(file.parent, {})
        if seen.get(file.name) != known:
            checksums.check(file)
            seen[file.name] = known


def manifests_of(manifest_list: Place) -> Iterator[Place]:
    """The manifests of a snapshot. Raises `CorruptError`."""
    for row in avro.rows(manifest_list):
        yield place(row["manifest_path"])
