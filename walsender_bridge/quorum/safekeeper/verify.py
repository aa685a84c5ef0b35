"""Verifies that the safekeepers' WAL is complete and equal: control files, pages and records, then byte by byte.

Of one safekeeper: the control file and the position file are valid, the segments are contiguous and of the right size,
and every record from the first that begins in it to the durable end is complete: its pages are the right ones, its
CRC-32C matches, it names its predecessor. Of several: they belong to the same cluster, and have the same bytes wherever
two of them hold WAL below the greatest `commit_lsn` that any of them knows. WAL behind that may differ, and will be
truncated.

It only reads, and may run while they do. A running safekeeper may truncate a tail, or remove old WAL, at the same time;
so a fault there is checked again, and counts only if it persists.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from walsender_bridge.errors import CorruptError, DivergedError, TrimmedError, TusklineError
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.postgres.protocol.wal_page import (
    CONTINUES,
    PAGE_BYTES,
    WalFormat,
    align,
    parse_page_header,
)
from walsender_bridge.postgres.protocol.wal_record import RecordScan
from walsender_bridge.quorum.safekeeper import data_dir
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.quorum.safekeeper.storage import position_file
from walsender_bridge.quorum.safekeeper.storage.position_file import StoragePosition
from walsender_bridge.quorum.safekeeper.storage.reader import WalReader
from walsender_bridge.runtime.folder import FolderDisk

#: Bytes that are compared at a time, and between two progress reports.
_PIECE: Final = 1 << 20
_TRIES: Final = 3

#: (activity, bytes done, bytes in total).
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """A safekeeper's data directory. `flush_lsn`: the durable end that a running one reports; 0: it does not run."""

    name: str
    data_dir: Path
    flush_lsn: Lsn = 0
    commit_lsn: Lsn = 0


