"""Decides how a table in the lake follows schema changes that the source has recorded: in place, or by another copy. Pure.

PostgreSQL numbers the columns of a table (`attnum`) and never uses a number again; Iceberg numbers the fields of a table, and finds
them by their numbers in every data file. A column of the lake's table stands for one number of PostgreSQL's. So a column that is
renamed keeps its field, one that is dropped loses it, and one that is new gets a new field, which reads as NULL in older files. No
data file is touched.

**Why this is right.** Rows of the lake equal those of the source if (1) each change is read with the columns that it had when it was
made, and (2) no value has changed without a change in the log.

1. A record holds from its place in the log on. What was changed before it has the columns of the record before, so each change is
   mapped by column numbers, not by names; its Relation message must have exactly these columns (`schema_match.mismatch`). One command
   has no changes before its record, except those of other event triggers: they have other columns, or the table is copied again.
2. A value changes silently if a column gets a default for old rows, or the table is rewritten. Both write the row of the column in
   `pg_attribute`. So a column may differ from the table's last known state only if the transaction of the record has written its row,
   and then only in its name, or by a wider type that PostgreSQL's own conversion gives it (`widening`). A new column must be one without a
   value in old rows, or with a value that the server keeps for all of them (`attmissingval`: a default that is constant, or was evaluated
   once) and a record has read there at the end of the command: rows before the record have that value, in data files
   (`initial_default`) as in the changes before it (`Layout.defaults`). A file that was replaced along with the row of a
   column that kept name and type is a rewrite. If another transaction has written the row of a column, something was not recorded.
   The same row version proves nothing in the transaction that wrote it: each of its commands may have written the row once more.

Whatever is not covered by this is copied again, as without records.
"""

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from spark_consumers.decode.types import arrow_schema, column_type
from spark_consumers.lake.format.iceberg_schema import file_type
from spark_consumers.lake.format.initial_default import value_of
from spark_consumers.lake.manifest.table_version import Column as Described
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.tables.recorded import RecordedColumn, TableRecord
from spark_consumers.lake.tables.schema_change import Evolution, FullResync
from spark_consumers.lake.tables.schema_match import Layout, arrays_of, unusable
from spark_consumers.lake.tables.shape import Columns, Shape, columns_in, sent_columns
from spark_consumers.lake.tables.widening import has_no_using, is_wider
from walsender_bridge.postgres.protocol.pgoutput import Column


def evolve(table: TableVersion, records: Sequence[TableRecord]) -> Evolution | FullResync:
    """The verdict on these records of one table, in the order of the log. `table`: as it is before the first."""
    if not table.layout or not table.shape:
        return FullResync("it was copied by an earlier version, which did not record its columns")
    if len(table.chunks) > 1:
        return FullResync("its columns changed while it was copied")
    if table.quarantine_files:
        return FullResync("its columns changed while it had quarantined rows")
    if table.runs is None:
        return FullResync("its columns changed before its row index was built")
    shape = Shape.load(table.shape)
    first = _numbered(table.layout, shape)
    if first is None:
        return FullResync("its columns changed before the catalog was compared")
    states = [first]
    steps = []
    for record in records:
        after = _after(states[-1], shape, record)
        if isinstance(after, FullResync):
            return after
        columns, shape = after
        states.append(columns)
        steps.append(columns_in(shape))
    return _evolution(table, records, states, shape, tuple(steps))


#: The columns that are sent, by number, in their order.
_Numbered = dict[int, Described]


def _numbered(layout: Sequence[Described], shape: Shape) -> _Numbered | None:
    """The table's columns by number; None if its shape has others."""
    sent = sent_columns(shape)
    if [name for name, _ in sent.values()] != [name for name, _, _ in layout]:
        return None
    return dict(zip(sent, layout, strict=True))


def _after(
    before: _Numbered, shape: Shape, record: TableRecord
) -> tuple[_Numbered, Shape] | FullResync:
    """The columns and the shape after one record."""
    old = {number: (name, kind, version) for number, name, kind, version in shape.columns}
    new = {column.number: column for column in record.columns}
    for number in old:
        if number not in new:
            return FullResync("a record of its columns lacks one of them")
    retyped = [
        column.name
        for column in record.columns
        if column.number in old and column.name and column.kind != old[column.number][1]
    ]
    keeps_values = bool(retyped) and all(
        has_no_using(record.query, record.name, name) for name in retyped
    )
    for column in record.columns:
        if reason := _refused(column, old, shape, record, keeps_values=keeps_values):
            return FullResync(reason)
    living = [column for column in record.columns if column.name is not None]
    generated = tuple(number for number in shape.generated if new[number].name is not None)
    renamed = {
        name: str(new[number].name) for number, (name, _, _) in old.items() if new[number].name
    }
    now = replace(
        shape,
        columns=tuple((c.number, str(c.name), c.kind, c.version) for c in living),
        natts=record.natts,
        file=record.file,
        generated=generated,
        filled=tuple(c.number for c in living if c.is_filled),
        identity=None
        if shape.identity is None
        else tuple(renamed.get(name, name) for name in shape.identity),
    )
    columns: _Numbered = {}
    for number, (name, kind) in sent_columns(now).items():
        if number not in before:
            columns[number] = (name, kind, new[number].typmod)
            continue
        earlier = before[number]
        # A column of a domain is sent as one of its base type, whose modifier is not known.
        is_of_domain = kind == old[number][1] != earlier[1]
        later = (name, *earlier[1:]) if is_of_domain else (name, kind, new[number].typmod)
        if not is_wider(earlier, later):
            return FullResync(f"it has another type for {name}")
        columns[number] = later
    known = {described: number for number, described in before.items()}
    for number, described in columns.items():
        if known.get(described, number) != number:
            # Rows that another event trigger writes before this one is fired have the same description, and belong to the new column.
            return FullResync(
                f"its column {described[0]!r} was replaced by another of its name in one command"
            )
    return columns, now


