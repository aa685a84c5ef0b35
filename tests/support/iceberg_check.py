"""Whether a table is what Iceberg's specification says: engines prune files, count and number rows by what its manifests claim.

Nothing of the writer is used but the reader of Avro: metadata is JSON, data files are read with PyArrow, and the transforms of
partitions are PyIceberg's.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.conversions import from_bytes
from pyiceberg.schema import Schema
from pyiceberg.transforms import parse_transform
from pyroaring import BitMap64

from spark_consumers.lake.format import avro

_DATA, _POSITIONS = 0, 1
_ADDED, _DELETED = 1, 2
_WITH_ROW_IDS = 3
_ROW_ID, _UPDATED = "_row_id", "_last_updated_sequence_number"
_VECTOR_MAGIC = b"\xd1\xd3\x39\x64"
#: Metadata files that a table's metadata names as earlier ones.
_PREVIOUS = 100

_Json = Mapping[str, Any]


def assert_valid(metadata_file: str) -> None:
    """Of the table that has this metadata file, the newest metadata, and what its snapshots' manifests claim of the files, are right."""
    # A catalog's file may be an earlier one, of which snapshots have expired.
    versions = Path(metadata_file).parent.glob("v*.metadata.json")
    newest = max(versions, key=lambda file: int(file.name[1:].partition(".")[0]))
    metadata = json.loads(newest.read_bytes())
    table = _Table(metadata)
    faults = [*_of_metadata(metadata), *_of_numbers(metadata)]
    for snapshot in metadata["snapshots"]:
        faults += [f"snapshot {snapshot['snapshot-id']}: {fault}" for fault in table.of(snapshot)]
    assert not faults, f"{newest}:\n" + "\n".join(faults[:20])


def _of_metadata(metadata: _Json) -> Iterator[str]:
    snapshots = {s["snapshot-id"]: s for s in metadata["snapshots"]}
    for name, ref in metadata["refs"].items():
        if ref["snapshot-id"] not in snapshots:
            yield f"ref {name} is of no snapshot"
    current = metadata["current-snapshot-id"]
    if "main" in metadata["refs"] and metadata["refs"]["main"]["snapshot-id"] != current:
        yield "the current snapshot is not that of main"
    shown = metadata["snapshot-log"]
    if shown and shown[-1]["snapshot-id"] != current:
        yield "the snapshot log does not end with the current snapshot"
    if not {each["snapshot-id"] for each in shown} <= snapshots.keys():
        yield "the snapshot log has snapshots that are gone"
    if len(metadata["metadata-log"]) > _PREVIOUS:
        yield f"the metadata log has {len(metadata['metadata-log'])} entries"
    if any(s["sequence-number"] > metadata["last-sequence-number"] for s in snapshots.values()):
        yield "a snapshot is beyond the last sequence number"
    ends = [s["first-row-id"] + s["added-rows"] for s in snapshots.values() if "first-row-id" in s]
    if max(ends, default=0) > metadata.get("next-row-id", 0):
        yield "next-row-id is below the rows of a snapshot"


def _of_numbers(metadata: _Json) -> Iterator[str]:
    for member, number, default in (
        ("schemas", "schema-id", "current-schema-id"),
        ("partition-specs", "spec-id", "default-spec-id"),
        ("sort-orders", "order-id", "default-sort-order-id"),
    ):
        numbers = [each[number] for each in metadata[member]]
        if len(set(numbers)) != len(numbers) or metadata[default] not in numbers:
            yield f"{member} are {numbers}, and {default} is {metadata[default]}"
    columns = {f["name"]: f["id"] for s in metadata["schemas"] for f in s["fields"]}
    known: dict[int, _Json] = {}
    for each in (f for spec in metadata["partition-specs"] for f in spec["fields"]):
        if known.setdefault(each["field-id"], each) != each:
            yield f"partition field {each['field-id']} has two meanings"
        if each["field-id"] > metadata["last-partition-id"]:
            yield f"partition field {each['field-id']} is beyond the last number"
        source = columns.get(each["name"], each["source-id"])
        if source != each["source-id"] or (
            each["name"] in columns and each["transform"] != "identity"
        ):
            yield f"partition field {each['name']} has the name of a column"


@dataclass
class _File:
    """A file of a snapshot: its manifest's entry, the number of its spec, its first row id, its data sequence number."""

    entry: _Json
    spec: int
    first: int | None
    sequence: int

    @property
    def path(self) -> Path:
        return Path(self.entry["file_path"])


@dataclass
class _Files:
    """The files of a snapshot by the path of the data file that they are or are about."""

    data: dict[str, _File] = field(default_factory=dict)
    deletes: dict[str, _File] = field(default_factory=dict)
    added_rows: int = 0


