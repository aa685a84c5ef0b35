"""A replica's files, read as they are: nothing is opened for writing, renamed or removed. For `tuskline log verify --offline`.

Rows are not judged here but handed to `verification.py`, which names the first one that is wrong. The log server must be
stopped: `DataDirectoryLock` holds its lock meanwhile.
"""

import contextlib
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import lmdb

from walsender_bridge.change_log.replica import damaged_segments
from walsender_bridge.change_log.replica import identity as log_server_identity
from walsender_bridge.change_log.replica.disk import (
    Durable,
    IndexRow,
    RecoveryOutcome,
    StoredReplica,
    evaluate,
)
from walsender_bridge.change_log.replica.replica_ids import ReplicaIds
from walsender_bridge.change_log.storage.records import (
    chain_of,
    key_of,
    offset_of,
    unpack_row,
    unpack_state,
)
from walsender_bridge.change_log.storage.segment import (
    Segment,
    SegmentSnapshot,
    check_newest,
    missing_next,
    refused_read,
)
from walsender_bridge.change_log.storage.store import WIPING
from walsender_bridge.change_log.verification import EntryRow, StatedReplica
from walsender_bridge.errors import ConfigError, CorruptError, RunningError
from walsender_bridge.runtime import lock_file
from walsender_bridge.runtime.closing import Closing


class DataDirectoryLock(Closing):
    """A log server's data directory, locked. Raises `ConfigError` if it is none, `RunningError` if its log server runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / log_server_identity.NAME).is_file():
            raise ConfigError(
                "this is not the data directory of a log server",
                where=str(path),
                repair="run the command on the log server's machine, or name the directory with --data-dir",
            )
        self._ids = ReplicaIds(path, log_server_identity.load(path))
        running = RunningError(
            "the log server runs",
            where=str(path),
            repair="stop it, or verify the running system without --offline",
        )
        self._lock: int | None = lock_file.lock(path / "lock", running)

    def replicas(self) -> "list[StoredReplicaFiles]":
        """The replicas in it, ordered by stream."""
        streams = self.path / "streams"
        folders = (
            sorted(each for each in streams.iterdir() if each.is_dir()) if streams.is_dir() else []
        )
        return [
            StoredReplicaFiles(folder, str(self.path), self._ids.of(folder.name))
            for folder in folders
            if any(folder.iterdir())
        ]

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class StoredReplicaFiles:
    """The files of one replica. `name`: of its data directory. Raises `CorruptError` where they cannot be read."""

    def __init__(self, folder: Path, name: str, replica_id: str | None = None) -> None:
        self.stream, self.name, self._folder = folder.name, name, folder
        self._replica_id = replica_id
        found = (Segment.offset_in_name(path.name) for path in folder.iterdir())
        self._segments = [
            Segment.at(folder, each) for each in sorted(o for o in found if o is not None)
        ]

    @property
    def disk_bytes(self) -> int:
        """Bytes of its files."""
        return sum(path.stat().st_size for path in self._folder.glob("segment-*/data.mdb"))

    @property
    def segments(self) -> list[Path]:
        """The folders of its segments."""
        return [each.folder for each in self._segments]

    # -- what it states ---------------------------------------------------------------------------

    def stated(self) -> StatedReplica:
        """See `Source`."""
        found = self.found()
        durable = found.durable
        outcome, _ = evaluate(found)
        sealed = durable.sealed_at is not None and durable.sealed_at <= durable.committed_end
        end = durable.committed_end if found.last_offset is None else found.last_offset + 1
        return StatedReplica(
            stream=self.stream,
            replica=self.name,
            state="sealed" if sealed and outcome == RecoveryOutcome.VALID else "",
            low_offset=durable.low_offset,
            committed_end=durable.committed_end,
            end_offset=max(end, durable.committed_end),
            version=durable.version,
            context=durable.context,
            sealed_at=durable.sealed_at,
        )

    def found(self) -> StoredReplica:
        """What recovery would find, except what it finds by reading everything."""
        damage = self._damage()
        if not self._segments:
            raise CorruptError(damage or "there are no segments", where=str(self._folder))
        newest = self._segments[-1]
        with _reading(newest) as snapshot:
            state, chain = snapshot.get(b"meta", b"state"), snapshot.get(b"meta", b"chain")
            bounds, commit = snapshot.bounds(b"entries"), snapshot.last_commit()
            if state is None or chain is None:
                raise CorruptError("segment has no state record", where=newest.file)
            durable = unpack_state(state, newest.folder)
            check_newest(snapshot, durable.stream, self._replica_id)
            damage = damage or missing_next(snapshot)
        damage = damage or self._missing(chain, newest, durable)
        first, last = bounds or (None, None)
        if len(self._segments) > 1:
            with _reading(self._segments[-2]) as snapshot:
                commit = commit or snapshot.last_commit()
            first, last = self._segments[0].first_offset, last or newest.first_offset - 1
        end = None if commit is None else commit.context.end
        return StoredReplica(durable, first, last, end, damage)

    def _damage(self) -> str:
        found = ""
        for path in sorted(self._folder.iterdir()):
            if path.name == WIPING:
                found = "it was being wiped to be synchronized with another replica"
            found = damaged_segments.damage(path) or found
        return found

    def _missing(self, chain: bytes, newest: Segment, durable: Durable) -> str:
        there = {each.first_offset for each in self._segments}
        offsets = chain_of(chain, newest.file)
        for first, following in pairwise([*offsets, newest.first_offset]):
            if following > durable.low_offset and first not in there:
                return f"the segment starting at {first} is missing"
        return ""

    # -- its rows -----------------------------------------------------------------------------------

    def entries(self, stated: StatedReplica) -> Iterator[EntryRow]:
        """See `Source`."""
        for segment, end in self._owners(stated.low_offset):
            start = max(segment.first_offset, stated.low_offset)
            with _reading(segment) as snapshot:
                for key, value in snapshot.rows(b"entries", key_of(start)):
                    offset = offset_of(key)
                    if end is not None and offset >= end:
                        break
                    yield EntryRow(offset, None, None, bytes(value))

    def rows(self, stated: StatedReplica) -> Iterator[IndexRow]:
        """See `Source`."""
        for segment, _ in self._owners(stated.low_offset):
            with _reading(segment) as snapshot:
                for key, value in snapshot.rows(b"index", key_of(stated.low_offset + 1)):
                    row = unpack_row(value, segment.file)
                    if offset_of(key) != row.context.end:
                        what = f"the commit that ends at {row.context.end} is stored at {offset_of(key)}"
                        raise CorruptError(what, where=segment.file)
                    yield row

    def _owners(self, low: int) -> Iterator[tuple[Segment, int | None]]:
        """The segments that hold something from `low` on, with the first offset of the next."""
        following = [*(each.first_offset for each in self._segments[1:]), None]
        for segment, end in zip(self._segments, following, strict=True):
            if end is None or end > low:
                yield segment, end


@contextlib.contextmanager
def _reading(segment: Segment) -> Iterator[SegmentSnapshot]:
    """A read of one segment, which is closed afterwards unless another read goes on."""
    try:
        with segment.using(), segment.reading() as snapshot:
            yield snapshot
    except lmdb.Error as error:
        raise refused_read(error, segment.file) from error
    finally:
        segment.retire()
