"""Is what safekeepers hold whole, and the same? Each one's control file, pages and records; then byte against byte.

Of one safekeeper: the control file and the position file are sound, the segments lie there without a gap and have
their size, and every record from the first that begins in it to the durable end is whole: its pages are the right
pages, its CRC-32C is right, it names its predecessor. Of several: the same cluster, and the same bytes wherever
two of them hold WAL below the greatest `commit_lsn` that any of them knows. What lies behind that may differ, and
will be cut.

It reads only, and may do so while they run. A running safekeeper may cut a tail, or remove old WAL, under the
reader's eyes; so what looks wrong there is looked at again, and counts when it is still wrong.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from walsender_bridge.errors import CorruptError, DivergedError, TrimmedError, TusklineError
from walsender_bridge.postgres.protocol.lsn import format_lsn
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

#: Bytes that are compared at a time, and between two words about progress.
_PIECE: Final = 1 << 20
_TRIES: Final = 3

#: (what is done, bytes done, bytes in all).
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """A safekeeper's data directory. `flush_lsn`: what a running one says is durable; 0: it does not run."""

    name: str
    data_dir: Path
    flush_lsn: int = 0
    commit_lsn: int = 0


@dataclass(frozen=True, slots=True)
class HeldWal:
    """What one safekeeper was found to hold: WAL of [begin_lsn, end_lsn), with so many whole records."""

    place: DataDirectory
    control: ControlState | None
    reader: WalReader | None
    begin_lsn: int = 0
    end_lsn: int = 0
    records: int = 0

    @property
    def commit_lsn(self) -> int:
        """What it knows to have a quorum; the control file may be a second behind."""
        return max(self.place.commit_lsn, self.control.commit_lsn if self.control else 0)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first byte in which two safekeepers differ below `commit_lsn`."""

    lsn: int
    names: tuple[str, str]
    files: tuple[str, str]
    found: tuple[int, int]

    def error(self) -> DivergedError:
        """As an error."""
        first, second = self.names
        return DivergedError(
            f"{first} and {second} differ at {format_lsn(self.lsn)}, which is committed: "
            f"{self.found[0]:02X} in {self.files[0]}, {self.found[1]:02X} in {self.files[1]}",
            repair="keep both data directories; the one that differs from the others joins anew as a new member",
        )


def check(
    place: DataDirectory, progress: Progress, look: Callable[[], DataDirectory] | None = None
) -> HeldWal:
    """What it holds, read from end to end. `look` says anew how it is while it runs.

    Raises `CorruptError`, `NotSupportedError`, `ConfigError` (`data_dir.check`).
    """
    for attempt in range(1, _TRIES + 1):
        try:
            return _check(place, progress)
        except (CorruptError, TrimmedError) as error:
            if not place.flush_lsn or look is None or attempt == _TRIES:
                raise _located(error, place) from error
            place = look()
    raise AssertionError


def _located(error: TusklineError, place: DataDirectory) -> TusklineError:
    return CorruptError(
        error.what,
        where=f"{place.data_dir}, {error.where}" if error.where else str(place.data_dir),
        repair=error.repair
        or "let the safekeeper join as a new member; see what happened to its disk",
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
            raise CorruptError(f"WAL up to {format_lsn(position.durable_lsn)} is gone")
        return HeldWal(place, control, reader)
    # A cut in progress is finished at the next start; what is behind it is no WAL.
    durable = position.durable_lsn
    if not position.cutting:
        durable = max(reader.complete_to(durable), place.flush_lsn)
    begin = reader.begin_lsn
    if begin > max(position.begin_lsn, 0) and durable > position.begin_lsn and not place.flush_lsn:
        raise CorruptError(
            f"the segments from {format_lsn(position.begin_lsn)} to {format_lsn(begin)} are gone"
        )
    first = _first_record(reader, wal, durable)
    walk = RecordScan(reader.page, first, wal, stop=durable)
    records = 0
    told = first
    for record in walk:
        records += 1
        if record.end - told >= _PIECE:
            told = record.end
            progress(f"{place.name}: records", record.end - begin, durable - begin)
    if durable > first and not walk.ran_out:
        raise CorruptError(
            f"WAL below {format_lsn(durable)}, which is durable, is damaged: {walk.why}",
            where=str(folder / reader.name_of(walk.end)),
        )
    end = durable
    if not (position.exact or position.cutting or place.flush_lsn):
        # After a crash the end is that of the last whole record.
        behind = RecordScan(reader.page, walk.end, wal, previous=walk.previous)
        records += sum(1 for _ in behind)
        end = max(durable, behind.end)
    return HeldWal(place, control, reader, begin, end, records)


def _first_record(reader: WalReader, wal: WalFormat, durable: int) -> int:
    """Where the first record begins: the oldest segment may start within one. Raises `CorruptError`."""
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
    """The first difference below the greatest known `commit_lsn`, and how many bytes were compared.

    Raises `DivergedError` when they are of different clusters.
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
                repair="give each cluster safekeepers of its own",
            )


def _compare(having: Sequence[HeldWal], begin: int, end: int) -> Difference | None:
    """The first byte of [begin, end), of one segment, in which one of them differs from the first of them."""
    pieces: list[tuple[HeldWal, WalReader, bytes]] = []
    for held in having:
        assert held.reader is not None
        with contextlib.suppress(TrimmedError):  # removed meanwhile, as old WAL is
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
