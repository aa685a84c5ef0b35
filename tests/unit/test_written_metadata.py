"""The metadata that a commit has written is not parsed again, unless the file is another one by then."""

import gzip
import json
import os

import pydantic_core
import pytest

from spark_consumers.lake.catalog import folder_catalog, written_metadata
from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.table_catalog import Outcome, TableCommit
from spark_consumers.lake.catalog.written_metadata import WrittenMetadata
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.iceberg_files import version_of
from tests.support.lake.table_commits import ORDERS, SCHEMA
from walsender_bridge.errors import CorruptError


@pytest.fixture
def catalog(tmp_path):
    catalog = FolderCatalog(tmp_path)
    assert catalog.create(ORDERS, SCHEMA, {}) is Outcome.WON
    return catalog


def commit(catalog, value):
    there = catalog.load(ORDERS)
    update = {"action": "set-properties", "updates": {"number": value}}
    made = TableCommit(ORDERS, (), (update,), there.location)
    assert catalog.commit(made) is Outcome.WON
    return catalog.load(ORDERS)


def test_what_was_committed_is_not_read_again(catalog, monkeypatch):
    commit(catalog, "1")

    def not_again(file):
        raise AssertionError(f"{file} was read")

    monkeypatch.setattr(folder_catalog, "_read", not_again)
    for value in ("2", "3"):
        there = commit(catalog, value)
        with open(there.location) as file:
            assert there.metadata == json.load(file)
        assert there.metadata["properties"]["number"] == value


def test_no_commit_depends_on_how_many_files_a_table_has(catalog, monkeypatch):
    commit(catalog, "1")

    def no_listing(folder):
        raise AssertionError(f"{folder} was listed")

    monkeypatch.setattr(folder_catalog, "newest_metadata", no_listing)
    assert commit(catalog, "2").metadata["properties"]["number"] == "2"


def test_a_snapshot_is_written_out_once(catalog, monkeypatch):
    def snapshot(number):
        numbers = {"snapshot-id": number, "sequence-number": number, "timestamp-ms": number}
        rows = {"first-row-id": number, "added-rows": 1, "schema-id": 0}
        made = {**numbers, **rows, "summary": {"operation": "append"}, "manifest-list": "é"}
        return {"action": "add-snapshot", "snapshot": made}

    def add(number):
        there = catalog.load(ORDERS)
        made = TableCommit(ORDERS, (), (snapshot(number),), there.location)
        assert catalog.commit(made) is Outcome.WON
        return catalog.load(ORDERS)

    written = []

    def to_json(value):
        written.append(value.get("snapshot-id"))
        return pydantic_core.to_json(value)

    monkeypatch.setattr(written_metadata, "to_json", to_json)
    for number in (1, 2, 3):
        there = add(number)
        with open(there.location) as file:
            assert there.metadata == json.load(file)
    assert [each for each in written if each is not None] == [1, 2, 3]


def test_a_compressed_file_that_follows_is_read(catalog, tmp_path):
    file = tmp_path.joinpath(commit(catalog, "1").location)
    metadata = {**json.loads(file.read_bytes()), "properties": {"number": "2"}}
    other = file.with_name(f"v{version_of(file) + 1}.gz.metadata.json")
    other.write_bytes(gzip.compress(json.dumps(metadata).encode()))
    assert catalog.load(ORDERS).metadata["properties"]["number"] == "2"


def test_a_commit_of_another_process_is_read(catalog, tmp_path):
    commit(catalog, "1")
    commit(FolderCatalog(tmp_path), "2")
    assert catalog.load(ORDERS).metadata["properties"]["number"] == "2"
    assert commit(catalog, "3").metadata["properties"]["number"] == "3"


def test_a_file_of_the_same_name_from_a_backup_is_read(catalog, tmp_path):
    commit(catalog, "1")
    file = tmp_path.joinpath(commit(catalog, "2").location)
    other = file.with_name("other")
    other.write_text(file.read_text().replace('"number":"2"', '"number":"9"'))
    there = file.stat()
    os.utime(other, ns=(there.st_atime_ns, there.st_mtime_ns))
    other.replace(file)
    checksums.sums_of(file).unlink()
    checksums.seal(file)
    assert catalog.load(ORDERS).metadata["properties"]["number"] == "9"


def test_a_damaged_file_is_found_by_who_reads_it(catalog, tmp_path):
    file = tmp_path.joinpath(commit(catalog, "1").location)
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptError):
        FolderCatalog(tmp_path).load(ORDERS)


def test_the_memory_for_it_is_bounded(tmp_path):
    written = WrittenMetadata(most_snapshots=10)
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_text("{}")
        written.keep(file, file, {"snapshots": [{}] * 4})
    assert [written.of(file, file) is not None for file in files] == [False, True, True]
    written.keep(files[1], files[1], {"snapshots": [{}] * 11})
    assert [written.of(file, file) is not None for file in files] == [False, False, False]
    written.keep(files[2], files[2], {"snapshots": []})
    assert written.of(files[2], files[2]) == {"snapshots": []}
