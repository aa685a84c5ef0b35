"""Files of a lake by their place: a bucket gives what a folder gives, to those who read, write, list and remove."""

import io
import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import MemoryStore
from pyroaring import BitMap64

from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.links import folders
from spark_consumers.lake.catalog.table_catalog import Outcome, TableCommit
from spark_consumers.lake.format import checksums, leaks
from spark_consumers.lake.format.arranged_files import write_arranged
from spark_consumers.lake.format.data_files import (
    Stage,
    new_file,
    orphans,
    read_data,
    read_partial,
    readable,
    whole_file,
    write_partial,
    write_table,
)
from spark_consumers.lake.format.iceberg_files import newest_metadata, versions_in
from spark_consumers.lake.format.position_deletes import read_removed, write_positions
from spark_consumers.lake.format.table_format import name_of
from spark_consumers.lake.index.run_format import (
    RECORD,
    IndexDamagedError,
    Tables,
    open_runs,
    write_run,
)
from spark_consumers.lake.layout.arrangement import Arrangement, Field
from spark_consumers.lake.store import place as places
from spark_consumers.lake.store.lake_store import FROM_ENVIRONMENT, StoreOptions
from spark_consumers.lake.store.object_store import ObjectStore
from spark_consumers.lake.store.place import (
    ObjectPlace,
    below,
    carried,
    files_in,
    location_of,
    place,
    remove_tree,
)
from tests.support.lake.table_commits import ORDERS, SCHEMA, race_of_writers
from walsender_bridge.errors import CorruptError, UnavailableError

LAKE = "s3://bucket/some/lake"
OPTIONS = StoreOptions("https://elsewhere", "there")


@pytest.fixture
def in_bucket(monkeypatch):
    """A bucket in memory."""
    memory = MemoryStore()
    store = ObjectStore(LAKE, memory, memory)
    monkeypatch.setattr(places, "_reached", {LAKE: OPTIONS})
    monkeypatch.setattr(places, "_stores", {(LAKE, False): store, (LAKE, True): store})
    return place(LAKE)


@pytest.fixture(params=["folder", "bucket"])
def root(request, tmp_path):
    return tmp_path if request.param == "folder" else request.getfixturevalue("in_bucket")


def put(at, content=b"x"):
    with whole_file(str(at)) as file:
        file.write(content)
    return at


def write_a_part(at):
    with whole_file(str(at)) as file:
        file.write(b"a part")
        raise ZeroDivisionError


def names(found):
    return sorted(each.name for each in found)


def test_a_location_means_a_place_of_its_kind(in_bucket):
    # Catalogs' locations, and Iceberg's.
    for location in ("file:/a/b%20 c", "file:///a/b%20 c", "file://host/a/b%20 c"):
        assert str(place(location)) == "/a/b%20 c"
    assert location_of(place("/a/b%20 c")) == "file:///a/b%20 c"
    assert location_of(in_bucket) == LAKE
    there = place(f"{LAKE}/tables/a%t1/data/x.parquet")
    assert isinstance(there, ObjectPlace)
    assert (there.name, str(there.parent)) == ("x.parquet", f"{LAKE}/tables/a%t1/data")
    assert below(there, in_bucket) == "tables/a%t1/data/x.parquet"
    assert there.is_relative_to(there.parent)
    assert not there.is_relative_to(place(f"{LAKE}/tables/a%t1/dat"))
    assert str(in_bucket / str(there)) == str(there)


def test_files_are_written_listed_read_and_removed(root):
    assert not list(root.glob("data/*"))
    one = put(root / "data" / "one.parquet", b"0123456789")
    put(root / "data" / "two.avro")
    put(root / "data" / "below" / "three")
    assert names(root.glob("data/*.parquet")) == ["one.parquet"]
    assert {"one.parquet", "two.avro", "below"} <= {each.name for each in (root / "data").iterdir()}
    assert (one.exists(), (root / "data" / "none").exists(), (root / "data").is_dir()) == (
        True,
        False,
        True,
    )
    assert (one.read_bytes(), one.stat().st_size) == (b"0123456789", 10)
    assert places.read_range(one, 3, 4) == b"3456"
    assert places.read_range(one, 8, 9) == b"89"
    with one.open("rb") as file:
        file.seek(-3, io.SEEK_END)
        assert (file.read(2), file.tell(), file.read(9), file.read(1)) == (b"78", 9, b"9", b"")
    assert root.is_dir()
    checksums.remove(one)
    checksums.remove(one)
    assert not one.exists()
    remove_tree(root / "data")
    assert not (root / "data").is_dir()