class _Table:
    def __init__(self, metadata: _Json) -> None:
        self._next_row = metadata.get("next-row-id", 0)
        self._specs = {s["spec-id"]: s["fields"] for s in metadata["partition-specs"]}
        self._orders = {s["order-id"] for s in metadata["sort-orders"]}
        fields = {f["id"]: f for s in metadata["schemas"] for f in s["fields"]}
        record = {"type": "struct", "schema-id": 0, "fields": list(fields.values())}
        self._types: dict[int, Any] = {
            each.field_id: each.field_type for each in Schema.model_validate(record).fields
        }
        self._read: dict[Path, pa.Table] = {}

    def of(self, snapshot: _Json) -> Iterator[str]:
        """What is wrong with a snapshot."""
        files = _Files()
        for manifest in avro.rows(Path(snapshot["manifest-list"])):
            yield from _of_manifest(snapshot, manifest, files)
        removed = {path: _removed(file) for path, file in files.deletes.items()}
        for path, file in files.data.items():
            rows = self._rows(file.path)
            yield from self._of_file(file, rows)
            if path in removed:
                yield from _of_delete(removed[path], files.deletes[path], file)
        if files.deletes.keys() - files.data.keys():
            yield "there are deletes of files that are not there"
        if "first-row-id" in snapshot:
            yield from self._of_row_ids(files, removed)
            if snapshot["added-rows"] < files.added_rows:
                yield f"{files.added_rows} rows were added, not {snapshot['added-rows']}"
        yield from _of_sums(snapshot["summary"], files)

    def _rows(self, path: Path) -> pa.Table:
        if path not in self._read:
            self._read[path] = pq.read_table(path, partitioning=None)
        return self._read[path]

    def _of_file(self, file: _File, rows: pa.Table) -> Iterator[str]:
        name, entry = file.path.name, file.entry
        yield from _of_size(file, len(rows))
        if (entry.get("sort_order_id") or 0) not in self._orders:
            yield f"{name} has an unknown sort order"
        columns = {
            int(each.metadata[b"PARQUET:field_id"]): rows.column(i).combine_chunks()
            for i, each in enumerate(rows.schema)
        }
        for part, value in zip(self._specs[file.spec], entry["partition"].values(), strict=True):
            kind = self._types[part["source-id"]]
            of = parse_transform(part["transform"]).transform(kind)
            expected = {of(each) for each in _values(columns[part["source-id"]])}
            is_number = isinstance(value, bytes) and str(kind).startswith("decimal")
            if expected != {from_bytes(kind, value) if is_number else value}:
                yield f"{name} is in partition {value!r} of {part['name']}, its rows in {expected}"
        for number, nulls in _pairs(entry["null_value_counts"]):
            if number in columns and columns[number].null_count != nulls:
                yield f"{name}: column {number} has {columns[number].null_count} NULL, not {nulls}"
        for number, least in _pairs(entry["lower_bounds"]):
            yield from self._beyond(name, number, columns, least, is_lower=True)
        for number, greatest in _pairs(entry["upper_bounds"]):
            yield from self._beyond(name, number, columns, greatest, is_lower=False)

    def _beyond(
        self,
        name: str,
        number: int,
        columns: Mapping[int, pa.Array],
        bound: bytes,
        *,
        is_lower: bool,
    ) -> Iterator[str]:
        """The values of a column that its bound leaves out."""
        if number not in self._types or number not in columns:
            return
        limit = _ordered(from_bytes(self._types[number], bound))
        for value in map(_ordered, _values(columns[number])):
            if value is None or (isinstance(value, float) and math.isnan(value)):
                continue
            if value < limit if is_lower else value > limit:
                yield f"{name}: column {number} has {value!r} beyond the bound {limit!r}"
                return

    def _of_row_ids(self, files: _Files, removed: Mapping[str, BitMap64]) -> Iterator[str]:
        """Whether each living row has an id of its own."""
        ids: Counter[int] = Counter()
        for path, file in files.data.items():
            rows, gone = self._rows(file.path), removed.get(path, BitMap64())
            if file.first is None:
                yield f"{file.path.name} has no row ids"
                continue
            kept = rows[_ROW_ID].to_pylist() if _ROW_ID in rows.column_names else []
            own = dict(enumerate(kept)) if kept else {}
            for at in (at for at in range(len(rows)) if at not in gone):
                there = own.get(at)
                ids[file.first + at if there is None else there] += 1
            updated = rows[_UPDATED].to_pylist() if _UPDATED in rows.column_names else []
            if any(each is not None and each > file.sequence for each in updated):
                yield f"{file.path.name} has rows that were changed after it was written"
        if twice := [number for number, count in ids.items() if count > 1]:
            yield f"{len(twice)} row ids are there twice: {twice[:3]}"
        if max(ids, default=-1) >= self._next_row:
            yield "a row id is beyond next-row-id"


