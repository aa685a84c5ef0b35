"""What a logical decoder does, as far as a slot's life depends on it: snapshots, restart points, what it leaves out.

Written from PostgreSQL's behavior (snapbuild.c, reorderbuffer.c, logical.c), with none of the resolver's words. One
transaction may be long: `OPEN` is its first change, `COMMIT` its end. All others begin and end in one record. A `DDL`
replaces a row of a catalog: whoever decodes a change before it needs the old row, and whoever decodes one after it has
to know that its transaction committed. A fast decoder takes no note of that: it is a subtransaction, say, before 14.

A snapshot on disk is there for all decoders of its server. Ours starts only with those that it wrote, and writes over
others'; any other one starts with what there is, and leaves it.
"""

from typing import NamedTuple

RUN, OPEN, COMMIT, DDL, VACUUM, REWRITE = "run", "open", "commit", "ddl", "vacuum", "rewrite"
DATABASE = "database"
NEVER = 1 << 62


class Wal(NamedTuple):
    """A record.

    RUN: `first` is the oldest running xid, `second` the next one. OPEN: `first` is its xid. COMMIT: `first` is the LSN of its first change,
    `second` 1 if it has changed the catalog itself before that one. REWRITE: the catalog's rows are moved.
    DDL: `first` is its xid. VACUUM: rows deleted before xid `first` are removed.
    DATABASE: `second` is the new row of the slot's database; 0: the database's slots are dropped.
    """

    lsn: int
    kind: str
    first: int = 0
    second: int = 0


class Position(NamedTuple):
    """A slot's three fields."""

    restart: int
    confirmed: int
    xmin: int


class File(NamedTuple):
    """A snapshot on disk."""

    lsn: int
    #: Our decoder wrote it.
    ours: bool = False
    #: The newest transaction whose catalog changes it lacks; 0: none.
    lacks: int = 0


Files = frozenset[File]


class Found(NamedTuple):
    """What came of decoding: the slot's new fields, the snapshots that are there now, and what it knew from where."""

    position: Position
    files: Files
    #: The first record that it can decode completely, and the first commit that it sends.
    knows_from: int
    sends_from: int
    #: From where to where it knew nothing of which transaction; the last may be open (NEVER).
    blind: tuple[tuple[int, int, int], ...] = ()


def decode(
    wal: tuple[Wal, ...],
    at: Position,
    target: int,
    found_files: Files,
    *,
    ours: bool = False,
    trusting: bool = False,
    fast: bool = False,
) -> Found:
    """Decode from `at` up to `target`, and confirm all of it.

    `ours`: as `advance` does it; `trusting`: but starting with anybody's snapshots; `fast`: without catalog changes.
    """
    files = {each.lsn: each for each in found_files}
    lacks = blind_from = 0
    blind = []
    restart, _, xmin = at
    phase, awaited = "start", 0
    knows_from = sends_from = NEVER
    last_file = 0
    builder_xmin = 0
    #: The long transaction: where a decoder has to begin for it, the oldest xid that its snapshot sees, its own.
    running: tuple[int, int, int] | None = None
    for record in wal:
        if record.lsn < at.restart or record.lsn > target:
            continue
        if record.kind == OPEN and phase in {"full", "consistent"}:
            running = (last_file, builder_xmin, record.first)
        elif record.kind == COMMIT and record.first != record.lsn:
            running = None
        elif record.kind == DDL and fast and phase in {"full", "consistent"}:
            lacks, blind_from = record.first, blind_from if lacks else record.lsn
        elif record.kind == RUN:
            oldest, following = record.first, record.second
            if running is not None and running[2] < oldest:
                running = None  # it ended without a record
            known = files.get(record.lsn)
            if phase == "consistent":
                if known is None or (ours and not known.ours):
                    files[record.lsn] = File(record.lsn, ours, lacks)
                last_file = record.lsn
            elif oldest == following:
                phase, builder_xmin = "consistent", following
                knows_from = sends_from = record.lsn
                continue
            elif known is not None and (known.ours or trusting or not ours):
                phase, last_file, builder_xmin = "consistent", record.lsn, oldest
                knows_from = sends_from = record.lsn
                lacks, blind_from = known.lacks, record.lsn
                continue
            elif phase == "start":
                phase, awaited = "building", following
                continue
            elif phase == "building" and oldest >= awaited:
                phase, awaited, knows_from = "full", following, record.lsn
                builder_xmin = oldest
                continue
            elif phase == "full" and oldest >= awaited:
                phase, sends_from = "consistent", record.lsn
                continue
            builder_xmin = oldest
            if lacks and lacks < oldest:
                blind.append((blind_from, record.lsn, lacks))
                lacks = 0
            xmin = max(xmin, running[1] if running is not None else oldest)
            if phase == "consistent":
                restart = max(restart, running[0] if running is not None else last_file)
    if lacks:
        blind.append((blind_from, NEVER, lacks))
    position = Position(restart, max(at.confirmed, target), xmin)
    return Found(position, frozenset(files.values()), knows_from, sends_from, tuple(blind))


def lacking(wal: tuple[Wal, ...], lsn: int) -> int:
    """What a fast decoder that was consistent long before lacks in its snapshot at the record `lsn`; 0: nothing."""
    before = [each for each in wal if each.kind == RUN and each.lsn < lsn]
    horizon = before[-1].first if before else 0
    return max(
        (r.first for r in wal if r.kind == DDL and r.lsn < lsn and r.first >= horizon), default=0
    )


def loss(
    wal: tuple[Wal, ...],
    at: Position,
    end: int,
    files: Files,
    removed: int,
    unmapped: frozenset[int] = frozenset(),
) -> str | None:
    """What decoding from `at` would leave out or fail at, on a server with WAL to `end` that is promoted now.

    `unmapped`: the rewrites of which it has no mapping files.
    """
    found = decode(wal, at, end, files)
    if found.sends_from == NEVER:
        return "its decoder would not begin until later transactions are past"
    for start, stop, xid in found.blind:
        for record in wal:
            sent = record.kind == COMMIT and at.confirmed < record.lsn <= end
            if sent and record.lsn > start and record.first < stop:
                return (
                    f"the change at {record.first} is decoded without the catalog change of {xid}"
                )
    again = decode(wal, found.position, end, found.files)
    for stop, xid in [each[1:] for each in (*found.blind, *again.blind)]:
        if stop == NEVER:
            return f"what is written then is decoded without the catalog change of {xid}"
    for record in wal:
        if record.kind != COMMIT or not at.confirmed < record.lsn <= end:
            continue
        if record.lsn < found.sends_from or record.first < found.knows_from:
            return f"the commit at {record.lsn} would be left out"
        for rewrite in wal:
            moved = rewrite.kind == REWRITE and record.lsn < rewrite.lsn <= end
            if record.second and moved and rewrite.lsn in unmapped:
                return f"the commit at {record.lsn} does not see its own catalog change, which {rewrite.lsn} has moved"
        for ddl in wal:
            if ddl.kind == DDL and record.first < ddl.lsn <= end and ddl.first < removed:
                return f"the change at {record.first} needs a row that was removed (deleted by {ddl.first})"
    return None