def test_the_first_whole_file_keeps_its_name(root):
    at = put(root / "data" / "a", b"first")
    put(at, b"first")
    with pytest.raises(UnavailableError, match="another file with this name"):
        put(at, b"second")
    assert at.read_bytes() == b"first"
    with pytest.raises(ZeroDivisionError):
        write_a_part(root / "data" / "b")
    assert names(root.glob("data/[!.]*")) == ["a"]


def test_a_file_larger_than_the_spool_arrives_whole(root, monkeypatch):
    monkeypatch.setattr(places, "_SMALL", 1000)
    content = bytes(range(256)) * 100
    assert put(root / "large", content).read_bytes() == content


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_copied_file_without_rows_does_not_come_to_be(root, is_wanted):
    at = root / "data" / "copy"
    with new_file(str(at)) as new:
        new.file.write(b"rows")
        new.is_wanted = is_wanted
    assert at.exists() == is_wanted
    assert new.size == (4 if is_wanted else 0)


def test_arrow_reads_what_it_has_written(root):
    table = pa.table({"a": list(range(5000)), "b": ["x"] * 5000})
    written = write_table(str(root / "data" / "t.parquet"), table)
    assert written.size == (root / "data" / "t.parquet").stat().st_size
    assert read_data(written.path) == table
    assert read_data(written.path, ["a"]).column_names == ["a"]
    part = write_partial(str(root / "staging" / "p.arrow"), table)
    assert read_partial(part) == table
    with pytest.raises(CorruptError, match="missing"):
        read_data(str(root / "data" / "none.parquet"))
    put(root / "data" / "bad.parquet", b"no Parquet")
    with pytest.raises(CorruptError, match="cannot be read"):
        read_data(root / "data" / "bad.parquet")


def test_a_run_of_the_index_is_read_by_ranges(root):
    records = np.zeros(5000, RECORD)
    records["high"] = np.arange(5000)
    table = str(root / "table")
    run = write_run(table, "index/a.run", [records], Tables())
    with open_runs(table, [run.name]) as (reader,):
        assert reader.between(700, 703)["high"].tolist() == [700, 701, 702]
        assert len(reader.between(0, None)) == 5000
    with pytest.raises(IndexDamagedError, match="missing"), open_runs(table, ["index/b.run"]):
        pass
    put(root / "table" / "index" / "c.run", b"TUSKRUN1")
    with pytest.raises(IndexDamagedError, match="truncated"), open_runs(table, ["index/c.run"]):
        pass


def test_partitions_and_positions_of_removed_rows_are_where_the_table_is(root):
    table, schema = root / "tables" / "orders", pa.schema([("v", pa.int64())])
    stage, column = f"{7:020d}-t1-a1", pa.array([1, 2, 1])
    by_v = Arrangement(spec=1, fields=(Field(1000, "v", "identity"),))
    files = write_arranged(f"{table}/data/{stage}-rows.parquet", [column], schema, by_v)
    found = {file.path: read_data(file.path)["v"].to_pylist() for file in files}
    assert sorted(found.values()) == [[1, 1], [2]]
    first = next(path for path, rows in found.items() if rows == [1, 1])
    removed = {name_of(first): BitMap64([1])}
    (vector,) = write_positions(str(table), f"{stage}-removed", removed)
    assert list(read_removed(table, vector)) == [1]
    assert pq.read_table(readable(table / vector.puffin))["file_path"].to_pylist() == [first]
    there = {str(file) for file in table.glob("data/*.parquet")}
    assert there == {*found, f"{table}/{vector.puffin}"}
    with pytest.raises(CorruptError, match="has 1 positions"):
        read_removed(table, replace(vector, rows=2))


