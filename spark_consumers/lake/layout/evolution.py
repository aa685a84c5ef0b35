"""What has to change in a table's metadata for it to have a layout: spec, sort order, properties. Pure.

Nothing of it touches a data file: a file keeps the spec that it was written with, and its rows stay in the order that they
have. A partition field that comes back has the number that it had.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from spark_consumers.lake.layout.arrangement import Arrangement, Field
from spark_consumers.lake.layout.transforms import applies
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.postgres.table_layout import (
    IDENTITY,
    PartitionField,
    SortField,
    TableLayout,
    compression,
)

#: The property that has the names of the options that the configuration has set.
OPTIONS = "tuskline.options"

#: Iceberg's options of one column begin so: which statistics its data files have.
_OF_COLUMN = "write.metadata.metrics.column."

_Json = Mapping[str, Any]


@dataclass(frozen=True)
class Layouts:
    """What a table's metadata says of layouts, in Iceberg's JSON.

    `columns`: the data files' columns; `ids`: their numbers, by name.
    """

    columns: pa.Schema
    ids: Mapping[str, int]
    specs: Sequence[_Json]
    spec: int
    last_field: int
    order: _Json
    properties: Mapping[str, str]


@dataclass(frozen=True)
class Changes:
    """What is to be set in the metadata; `spec` and `order` are Iceberg's JSON, None: they stay."""

    spec: _Json | None
    order: _Json | None
    properties: Mapping[str, str]
    removed: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.spec or self.order or self.properties or self.removed)


def changes(
    there: Layouts, wanted: TableLayout, defaults: Mapping[str, str], where: str
) -> Changes:
    """What makes `wanted` of a table; `defaults`: the lake's own properties.

    Raises `NotSupportedError`, which names `where`, for a layout that the table cannot have.
    """
    check(wanted, there.columns, where)
    options = {n: v for n, v in wanted.options if _applies(n, there.columns)}
    before = set(json.loads(there.properties.get(OPTIONS, "[]")))
    properties = {name: defaults[name] for name in before - options.keys() if name in defaults}
    properties |= options
    if before != options.keys():
        properties[OPTIONS] = json.dumps(sorted(options))
    return Changes(
        _spec(there, wanted.partition),
        _order(there, wanted.sort),
        {n: v for n, v in properties.items() if there.properties.get(n) != v},
        frozenset((before - properties.keys()) & there.properties.keys()),
    )


def _applies(option: str, columns: pa.Schema) -> bool:
    """Whether the table can have the option: Iceberg changes no table with statistics of a column that it lacks."""
    column = option.removeprefix(_OF_COLUMN)
    return column == option or column.removesuffix(".element") in columns.names


def check(wanted: TableLayout, columns: pa.Schema, where: str) -> None:
    """Raise `NotSupportedError` for a layout that a table with these columns cannot have."""
    for what, column in [
        *((f"partition field {field}", field.column) for field in wanted.partition),
        *((f"sort field {field.column}", field.column) for field in wanted.sort),
    ]:
        if column not in columns.names:
            raise _unfit(f"{what}: the table has no column {column!r}", where)
    for field in wanted.partition:
        kind = columns.field(field.column).type
        if not applies(field.transform, kind):
            raise _unfit(f"partition field {field}: a column of type {kind} cannot have it", where)
    for each in wanted.sort:
        if pa.types.is_nested(columns.field(each.column).type):
            raise _unfit(f"sort field {each.column}: an array has no order", where)


def _unfit(what: str, where: str) -> NotSupportedError:
    repair = "correct the first [[lake.tables]] whose pattern matches the table, and start `lake run` again"
    return NotSupportedError(what, where=where, repair=repair)


def _spec(there: Layouts, wanted: Sequence[PartitionField]) -> _Json | None:
    """The spec to make the default; None if it is that already."""
    sources = [(there.ids[field.column], field.iceberg) for field in wanted]
    current = next(spec for spec in there.specs if spec["spec-id"] == there.spec)
    if [(f["source-id"], f["transform"]) for f in current["fields"]] == sources:
        return None
    known = {(f["source-id"], f["transform"]): f for spec in there.specs for f in spec["fields"]}
    last = there.last_field
    fields: list[dict[str, Any]] = []
    taken = {field["name"] for field in known.values()}
    for field, source in zip(wanted, sources, strict=True):
        if source in known:
            fields.append({**known[source]})
            continue
        last += 1
        name = _field_name(field, there.columns.names, taken)
        taken.add(name)
        fields.append(
            {"source-id": source[0], "field-id": last, "name": name, "transform": source[1]}
        )
    return {"spec-id": max(s["spec-id"] for s in there.specs) + 1, "fields": fields}


def _field_name(field: PartitionField, columns: Iterable[str], taken: Iterable[str]) -> str:
    """A name for the partition field: no column's, except its own if it has the same values; and no other field's."""
    # Avro has ASCII names only, and Iceberg writes other letters as they are: DuckDB ends at such a manifest.
    words = [re.sub(r"[^\x00-\x7f]", "_", field.column)]
    if field.transform != IDENTITY:
        words += [field.transform, *([] if field.number is None else [str(field.number)])]
    name = "_".join(words)
    own = {field.column} if field.transform == IDENTITY else set()
    others = {*columns} - own | {*taken}
    while name in others:
        name += "_"
    return name


def _order(there: Layouts, wanted: Sequence[SortField]) -> _Json | None:
    """The sort order to make the default; None if it is that already."""
    fields = [
        {
            "transform": "identity",
            "source-id": there.ids[field.column],
            "direction": "desc" if field.descending else "asc",
            "null-order": "nulls-first" if field.nulls_first else "nulls-last",
        }
        for field in wanted
    ]
    if [*there.order["fields"]] == fields:
        return None
    return {"order-id": there.order["order-id"] + 1 if fields else 0, "fields": fields}


def arrangement(there: Layouts) -> Arrangement:
    """How files of the table are written, as its metadata says."""
    names = {number: name for name, number in there.ids.items()}
    spec = next(spec for spec in there.specs if spec["spec-id"] == there.spec)
    codec, level = compression(there.properties)
    return Arrangement(
        spec=there.spec,
        fields=tuple(
            Field(f["field-id"], names[f["source-id"]], *_transform(f["transform"]))
            for f in spec["fields"]
        ),
        order=there.order["order-id"],
        sort=tuple(
            SortField(
                names[f["source-id"]], f["direction"] == "desc", f["null-order"] == "nulls-first"
            )
            for f in there.order["fields"]
        ),
        codec=codec,
        level=level,
    )


def _transform(text: str) -> tuple[str, int | None]:
    """Iceberg's name of a transform, and its number."""
    name, _, number = text.rstrip("]").partition("[")
    return name, int(number) if number else None
