"""Quarantined rows as operators see them: listed, and skipped by name.

`quarantine` describes the rows and how they are quarantined. Files are never changed: skipping a row rewrites all
quarantined rows of its table into a file that the next link names.
"""

import datetime as dt
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import pyarrow as pa

from spark_consumers.decode.types import ColumnType, from_text
from spark_consumers.decode.unrepresentable import UnrepresentableValueError
from spark_consumers.lake.epoch.quarantine import ABOUT_IT, UNREPRESENTABLE, VALUE
from spark_consumers.lake.format.data_files import read_data, write_table
from spark_consumers.lake.manifest.chain import TableVersion
from spark_consumers.lake.store.place import Place, place
from walsender_bridge.postgres.protocol.lsn import format_lsn

_SKIPPED = f"{ABOUT_IT}skipped"


@dataclass(frozen=True)
class QuarantinedRow:
    """One quarantined row.

    `id` names it among its table's: by its key, or by its values where there is no key (equal rows then share
    it). `position`: of its last change (`stream`, `offset`, `lsn`, `xid`, `version`, `commit_time`; offset and
    version 0 for a row of the initial copy). `values`: every column as text. `unrepresentable`: the reason, by column.
    """

    id: str
    table: str
    skipped: bool
    position: dict[str, Any]
    key: dict[str, str | None]
    values: dict[str, str | None]
    unrepresentable: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """The row as `tuskline quarantine list --json` has it."""
        return {
            "table": self.table,
            "row": self.id,
            "state": "skipped" if self.skipped else "waiting",
            **self.position,
            "key": self.key,
            "columns": [
                {"column": name, "value": self.values[name], "reason": reason}
                for name, reason in self.unrepresentable.items()
            ],
            "values": self.values,
        }


def rows_of(lake: str | Place, name: str, table: TableVersion) -> Iterator[QuarantinedRow]:
    """The quarantined rows of a table (`stream.schema.table`) in the epoch of this version."""
    for file in table.quarantine_files:
        yield from _rows(name, table, read_data(place(lake) / table.path / file))


def skip(
    lake: str | Place, name: str, table: TableVersion, ids: Collection[str], term: int
) -> tuple[TableVersion, set[str]]:
    """The table with these rows skipped (all of them without any id), and the unknown ids.

    `term` is the writer's.
    """
    folder = place(lake) / table.path
    parts = []
    missing = set(ids)
    skipped = 0
    for file in table.quarantine_files:
        part = read_data(folder / file)
        rows = list(_rows(name, table, part))
        missing -= {row.id for row in rows}
        flags = [row.skipped or not ids or row.id in ids for row in rows]
        skipped += sum(flags)
        at = part.schema.get_field_index(_SKIPPED)
        parts.append(part.set_column(at, part.schema.field(at), pa.array(flags, pa.bool_())))
    if missing or not parts:
        return table, missing
    made = f"quarantine/skip-t{term}-{uuid.uuid4().hex}.parquet"
    whole = pa.concat_tables(parts, promote_options="default")
    write_table(str(folder / made), whole)
    return replace(table, quarantine_files=(made,), skipped_rows=skipped), missing


def _rows(name: str, table: TableVersion, rows: pa.Table) -> Iterator[QuarantinedRow]:
    fields = [field for field in rows.schema if field.name.startswith(VALUE)]
    for record in rows.to_pylist():
        values: dict[str, str | None] = {}
        unrepresentable: dict[str, str] = {}
        for field in fields:
            column = field.name.removeprefix(VALUE)
            text = record[f"{UNREPRESENTABLE}{column}"]
            if text is None:
                values[column] = _text(record[field.name])
            else:
                values[column] = text
                unrepresentable[column] = _reason(text, field.type)
        key = {column: values[column] for column in table.key}
        identity = repr([name, *sorted((key or values).items())])
        about = {
            field.name.removeprefix(ABOUT_IT): record[field.name]
            for field in rows.schema
            if field.name.startswith(ABOUT_IT)
        }
        skipped = bool(about.pop("skipped"))
        about["lsn"] = format_lsn(about["lsn"])
        position = {"stream": name.partition(".")[0], **about}
        digest = blake2b(identity.encode(), digest_size=6).hexdigest()
        yield QuarantinedRow(digest, name, skipped, position, key, values, unrepresentable)


def _reason(text: str, arrow: pa.DataType) -> str:
    try:
        from_text(pa.array([text], pa.string()), ColumnType(0, -1, arrow, kept_as_text=False))
    except UnrepresentableValueError as fault:
        return fault.what
    # Either the bytes were not valid text, or an earlier version could not represent the value.
    return f"was not representable as {arrow} when it arrived"


def _text(value: Any) -> str | None:
    """A value as PostgreSQL writes it (floats as Python does)."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    if isinstance(value, dt.datetime):
        text = value.replace(tzinfo=None).isoformat(sep=" ")
        return text if value.tzinfo is None else f"{text}+00"
    if isinstance(value, list):
        return "{" + ",".join(map(_element, value)) + "}"
    return str(value)


def _element(value: Any) -> str:
    text = _text(value)
    if text is None:
        return "NULL"
    if text and text.upper() != "NULL" and not set(text) & set('{}",\\ \t\n\r\v\f'):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
