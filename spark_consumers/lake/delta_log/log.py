"""The Delta log of one table: files in `_delta_log`, in the table's folder.

    00000000000000000007.json                   the actions of version 7
    00000000000000000007.checkpoint.parquet     what all versions up to 7 amount to

Each is created exclusively and never changed, and has checksums beside it (`checksums`). There is no `_last_checkpoint`, which would
have to be replaced: readers list the folder, which `clean` keeps short.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from spark_consumers.lake.delta_log.actions import (
    APPLICATION,
    Action,
    LogState,
    Shown,
    lines,
    shown_in,
)
from spark_consumers.lake.format import checksums
from spark_consumers.lake.store.place import ObjectPlace, Place, create, files_in
from walsender_bridge.errors import CorruptError

FOLDER: Final = "_delta_log"
#: The file in a table's folder with the newest snapshot that its log was not to show, and why (`refusal_record`).
REFUSAL: Final = "_delta_refused"
_NAME: Final = re.compile(r"(\d{20})\.(json|checkpoint\.parquet)")
_REPAIR: Final = (
    "remove the folder: `tuskline lake run` then begins the table's Delta log again, from version 0"
)

_TEXTS = pa.map_(pa.string(), pa.string())
_VECTOR = pa.struct(
    [
        ("storageType", pa.string()),
        ("pathOrInlineDv", pa.string()),
        ("offset", pa.int32()),
        ("sizeInBytes", pa.int32()),
        ("cardinality", pa.int64()),
    ]
)
#: A checkpoint's columns, of which each row has one.
_CHECKPOINT: Final = pa.schema(
    {
        "txn": pa.struct(
            [("appId", pa.string()), ("version", pa.int64()), ("lastUpdated", pa.int64())]
        ),
        "add": pa.struct(
            [
                ("path", pa.string()),
                ("partitionValues", _TEXTS),
                ("size", pa.int64()),
                ("modificationTime", pa.int64()),
                ("dataChange", pa.bool_()),
                ("stats", pa.string()),
                ("tags", _TEXTS),
                ("deletionVector", _VECTOR),
            ]
        ),
        "remove": pa.struct(
            [
                ("path", pa.string()),
                ("deletionTimestamp", pa.int64()),
                ("dataChange", pa.bool_()),
            ]
        ),
        "metaData": pa.struct(
            [
                ("id", pa.string()),
                ("name", pa.string()),
                ("description", pa.string()),
                ("format", pa.struct([("provider", pa.string()), ("options", _TEXTS)])),
                ("schemaString", pa.string()),
                ("partitionColumns", pa.list_(pa.string())),
                ("createdTime", pa.int64()),
                ("configuration", _TEXTS),
            ]
        ),
        "protocol": pa.struct(
            [
                ("minReaderVersion", pa.int32()),
                ("minWriterVersion", pa.int32()),
                ("readerFeatures", pa.list_(pa.string())),
                ("writerFeatures", pa.list_(pa.string())),
            ]
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Listing:
    """The versions of a log that have a commit, and those that have a checkpoint; ascending."""

    commits: tuple[int, ...]
    checkpoints: tuple[int, ...]

    @property
    def newest(self) -> int:
        """The newest version; -1 for a log without any."""
        return max((*self.commits[-1:], *self.checkpoints[-1:]), default=-1)


class DeltaLog:
    """The log of the table in a folder."""

    def __init__(self, table: Place) -> None:
        self.folder = table / FOLDER

    def listing(self) -> Listing:
        """The versions that are there now."""
        found: dict[str, list[int]] = {"json": [], "checkpoint.parquet": []}
        for file in files_in(self.folder):
            if match := _NAME.fullmatch(file.name):
                found[match[2]].append(int(match[1]))
        return Listing(*(tuple(sorted(found[kind])) for kind in ("json", "checkpoint.parquet")))

    def state(self, version: int | None = None) -> LogState:
        """The table at this version, by default the newest. Raises `CorruptError`."""
        there = self.listing()
        wanted = there.newest if version is None else version
        base = max((each for each in there.checkpoints if each <= wanted), default=None)
        state = LogState() if base is None else self._checkpoint(base)
        for number in range(state.version + 1, wanted + 1):
            state = state.after(number, self.actions(number))
        return state

    def actions(self, version: int) -> list[Action]:
        """The actions of a commit. Raises `CorruptError`."""
        file = self.commit_file(version)
        checksums.check(file)
        try:
            with checksums.read_whole(file):
                found = [json.loads(line) for line in file.read_bytes().splitlines()]
            # It is looked at here, so that another program's commit is named.
            LogState().after(version, found)
        except FileNotFoundError:
            raise CorruptError("the file is missing", where=str(file), repair=_REPAIR) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError(
                f"not a commit of Tuskline's: {error}", where=str(file), repair=_REPAIR
            ) from None
        return found

    def shown(self, version: int) -> Shown:
        """What a commit shows. Raises `CorruptError`."""
        return shown_in(self.actions(version)[0]["commitInfo"])

    def commit(self, version: int, actions: Sequence[Action]) -> bool:
        """Create the commit of that version; False if there is one. Raises `CorruptError` if the one before is gone.

        Cleaning keeps the newest commit. Without it, the log was removed, or another writer's is further: no reader could use this one.
        """
        if version and not (before := self.commit_file(version - 1)).exists():
            raise CorruptError("the file is missing", where=str(before), repair=_REPAIR)
        if not isinstance(self.folder, ObjectPlace):
            self.folder.mkdir(exist_ok=True)
        file = self.commit_file(version)
        if not create(file, lines(actions)):
            return False
        checksums.seal(file)
        return True

    def write_checkpoint(self, state: LogState) -> None:
        """Create the checkpoint of a state, unless it is there."""
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(_rows(state), schema=_CHECKPOINT), sink)
        file = self._checkpoint_file(state.version)
        if create(file, sink.getvalue().to_pybytes()):
            checksums.seal(file)

    def remove(self, commits: Iterable[int], checkpoints: Iterable[int]) -> None:
        """Remove these files, the oldest first, so that what is left is always a log."""
        files = [(n, self._checkpoint_file(n)) for n in checkpoints]
        files += [(n, self.commit_file(n)) for n in commits]
        for _, file in sorted(files, key=lambda each: each[0]):
            checksums.remove(file)

    def commit_file(self, version: int) -> Place:
        """The file of a commit."""
        return self.folder / f"{version:020d}.json"

    def _checkpoint_file(self, version: int) -> Place:
        return self.folder / f"{version:020d}.checkpoint.parquet"

    def _checkpoint(self, version: int) -> LogState:
        file = self._checkpoint_file(version)
        checksums.check(file)
        try:
            with checksums.read_whole(file):
                rows = pq.read_table(pa.BufferReader(file.read_bytes())).to_pylist(
                    maps_as_pydicts="strict"
                )
            actions = [{k: v for k, v in row.items() if v is not None} for row in rows]
            state = LogState().after(version, (a for a in actions if "txn" not in a))
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise CorruptError(
                f"not a checkpoint: {error}", where=str(file), repair=_REPAIR
            ) from None
        # A checkpoint does not have the term, by which links ascend; its commit stays as long as it does.
        return LogState(version, self.shown(version), state.protocol, state.metadata, state.adds)


def refusal_record(snapshot: int, reason: str) -> bytes:
    """The content of the file `REFUSAL`."""
    return f"{snapshot} {reason}".encode()


def refusal_of(table: Place) -> tuple[int, str] | None:
    """The newest snapshot that the log of the table in this folder was not to show, and why; None if there was none.

    The file is not synced, so it may be empty after a power failure. It is a report, so a damaged one counts as none.
    """
    try:
        snapshot, _, reason = (table / REFUSAL).read_text().partition(" ")
        return int(snapshot), reason
    except (FileNotFoundError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Cleaning:
    """What `cleaning` decides: versions that get a checkpoint first, and the commits and checkpoints to remove then."""

    new_checkpoints: tuple[int, ...]
    commits: tuple[int, ...]
    checkpoints: tuple[int, ...]


def cleaning(there: Listing, kept: Collection[int], least: int) -> Cleaning | None:
    """What makes a log short of which only the versions `kept` and the newest are needed; None if that are fewer than `least` commits.

    A version that is kept can be read: its own commit stays, and either that of the version before stays, too, or it has a
    checkpoint. So any number of old versions, which pins keep, cost a checkpoint each, and not all commits since.
    """
    needed = {*kept, there.newest}
    gone = tuple(number for number in there.commits if number not in needed)
    if len(gone) < least:
        return None
    stay = set(there.commits) - set(gone)
    first = [number for number in stay if number - 1 not in stay and number > 0]
    made = tuple(sorted(number for number in first if number not in there.checkpoints))
    old = tuple(number for number in there.checkpoints if number not in stay)
    return Cleaning(made, gone, old)


def _rows(state: LogState) -> list[dict[str, Any]]:
    """The rows of a checkpoint."""
    assert state.metadata is not None
    transaction = {
        "appId": APPLICATION,
        "version": state.shown.link,
        "lastUpdated": state.metadata["createdTime"],
    }
    first: list[dict[str, Any]] = [
        {"protocol": state.protocol},
        {"metaData": state.metadata},
        {"txn": transaction},
    ]
    return first + [{"add": {**add, "dataChange": False}} for add in state.adds.values()]
