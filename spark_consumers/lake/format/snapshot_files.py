"""The files of an Iceberg snapshot, read from its manifests without Spark."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from spark_consumers.lake.format import avro
from spark_consumers.lake.format.position_deletes import is_ours
from spark_consumers.lake.format.table_format import RowIds, ScanFile, Vector, name_of
from spark_consumers.lake.store.place import Place, place
from walsender_bridge.errors import CorruptError, NotSupportedError

_DATA, _POSITION_DELETES, _EQUALITY_DELETES = range(3)
_DELETED = 2


@dataclass(frozen=True, slots=True)
class ManifestFiles:
    """The files of a snapshot that one manifest names: data files and files of keys, with their sequence numbers, and deletion vectors."""

    data: tuple[tuple[ScanFile, int], ...]
    deletes: tuple[tuple[str, int], ...]
    vectors: tuple[Vector, ...]


def files_of(manifest_list: Place) -> list[ScanFile]:
    """The data files of the snapshot with this manifest list.

    Raises `CorruptError`, also for what only damage explains (two vectors of a data file), and `NotSupportedError` for
    deletes that are none of Tuskline's kinds.
    """
    return joined(manifest_files(live_files(manifest)) for manifest in avro.rows(manifest_list))


def manifest_files(found: Iterable[tuple[Mapping[str, Any], int]]) -> ManifestFiles:
    """The `live_files` of a manifest. Raises as `files_of`."""
    data, deletes, vectors = [], [], []
    for file, sequence in found:
        path = str(place(file["file_path"]))
        match file.get("content", _DATA):
            case kind if kind == _DATA:
                scanned = ScanFile(path, file["file_size_in_bytes"], file["record_count"])
                data.append((scanned, sequence))
            case kind if kind == _EQUALITY_DELETES:
                deletes.append((path, sequence))
            case _:
                vectors.append(_vector(path, file))
    return ManifestFiles(tuple(data), tuple(deletes), tuple(vectors))


def joined(manifests: Iterable[ManifestFiles]) -> list[ScanFile]:
    """The data files of a snapshot with these manifests, with what removes rows of them. Raises `CorruptError`."""
    data: list[tuple[ScanFile, int]] = []
    vectors: dict[str, Vector] = {}
    by_sequence = defaultdict(list)
    for manifest in manifests:
        data += manifest.data
        for path, sequence in manifest.deletes:
            by_sequence[sequence].append(path)
        for vector in manifest.vectors:
            if vector.file in vectors:
                raise CorruptError("a data file has two deletion vectors", where=vector.file)
            vectors[vector.file] = vector
    files = []
    used = set()
    for file, sequence in data:
        newer = [p for s, paths in sorted(by_sequence.items()) if s > sequence for p in paths]
        name = file.name
        vector_ = vectors.get(name)
        used.add(name)
        files.append(ScanFile(file.path, file.size, file.rows, vector_, tuple(newer)))
    if stray := sorted(vectors.keys() - used):
        raise CorruptError(
            "a deletion vector is of a data file that the table does not have", where=stray[0]
        )
    return files


def equality_deletes(manifest_list: Place) -> list[str]:
    """The files of keys in a snapshot of an earlier version."""
    return [
        str(place(found["file_path"]))
        for manifest in avro.rows(manifest_list)
        for found, _ in live_files(manifest)
        if found.get("content", _DATA) == _EQUALITY_DELETES
    ]


def row_ids(manifest_list: Place) -> dict[str, RowIds]:
    """The row ids of the snapshot's data files that have some, by the files' names."""
    return {name: ids for name, ids in data_files(manifest_list).items() if ids is not None}


def data_files(manifest_list: Place) -> dict[str, RowIds | None]:
    """The names of the snapshot's data files, with their row ids, if they have some (Iceberg specification, First Row ID Inheritance)."""
    found = {}
    for manifest in avro.rows(manifest_list):
        next_id = manifest.get("first_row_id")
        for entry in avro.rows(place(manifest["manifest_path"])):
            file = entry["data_file"]
            if entry["status"] == _DELETED or file.get("content", _DATA) != _DATA:
                continue
            first = file.get("first_row_id")
            if first is None and next_id is not None:
                first, next_id = next_id, next_id + file["record_count"]
            sequence = entry.get("sequence_number")
            if sequence is None:
                sequence = manifest["sequence_number"]
            name = name_of(str(place(file["file_path"])))
            found[name] = None if first is None else RowIds(first, sequence)
    return found


def live_files(manifest: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """Each file that this manifest of a list has in the snapshot, as Iceberg describes it, and its sequence number."""
    for entry in avro.rows(place(manifest["manifest_path"])):
        if entry["status"] == _DELETED:
            continue
        sequence = entry.get("sequence_number")
        yield entry["data_file"], manifest["sequence_number"] if sequence is None else sequence


def _vector(path: str, found: Mapping[str, Any]) -> Vector:
    file, offset = found.get("referenced_data_file"), found.get("content_offset")
    if file is not None and offset is None and is_ours(PurePath(path).name):
        rows, size = found["record_count"], found["file_size_in_bytes"]
        return Vector(name_of(str(place(file))), name_of(path), 0, 0, rows, size)
    if file is None or offset is None:
        raise NotSupportedError(
            "holds deletes by position, which Tuskline does not write",
            where=path,
            repair="let only Tuskline write to the lake's tables",
        )
    return Vector(
        name_of(str(place(file))),
        name_of(path),
        offset,
        found["content_size_in_bytes"],
        found["record_count"],
        found["file_size_in_bytes"],
    )
