"""The data files of an Iceberg snapshot with Delta's statistics, read from its manifests without Spark."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from spark_consumers.lake.delta_log.actions import WantedFile
from spark_consumers.lake.format import avro
from spark_consumers.lake.format.snapshot_files import files_of
from spark_consumers.lake.format.table_format import name_of
from spark_consumers.lake.store.place import Place, place
from walsender_bridge.errors import NotSupportedError

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DATA, _DELETED = 0, 2
#: Decimals of so many digits are written by JSON's numbers as they are.
_EXACT = 10**15


@dataclass(frozen=True, slots=True)
class _Measures:
    """What Iceberg's manifest has of a data file's columns, by their field ids: NULLs, and bounds in Iceberg's bytes."""

    nulls: Mapping[int, int]
    lower: Mapping[int, bytes]
    upper: Mapping[int, bytes]


def wanted_files(
    manifest_list: Place, physical: Mapping[int, tuple[str, str]], path: str
) -> tuple[dict[str, WantedFile], dict[str, Any]]:
    """The data files of the snapshot, and by the paths of their files the deletion vectors that these have.

    `physical`: see `DeltaSchema`. Raises `CorruptError`, and `NotSupportedError` for a table whose removed rows a Delta log cannot name.
    """
    measures = _measures(manifest_list)
    files, vectors = {}, {}
    for file in files_of(manifest_list):
        if file.deletes:
            raise NotSupportedError(
                "has equality deletes, which a Delta table cannot have",
                where=path,
                repair="the table's next change replaces them",
            )
        there = measures[file.name]
        vector = file.vector.puffin if file.vector is not None else ""
        told = statistics(file.rows, there.nulls, there.lower, there.upper, physical)
        if file.vector is not None:
            # The bounds are those of all rows of the file, removed ones too.
            told["tightBounds"] = False
            vectors[vector] = file.vector
        files[file.name] = WantedFile(file.name, file.size, json.dumps(told), vector)
    return files, vectors


def statistics(
    rows: int,
    nulls: Mapping[int, int],
    lower: Mapping[int, bytes],
    upper: Mapping[int, bytes],
    physical: Mapping[int, tuple[str, str]],
) -> dict[str, Any]:
    """Delta's statistics of a data file. A bound that Delta's JSON cannot have is left out, and nothing is skipped by it."""
    low, high, null = {}, {}, {}
    for number, (name, kind) in physical.items():
        if number in nulls:
            null[name] = nulls[number]
        if number not in lower or number not in upper:
            continue
        bounds = [_bound(bytes(each[number]), kind) for each in (lower, upper)]
        if None not in bounds:
            low[name], high[name] = bounds
    return {"numRecords": rows, "minValues": low, "maxValues": high, "nullCount": null}


def _measures(manifest_list: Place) -> dict[str, _Measures]:
    found = {}
    for manifest in avro.rows(manifest_list):
        if manifest.get("content", _DATA) != _DATA:
            continue
        for entry in avro.rows(place(manifest["manifest_path"])):
            file = entry["data_file"]
            if entry["status"] != _DELETED:
                found[name_of(str(place(file["file_path"])))] = _Measures(
                    _by_id(file.get("null_value_counts")),
                    _by_id(file.get("lower_bounds")),
                    _by_id(file.get("upper_bounds")),
                )
    return found


def _by_id(pairs: Any) -> dict[int, Any]:
    """A map with numbers for keys, which Avro has as an array of pairs."""
    return {pair["key"]: pair["value"] for pair in pairs or ()}


def _bound(value: bytes, kind: str) -> Any:  # one for each type
    """A bound in Delta's JSON; None if there is none for it. Dates and times in the years of four digits only; no floats, for NaN."""
    try:
        match kind:
            case "int" | "long":
                # A file from before the column was widened has fewer bytes.
                return int.from_bytes(value, "little", signed=True)
            case "string":
                return value.decode()
            case "date":
                (days,) = struct.unpack("<i", value)
                return (date(1970, 1, 1) + timedelta(days)).isoformat()
            case "timestamp" | "timestamptz":
                (micros,) = struct.unpack("<q", value)
                # Readers know that these are cut off at the millisecond.
                at = _EPOCH + timedelta(milliseconds=micros // 1000)
                text = at.replace(tzinfo=None).isoformat(timespec="milliseconds")
                return text if kind == "timestamp" else f"{text}Z"
        if kind.startswith("decimal("):
            scale = int(kind.rstrip(")").rpartition(",")[2])
            unscaled = int.from_bytes(value, "big", signed=True)
            if abs(unscaled) < _EXACT:
                return float(Decimal(unscaled).scaleb(-scale))
    except (ValueError, OverflowError, struct.error):
        return None
    return None
