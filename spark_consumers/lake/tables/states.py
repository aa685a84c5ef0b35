"""How tables change their state: from the newest link to what the next one says. Pure.

The states are those of `table_version`. A table that stops following keeps its rows, says of which epoch
they are, and from which offset of the log it lacks changes; this decides whether it may continue from there.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from spark_consumers.lake.manifest.chain import Manifest, TableVersion
from spark_consumers.lake.manifest.table_version import HELD, LEFT, LIVE, PAUSED, RESUMING, STALE
from spark_consumers.lake.store.place import Place
from spark_consumers.lake.tables.origin import Joins, joins
from walsender_bridge.change_log.client import StreamCut


def stream_of(name: str) -> str:
    """The stream of `stream.schema.table`."""
    return name.partition(".")[0]


def wanted_copies(head: Manifest, published: Collection[str]) -> set[str]:
    """The published tables that have to be copied: new, come back, to be copied again, or copied in part."""
    return {
        name
        for name in published
        if (name not in head.copies or head.copies[name].is_partial)
        and _wants(head.tables.get(name))
    }


def _wants(table: TableVersion | None) -> bool:
    if table is None or table.state == LEFT:
        return True
    return bool(table.resync) and table.state != PAUSED


def without(head: Manifest, published: Collection[str], stream: str) -> Manifest:
    """The tables of a stream that are no longer published have left; what was copied of them is dropped."""
    gone = {n for n in {*head.tables, *head.copies} if stream_of(n) == stream} - set(published)
    tables = dict(head.tables)
    for name in gone & set(tables):
        if tables[name].state != LEFT:
            tables[name] = replace(_stopped(head, name, LEFT), resync="")
    copies = {name: table for name, table in head.copies.items() if name not in gone}
    not_copied = {
        name: reason
        for name, reason in head.not_copied.items()
        if stream_of(name) != stream or name in published
    }
    return replace(head, tables=tables, copies=copies, not_copied=not_copied)


def stop(head: Manifest, name: str, reason: str, *, holds: bool, full_resync: bool) -> Manifest:
    """The table cannot follow any more. `holds`: epochs wait for it; `full_resync`: it is copied again.

    A table that did not follow before holds nothing back. What was copied of it and not shown is dropped.
    """
    copies = {n: t for n, t in head.copies.items() if n != name}
    tables = dict(head.tables)
    if name in tables:
        before = tables[name].state
        state = HELD if holds and before in {LIVE, HELD} else STALE
        if before == LEFT:
            state = LEFT
        tables[name] = replace(
            _stopped(head, name, state), reason=reason, resync=reason if full_resync else ""
        )
    return replace(head, tables=tables, copies=copies)


def damaged(head: Manifest, reasons: Mapping[str, str], *, holds: bool) -> Manifest:
    """The head without the tables, by path, whose files are damaged, and why.

    A copy that is not shown yet is made once more; a table cannot follow until it is restored or copied again, as
    it may have been asked for already.
    """
    copies = {name: copy for name, copy in head.copies.items() if copy.path not in reasons}
    tables = dict(head.tables)
    for name, table in head.tables.items():
        if table.path in reasons and table.state != LEFT:
            state = HELD if holds and table.state in {LIVE, HELD} else STALE
            tables[name] = replace(_stopped(head, name, state), reason=reasons[table.path])
    return replace(head, tables=tables, copies=copies)


def path_of(head: Manifest, lake: Place, where: str) -> str | None:
    """The path of the table that an error at `where` is about: its name, its folder or a file in that."""
    for name, table in [*head.copies.items(), *head.tables.items(), *head.readable.items()]:
        folder = str(lake / table.path)
        if where in {name, folder} or where.startswith(f"{folder}/"):
            return table.path
    return None


def outdate(head: Manifest, name: str, reason: str, *, holds: bool) -> Manifest:
    """The table lacks changes that emitted no message, and is copied again; see `stop`. A copy of it stays.

    A table that is paused stays so, and is copied again when it is resumed.
    """
    table = head.tables[name]
    if table.state == PAUSED:
        return replace(head, tables={**head.tables, name: replace(table, resync=reason)})
    return replace(stop(head, name, reason, holds=holds, full_resync=True), copies=head.copies)


def pause(head: Manifest, name: str) -> Manifest:
    """The table stops following, as asked; it is not copied either."""
    copies = {n: t for n, t in head.copies.items() if n != name}
    table = replace(_stopped(head, name, PAUSED), reason=PAUSED)
    return replace(head, tables={**head.tables, name: table}, copies=copies)


def resume(head: Manifest, name: str, low_offset: int) -> Manifest:
    """The table follows again: from where it stopped, if the log has that (`low_offset`), or copied again."""
    table = head.tables[name]
    if not table.resync and table.offset < low_offset:
        reason = f"the log is trimmed up to offset {low_offset}, but it stopped at {table.offset}"
        table = replace(table, reason=f"{table.reason}; {reason}", resync=reason)
    state = STALE if table.resync else RESUMING
    if table.reason == PAUSED:
        table = replace(table, reason=table.resync)
    if table.state == HELD:
        # Epochs have waited for it, so it lacks nothing.
        state = HELD if table.resync else LIVE
    if state == LIVE:
        table = replace(table, as_of=0, reason="")
    return replace(head, tables={**head.tables, name: replace(table, state=state)})


def resync(head: Manifest, name: str, reason: str) -> Manifest:
    """The table is copied again. It continues to follow until the copy is shown, or stays as it is if it is suspended."""
    copies = {n: t for n, t in head.copies.items() if n != name}
    tables = dict(head.tables)
    if name in tables:
        table = tables[name]
        state = STALE if table.state in {PAUSED, RESUMING} else table.state
        why = table.reason
        if state == STALE and why in {"", PAUSED}:
            why = f"it is copied again: {reason}"
        tables[name] = replace(table, state=state, reason=why, resync=reason)
    return replace(head, tables=tables, copies=copies)


def unreadable(head: Manifest, names: Collection[str]) -> dict[str, str]:
    """Which of these published tables do not show the newest epoch, and why.

    A table that an operator has paused is not among them.
    """
    found = {}
    for name in names:
        table = head.tables.get(name)
        if table is not None and table.state in {LIVE, PAUSED}:
            continue
        if table is not None and table.state != LEFT:
            found[name] = f"{table.state}: {table.reason}" if table.reason else table.state
        elif name in head.not_copied:
            found[name] = f"not copied: {head.not_copied[name].splitlines()[0]}"
        else:
            copy = head.copies.get(name)
            is_whole = copy is not None and not copy.is_partial
            found[name] = "copied, but not published yet" if is_whole else "not copied yet"
    return found


def is_behind(head: Manifest, table: TableVersion) -> bool:
    """Whether the rows are of an earlier epoch for another reason than a pause that lasts or the table's removal.

    The state alone says so: the reason why a table stopped outlasts the request that it follows again.
    """
    return table.state not in {LIVE, PAUSED, LEFT} and table.as_of != head.epoch


def without_earlier(head: Manifest, shown: Mapping[str, int]) -> Manifest:
    """The head with the tables held back that have stopped at an epoch before the version at which a live read has `shown` them.

    A pause, or leaving the publication, takes the rows of the newest epoch, and a live read was ahead of it.
    """
    tables = dict(head.tables)
    for name, table in head.tables.items():
        if table.state in {PAUSED, LEFT} and table.as_of < shown.get(name, 0):
            why = f"this session has read version {shown[name]} of it, and its rows stopped before: {table.reason or table.state}"
            tables[name] = replace(table, state=HELD, reason=why)
    return replace(head, tables=tables)


def is_undecided(table: TableVersion) -> bool:
    """Whether the table is suspended until an operator acts: no copy of it will take its place."""
    return table.state in {HELD, STALE} and not table.resync


def held(head: Manifest) -> dict[str, TableVersion]:
    """The tables that epochs wait for."""
    return {name: table for name, table in head.tables.items() if table.state == HELD}


def without_outrun(
    head: Manifest, cuts: Mapping[str, StreamCut]
) -> tuple[Manifest, dict[str, TableVersion]]:
    """The head without the copies that the log cannot continue any more, and these. They are copied once more.

    The log has gone to a later timeline, or does not have any more what a copy lacks.
    """
    gone = {
        name: copy
        for name, copy in head.copies.items()
        if (cut := cuts.get(stream_of(name))) is not None
        and (
            joins(copy, cut.timeline, cut.last_end_lsn) is Joins.NEVER
            or copy.offset < cut.low_offset
        )
    }
    kept = {name: copy for name, copy in head.copies.items() if name not in gone}
    return replace(head, copies=kept), gone


def trimmed(head: Manifest, low_offsets: Mapping[str, int]) -> dict[str, str]:
    """The tables that follow a stream which no longer has what they need, and why."""
    found = {}
    for name, table in head.tables.items():
        stream = stream_of(name)
        position, low = head.streams.get(stream), low_offsets.get(stream, 0)
        if position is not None and position.offset < low and table.state in {LIVE, RESUMING}:
            found[name] = (
                f"the log was trimmed: stream {stream} is kept from offset {low} on, but the lake "
                f"is at {position.offset}"
            )
    return found


def _stopped(head: Manifest, name: str, state: str) -> TableVersion:
    table = head.tables[name]
    if table.state != LIVE:
        return replace(table, state=state)
    return replace(
        table, state=state, as_of=head.epoch, offset=head.streams[stream_of(name)].offset
    )
