"""The row index of a table: it is built again when it is not there, and from the files of an earlier version."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable

from spark_consumers.lake.copy import bootstrap, initial_copy
from spark_consumers.lake.epoch import epoch_writer as epoch_module
from spark_consumers.lake.format import checksums, iceberg
from spark_consumers.lake.format.data_files import write_table
from spark_consumers.lake.format.iceberg import IcebergFormat
from spark_consumers.lake.format.iceberg_files import metadata_file, versions_in
from spark_consumers.lake.format.puffin import positions_of, read_vector
from spark_consumers.lake.format.table_format import ROW_ID
from spark_consumers.lake.manifest import reader_leases
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.verify import verify
from spark_consumers.lake.writer import requests
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans

DOCS, PAIRS, BAG = (f"{STREAM}.public.{name}" for name in ("docs", "pairs", "bag"))


def runs(pipeline, name) -> list[Path]:
    table = pipeline.head().tables[name]
    return [pipeline.lake / table.path / file for file in table.index_files]


def metadata(pipeline, name) -> Path:
    """The table's newest metadata file."""
    folder = pipeline.lake / pipeline.head().tables[name].path / "metadata"
    return folder / metadata_file(folder, versions_in(folder)[-1]).name


CHANGES = (
    "UPDATE docs SET title = title || '!' WHERE id < 5",
    "UPDATE docs SET n = n + 1 WHERE id = 7",
    "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE t = 'three')",
    "UPDATE pairs SET tags = tags || 7 WHERE a = 1",
)


@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_a_lost_or_damaged_index_is_built_again(pipeline, database, damage):
    database.execute(*CHANGES)
    pipeline.flush()
    for name in (DOCS, BAG):
        for file in runs(pipeline, name):
            good = file.read_bytes()
            file.unlink()
            if damage == "flip":
                file.write_bytes(good[:10] + bytes([good[10] ^ 1]) + good[11:])
    database.execute(*CHANGES, "DELETE FROM docs WHERE id = 2", "INSERT INTO docs VALUES (2)")
    assert_equal(database.dsn, pipeline.flush())
    assert any("-built" in file.name or "-again" in file.name for file in runs(pipeline, DOCS))
    database.execute(*CHANGES)
    assert_equal(database.dsn, pipeline.flush())
    assert_no_orphans(pipeline.spark, pipeline.lake)


def test_runs_that_the_newest_link_does_not_need_are_removed(pipeline, database, monkeypatch):
    monkeypatch.setattr(reader_leases, "HOLD", 0.0)
    for _ in range(4):
        database.execute(*CHANGES)
        pipeline.flush()
    writer = pipeline.house._writer
    writer.kept.expire(writer.head, 0.0)
    for name in (DOCS, PAIRS, BAG):
        table = pipeline.head().tables[name]
        there = (pipeline.lake / table.path / "index").glob("[!.]*")
        assert sorted(there) == sorted(runs(pipeline, name))
    database.execute(*CHANGES)
    assert_equal(database.dsn, pipeline.flush())
    assert verify(open_chain(pipeline.lake), lambda *_: None).errors == []


def keys_instead(self, _parts, _table, path, vector):
    """A file of keys, as an earlier version wrote it, in place of a vector."""
    name = Path(path).name.partition("%")[0]
    key = {"docs": ["id"], "pairs": ["b", "a"], "bag": [ROW_ID]}[name]
    rows = pq.read_table(f"{path}/{vector.file}", columns=key)
    removed = rows.take(positions_of(read_vector(path, vector)))
    file = write_table(f"{path}/{vector.file}-deletes.parquet", removed)
    numbers = self._new_array(self._jvm.int, len(key))
    schema = self._tables.current(path).schema()
    for place, column in enumerate(key):
        numbers[place] = schema.findField(column).fieldId()
    unpartitioned = self._iceberg.PartitionSpec.unpartitioned()
    builder = self._iceberg.FileMetadata.deleteFileBuilder(unpartitioned)
    return self._described(
        builder.ofEqualityDeletes(numbers), self._tables.current(path), file
    ).build()


