"""The data files of an Iceberg snapshot with Delta's statistics, read from its manifests without Spark.

A manifest never changes, so one that an earlier snapshot of the table had, too, is not read again (`ReadManifests`): what a commit reads is
what has changed, however many files the table has.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from spark_consumers.lake.delta_log.actions import WantedFile
from spark_consumers.lake.format import avro, checksums
from spark_consumers.lake.format.snapshot_files import (
    ManifestFiles,
    joined,
    live_files,
    manifest_files,
)
from spark_consumers.lake.format.table_format import Vector, name_of
from spark_consumers.lake.store.place import Place, place
from walsender_bridge.errors import NotSupportedError

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DATA: Final = 0
#: Decimals of so many digits are written by JSON's numbers as they are.
_EXACT = 10**15


@dataclass(frozen=True, slots=True)
class _Read:
    """A manifest that was read: its files, and by their names the statistics of data files, in Delta's JSON."""

    files: ManifestFiles
    statistics: Mapping[str, str]


class ReadManifests:
    """The manifests of one table's snapshot, by their locations, with what they say for a Delta log."""

    def __init__(self) -> None:
        self._physical: Mapping[int, tuple[str, str]] = {}
        self._read: dict[str, _Read] = {}

    def wanted(
        self, manifest_list: Place, physical: Mapping[int, tuple[str, str]], path: str
    ) -> tuple[dict[str, WantedFile], dict[str, Vector]]:
        """The data files of the snapshot, and by the paths of their files the deletion vectors that these have.

        `physical`: see `DeltaSchema`; with others, all manifests are read again. Raises `CorruptError`, and `NotSupportedError` for a
        table whose removed rows a Delta log cannot name.
        """
        known = self._read if physical == self._physical else {}
        now = {}
        checksums.check(manifest_list)
        for manifest in avro.rows(manifest_list):
            at = manifest["manifest_path"]
            now[at] = known.get(at) or _read(manifest, physical)
        self._physical, self._read = physical, now
        told = {name: text for read in now.values() for name, text in read.statistics.items()}
        files, vectors = {}, {}
        for file in joined(read.files for read in now.values()):
            if file.deletes:
                raise NotSupportedError(
                    "has equality deletes, which a Delta table cannot have",
                    where=path,
                    repair="the table's next change replaces them",
                )
            name, vector = file.name, file.vector
            text = told[name]
            if vector is not None:
                text = _with_wide_bounds(text)
                vectors[vector.puffin] = vector
            files[name] = WantedFile(name, file.size, text, vector.puffin if vector else "")
        return files, vectors


def _read(manifest: Mapping[str, Any], physical: Mapping[int, tuple[str, str]]) -> _Read:
    checksums.check(place(manifest["manifest_path"]))
    found = list(live_files(manifest))
    told = {
        name_of(str(place(file["file_path"]))): json.dumps(
            statistics(
                file["record_count"],
                _by_id(file.get("null_value_counts")),
                _by_id(file.get("lower_bounds")),
                _by_id(file.get("upper_bounds")),
                physical,
            ),
            # delta-rs and DuckDB read U+10FC00 and beyond wrongly in JSON's escapes, and skip files by that.
            ensure_ascii=False,
        )
        for file, _ in found
        if file.get("content", _DATA) == _DATA
    }
    return _Read(manifest_files(found), told)


def _with_wide_bounds(text: str) -> str:
    """These statistics for a data file of which rows are removed: the bounds are those of all rows."""
    return f'{text.removesuffix("}")}, "tightBounds": false}}'


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