def _refused(
    column: RecordedColumn,
    old: dict[int, tuple[str, int, str]],
    shape: Shape,
    record: TableRecord,
    *,
    keeps_values: bool,
) -> str | None:
    """Why the table cannot be followed to what this record says of one column; None if it can.

    `keeps_values`: the command is known to convert values by nothing but their types.
    """
    name, kind, version = old.get(column.number, (None, 0, ""))
    if name is None:
        return _refused_new(column, shape, record)
    if version == column.version and not column.is_written:
        # The same row of the catalog.
        return None
    if not column.is_written:
        return f"a change of its column {name!r} was not recorded"
    if column.name is None:
        return None
    if kind != column.kind and not keeps_values:
        return f"it has another type for {column.name}, by a command that is not known to keep all values"
    if column.number in shape.generated and not column.is_generated:
        return f"its column {column.name!r} is no longer generated"
    # Of the columns whose type stays, a rewrite writes the rows of those that have a default; an earlier command of the transaction
    # may have written any.
    stays = keeps_values and (kind != column.kind or column.is_filled or version == column.version)
    if record.file != shape.file and not stays:
        return f"its rows were rewritten: its column {column.name!r} was altered"
    return None


def _refused_new(column: RecordedColumn, shape: Shape, record: TableRecord) -> str | None:
    if column.number <= shape.natts:
        # Dropped before the table was copied.
        return None if column.name is None else "a record of its columns has an unknown one"
    if column.name is None:
        return "a column was added and dropped again, which was not recorded"
    if not column.is_written:
        return f"the addition of its column {column.name!r} was not recorded"
    if column.is_filled and column.missing is None:
        return f"its column {column.name!r} was added with a default that the server does not keep, or NOT NULL"
    if column.is_filled and _default_of(column) is None:
        return f"its column {column.name!r} was added with a default that Iceberg cannot keep"
    if record.file != shape.file:
        # A default that has filled it may have been dropped by a command that fired no event trigger.
        return f"its rows were rewritten: its column {column.name!r} was added"
    return None


def _default_of(column: RecordedColumn) -> pa.Scalar | None:
    """The value of rows that are older than this new column; None if they have none, or one that cannot be kept."""
    if column.missing is None:
        return None
    return value_of(column.missing, column_type(column.kind, column.typmod))


def _defaults(
    first: _Numbered, last: _Numbered, columns: pa.Schema, records: Sequence[TableRecord]
) -> tuple[pa.Scalar | None, ...]:
    """For each of the last columns, the value of older rows, by the record that has added it; of the type that the column has at last."""
    found: list[pa.Scalar | None] = []
    for number, field in zip(last, columns, strict=True):
        value = None
        if number not in first:
            added = next(c for r in records for c in r.columns if c.number == number)
            value = _default_of(added)
        found.append(None if value is None else pa.array([value]).cast(field.type)[0])
    return tuple(found)


def _evolution(
    table: TableVersion,
    records: Sequence[TableRecord],
    states: Sequence[_Numbered],
    shape: Shape,
    steps: tuple[Columns, ...],
) -> Evolution | FullResync:
    first, last = states[0], states[-1]
    names = {column[0]: number for number, column in first.items()}
    keys = [names[name] for name in table.key]
    gone = [name for name, number in zip(table.key, keys, strict=True) if number not in last]
    if gone:
        return FullResync(f"it lost {gone[0]}, a column of its key")
    key = tuple(last[number][0] for number in keys)
    columns = arrow_schema(Column(*column, is_key=False) for column in last.values())
    if reason := unusable(columns.names, key, arrays_of(columns)):
        return FullResync(reason)
    places = [(0, 0), *(record.place for record in records)]
    defaults = _defaults(first, last, columns, records)
    layouts = []
    for (offset, sequence), state in zip(places, states, strict=True):
        numbers = list(state)
        there = tuple(numbers.index(n) if n in state else None for n in last)
        layouts.append(Layout(offset, tuple(state.values()), sequence, there, defaults))
    numbers = list(first)
    sources = tuple(numbers.index(n) if n in first else None for n in last)
    return Evolution(
        tuple(layouts),
        sources,
        key,
        # Without a key, rows that are there get a value that is in their digests.
        reindexes=_has_other_digests(first, last, keys)
        or (not keys and any(value is not None for value in defaults)),
        places=frozenset(record.place for record in records),
        shape=shape,
        steps=steps,
        defaults=defaults,
    )


def _has_other_digests(first: _Numbered, last: _Numbered, keys: Sequence[int]) -> bool:
    """Whether rows have other digests in the row index (`index.digests`): of their key, or of all columns, each with its position."""
    if not keys and [number for number in last if number in first] != list(first):
        return True
    numbers = keys or list(first)
    return any(_in_files(first[number]) != _in_files(last[number]) for number in numbers)


def _in_files(column: Described) -> str:
    """The type of a column in data files."""
    return str(file_type(column_type(*column[1:]).arrow))