def with_hidden_column(monkeypatch):
    """From here on copies of tables without a key have the column by which an earlier version told equal rows apart."""
    create, write_source = IcebergFormat.create, initial_copy.write_source

    def create_with(self, path, columns, **options):
        hidden = pa.schema([*columns, (ROW_ID, pa.string())])
        create(self, path, hidden if "/bag%" in path else columns, **options)

    def write_with(spark, reader, prefix, schema, **options):
        own = pa.schema([field for field in schema if field.name != ROW_ID])
        files, quarantined = write_source(spark, reader, prefix, own, **options)
        for number, file in enumerate(files if own != schema else ()):
            rows = pq.read_table(file.path)
            ids = pa.array([f"copy-{number}-{row}" for row in range(len(rows))])
            checksums.remove(Path(file.path))
            wide = rows.append_column(schema.field(ROW_ID), ids).cast(schema)
            files[number] = write_table(file.path, wide)
        return files, quarantined

    monkeypatch.setattr(IcebergFormat, "create", create_with)
    monkeypatch.setattr(bootstrap, "write_source", write_with)


@pytest.mark.parametrize(
    ("choice", "version"),
    [("vectors", 3), pytest.param("position-deletes", 2, marks=pytest.mark.long)],
)
def test_a_table_of_an_earlier_version_gets_an_index_and_vectors(
    pipeline, database, monkeypatch, choice, version
):
    with monkeypatch.context() as earlier:
        earlier.setattr(iceberg, "_VERSION", 2)
        earlier.setitem(iceberg._PROPERTIES, "format-version", "2")
        earlier.setattr(IcebergFormat, "_vector", keys_instead)
        with_hidden_column(earlier)
        for name in (DOCS, PAIRS, BAG):
            pipeline.wait_for_tables(name.rpartition(".")[2])
        requests.ask(open_chain(pipeline.lake), "resync", [DOCS, PAIRS, BAG])
        before = {name: pipeline.head().tables[name].path for name in (DOCS, PAIRS, BAG)}
        while any(pipeline.head().tables[name].path == path for name, path in before.items()):
            pipeline.flush()
        # So few that no file is rewritten.
        database.execute(*CHANGES[1:])
        assert_equal(database.dsn, pipeline.flush())
    pipeline.house.close()
    chain = open_chain(pipeline.lake)
    head = pipeline.head()
    for name in (DOCS, PAIRS, BAG):
        assert list((pipeline.lake / head.tables[name].path).glob("data/*-deletes.parquet"))
    unknown = {name: replace(table, runs=None) for name, table in head.tables.items()}
    chain.publish(head.next(head.steady_at, tables=unknown), head)
    pipeline.house = pipeline.lakehouse(deletes={"default": choice})
    database.execute(*CHANGES)
    assert_equal(database.dsn, pipeline.flush())
    for name in (DOCS, PAIRS, BAG):
        table = pipeline.head().tables[name]
        scanned = pipeline.house._format.scan(str(pipeline.lake / table.path), table.snapshot_id)
        assert not any(file.deletes for file in scanned)
        assert json.loads(metadata(pipeline, name).read_bytes())["format-version"] == version
    bag = StaticTable.from_metadata(str(metadata(pipeline, BAG)))
    assert [field.name for field in bag.schema().fields] == ["a", "f", "t", "l", ROW_ID]
    database.execute("ALTER TABLE bag ADD more int", "INSERT INTO bag (more) VALUES (1), (1)")
    assert_equal(database.dsn, pipeline.flush())
    database.execute(*CHANGES, "TRUNCATE pairs")
    assert_equal(database.dsn, pipeline.flush())
    assert verify(chain, lambda *_: None).errors == []


def test_other_engines_read_the_rows_that_spark_reads(pipeline, database, monkeypatch):
    monkeypatch.setattr(epoch_module, "_COMPACT_FILES", 3)
    for _ in range(5):
        database.execute(*CHANGES)
        shown = pipeline.flush()
    files: list[Any] = []
    for name in (DOCS, PAIRS, BAG):
        scan = StaticTable.from_metadata(str(metadata(pipeline, name))).scan()
        files += scan.plan_files()
        assert scan.to_arrow().num_rows == scan.count() == shown[name].count()
        if name == DOCS:
            rows = {(r["id"], r["title"], r["n"]) for r in scan.to_arrow().to_pylist()}
            assert rows == {(r.id, r.title, r.n) for r in shown[name].collect()}
    assert any(file.delete_files for file in files)