@dataclass(frozen=True, slots=True)
class HeldWal:
    """The verified WAL of one safekeeper: [begin_lsn, end_lsn), with so many complete records."""

    place: DataDirectory
    control: ControlState | None
    reader: WalReader | None
    begin_lsn: Lsn = 0
    end_lsn: Lsn = 0
    records: int = 0

    @property
    def commit_lsn(self) -> Lsn:
        """Its `commit_lsn`; the control file may be a second behind."""
        return max(self.place.commit_lsn, self.control.commit_lsn if self.control else 0)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first byte in which two safekeepers differ below `commit_lsn`."""

    lsn: Lsn
    names: tuple[str, str]
    files: tuple[str, str]
    found: tuple[int, int]

    def error(self) -> DivergedError:
        """As an error."""
        first, second = self.names
        return DivergedError(
            f"{first} and {second} differ at {format_lsn(self.lsn)}, which is committed: "
            f"{self.found[0]:02X} in {self.files[0]}, {self.found[1]:02X} in {self.files[1]}",
            repair="keep both data directories; rejoin the safekeeper that differs from the others as a new member",
        )


def check(
    place: DataDirectory, progress: Progress, probe: Callable[[], DataDirectory] | None = None
) -> HeldWal:
    """Read and verify its WAL from end to end. `probe` probes it again while it runs.

    Raises `CorruptError`, `NotSupportedError`, `ConfigError` (`data_dir.check`).
    """
    for attempt in range(1, _TRIES + 1):
        try:
            return _check(place, progress)
        except (CorruptError, TrimmedError) as error:
            if not place.flush_lsn or probe is None or attempt == _TRIES:
                raise _located(error, place) from error
            place = probe()
    raise AssertionError


def _located(error: TusklineError, place: DataDirectory) -> TusklineError:
    return CorruptError(
        error.what,
        where=f"{place.data_dir}, {error.where}" if error.where else str(place.data_dir),
        repair=error.repair or "rejoin the safekeeper as a new member, and check its disk",
    )


def _check(place: DataDirectory, progress: Progress) -> HeldWal:
    control = data_dir.check(place.data_dir)
    if control is None or not control.server.system_id:
        return HeldWal(place, control, None)
    server = control.server
    wal = WalFormat(server.major, server.system_id, server.segment_size)
    folder = place.data_dir / data_dir.WAL
    reader = WalReader(folder, server.segment_size)
    position = position_file.read(FolderDisk(folder)) or StoragePosition()
    if not reader.end_lsn:
        if position.durable_lsn > position.begin_lsn:
            raise CorruptError(f"WAL up to {format_lsn(position.durable_lsn)} is missing")
        return HeldWal(place, control, reader)
    # A truncation in progress is completed at the next start; nothing behind it is WAL.
    durable = position.durable_lsn
    if not position.cutting:
        durable = max(reader.complete_to(durable), place.flush_lsn)
    begin = reader.begin_lsn
    if begin > max(position.begin_lsn, 0) and durable > position.begin_lsn and not place.flush_lsn:
        raise CorruptError(
            f"the segments from {format_lsn(position.begin_lsn)} to {format_lsn(begin)} are missing"
        )
    first = _first_record(reader, wal, durable)
    walk = RecordScan(reader.page, first, wal, stop=durable)
    records = 0
    reported = first
    for record in walk:
        records += 1
        if record.end - reported >= _PIECE:
            reported = record.end
            progress(f"{place.name}: records", record.end - begin, durable - begin)
    if durable > first and not walk.ran_out:
        raise CorruptError(
            f"WAL below {format_lsn(durable)}, which is durable, is damaged: {walk.why}",
            where=str(folder / reader.name_of(walk.end)),
        )
    end = durable
    if not (position.exact or position.cutting or place.flush_lsn):
        # After a crash the end is that of the last complete record.
        behind = RecordScan(reader.page, walk.end, wal, previous=walk.previous)
        records += sum(1 for _ in behind)
        end = max(durable, behind.end)
    return HeldWal(place, control, reader, begin, end, records)


def _first_record(reader: WalReader, wal: WalFormat, durable: Lsn) -> Lsn:
    """The start of the first record: the oldest segment may begin inside one. Raises `CorruptError`."""
    page_lsn = reader.begin_lsn
    while page_lsn < durable:
        header = parse_page_header(reader.page(page_lsn), page_lsn, wal)
        if not header.info & CONTINUES:
            return page_lsn
        end = align(page_lsn + header.size + header.remaining)
        if end <= page_lsn + PAGE_BYTES:
            return end
        page_lsn += PAGE_BYTES
    return durable


def compare(helds: Sequence[HeldWal], progress: Progress) -> tuple[Difference | None, int]:
    """The first difference below the greatest known `commit_lsn`, and the number of bytes compared.

    Raises `DivergedError` when they belong to different clusters.
    """
    holding = [held for held in helds if held.end_lsn]
    _same_cluster(holding)
    committed = max((held.commit_lsn for held in holding), default=0)
    begin = min((held.begin_lsn for held in holding), default=0)
    bounds = sorted({b for held in holding for b in (held.begin_lsn, held.end_lsn)} | {committed})
    compared, at = 0, begin
    while at < committed:
        end = min(at + _PIECE - at % _PIECE, next(bound for bound in bounds if bound > at))
        having = [held for held in holding if held.begin_lsn <= at and end <= held.end_lsn]
        if len(having) > 1:
            found = _compare(having, at, end)
            if found is not None:
                return found, compared + found.lsn - at
            compared += end - at
            progress("byte against byte", end - begin, committed - begin)
        at = end
    return None, compared


def _same_cluster(holding: Sequence[HeldWal]) -> None:
    for one, other in pairwise(holding):
        assert one.control is not None
        assert other.control is not None
        if one.control.server != other.control.server:
            raise DivergedError(
                f"{one.place.name} holds WAL of {one.control.server}, "
                f"{other.place.name} of {other.control.server}",
                repair="give each cluster its own safekeepers",
            )


def _compare(having: Sequence[HeldWal], begin: Lsn, end: Lsn) -> Difference | None:
    """The first byte of [begin, end), of one segment, in which any of them differs from the first one."""
    pieces: list[tuple[HeldWal, WalReader, bytes]] = []
    for held in having:
        assert held.reader is not None
        with contextlib.suppress(TrimmedError):  # removed meanwhile, as old WAL
            pieces.append((held, held.reader, held.reader.read(begin, end - begin)))
    for other in pieces[1:]:
        one = pieces[0]
        if one[2] != other[2]:
            at = next(n for n, (a, b) in enumerate(zip(one[2], other[2], strict=True)) if a != b)
            return Difference(
                begin + at,
                (one[0].place.name, other[0].place.name),
                (one[1].name_of(begin), other[1].name_of(begin)),
                (one[2][at], other[2][at]),
            )
    return None
