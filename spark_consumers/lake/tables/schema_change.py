"""Decides how a table follows changes of another shape than its own. Pure.

Where the source records schema changes, `evolve` decides. Here are those that nothing has recorded: a Relation message carries
neither attribute numbers nor defaults, so a rename looks like a drop and an add, and a default fills old rows without a word.
So one kind of change is followed in place: columns that came at the end, nullable, without a default (the catalog is asked,
`not_plain`). Old rows then hold NULL there, which is what the lake's files without that column read as. Everything else is a
table of its own: it is copied again, alone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import pyarrow as pa

from spark_consumers.lake.manifest.table_version import Column, TableVersion
from spark_consumers.lake.tables.schema_match import Layout, SchemaMismatch
from spark_consumers.lake.tables.shape import Columns, Shape


@dataclass(frozen=True, slots=True)
class ColumnsAdded:
    """The table has more columns at its end, from the offsets of these layouts on."""

    layouts: tuple[Layout, ...]
    added: tuple[Column, ...]

    def evolution(self, table: TableVersion) -> "Evolution":
        """How the table changes."""
        known = len(table.layout)
        sources = tuple(at if at < known else None for at in range(len(self.layouts[-1].columns)))
        return Evolution(self.layouts, sources, table.key)


@dataclass(frozen=True, slots=True)
class Evolution:
    """How a table changes in place.

    `layouts`: the columns of its changes, each from its place in the log on. `sources`: for each of the table's new columns, which of
    its columns it was; None: it is new. `key`: its new names. `reindexes`: whether rows have other digests in the row index then.

    `defaults`: for each of the new columns, the value of rows that are older than it; None: NULL (or it is not new).

    By records (`recorded`): their `places` in the log, the table's `shape` behind the last one, and the columns behind each (`steps`).
    """

    layouts: tuple[Layout, ...]
    sources: tuple[int | None, ...]
    key: tuple[str, ...]
    reindexes: bool = False
    places: frozenset[tuple[int, int]] = frozenset()
    shape: Shape | None = None
    steps: tuple[Columns, ...] = ()
    defaults: tuple[pa.Scalar | None, ...] = ()


@dataclass(frozen=True, slots=True)
class FullResync:
    """The table has to be copied again."""

    reason: str


def evaluate(
    table: TableVersion, layouts: Sequence[Layout], mismatches: Sequence[SchemaMismatch]
) -> ColumnsAdded | FullResync:
    """The verdict on these mismatches of one table. `layouts`: those of this epoch's changes that are known already."""
    known = list(layouts)
    added: list[Column] = []
    for mismatch in sorted(mismatches, key=lambda m: (m.offset, m.number)):
        if mismatch.reason:
            return FullResync(mismatch.reason)
        if not known:
            return FullResync(f"its columns changed to ({_named(mismatch.columns)})")
        now = known[-1].columns
        if mismatch.columns == now:
            # A later range of the same epoch tells it again.
            continue
        new = mismatch.columns[len(now) :]
        if mismatch.columns[: len(now)] != now or not new:
            return FullResync(_changes(now, mismatch.columns))
        if any(name in mismatch.key for name, _, _ in new) and table.key:
            return FullResync(f"the column {new[0][0]!r} was added to its key")
        if mismatch.offset < known[-1].offset:
            return FullResync(_changes(now, mismatch.columns))
        known.append(Layout(mismatch.offset, mismatch.columns))
        added += new
    return ColumnsAdded(tuple(known), tuple(added))


def schema_hash(columns: pa.Schema, key: Collection[str]) -> str:
    """A digest of a table's columns, types and key."""
    text = "\n".join([*(f"{f.name}\t{f.type}" for f in columns), *key])
    return blake2b(text.encode(), digest_size=16).hexdigest()


def first_layout(table: TableVersion) -> tuple[Layout, ...]:
    """A table's columns before any change of them; nothing is known of a table of format 1."""
    return (Layout(0, table.layout),) if table.layout else ()


def of_filter(table: TableVersion, evolution: Evolution, columns: frozenset[str]) -> str | None:
    """Why a table whose row filter reads these columns cannot change so in place; None if it can: each stays what it was."""
    now = evolution.layouts[-1].columns
    kept = {
        column[0]
        for column, at in zip(now, evolution.sources, strict=True)
        if at is not None and table.layout[at] == column
    }
    gone = sorted(columns - kept)
    return f"its column {gone[0]!r}, which its row filter names, was changed" if gone else None


def not_plain(added: Sequence[Column], catalog: Mapping[str, tuple[int, int, bool]]) -> str | None:
    """Why added columns cannot be taken as they are; None if they can.

    `catalog`: the table's columns now: type, modifier, and whether a row could have got a value there
    that the log does not tell (a default, NOT NULL, generated).
    """
    for name, kind, typmod in added:
        found = catalog.get(name)
        if found is not None and found[2]:
            return f"its column {name!r} was added with a default, or NOT NULL"
        if found is None or found[:2] != (kind, typmod):
            return f"its column {name!r} was added, and has been replaced since"
    return None


def _changes(before: Sequence[Column], after: Sequence[Column]) -> str:
    """In words, what differs between two lists of columns."""
    old = {name: (kind, typmod) for name, kind, typmod in before}
    new = {name: (kind, typmod) for name, kind, typmod in after}
    gone = [name for name in old if name not in new]
    come = [name for name in new if name not in old]
    other = [name for name in old if name in new and new[name] != old[name]]
    differences = [
        f"{word} {', '.join(names)}"
        for word, names in (("lost", gone), ("got", come), ("has another type for", other))
        if names
    ]
    return f"it {'; '.join(differences)}" if differences else "its columns are in another order"


def _named(columns: Sequence[Column]) -> str:
    return ", ".join(name for name, _, _ in columns)