def _of_manifest(snapshot: _Json, manifest: _Json, files: _Files) -> Iterator[str]:
    """What is wrong with a manifest, whose living files are added to `files`."""
    path = Path(manifest["manifest_path"])
    entries = avro.rows(path)
    yield from _of_counts(snapshot, manifest, entries)
    next_id = manifest.get("first_row_id")
    if manifest["content"] == 0 and "first-row-id" in snapshot and next_id is None:
        yield f"{path.name} has no first row id"
    if manifest["content"] == 0 and manifest["added_snapshot_id"] == snapshot["snapshot-id"]:
        files.added_rows += manifest["added_rows_count"]
    for entry in entries:
        if entry["status"] == _DELETED:
            continue
        found, sequence = entry["data_file"], entry.get("sequence_number")
        if sequence is None and entry["status"] != _ADDED:
            yield f"{path.name}: an entry that is not new has no sequence number"
        sequence = manifest["sequence_number"] if sequence is None else sequence
        if manifest["min_sequence_number"] > sequence:
            yield f"{path.name}: min_sequence_number is above {sequence}"
        first = found.get("first_row_id")
        if found["content"] == _DATA and first is None and next_id is not None:
            first, next_id = next_id, next_id + found["record_count"]
        file = _File(found, manifest["partition_spec_id"], first, sequence)
        of_data = found["content"] == _DATA
        if not of_data and found["content"] != _POSITIONS:
            yield f"{found['file_path']} has content {found['content']}"
        named = found["file_path"] if of_data else found["referenced_data_file"]
        if named in (known := files.data if of_data else files.deletes):
            yield f"{named} is there twice"
        known[named] = file


def _of_counts(snapshot: _Json, manifest: _Json, entries: list[Any]) -> Iterator[str]:
    name = Path(manifest["manifest_path"]).name
    if manifest["manifest_length"] != Path(manifest["manifest_path"]).stat().st_size:
        yield f"{name} has another length"
    if manifest["sequence_number"] > snapshot["sequence-number"]:
        yield f"{name} is of a later sequence number"
    for number, kind in enumerate(("existing", "added", "deleted")):
        some = [entry["data_file"] for entry in entries if entry["status"] == number]
        there = len(some), sum(each["record_count"] for each in some)
        said = manifest[f"{kind}_files_count"], manifest[f"{kind}_rows_count"]
        if said != there:
            yield f"{name} has {kind} files and rows {there}, not {said}"


def _removed(file: _File) -> BitMap64:
    """The positions in a deletion vector, or in a file of positions."""
    if file.entry["file_format"].lower() == "parquet":
        found = pq.read_table(file.path, partitioning=None)
        assert set(found["file_path"].to_pylist()) == {file.entry["referenced_data_file"]}
        return BitMap64(found["pos"].to_pylist())
    begin, length = file.entry["content_offset"], file.entry["content_size_in_bytes"]
    blob = file.path.read_bytes()[begin : begin + length]
    assert int.from_bytes(blob[:4], "big") == length - 8
    assert blob[4:8] == _VECTOR_MAGIC
    return BitMap64.deserialize(blob[8:-4])


def _of_delete(gone: BitMap64, file: _File, data: _File) -> Iterator[str]:
    yield from _of_size(file, len(gone))
    name = file.path.name
    if gone and gone.max() >= data.entry["record_count"]:
        yield f"{name} removes rows that {data.path.name} does not have"
    if file.sequence < data.sequence:
        yield f"{name} is older than its data file"
    if (file.spec, file.entry["partition"]) != (data.spec, data.entry["partition"]):
        yield f"{name} is in another partition than its data file"


def _of_size(file: _File, rows: int) -> Iterator[str]:
    there = rows, file.path.stat().st_size
    if there != (said := (file.entry["record_count"], file.entry["file_size_in_bytes"])):
        yield f"{file.path.name} has rows and bytes {there}, not {said}"


def _of_sums(summary: _Json, files: _Files) -> Iterator[str]:
    for name, there in (
        ("total-records", sum(f.entry["record_count"] for f in files.data.values())),
        ("total-data-files", len(files.data)),
        ("total-delete-files", len(files.deletes)),
        ("total-position-deletes", sum(f.entry["record_count"] for f in files.deletes.values())),
        ("total-equality-deletes", 0),
    ):
        if int(summary.get(name, 0)) != there:
            yield f"{name} is {summary.get(name)}, but there are {there}"


def _pairs(found: Any) -> list[tuple[int, Any]]:
    """A map of Avro by the columns' numbers, which is an array of pairs."""
    return [(each["key"], each["value"]) for each in found or ()]


def _values(column: pa.Array) -> list[Any]:
    """Its values, each once, as Iceberg has them: days and microseconds are numbers."""
    if pa.types.is_date(column.type):
        column = column.cast(pa.int32())
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    return [] if pa.types.is_nested(column.type) else list(pc.unique(column).to_pylist())


def _ordered(value: Any) -> Any:
    """The value as Iceberg compares it: text by its bytes."""
    return value.encode() if isinstance(value, str) else value
