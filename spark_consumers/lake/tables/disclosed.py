"""Finds the tables that were renamed to a name without the masks that they had, and partitions that have a name of their own now. Pure.

Masks are configured by names, so a new name may have none. A table is recognized by its OID among those of the head, which keeps the ones
that have left the publication, and is not copied until an operator says what is to be shown: `table drop` of the earlier name removes it.

Another table may get the earlier name, as in a swap by two renames, and a masked table may lose a partition. The next version has the OIDs of
these (`succeeding`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.table_version import LEFT, TableVersion
from spark_consumers.lake.tables.shape import Shape
from spark_consumers.lake.tables.states import stream_of
from walsender_bridge.postgres.table_layout import RowRules

#: Tables that a version knows to have had its name before, the newest: one may be swapped every hour, and dropped.
_KNOWN: Final = 1000


def succeeding(before: TableVersion | None, after: TableVersion) -> TableVersion:
    """The version that takes the place of another under its name, with what is known of masked tables that had the name, and their partitions."""
    if before is None:
        return after
    known = dict(before.had_masks)
    if before.masks:
        columns = tuple(sorted(mask.column for mask in before.masks))
        known |= dict.fromkeys(sorted(_relations(before)), columns)
    ours = _relations(after)
    gone = [(oid, columns) for oid, columns in known.items() if oid not in ours]
    return replace(after, had_masks=tuple(gone[-_KNOWN:]))


def disclosed(
    head: Manifest, oids: Mapping[str, int], rules: Callable[[str], RowRules]
) -> dict[str, str]:
    """The tables whose copy would show columns that the lake has masked under another name, and why they are not copied.

    `oids`: of published tables, by name.
    """
    before: dict[tuple[str, int], list[tuple[str, set[str]]]] = {}
    for name, table in head.tables.items():
        known = [(oid, {*columns}) for oid, columns in table.had_masks]
        if table.masks:
            columns = {mask.column for mask in table.masks}
            known += [(oid, columns) for oid in _relations(table)]
        for oid, columns in known:
            before.setdefault((stream_of(name), oid), []).append((name, columns))
    found = {}
    for name, oid in oids.items() if before else ():
        for earlier, columns in before.get((stream_of(name), oid), ()):
            shown = columns - {mask.column for mask in rules(name).masks}
            if earlier != name and shown:
                found[name] = _reason(head.tables[earlier], earlier, oid, ", ".join(sorted(shown)))
    return found


def _reason(table: TableVersion, earlier: str, oid: int, shown: str) -> str:
    is_it = oid == table.relation_id
    was = f"renamed from {earlier}" if is_it else f"{earlier} before, or a partition of it"
    otherwise = (
        f"to have it copied without them, run tuskline table drop {earlier}"
        if is_it or table.state == LEFT
        else "or leave it out (tables)"
    )
    return f"it was {was}, which had masks on {shown}. Add them under the new name in [[lake.tables]] and start lake run again; {otherwise}"


def _relations(table: TableVersion) -> frozenset[int]:
    """The OIDs of the table and its partitions."""
    return _partitions(table.shape) | {table.relation_id}


@lru_cache(maxsize=1000)
def _partitions(shape: str) -> frozenset[int]:
    return frozenset(part.oid for part in Shape.load(shape).parts) if shape else frozenset()