def test_what_writers_have_left_is_found(root):
    table = root / "tables" / "shop" / "public" / "orders%t1-0a"
    for term in (1, 2):
        put(table / "data" / f"{7:020d}-t{term}-a1-x.parquet")
    put(table / "metadata" / "snap-1.avro")
    written_at = (table / "metadata" / "snap-1.avro").stat().st_mtime_ns
    data = f"{7:020d}-t1-a1-x.parquet"
    for taken_at, left in ((written_at + 1, {data, "snap-1.avro"}), (written_at, {data})):
        assert {f.rpartition("/")[2] for f in leaks.listed(table, 2, taken_at)} == left
    found = orphans(table, {7: f"{7:020d}-t2-a1"}, 2)
    assert names(found) == [f"{7:020d}-t1-a1-x.parquet"]
    assert names(folders(root)) == ["orders%t1-0a"]
    assert not list(orphans(root / "tables" / "none", {7: ""}, 2))


def test_files_are_listed_from_a_name_on(root):
    data = root / "tables" / "shop" / "public" / "orders%t1-0a" / "data"
    for link in (9, 10, 11):
        put(data / f"{link:020d}-t1-a1-x.parquet")
    put(root / "tables" / "shop" / "public" / "orders%t1-0b" / "data" / "z.parquet")
    there = [file for file in files_in(data) if checksums.file_of(file) is None]
    since = [file for file in files_in(data, Stage.names_from(10)) if file in there]
    assert names(since) == [f"{link:020d}-t1-a1-x.parquet" for link in (10, 11)]
    assert len(there) == 3
    assert files_in(root / "tables" / "none", "a") == []


def test_metadata_is_created_by_one_writer_and_found_by_the_hint(root):
    catalog = FolderCatalog(root)
    assert catalog.create(ORDERS, SCHEMA, {}) is Outcome.WON
    assert catalog.create(ORDERS, SCHEMA, {}) is Outcome.LOST
    for _ in range(5):
        race_of_writers(catalog)
    metadata = catalog.folder(ORDERS) / "metadata"
    assert versions_in(metadata) == [1, 2, 3, 4, 5, 6]
    for hint in (b"3", b"9", b"nonsense"):
        if isinstance(metadata, ObjectPlace):
            (metadata / "version-hint.text").replace_by(hint)
        else:
            (metadata / "version-hint.text").write_bytes(hint)
        newest = newest_metadata(catalog.folder(ORDERS))
        assert newest is not None
        assert newest.name == "v6.metadata.json"
    catalog.drop(ORDERS)
    assert catalog.load(ORDERS) is None


def test_equal_commits_of_two_writers_to_a_bucket_differ(in_bucket, monkeypatch):
    """In the same millisecond both would make the same metadata, and each would take it for its own."""
    monkeypatch.setattr("spark_consumers.lake.catalog.folder_catalog._now", lambda: 1)
    catalog = FolderCatalog(in_bucket)
    assert catalog.create(ORDERS, SCHEMA, {}) is Outcome.WON
    there = catalog.load(ORDERS)
    assert there is not None
    commit = TableCommit(
        ORDERS, [], [{"action": "set-properties", "updates": {"a": "1"}}], there.location
    )
    assert [catalog.commit(commit) for _ in range(2)] == [Outcome.WON, Outcome.LOST]


def test_tasks_reach_a_bucket_as_their_driver_does(in_bucket, monkeypatch):
    task = pickle.dumps(carried(len))
    monkeypatch.setattr(places, "_reached", {})
    assert places.options_of(LAKE) == FROM_ENVIRONMENT
    there = pickle.loads(task)  # noqa: S301  # as Spark does
    assert there("four") == 4
    assert places.options_of(f"{LAKE}/tables") == OPTIONS
    assert carried(len) is not len
    monkeypatch.setattr(places, "_reached", {})
    assert carried(len) is len
