"""Finds the tables that were renamed to a name without the masks that they had. Pure.

Masks are configured by names, so a new name may have none. A table is recognized by its OID among those of the head, which keeps the ones
that have left the publication, and is not copied until an operator says what is to be shown: `table drop` of the earlier name removes it.
"""

from collections.abc import Callable, Mapping

from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.tables.states import stream_of
from walsender_bridge.postgres.table_layout import RowRules


def disclosed(
    head: Manifest, oids: Mapping[str, int], rules: Callable[[str], RowRules]
) -> dict[str, str]:
    """The tables whose copy would show columns that the lake has masked under their earlier name, and why they are not copied.

    `oids`: of published tables, by name.
    """
    before: dict[tuple[str, int], list[tuple[str, set[str]]]] = {}
    for name, table in head.tables.items():
        if table.masks:
            columns = {mask.column for mask in table.masks}
            before.setdefault((stream_of(name), table.relation_id), []).append((name, columns))
    found = {}
    for name, oid in oids.items() if before else ():
        for earlier, columns in before.get((stream_of(name), oid), ()):
            shown = columns - {mask.column for mask in rules(name).masks}
            if earlier != name and shown:
                found[name] = (
                    f"it was renamed from {earlier}, which had masks on {', '.join(sorted(shown))}. Add them under the new name in"
                    f" [[lake.tables]] and start lake run again; to have it copied without them, run tuskline table drop {earlier}"
                )
    return found
