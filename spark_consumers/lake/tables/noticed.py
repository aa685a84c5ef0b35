"""Compares a source's publication with its tables in the lake: which are copied again, and which continue. Pure.

The publication was read after every compared table had come into the chain. It is compared with the shape of each table,
and of each copy that is not shown yet (`shape`): if changes are missing, the table stops following, and a copy is
discarded; both are copied again. Otherwise the table gets the shape that was read, with which the next one is compared.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from spark_consumers.lake.manifest.chain import Manifest, TableVersion
from spark_consumers.lake.manifest.table_version import HELD, LEFT, LIVE, STALE
from spark_consumers.lake.tables import states
from spark_consumers.lake.tables.expected import Expected, is_expected
from spark_consumers.lake.tables.shape import (
    Publication,
    Shape,
    changed,
    followed,
    others_by_now,
    refusal,
    sent_names,
    with_columns_of,
)
from spark_consumers.lake.tables.states import stream_of
from walsender_bridge.change_log.entry import NAMED_OTHERWISE
from walsender_bridge.postgres.protocol.lsn import Lsn

#: How the shape of a table without partitions is written.
_NO_PARTS = '"parts":[]'
#: What a table was compared with last, by its name, where the comparison has changed nothing.
Seen = dict[str, tuple[TableVersion, Shape]]


def compare(
    head: Manifest,
    stream: str,
    publication: Publication,
    later: Collection[str],
    *,
    holds: bool,
    seen: Seen | None = None,
    expected: Expected | None = None,
) -> tuple[Manifest, dict[str, str]]:
    """The head after this comparison, and why tables must be copied again. `later`: tables that came after the read began.

    `expected`: changes of columns that the log is to tell. `holds`: epochs wait for a table that is copied again. `seen`: kept by the caller from one comparison to the next, so that
    only what has changed on either side is compared.
    """
    reasons: dict[str, str] = {}
    tables, copies = dict(head.tables), dict(head.copies)
    going: dict[str, str] = {}
    seen = {} if seen is None else seen
    expected = Expected() if expected is None else expected
    read_to = head.streams[stream].lsn if stream in head.streams else 0
    for relation, now in publication.shapes.items():
        name = f"{stream}.{relation}"
        if name in later:
            continue
        copy, table = copies.get(name), tables.get(name)
        if copy is not None:
            # A copy that is not shown yet has not been read on from, whatever the lake has read.
            there = now
            if not copy.chunks and is_expected(copy, now):
                there = with_columns_of(now, Shape.load(copy.shape))
            reason = outdated(copy, there, publication)
            if reason is None:
                copies[name] = followed_by(copy, there, publication)
            else:
                reasons[name] = reason
                del copies[name]
        if table is None or _is_copied_again(table) or _is_seen(table, now, seen.get(name)):
            continue
        # Where a table has stopped, the lake has not read on.
        position = read_to if table.state == LIVE else 0
        found = expected.compared(table, now, publication.lsn, position)
        why = found if isinstance(found, str) else outdated(table, found, publication)
        if isinstance(found, str) or why is not None:
            reasons[name] = going[name] = str(why)
            continue
        tables[name] = followed_by(table, found, publication)
        if tables[name] is table and found is now:
            seen[name] = table, now
    if copies != head.copies or tables != head.tables:
        head = replace(head, tables=tables, copies=copies)
    for name, reason in going.items():
        seen.pop(name, None)
        head = states.outdate(head, name, reason, holds=holds)
    return head, reasons


def _is_seen(table: TableVersion, now: Shape, seen: tuple[TableVersion, Shape] | None) -> bool:
    """Whether this comparison is one that has changed nothing: it depends on no more than this of a table."""
    if seen is None or (seen[1] is not now and seen[1] != now):
        return False
    before = seen[0]
    return table is before or (
        (table.shape, table.layout, table.relation_id)
        == (before.shape, before.layout, before.relation_id)
    )


def followed_by(table: TableVersion, now: Shape, publication: Publication) -> TableVersion:
    """The table after a comparison in which it lacks nothing."""
    if table.shape:
        now = followed(Shape.load(table.shape), now, publication.lsn)
    shape = now.dump()
    return table if shape == table.shape else replace(table, shape=shape)


def partitions(table: TableVersion) -> dict[int, Lsn]:
    """The partitions that are known of a table, and before which LSN none of their changes was committed."""
    # Of a table without partitions, as most are, at no cost.
    if not table.shape or _NO_PARTS in table.shape:
        return {}
    return {part.oid: part.empty_at for part in Shape.load(table.shape).parts}


def after_partition_changes(
    tables: Mapping[str, TableVersion],
    unexpected: Mapping[str, Collection[int]],
    polled: Collection[str],
) -> tuple[dict[str, TableVersion], dict[str, str]]:
    """The tables after changes of `unexpected` partitions of some, and why tables must be copied again.

    The log is read after the publications. `polled`: the streams whose publication was read after all these changes were
    committed: a partition that it does not have is gone already, with rows that no change has removed. For other streams
    the next poll decides.
    """
    made, reasons = dict(tables), {}
    for name, oids in unexpected.items():
        table = tables[name]
        if not oids or not table.shape:
            continue
        shape = Shape.load(table.shape)
        back = sorted(part.name for part in shape.parts if part.link and part.oid in oids)
        gone = sorted(set(oids) - set(partitions(table)))
        if NAMED_OTHERWISE in oids:
            reasons[name] = "one of its partitions had another replica identity than the table"
        elif back:
            reasons[name] = f"its partition {back[0]} had rows, and was attached again without rows"
        elif gone and stream_of(name) in polled:
            reasons[name] = (
                f"its partition with OID {gone[0]} had rows, and was dropped or detached"
            )
        else:
            made[name] = replace(table, shape=shape.with_partitions(oids).dump())
    return made, reasons


def _is_copied_again(table: TableVersion) -> bool:
    """Whether its rows do not count any more, or an operator must decide first."""
    return table.state in {HELD, STALE, LEFT} or (table.state != LIVE and bool(table.resync))


def outdated(table: TableVersion, now: Shape, publication: Publication) -> str | None:
    """Why the table must be copied again, by this publication; None if it need not."""
    if now.oid != table.relation_id:
        return "the table was dropped, and another one created with its name"
    reason = None
    if table.shape:
        before = Shape.load(table.shape)
        reason = changed(before, now, publication.empty) or _added_since(table, before, now)
    elif now.file == 0:
        # The stream has had no changes of its partitions since it was copied.
        reason = "it was copied by an earlier version, which did not follow its partitions"
    refused = refusal(now)
    if reason is None and refused is not None:
        reason = f"{refused.reason}: {refused.repair}"
    return reason


def _added_since(table: TableVersion, before: Shape, now: Shape) -> str | None:
    """Why columns that the lake took from the stream before the catalog was read are not what they were."""
    names = [name for name, _, _ in table.layout]
    added = [name for name in names if name not in sent_names(before)]
    if added and (others_by_now(names, now) or not set(names) <= set(sent_names(now))):
        return f"its column {added[0]!r} was added, and has been replaced since"
    return None


def known(head: Manifest, stream: str) -> set[int]:
    """The OIDs of a stream's tables and their partitions."""
    found: set[int] = set()
    for tables in (head.tables, head.copies):
        for name, table in tables.items():
            if stream_of(name) == stream and table.shape:
                found |= _relations(table)
    return found


def _relations(table: TableVersion) -> set[int]:
    return {table.relation_id} if _NO_PARTS in table.shape else Shape.load(table.shape).relations


def unshown(head: Manifest, publications: Mapping[str, Publication]) -> dict[str, str]:
    """The tables of the head that differ from these publications, and why.

    A table whose shape is not known is not known to be.
    """
    found = {}
    for stream, publication in publications.items():
        for relation, now in publication.shapes.items():
            name = f"{stream}.{relation}"
            table = head.tables.get(name)
            if table is None or table.state != LIVE:
                continue
            reason = outdated(table, now, publication)
            if reason is None and not table.shape:
                reason = "not compared with its source yet"
            if reason is not None:
                found[name] = reason
    return found
