"""Decoded changes as the rows that `format("tuskline")` gives, in its two shapes.

`changes`: one shape for every table, values as PostgreSQL's text in maps by column name.
`table`: the typed columns of one table, with what happened to the row before them. The shape is fixed
when a query begins; changes that the table had under other columns are fitted into it where nothing is
lost, and are a `SchemaError` otherwise.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from spark_consumers.decode.entries import ChangeBatch
from spark_consumers.decode.spans import Bools, of_numbers, of_texts, validity
from walsender_bridge.errors import SchemaError
from walsender_bridge.postgres.protocol.pgoutput import DELETE, INSERT, TRUNCATE, UPDATE

_TIME = pa.timestamp("us", "UTC")
_TEXTS = pa.map_(pa.string(), pa.string())
_NAMES = pa.list_(pa.string())

#: `mode=changes`.
CHANGES_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("relation", pa.string()),
        ("op", pa.string()),
        ("before", _TEXTS),
        ("after", _TEXTS),
        ("unchanged", _NAMES),
        ("commit_lsn", pa.int64()),
        ("xid", pa.int64()),
        ("commit_time", _TIME),
        ("version", pa.int64()),
        ("offset", pa.int64()),
        ("sequence", pa.int64()),
    ]
)


#: What `mode=table` says about each row, beside its columns.
_ABOUT = pa.schema(
    [
        ("_op", pa.string()),
        ("_commit_lsn", pa.int64()),
        ("_xid", pa.int64()),
        ("_commit_time", _TIME),
        ("_version", pa.int64()),
        ("_offset", pa.int64()),
        ("_sequence", pa.int64()),
        ("_unchanged", _NAMES),
    ]
)
_BEFORE = "_before"


def table_schema(columns: pa.Schema) -> pa.Schema:
    """`mode=table` for a table of these columns. Raises `SchemaError` for a name that is reserved."""
    taken = {*_ABOUT.names, _BEFORE} & set(columns.names)
    if taken:
        raise SchemaError(
            f"the table has columns that mode=table uses itself: {', '.join(sorted(taken))}",
            where="format('tuskline')",
            repair="use mode=changes, or choose others with the option columns",
        )
    return pa.schema([*_ABOUT, pa.field(_BEFORE, pa.struct(list(columns))), *columns])


def table_columns(schema: pa.Schema) -> pa.Schema:
    """The table's own columns in a schema of `mode=table`."""
    ours = {*_ABOUT.names, _BEFORE}
    return pa.schema([field for field in schema if field.name not in ours])


def change_rows(stream: str, batch: ChangeBatch) -> pa.RecordBatch:
    """A batch that was decoded `as_text`, as rows of `CHANGES_SCHEMA`."""
    count = len(batch)
    names = [column.name for column in batch.relation.columns]
    width = len(names)
    new = (batch.ops == INSERT) | (batch.ops == UPDATE)
    sent = np.repeat(new[:, None], width, axis=1)
    if batch.unchanged is not None:
        sent &= ~batch.unchanged
    before = pa.nulls(count, _TEXTS)
    if batch.old_columns is not None:
        had = np.repeat((batch.old_kind != 0)[:, None], width, axis=1)
        key = np.array([column.is_key for column in batch.relation.columns], np.bool_)
        had &= key[None, :] | (batch.old_kind == ord("O"))[:, None]
        before = _maps(batch.old_columns, names, had, batch.old_kind != 0)
    arrays = [
        _constant(stream, count),
        _constant(batch.relation.full_name, count),
        _ops(batch),
        before,
        _maps(batch.columns, names, sent, new),
        _unchanged(batch.unchanged, names, count),
        *_numbers(batch),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGES_SCHEMA)


