"""The metadata that this process has written last into tables of a folder, so that its next commit need not parse it.

An epoch commits to each changed table twice, and a table has a snapshot for each retained epoch in its metadata: after a
day of them, parsing is a quarter of an epoch's time. What was written is known, if the file that the table has now is the
one that was written: the same inode, time and length. Nothing is taken from the file then, so its checksum is not
compared here; who reads it compares it.

In a bucket nothing is kept: to ask whether an object is the same costs as much as to read it.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spark_consumers.lake.store.place import ObjectPlace, Place

#: Snapshots in all that is kept, each of about 3 KB.
_MOST_SNAPSHOTS = 10_000

_Identity = tuple[int, int, int]


class WrittenMetadata:
    """What was written, by table; what was not used for longest goes first. Several threads use it."""

    def __init__(self, most_snapshots: int = _MOST_SNAPSHOTS) -> None:
        self._most = most_snapshots
        self._snapshots = 0
        self._kept: OrderedDict[str, tuple[str, _Identity, Mapping[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, table: Place, file: Place, metadata: Mapping[str, Any]) -> None:
        """This process has written this file; `metadata` is not changed from now on."""
        if isinstance(file, ObjectPlace):
            return
        try:
            identity = _identity(file)
        except FileNotFoundError:
            return
        with self._lock:
            self._forget(str(table))
            self._kept[str(table)] = str(file), identity, metadata
            self._snapshots += _weight(metadata)
            while self._snapshots > self._most:
                self._forget(next(iter(self._kept)))

    def of(self, table: Place, file: Place) -> dict[str, Any] | None:
        """What is in this file of the table, if this process has written it, and it is still there."""
        with self._lock:
            kept = self._kept.get(str(table))
            if kept is None or kept[0] != str(file):
                return None
            self._kept.move_to_end(str(table))
        try:
            return dict(kept[2]) if _identity(file) == kept[1] else None
        except FileNotFoundError:
            return None

    def _forget(self, table: str) -> None:
        kept = self._kept.pop(table, None)
        if kept is not None:
            self._snapshots -= _weight(kept[2])


def _weight(metadata: Mapping[str, Any]) -> int:
    # The rest of the metadata weighs about as much as one of them.
    return 1 + len(metadata.get("snapshots", ()))


def _identity(file: Place) -> _Identity:
    there = Path(str(file)).stat()
    return there.st_ino, there.st_mtime_ns, there.st_size
