"""What a logical decoder does, as far as a slot's life depends on it: snapshots, restart points, what it leaves out.

Written from PostgreSQL's behaviour (snapbuild.c, reorderbuffer.c, logical.c), with none of the resolver's words. One
transaction may be long: `OPEN` is its first change, `COMMIT` its end. All others begin and end in one record. A `DDL`
replaces a row of a catalog: whoever decodes a change before it needs the old row.
"""

from typing import NamedTuple

RUN, OPEN, COMMIT, DDL, VACUUM = "run", "open", "commit", "ddl", "vacuum"
NEVER = 1 << 62


class Wal(NamedTuple):
    """A record.

    RUN: `first` is the oldest running xid, `second` the next one. OPEN: `first` is its xid. COMMIT: `first` is the LSN of its first change.
    DDL: `first` is its xid. VACUUM: rows deleted before xid `first` are removed.
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


class Found(NamedTuple):
    """What came of decoding: the slot's new fields, the snapshots that are there now, and what it knew from where."""

    position: Position
    files: frozenset[int]
    #: The first record that it can decode completely, and the first commit that it sends.
    knows_from: int
    sends_from: int


def decode(wal: tuple[Wal, ...], at: Position, target: int, files: frozenset[int]) -> Found:
    """Decode from `at` up to `target`, and confirm all of it."""
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
        elif record.kind == RUN:
            oldest, following = record.first, record.second
            if running is not None and running[2] < oldest:
                running = None  # it ended without a record
            if phase == "consistent":
                files |= {record.lsn}
                last_file = record.lsn
            elif record.lsn in files:
                phase, last_file, builder_xmin = "consistent", record.lsn, oldest
                knows_from = sends_from = record.lsn
                continue
            elif oldest == following:
                phase, builder_xmin = "consistent", following
                knows_from = sends_from = record.lsn
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
            xmin = max(xmin, running[1] if running is not None else oldest)
            if phase == "consistent":
                restart = max(restart, running[0] if running is not None else last_file)
    return Found(Position(restart, max(at.confirmed, target), xmin), files, knows_from, sends_from)


def loss(
    wal: tuple[Wal, ...], at: Position, end: int, files: frozenset[int], removed: int
) -> str | None:
    """What decoding from `at` would leave out or fail at, on a server with WAL to `end` that is promoted now."""
    found = decode(wal, at, end, files)
    if found.sends_from == NEVER:
        return "its decoder would not begin until later transactions are past"
    for record in wal:
        if record.kind != COMMIT or not at.confirmed < record.lsn <= end:
            continue
        if record.lsn < found.sends_from or record.first < found.knows_from:
            return f"the commit at {record.lsn} would be left out"
        for ddl in wal:
            if ddl.kind == DDL and record.first < ddl.lsn <= end and ddl.first < removed:
                return f"the change at {record.first} needs a row that was removed (deleted by {ddl.first})"
    return None