def table_rows(batch: ChangeBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch as rows of `schema`: that of `table_schema`, or fields chosen from it.

    A column that the table did not have then is NULL and among `_unchanged`.
    """
    count = len(batch)
    columns = table_columns(schema)
    names = [column.name for column in batch.relation.columns]
    have = {name: i for i, name in enumerate(names)}
    absent = [name for name in columns.names if name not in have]
    marks = batch.unchanged
    if absent:
        new = (batch.ops == INSERT) | (batch.ops == UPDATE)
        lacking = np.repeat(new[:, None], len(absent), axis=1)
        marks = np.zeros((count, len(names)), np.bool_) if marks is None else marks
        marks = np.hstack([marks, lacking])

    def fitted(arrays: Sequence[pa.Array], fields: Iterable[pa.Field]) -> list[pa.Array]:
        return [
            _fit(arrays[have[field.name]], field, batch)
            if field.name in have
            else pa.nulls(count, field.type)
            for field in fields
        ]

    found = dict(
        zip(
            _ABOUT.names,
            [_ops(batch), *_numbers(batch), _unchanged(marks, [*names, *absent], count)],
            strict=True,
        )
    )
    if _BEFORE in schema.names:
        kind = schema.field(_BEFORE).type
        if batch.old_columns is None:
            found[_BEFORE] = pa.nulls(count, kind)
        else:
            children = fitted(batch.old_columns, kind)
            bitmap = validity(batch.old_kind != 0)
            found[_BEFORE] = pa.Array.from_buffers(kind, count, [bitmap], children=children)
    found |= dict(zip(columns.names, fitted(batch.columns, columns), strict=True))
    return pa.RecordBatch.from_arrays([found[name] for name in schema.names], schema=schema)


def _fit(array: pa.Array, field: pa.Field, batch: ChangeBatch) -> pa.Array:
    """The array in the field's type, if every value fits."""
    have, want = array.type, field.type
    if have == want:
        return array
    wider = (
        (pa.types.is_integer(have) and pa.types.is_integer(want))
        or (pa.types.is_decimal(have) and pa.types.is_decimal(want))
        or (pa.types.is_float32(have) and pa.types.is_float64(want))
    )
    try:
        if wider:
            return array.cast(want)
    except pa.ArrowInvalid:
        pass
    raise SchemaError(
        f"column {field.name} was {have} at log offset {batch.offset[0]}, and is {want} in this query",
        where=batch.relation.full_name,
        repair="restart the query for the newest columns; read earlier changes with mode=changes",
    )


def _numbers(batch: ChangeBatch) -> list[pa.Array]:
    return [
        of_numbers(batch.commit_lsn.astype(np.int64)),
        of_numbers(batch.xid.astype(np.int64)),
        of_numbers(batch.commit_time).view(_TIME),
        of_numbers(batch.version.astype(np.int64)),
        of_numbers(batch.offset.astype(np.int64)),
        of_numbers(batch.sequence.astype(np.int64)),
    ]


def _ops(batch: ChangeBatch) -> pa.Array:
    letters = np.zeros(256, np.int32)
    letters[[INSERT, UPDATE, DELETE, TRUNCATE]] = range(4)
    return of_texts("IUDT").take(of_numbers(letters[batch.ops]))


def _constant(text: str, count: int) -> pa.Array:
    return of_texts([text]).take(of_numbers(np.zeros(count, np.int32)))


def _maps(columns: Sequence[pa.Array], names: list[str], chosen: Bools, valid: Bools) -> pa.Array:
    """One map a row from column names to values, of the cells that are `chosen` (rows by columns)."""
    count = len(valid)
    rows, places = np.nonzero(chosen)
    offsets = np.concatenate([[0], np.cumsum(chosen.sum(axis=1))]).astype(np.int32)
    keys = of_texts(names).take(of_numbers(places))
    if columns:
        items = pa.concat_arrays(columns).take(of_numbers(places * count + rows))
    else:
        items = pa.nulls(0, pa.string())
    entries = pa.StructArray.from_arrays(
        [keys, items], fields=[_TEXTS.key_field, _TEXTS.item_field]
    )
    return pa.Array.from_buffers(
        _TEXTS, count, [validity(valid), pa.py_buffer(offsets)], children=[entries]
    )


def _unchanged(marks: Bools | None, names: list[str], count: int) -> pa.Array:
    """The names of the marked columns in each row; an empty list where there are none."""
    if marks is None:
        return pa.ListArray.from_arrays(
            of_numbers(np.zeros(count + 1, np.int32)), pa.nulls(0, pa.string()), type=_NAMES
        )
    _, places = np.nonzero(marks)
    offsets = np.concatenate([[0], np.cumsum(marks.sum(axis=1))]).astype(np.int32)
    return pa.ListArray.from_arrays(
        of_numbers(offsets), of_texts(names).take(of_numbers(places)), type=_NAMES
    )
