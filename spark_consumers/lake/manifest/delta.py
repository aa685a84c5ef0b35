"""A link as what differs from an earlier one, so that its size follows what changed, not the number of tables. Pure.

A *full* link names every table. A *delta* names a full link of the same term, its *base*, with that one's checksum, and has of
each table only the members that are not as there. It is read with its base, and with no other link, so a damaged delta is one
lost epoch. Deltas on one base grow with every table that changes for the first time, so there is a new base once as many
records were written as there are tables: a link costs what has changed, on average, and a full one comes due rarely.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from spark_consumers.lake.manifest.table_version import TableVersion

#: The member by which a delta names its base.
BASE = "base"
#: Tables up to which every link is full: it is small.
_FEW = 32
#: Links on one base: it is kept for as long as one of them is.
_LINKS = 64
_MEMBERS = tuple(field.name for field in fields(TableVersion))

Tables = Mapping[str, TableVersion]


@dataclass(frozen=True, slots=True)
class Base:
    """A full link that deltas build on. `crc`: its checksum. `written`: records in the deltas on it so far."""

    link: int
    term: int
    crc: int
    tables: Tables
    written: int = 0


def is_due(base: Base | None, link: int, term: int, count: int) -> bool:
    """Whether the link of this number is to be a full one, with so many tables."""
    return (
        base is None
        or base.term != term
        or count <= _FEW
        or link - base.link > _LINKS
        or base.written >= count
    )


def delta(base: Tables, tables: Tables) -> dict[str, Any]:
    """What differs: `changed`, of each table the members that are others, and the tables that are `gone`."""
    changed = {}
    for name, table in tables.items():
        before = base.get(name)
        # Mostly the very same object.
        if table is not before and table != before:
            changed[name] = _differing(before, table)
    return {"changed": changed, "gone": [name for name in base if name not in tables]}


def _differing(before: TableVersion | None, table: TableVersion) -> dict[str, Any]:
    values = {name: getattr(table, name) for name in _MEMBERS}
    if before is None:
        return values
    return {name: value for name, value in values.items() if value != getattr(before, name)}


def applied(base: Tables, delta: Mapping[str, Any]) -> dict[str, TableVersion]:
    """The tables of a link with this delta. Raises `KeyError`, `TypeError` or `ValueError` for what is none."""
    tables = {name: base[name] for name in base.keys() - set(delta["gone"])}
    for name, members in delta["changed"].items():
        before = base.get(name)
        if before is None:
            tables[name] = TableVersion.from_json(members)
        else:
            tables[name] = replace(before, **TableVersion.members(members))
    return tables
