"""The metadata that this process has written last into tables of a folder, so that its next commit need not parse it.

An epoch commits to each changed table twice, and a table has a snapshot for each retained epoch in its metadata: after a
day of them, parsing and writing them out was a quarter of an epoch's time. What was written is known, if the file that the
table has now is the one that was written: the same inode, time and length. Nothing is taken from the file then, so its
checksum is not compared here; who reads it compares it. A snapshot never changes, so its JSON is made once.

In a bucket nothing is kept: to ask whether an object is the same costs as much as to read it.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import to_json

from spark_consumers.lake.format.iceberg_files import FileIdentity, is_newest
from spark_consumers.lake.store.place import ObjectPlace, Place

#: Snapshots in all that is kept, each of about 1.2 KB.
_MOST_SNAPSHOTS = 40_000
#: The members of the metadata and of a snapshot that are looked at here.
_SNAPSHOTS, _ID, _TIME = "snapshots", "snapshot-id", "timestamp-ms"

_Metadata = Mapping[str, Any]


class WrittenSnapshot(Mapping[str, Any]):
    """A snapshot as its JSON, which a mapping of all its members would be three times as large as."""

    __slots__ = ("_id", "_time", "encoded")

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self.encoded = to_json(snapshot)
        self._id, self._time = snapshot[_ID], snapshot[_TIME]

    def __getitem__(self, name: str) -> Any:
        if name == _ID:
            return self._id
        return self._time if name == _TIME else self._members()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members())

    def __len__(self) -> int:
        return len(self._members())

    def _members(self) -> dict[str, Any]:
        members: dict[str, Any] = json.loads(self.encoded)
        return members


def light(metadata: _Metadata) -> _Metadata:
    """The metadata with each snapshot as a `WrittenSnapshot`; those that are one stay the same."""
    snapshots = [
        each if isinstance(each, WrittenSnapshot) else WrittenSnapshot(each)
        for each in metadata.get(_SNAPSHOTS, ())
    ]
    return {**metadata, _SNAPSHOTS: snapshots}


def encoded(metadata: _Metadata) -> bytes:
    """The JSON of metadata that is `light`."""
    others = to_json({name: value for name, value in metadata.items() if name != _SNAPSHOTS})
    snapshots = b",".join(each.encoded for each in metadata[_SNAPSHOTS])
    return b'%b,"%b":[%b]}' % (others[:-1], _SNAPSHOTS.encode(), snapshots)


class WrittenMetadata:
    """What was written, by table; what was not used for longest goes first. Several threads use it."""

    def __init__(self, most_snapshots: int = _MOST_SNAPSHOTS) -> None:
        self._most = most_snapshots
        self._snapshots = 0
        self._kept: OrderedDict[str, tuple[Place, FileIdentity, _Metadata]] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, table: Place, file: Place, metadata: _Metadata) -> None:
        """This process has written this file; `metadata`, which is `light`, is not changed from now on."""
        if isinstance(file, ObjectPlace):
            return
        identity = FileIdentity.of(file)
        if identity is None:
            return
        with self._lock:
            self._forget(str(table))
            self._kept[str(table)] = file, identity, metadata
            self._snapshots += _weight(metadata)
            while self._snapshots > self._most:
                self._forget(next(iter(self._kept)))

    def of(self, table: Place, file: Place) -> dict[str, Any] | None:
        """What is in this file of the table, if this process has written it, and it is still there."""
        with self._lock:
            kept = self._kept.get(str(table))
            if kept is None or kept[0] != file:
                return None
            self._kept.move_to_end(str(table))
        return dict(kept[2]) if FileIdentity.of(file) == kept[1] else None

    def newest(self, table: Place) -> tuple[Place, dict[str, Any]] | None:
        """The newest metadata file of the table, and what is in it, if this process has written it; None if another one may be newer."""
        with self._lock:
            kept = self._kept.get(str(table))
        if kept is None or not is_newest(kept[0]):
            return None
        metadata = self.of(table, kept[0])
        return None if metadata is None else (kept[0], metadata)

    def _forget(self, table: str) -> None:
        kept = self._kept.pop(table, None)
        if kept is not None:
            self._snapshots -= _weight(kept[2])


def _weight(metadata: _Metadata) -> int:
    # The rest of the metadata weighs about as much as a few of them.
    return 1 + len(metadata.get(_SNAPSHOTS, ()))
