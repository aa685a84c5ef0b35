"""Iceberg tables as the pipeline writes them: whole, once, fenced by term, and readable until they expire."""

import json
import os
import random
import re
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyroaring import BitMap64
from pyspark.errors import PySparkException

from spark_consumers.lake.catalog import folder_catalog
from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.table_catalog import TableId
from spark_consumers.lake.format import checksums, iceberg, iceberg_files, leaks
from spark_consumers.lake.format.checked import manifests_of
from spark_consumers.lake.format.checksums import check, file_of, sums_of
from spark_consumers.lake.format.counted import count
from spark_consumers.lake.format.data_files import write_data
from spark_consumers.lake.format.iceberg import IcebergFormat
from spark_consumers.lake.format.iceberg_commit import refs_of
from spark_consumers.lake.format.iceberg_read import read_snapshot
from spark_consumers.lake.format.puffin import read_vector, write_vectors
from spark_consumers.lake.format.table_format import ROW_ID, FileInfo, TableWrite
from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.store.place import place as place_of
from walsender_bridge.errors import CorruptError, FencedError, LakeError, NotSupportedError
from walsender_bridge.postgres.table_layout import CODEC, TableLayout

pytestmark = pytest.mark.iceberg_only("is of the format itself")

COLUMNS = pa.schema(
    [
        pa.field("id", pa.int16()),
        pa.field("amount", pa.decimal128(20, 4)),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("local", pa.timestamp("us")),
        pa.field("day", pa.date32()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("raw", pa.binary()),
        pa.field("real", pa.float32()),
    ]
)


class Table:
    """A table of one test, and writes to it; the names of its data files begin with `prefix`."""

    prefix = ""

    def __init__(self, spark, folder, columns=COLUMNS, name="Odd %name"):
        self.spark = spark
        self.folder = folder
        self.format = self.newer()
        self.path = str(folder / "tables" / "shop" / "public" / name)
        self.format.create(self.path, columns)
        self.columns, self.schema = self.format.schemas(self.path)

    def newer(self):
        """Another driver, with what it has loaded itself."""
        return IcebergFormat(self.spark, "lake-uuid", FolderCatalog(self.folder))

    def file(self, ids, schema=None):
        schema = schema or self.schema
        rows = [[i, None, None, None, None, ["a", None], b"\0", i / 2] for i in ids]
        columns = [pa.array([r[n] for r in rows], f.type) for n, f in enumerate(schema)]
        name = f"{self.prefix}{uuid.uuid4()}.parquet"
        written = write_data(f"{self.path}/data/{name}", columns, schema)
        return [written] if written else []

    def write(self, version, base, *, add=(), delete=(), term=1, truncate=False):
        stage = f"stage-{version}"
        removal = self.removal(base, set(delete)) if delete and not truncate else {}
        write = TableWrite(version, base, stage, self.file(add), truncate=truncate, **removal)
        return self.format.write(self.path, term, write).snapshot

    def removal(self, base, ids):
        """What removes the rows with these ids, found in the files themselves."""
        vectors: dict[str, BitMap64] = {}
        found: dict[str, list[Any]] = {"replaced": [], "removed": []}
        for file in self.format.scan(self.path, base):
            gone = BitMap64() if file.vector is None else read_vector(self.path, file.vector)
            there = pq.read_table(file.path, columns=["id"]).column(0).to_pylist()
            new = gone | BitMap64([n for n, each in enumerate(there) if each in ids])
            if new == gone:
                continue
            if file.vector is not None:
                found["replaced"].append(file.vector)
            if len(new) == file.rows:
                found["removed"].append(FileInfo(file.path, file.rows, file.size))
            else:
                vectors[file.name] = new
        made = write_vectors(self.path, f"{self.prefix}{uuid.uuid4()}", vectors)
        return {"vectors": made, **found}

    def ids(self, snapshot):
        return sorted(r.id for r in read_snapshot(self.spark, self.path, snapshot).collect())

    def main(self):
        return sorted(r.id for r in self.spark.read.format("iceberg").load(self.path).collect())


@pytest.fixture
def table(spark, tmp_path):
    return Table(spark, tmp_path)


def test_writes_follow_one_another_and_each_snapshot_stays(table):
    first = table.write(1, None, add=[1, 2, 3])
    second = table.write(2, first, add=[2, 4], delete=[2, 3])
    third = table.write(3, second, add=[9], truncate=True)
    empty = table.write(4, third, truncate=True)
    assert table.ids(first) == [1, 2, 3]
    assert table.ids(second) == [1, 2, 4]
    assert table.ids(third) == [9]
    assert table.ids(empty) == []


def test_types_survive(table):
    assert table.columns == COLUMNS
    snapshot = table.write(1, None, add=[7])
    frame = read_snapshot(table.spark, table.path, snapshot)
    assert [t for _, t in frame.dtypes] == [
        "int",
        "decimal(20,4)",
        "timestamp",
        "timestamp_ntz",
        "date",
        "array<string>",
        "binary",
        "float",
    ]
    (row,) = frame.collect()
    assert (row.id, row.tags, row.raw, row.real) == (7, ["a", None], bytearray(b"\0"), 3.5)


def test_an_empty_table_has_a_snapshot(table):
    assert table.ids(table.write(0, None)) == []


def test_7_a_replayed_write_is_a_no_op(table):
    first = table.write(1, None, add=[1])
    second = table.write(2, first, add=[2])
    assert table.write(2, first, add=[2]) == second
    assert table.ids(second) == [1, 2]


def test_a_write_at_another_version_replaces_one_that_was_not_published(table):
    first = table.write(1, None, add=[1])
    table.write(2, first, add=[2])
    third = table.write(3, first, add=[2, 3])
    assert table.ids(third) == [1, 2, 3]


def test_plain_readers_see_what_is_shown(table):
    first = table.write(1, None, add=[1])
    table.format.show(table.path, 1, first)
    second = table.write(2, first, add=[2])
    assert table.main() == [1]
    table.format.show(table.path, 1, second)
    assert table.main() == [1, 2]


def test_a_table_is_not_read_again_after_own_commits(table, monkeypatch):
    table.format.show(table.path, 1, table.write(1, None, add=[1]))
    tables = table.format._tables

    def not_again(path):
        raise AssertionError(f"{path} was read")

    with monkeypatch.context() as patched:
        patched.setattr(tables, "_load", not_again)
        last = 1
        for version in (2, 3):
            base = tables.current(table.path).currentSnapshot().snapshotId()
            last = table.write(version, base, add=[version], delete=[version - 1])
            table.format.show(table.path, 1, last)
        known = tables.current(table.path).operations().current()
        # Nor refreshed, which reads it, too.
        assert table.path in tables._committed
    assert table.main() == table.ids(last) == [3]
    # What is known is what is there.
    there = table.newer()._tables.current(table.path).operations().current()
    assert str(known.metadataFileLocation()) == str(there.metadataFileLocation())
    parser = table.spark._jvm.org.apache.iceberg.TableMetadataParser
    found, expected = (json.loads(parser.toJson(each)) for each in (known, there))
    # The library writes no metadata file, and its clock is another one.
    for member in ("last-updated-ms", "metadata-log", "snapshot-log"):
        del found[member], expected[member]
    assert found == expected


@pytest.mark.parametrize("change", ["damaged", "restored"])
def test_a_committed_file_that_is_another_by_now_is_read(table, change):
    first = table.write(1, None, add=[1])
    table.format.show(table.path, 1, first)
    file = table.format.metadata_file(table.path, first)
    content = file.read_bytes()
    file.write_bytes(content[:-9] + b"x" + content[-8:] if change == "damaged" else content)
    if change == "damaged":
        with pytest.raises(CorruptError, match=file.name):
            table.write(2, first, add=[2])
        return
    Path(table.path, "data", "others").touch()
    assert table.ids(table.write(2, first, add=[2])) == [1, 2]


def test_13_a_writer_of_an_older_term_is_refused(table):
    first = table.write(1, None, add=[1])
    stale = table.write(2, first, add=[2])
    table.format.take_over(table.path, first, 2, 1)
    for attempt in (
        lambda: table.write(2, first, add=[2]),
        lambda: table.write(3, stale, add=[3]),
        lambda: table.format.show(table.path, 1, stale),
        lambda: table.format.expire(table.path, 1, {stale}),
        lambda: table.format.take_over(table.path, first, 1, 1),
    ):
        with pytest.raises(FencedError):
            attempt()
    assert table.main() == [1]
    assert table.ids(table.write(2, first, add=[5], term=2)) == [1, 5]


def test_13_a_table_that_is_taken_later_is_fenced_by_the_first_change(table):
    first = table.write(1, None, add=[1])
    table.format.show(table.path, 1, first)
    metadata = Path(table.path, "metadata")
    versions = iceberg_files.versions_in(metadata)
    newer = table.newer()
    newer.take_over(table.path, first, 2, 1, later=True)
    assert iceberg_files.versions_in(metadata) == versions
    assert newer.metadata_file(table.path, first) == metadata / f"v{versions[-1]}.metadata.json"
    # The older writer, suspended and continued: what it has published is shown already, and what it writes is not seen.
    table.format.show(table.path, 1, first)
    stale = table.write(2, first, add=[2])
    table.format.expire(table.path, 1, {first, stale})
    assert table.main() == table.ids(first) == [1]
    older, table.format = table.format, newer
    second = table.write(2, first, add=[5], term=2)
    for attempt in (
        lambda: older.show(table.path, 1, stale),
        lambda: older.write(table.path, 1, TableWrite(3, stale, "stage-3", table.file([3]))),
        lambda: older.expire(table.path, 1, {stale}),
        lambda: older.pin(table.path, 1, {"p": first}),
    ):
        with pytest.raises(FencedError):
            attempt()
    newer.show(table.path, 2, second)
    assert table.main() == [1, 5]
    assert newer.terms(table.path) == [2]


@pytest.mark.parametrize("change", ["show", "pin", "expire", "sweep", "evolve", "arrange"])
def test_13_any_change_takes_a_table_that_was_left_for_later(table, change):
    first = table.write(1, None, add=[1])
    table.format.show(table.path, 1, first)
    newer = table.newer()
    newer.take_over(table.path, first, 2, 1, later=True)
    assert newer.terms(table.path) == [1]
    more = pa.schema([*COLUMNS, pa.field("more", pa.int32())])
    arguments = {
        "show": [first],
        "pin": [{}],
        "expire": [{first}],
        "sweep": [frozenset()],
        "evolve": [first, more, {name: name for name in COLUMNS.names}, {}],
        "arrange": [TableLayout.parse([], ["id"], {})],
    }
    getattr(newer, change)(table.path, 2, *arguments[change])
    assert newer.terms(table.path) == [2]
    with pytest.raises(FencedError):
        table.write(2, first, add=[2])


def test_13_a_table_that_has_its_layout_is_still_left_for_later(table):
    first = table.write(1, None, add=[1])
    table.format.show(table.path, 1, first)
    layout = TableLayout.parse(["bucket(3, id)"], ["id desc"], {"own": "1"})
    table.format.arrange(table.path, 1, layout)
    versions = iceberg_files.versions_in(Path(table.path, "metadata"))
    newer = table.newer()
    newer.take_over(table.path, first, 2, 1, later=True)
    assert newer.arrange(table.path, 2, layout) == newer.arrangement(table.path)
    assert iceberg_files.versions_in(Path(table.path, "metadata")) == versions
    assert newer.terms(table.path) == [1]


def test_13_a_table_in_which_there_is_something_to_mend_is_taken_at_once(table):
    first = table.write(1, None, add=[1])
    second = table.write(2, first, add=[2])
    table.format.show(table.path, 1, first)
    # The older writer has published the second one, and died before it was shown.
    newer = table.newer()
    newer.take_over(table.path, second, 2, 2, later=True)
    assert table.main() == [1, 2]
    assert newer.terms(table.path) == [2]
    with pytest.raises(FencedError):
        table.newer().take_over(table.path, second, 1, 2, later=True)
    (manifest,) = Path(table.path, "metadata").glob(f"snap-{second}-*.avro")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(CorruptError):
        table.newer().take_over(table.path, second, 3, 2, later=True)


def test_36_tags_and_branches_of_the_users_own_are_left_alone(table):
    first = table.write(1, None, add=[1])
    second = table.write(2, first, add=[2])
    third = table.write(3, second, add=[3])
    raw = table.format._tables._tables.load(table.path)
    users = {"epoch_x", "epoch_", "epoch_3_backup", "epoch_007", "epoch_99"}
    for name in users:
        raw.manageSnapshots().createTag(name, first).commit()
    branches = {"tuskline_tx", "tuskline_t", "tuskline_t1_mine", "epoch_98"}
    for name in branches:
        raw.manageSnapshots().createBranch(name, first).commit()
    table.format.take_over(table.path, second, 2, 2)

    def refs():
        return set(refs_of(table.format._tables.current(table.path).operations().current()))

    # The branch of the term before is ours; epochs have no tags.
    assert refs() == users | branches | {"main", "tuskline_t2"}
    # What a user has tagged stays readable.
    table.format.expire(table.path, 2, {second})
    assert users | branches <= refs()
    assert table.ids(first) == [1]
    with pytest.raises(Exception, match="snapshot"):
        table.ids(third)
    fourth = table.write(4, second, add=[4], term=2)
    table.format.show(table.path, 2, fourth)
    table.format.expire(table.path, 2, {fourth})
    assert table.ids(fourth) == [1, 2, 4]
    assert users | branches <= refs()


def test_references_of_users_are_never_moved_whatever_names_they_have(table):
    """Also those that have the name which an earlier version would have given to the tag of this very epoch."""
    first = table.write(1, None, add=[1])
    raw = table.format._tables._tables.load(table.path)
    tags = {"epoch_1", "epoch_2", "tuskline_epoch_2", "tuskline_epoch_2_2", "tuskline_epoch_9"}
    branches = {"epoch_3", "tuskline_epoch_3"}
    for name in tags:
        raw.manageSnapshots().createTag(name, first).commit()
    for name in branches:
        raw.manageSnapshots().createBranch(name, first).commit()
    second = table.write(2, first, add=[2])
    third = table.write(3, second, add=[3])
    table.format.show(table.path, 1, third)
    table.format.take_over(table.path, second, 2, 2)
    fourth = table.write(4, second, add=[4], term=2)

    def refs():
        return refs_of(table.format._tables.current(table.path).operations().current())

    assert {name: refs()[name].snapshot for name in tags | branches} == dict.fromkeys(
        tags | branches, first
    )
    assert set(table.format.users_refs(table.path)) == tags | branches
    table.format.show(table.path, 2, fourth)
    table.format.expire(table.path, 2, {fourth})
    assert set(refs()) == tags | branches | {"main", "tuskline_t2"}
    assert table.ids(first) == [1]


def test_the_tags_that_earlier_versions_made_for_epochs_go_with_the_next_expiry(table, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(iceberg, "TAG", "tuskline.unknown")
        first = table.write(1, None, add=[1])
    with monkeypatch.context() as earlier:
        earlier.setattr(iceberg, "NO_TAG", "tuskline_epoch_2_2")
        second = table.write(2, first, add=[2])
    raw = table.format._tables._tables.load(table.path)
    for name, snapshot in (("epoch_1", first), ("tuskline_epoch_2_2", second)):
        raw.manageSnapshots().createTag(name, snapshot).commit()
    assert table.format.users_refs(table.path) == []
    # Although their snapshots stay.
    table.format.expire(table.path, 1, {first, second})
    found = set(refs_of(table.format._tables.current(table.path).operations().current()))
    # The branch of a first writer is made with its first snapshot.
    assert found == {"tuskline_t1"}
    assert [table.ids(each) for each in (first, second)] == [[1], [1, 2]]


def test_the_tags_of_pins_are_exactly_those_that_are_asked_for(table):
    first = table.write(1, None, add=[1])
    second = table.write(2, first, add=[2])
    raw = table.format._tables._tables.load(table.path)
    raw.manageSnapshots().createTag("tuskline_pin_mine", first).commit()

    def pins():
        found = iceberg_files.refs_in(table.path)
        return {name: ref.snapshot for name, ref in found.items() if ref.is_pin}

    def versions():
        return len(list(Path(table.path, "metadata").glob("v*.metadata.json")))

    for wanted in ({"tuskline_pin_a": first, "tuskline_pin_b": second}, {"tuskline_pin_b": second}):
        table.format.pin(table.path, 1, wanted)
        assert pins() == wanted
        before = versions()
        table.format.pin(table.path, 1, wanted)
        assert versions() == before
    # A user's tag of such a name is neither taken over nor removed, and counts as the user's.
    with pytest.raises(LakeError, match="a tag 'tuskline_pin_mine' exists that no pin created"):
        table.format.pin(table.path, 1, {"tuskline_pin_mine": second})
    assert table.format.users_refs(table.path) == ["tuskline_pin_mine"]
    # So is ours, once a user has moved it.
    raw.refresh()
    raw.manageSnapshots().replaceTag("tuskline_pin_b", first).commit()
    with pytest.raises(LakeError, match="no pin created"):
        table.format.pin(table.path, 1, {"tuskline_pin_b": second})
    table.format.pin(table.path, 1, {})
    assert set(table.format.users_refs(table.path)) == {"tuskline_pin_b", "tuskline_pin_mine"}
    with pytest.raises(CorruptError, match="snapshot 7 is missing"):
        table.format.pin(table.path, 1, {"tuskline_pin_c": 7})
    # A newer writer's change of tags fences an older one, also at a table that it has not taken over.
    table.format.show(table.path, 1, second)
    table.format.pin(table.path, 2, {"tuskline_pin_c": second})
    with pytest.raises(FencedError):
        table.format.pin(table.path, 1, {"tuskline_pin_d": second})
    assert pins() == {"tuskline_pin_c": second}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_table_s_metadata_does_not_grow_with_its_epochs(table):
    """200 epochs, of which the last five are retained: references, snapshots and bytes stay as they were."""

    def metadata():
        folder = Path(table.path, "metadata")
        newest = iceberg_files.metadata_file(folder, iceberg_files.versions_in(folder)[-1])
        return len(newest.read_bytes()), len(json.loads(newest.read_bytes())["snapshots"])

    base: int | None = None
    kept: list[int] = []
    sizes = {}
    for version in range(1, 201):
        base = table.write(version, base, add=[version])
        table.format.show(table.path, 1, base)
        kept = [*kept[-4:], base]
        if version % 5 == 0:
            table.format.expire(table.path, 1, set(kept))
            sizes[version] = metadata()
    assert set(iceberg_files.refs_in(table.path)) == {"main", "tuskline_t1"}
    print(sizes)
    # The log of earlier metadata files grows up to 100 of them.
    (early, snapshots), (late, same) = sizes[100], sizes[200]
    assert snapshots == same == 5
    assert late < 1.05 * early


@pytest.mark.parametrize("place", ["takeover.ReadNamed", "takeover.RemovePrepared"])
def test_31_a_takeover_paused_before_it_cleans_up_destroys_nothing_newer(table, monkeypatch, place):
    """What was prepared and never committed goes, by whatever driver; what a newer one commits stays."""
    first = table.write(1, None, add=[1])
    # What dead writers have left, with an mtime as late as if it were the newest.
    garbage = Path(table.path, "metadata", "7e0-m0.avro")
    garbage.write_bytes(b"prepared, and never committed")
    os.utime(garbage, (time.time() + 60, time.time() + 60))
    newer = Newer(table)
    monkeypatch.setattr(takeover, "carry_out", paused(place.partition(".")[2], newer.publish))
    table.format.take_over(table.path, first, 2, 1)
    assert newer.snapshots, "the older driver was not paused"
    assert [table.ids(s) for s in newer.snapshots] == [[1, 7], [1, 7, 8]]
    assert not garbage.exists()


class Newer:
    """A driver that takes the table over under term 3 and publishes two epochs."""

    def __init__(self, table):
        self.table = table
        self.format = table.newer()
        self.snapshots = []

    def publish(self):
        (first,) = (s.snapshotId() for s in self.format._tables.at(self.table.path).snapshots())
        self.format.take_over(self.table.path, first, 3, 1)
        base = first
        for version in (7, 8):
            rows = self.table.file([version])
            # As a clock that was set back would have it.
            write = TableWrite(version, base, f"stage-{version}", rows)
            base = self.format.write(self.table.path, 3, write).snapshot
            self.format.show(self.table.path, 3, base)
            self.snapshots.append(base)


def paused(place, meanwhile):
    """`takeover.carry_out` that lets something happen before the first effect of that name."""
    whole = takeover.carry_out
    been: list[takeover.Effect] = []

    def carry_out(steps, do):
        def wait(effect):
            if type(effect).__name__ == place and not been:
                been.append(effect)
                meanwhile()
            return do(effect)

        return whole(steps, wait)

    return carry_out


def test_31_what_a_snapshot_needs_is_never_garbage_whatever_the_clock_says(table):
    """Set back between a commit's files and its metadata, the clock makes these look newer than it."""
    snapshots = [table.write(1, None, add=[1])]
    snapshots.append(table.write(2, snapshots[-1], add=[2]))
    for file in Path(table.path, "metadata").glob("*.avro"):
        os.utime(file, (time.time() + 60, time.time() + 60))
    table.format.take_over(table.path, snapshots[-1], 2, 2)
    assert [table.ids(s) for s in snapshots] == [[1], [1, 2]]


@pytest.mark.parametrize(
    "moment", ["before its draft", "behind its draft, which a takeover removes"]
)
def test_31_a_hint_that_was_written_late_leads_readers_to_the_table(table, monkeypatch, moment):
    monkeypatch.setattr(iceberg_files, "_KEPT_METADATA", 2)
    first = table.write(1, None, add=[1])
    folder = Path(table.path, "metadata")
    write = Path.write_text
    slept: list[str] = []

    def sleep_first(self, text):
        if not slept and self.name.startswith(".hint-"):
            slept.append(text)
            if moment.startswith("behind"):
                write(self, text)
            for version in range(2, 9):
                other = table.newer()
                other.take_over(table.path, first, version, 1)
            if moment.startswith("behind"):
                assert not self.exists()
                return len(text)
        return write(self, text)

    monkeypatch.setattr(Path, "write_text", sleep_first)
    table.write(2, first, add=[2])
    assert slept
    hint = int((folder / "version-hint.text").read_text())
    assert (folder / f"v{hint}.metadata.json").exists()
    assert table.main() == [1]


def test_13_a_writer_that_slept_before_its_last_step_is_refused(table, monkeypatch):
    """Paused when all is checked and only the new metadata file is missing, then woken up."""
    first = table.write(1, None, add=[1])
    newer = table.newer()
    link = iceberg_files.link
    slept: list[int] = []

    def sleep_first(path, number, metadata):
        if not slept:
            slept.append(number)
            newer.take_over(table.path, first, 2, 1)
        return link(path, number, metadata)

    monkeypatch.setattr(folder_catalog, "link", sleep_first)
    with pytest.raises(FencedError):
        table.write(2, first, add=[2])
    assert slept
    write = TableWrite(2, first, "stage", table.file([7]))
    assert table.ids(newer.write(table.path, 2, write).snapshot) == [1, 7]


def test_13_a_writer_that_slept_until_its_number_was_removed_is_refused(table, monkeypatch):
    """Its metadata file can be made again; readers would follow it into the past."""
    monkeypatch.setattr(iceberg_files, "_KEPT_METADATA", 3)
    first = table.write(1, None, add=[1])
    newer = table.newer()
    link = iceberg_files.link
    snapshots = [first]
    slept: list[int] = []

    def sleep_first(path, number, metadata):
        if not slept:
            slept.append(number)
            newer.take_over(table.path, first, 2, 1)
            for version in range(3, 10):
                write = TableWrite(version, snapshots[-1], "stage", table.file([version]))
                snapshots.append(newer.write(table.path, 2, write).snapshot)
                newer.show(table.path, 2, snapshots[-1])
            assert not Path(path, "metadata", f"v{number}.metadata.json").exists()
        return link(path, number, metadata)

    monkeypatch.setattr(folder_catalog, "link", sleep_first)
    with pytest.raises(FencedError):
        table.write(2, first, add=[2])
    assert table.main() == table.ids(snapshots[-1]) == [1, *range(3, 10)]
    found = sorted(
        int(f.name[1:].partition(".")[0]) for f in Path(table.path).glob("metadata/v*.json")
    )
    # None below a gap: what is there follows one another.
    assert found == list(range(found[0], found[0] + len(found)))
    assert len(found) <= 4


def test_metadata_that_a_crash_left_behind_is_removed_with_the_next(table, monkeypatch):
    monkeypatch.setattr(iceberg_files, "_KEPT_METADATA", 2)
    remove = iceberg_files._remove_old
    monkeypatch.setattr(iceberg_files, "_remove_old", lambda *_: None)
    snapshot = table.write(1, None, add=[1])
    for version in range(2, 6):
        snapshot = table.write(version, snapshot, add=[version])
    monkeypatch.setattr(iceberg_files, "_remove_old", remove)
    table.write(6, snapshot, add=[6])
    names = sorted(f.name for f in Path(table.path).glob("metadata/v*.json"))
    assert names == ["v6.metadata.json", "v7.metadata.json"]


def test_what_a_commit_names_is_durable_before_the_commit(table, monkeypatch):
    # By inode: a data file gets its name after it is synced.
    synced: set[int] = set()
    fsync = os.fsync

    def note(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    link = iceberg_files.link
    checked: list[Path] = []

    def check(path, number, metadata):
        new = set(Path(path, "metadata").glob("*.avro")) - set(checked)
        data = set(Path(path, "data").glob("*.parquet"))
        assert len(new) >= 2
        assert {file.stat().st_ino for file in (*new, *data)} <= synced
        assert Path(path, "data").stat().st_ino in synced
        checked.extend(new)
        synced.clear()
        synced.update(file.stat().st_ino for file in data)
        return link(path, number, metadata)

    monkeypatch.setattr(folder_catalog, "link", check)
    first = table.write(1, None, add=[1, 2])
    second = table.write(2, first, add=[3], delete=[1])
    table.write(3, second, add=[9], truncate=True)
    assert len(checked) >= 6


def test_two_writers_of_one_table_lose_nothing(table):
    """Commits of two threads that meet: each is a compare-and-set, so both are there."""
    first = table.write(1, None, add=[1])
    second = table.write(2, first, add=[2])
    errors = []

    def show():
        other = table.newer()
        try:
            for snapshot in [first, second] * 6:
                other.show(table.path, 1, snapshot)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=show)
    thread.start()
    snapshots = [table.write(v, first, add=[v]) for v in range(3, 9)]
    thread.join()
    assert not errors
    assert [table.ids(s) for s in snapshots] == [[1, v] for v in range(3, 9)]


def test_what_expires_takes_only_its_own_files(table):
    snapshots = [table.write(1, None, add=range(10))]
    for version in range(2, 8):
        snapshots.append(
            table.write(
                version, snapshots[-1], add=[version], delete=[version], truncate=version == 5
            )
        )
    expected = [table.ids(s) for s in snapshots]
    # A snapshot that no manifest came to name.
    table.write(9, snapshots[-1], add=[100])
    table.format.take_over(table.path, snapshots[-1], 2, 8)
    removed = table.format.expire(table.path, 2, set(snapshots))
    assert removed > 0
    assert [table.ids(s) for s in snapshots] == expected
    for snapshot in snapshots:
        for file in table.format.scan(table.path, snapshot):
            assert Path(file.path).exists()
            assert file.vector is None or Path(table.path, file.vector.puffin).exists()
    # Before the truncation: its data files are needed by nobody then.
    data = sorted(Path(table.path, "data").iterdir())
    assert len(data) == 2 * len(list(Path(table.path, "data").glob("[!.]*")))
    table.format.expire(table.path, 2, set(snapshots[4:]))
    assert [table.ids(s) for s in snapshots[4:]] == expected[4:]
    assert len(list(Path(table.path, "data").iterdir())) < len(data)
    with pytest.raises(Exception, match="snapshot"):
        table.ids(snapshots[0])
    sums = Path(table.path).glob("*/.*.crc")
    assert all(file.exists() for each in sums if (file := file_of(each))), "they go with their file"


def files_of(table):
    folders = [Path(table.path, name) for name in ("data", "metadata")]
    return {file for folder in folders for file in folder.iterdir() if file.suffix != ".json"}


@pytest.mark.parametrize("after", [0, 1, 5])
def test_what_a_writer_killed_while_it_expired_has_left_is_found(table, monkeypatch, after):
    """Killed between the commit that forgets the files and the last removal."""

    class KilledError(BaseException):
        pass

    def write(version, base, term, **changes):
        table.prefix = f"{version:020d}-t{term}-a1-"
        return table.write(version, base, term=term, **changes)

    first = write(1, None, 1, add=range(10))
    second = write(2, first, 1, add=[2], delete=[2])
    table.format.take_over(table.path, second, 2, 2)
    third = write(3, second, 2, add=[3], truncate=True)
    table.format.show(table.path, 2, third)
    users = Path(table.path, "data", "00000-0-a-users-own.parquet")
    users.write_bytes(b"of no term")
    done: list[Path] = []

    def killed(file):
        if len(done) == after:
            raise KilledError
        done.append(file)
        remove(file)

    remove = checksums.remove
    with monkeypatch.context() as dying:
        dying.setattr(checksums, "remove", killed)
        with pytest.raises(KilledError):
            table.format.expire(table.path, 2, {third})
    there = files_of(table)
    table.format.take_over(table.path, third, 3, 3)
    taken_at = time.time_ns()
    listed = leaks.listed(Path(table.path), 3, taken_at)
    fourth = write(4, third, 3, add=[4])
    assert table.format.sweep(table.path, 3, listed) > 0
    assert table.ids(third) == [3]
    assert table.ids(fourth) == [3, 4]
    assert users.exists()
    assert {f for f in there if "-t1-a1" in f.name} & files_of(table) == set()
    assert leaks.listed(Path(table.path), 1, taken_at) <= {
        str(f) for f in Path(table.path, "metadata").glob("*.avro")
    }
    # Nothing is left to be found, and a fenced writer removes nothing.
    assert table.format.sweep(table.path, 3, leaks.listed(Path(table.path), 3, taken_at)) == 0
    with pytest.raises(FencedError):
        table.format.sweep(table.path, 2, leaks.listed(Path(table.path), 3, taken_at))


def test_33_no_damaged_file_of_a_table_becomes_a_row(table, request):
    # Executors keep files of deletes in memory, where no damage on disk reaches them.
    cache = "spark.sql.iceberg.executor-cache.delete-files.enabled"
    table.spark.conf.set(cache, "false")
    request.addfinalizer(lambda: table.spark.conf.unset(cache))
    first = table.write(1, None, add=[1, 2, 3])
    second = table.write(2, first, add=[2, 4], delete=[2, 3])
    files = [f for f in Path(table.path).glob("*/[!.]*") if f.name != "version-hint.text"]
    assert [file for file in files if not sums_of(file).exists()] == []
    used = {"v3.metadata.json", f"snap-{second}"}
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    kinds = set()
    for file in sorted(files):
        if file.name.startswith(("snap-", "v")) and not any(map(file.name.startswith, used)):
            continue  # what only other snapshots, or older versions of the metadata, need
        good = file.read_bytes()
        flipped = bytearray(good)
        flipped[choose.randrange(len(good))] ^= 1 << choose.randrange(8)
        # What is still good JSON only its checksum tells.
        other = re.sub(
            rb'"table-uuid":"(.)', lambda m: m[0][:-1] + (b"1" if m[1] == b"0" else b"0"), good
        )
        assert (other != good) is (file.suffix == ".json")
        for damaged in {bytes(flipped), good[: choose.randrange(len(good))], other} - {good}:
            file.write_bytes(damaged)
            with pytest.raises((CorruptError, PySparkException, Py4JJavaError)) as caught:
                table.ids(second)
            # Iceberg does not name a vector's file that ends too early.
            ends = file.suffix == ".puffin" and "EOFException" in str(caught.value)
            assert ends or file.name in str(caught.value)
            if file.suffix not in {".parquet", ".puffin"}:
                assert caught.type is CorruptError
                # Nor is anything built on it by a driver that is new.
                write = TableWrite(3, second, "stage", truncate=True)
                with pytest.raises(CorruptError, match=file.name):
                    table.newer().write(table.path, 1, write)
            kinds.add(file.name.partition("-")[0] if file.suffix == ".avro" else file.suffix)
        file.write_bytes(good)
    assert len(kinds) >= 4, kinds
    assert table.ids(second) == [1, 2, 4]


def test_33_a_table_with_a_damaged_manifest_expires_nothing(table):
    """The manifest of a snapshot that stays is another one's: what it names is no longer seen to be needed."""
    first = table.write(1, None, add=[1])
    second = table.write(2, first, add=[2], truncate=True)
    third = table.write(3, second, add=[3])

    def manifests(snapshot):
        (found,) = Path(table.path, "metadata").glob(f"snap-{snapshot}-*.avro")
        return set(manifests_of(found))

    (damaged,) = manifests(third) - manifests(second)
    good = damaged.read_bytes()
    damaged.write_bytes(min(manifests(first)).read_bytes())
    there = files_of(table)
    assert table.format.expire(table.path, 1, {third}) == 0
    assert files_of(table) == there
    damaged.write_bytes(good)
    assert table.format.expire(table.path, 1, {third}) > 0
    assert table.ids(third) == [2, 3]


def test_a_takeover_from_a_snapshot_that_is_not_there_is_refused(table):
    table.write(1, None, add=[1])
    with pytest.raises(CorruptError, match="is missing"):
        table.format.take_over(table.path, 12345, 2, 1)


def test_the_hidden_column_is_no_column_of_the_table(spark, tmp_path):
    layout = pa.schema([pa.field("a", pa.int32()), pa.field(ROW_ID, pa.string())])
    bag = Table(spark, tmp_path, layout)
    assert bag.columns.names == ["a", ROW_ID]
    assert bag.schema.names == ["a", ROW_ID]


def test_a_conversion_is_never_taken_over_from_an_earlier_attempt(table):
    first = table.write(1, None, add=[1, 2])

    def convert():
        rows = table.file([1, 2])
        write = TableWrite(2, first, "stage", rows, truncate=True, conversion=True)
        return table.format.write(table.path, 1, write).snapshot

    # An attempt that fails later leaves its files to be removed: the next one must not build on them.
    assert convert() != convert()


def test_14_columns_are_added_by_number_and_older_snapshots_keep_theirs(table):
    first = table.write(1, None, add=[1, 2])
    more = pa.schema([pa.field("late", pa.int16()), pa.field("tags2", pa.list_(pa.string()))])
    for _ in range(2):  # again is a no-op
        made = extend(table, 1, first, more)
    columns, files = table.format.schemas(table.path)
    assert made == files
    assert columns == pa.schema([*COLUMNS, *more])
    numbers = [field.metadata[b"PARQUET:field_id"] for field in files]
    assert len(set(numbers)) == len(numbers)
    assert [f.metadata for f in files][: len(COLUMNS)] == [f.metadata for f in table.schema]
    second = table.write(2, first, add=[3])
    # A file without the columns, in a snapshot that has them.
    frame = read_snapshot(table.spark, table.path, second)
    assert frame.columns == columns.names
    assert {row.late for row in frame.collect()} == {None}
    assert read_snapshot(table.spark, table.path, first).columns == COLUMNS.names
    table.format.take_over(table.path, second, 2, 2)
    with pytest.raises(FencedError):
        extend(table, 1, second, pa.schema([pa.field("z", pa.string())]))


def extend(table, term, snapshot, more):
    """Give the table more columns than this snapshot has."""
    columns = [field for field in table.format.schemas(table.path)[0] if field.name != ROW_ID]
    known = {*table.format.schemas(table.path, snapshot)[1].names}
    wanted = [*(f for f in columns if f.name in known), *more]
    sources = {field.name: field.name for field in wanted if field.name in known}
    return table.format.evolve(table.path, term, snapshot, pa.schema(wanted), sources, {})


def test_14_fields_keep_their_numbers_when_they_are_renamed_and_no_number_is_used_twice(table):
    first = table.write(1, None, add=[1, 2])
    _, before = table.format.schemas(table.path)
    numbers = {field.name: field.metadata[b"PARQUET:field_id"] for field in before}
    names = [field.name for field in COLUMNS]
    keyed, gone, *rest = names
    # One is renamed, one goes, and another one takes its name; wherever an attempt before has stopped.
    again = pa.field(gone, pa.string())
    renamed = COLUMNS.field(keyed).with_name("renamed")
    for wanted in ([renamed], [renamed, *map(COLUMNS.field, rest), again]):
        sources = {"renamed": keyed, **{name: name for name in rest}}
        columns = pa.schema(wanted)
        sources = {name: sources[name] for name in columns.names if name in sources}
        for _ in range(2):
            files = table.format.evolve(table.path, 1, first, columns, sources, {})
        made = {field.name: field.metadata[b"PARQUET:field_id"] for field in files}
        assert {name: made[name] for name in sources} == {n: numbers[s] for n, s in sources.items()}
    assert made[gone] not in numbers.values()
    _, still = table.format.schemas(table.path, first)
    assert still == before
    second = table.format.write(table.path, 1, TableWrite(2, first, "stage", count=2)).snapshot
    frame = read_snapshot(table.spark, table.path, second)
    assert frame.columns == ["renamed", *rest, gone]
    assert {row[gone] for row in frame.collect()} == {None}
    assert sorted(row.renamed for row in frame.collect()) == [1, 2]
    assert read_snapshot(table.spark, table.path, first).columns == names


def test_the_hidden_column_stays_the_last(spark, tmp_path):
    hidden = pa.schema([pa.field("id", pa.int16()), pa.field(ROW_ID, pa.string())])
    table = Table(spark, tmp_path, hidden)
    first = table.format.write(table.path, 1, TableWrite(1, None, "s")).snapshot
    extend(table, 1, first, pa.schema([pa.field("a.b", pa.date32())]))
    columns, files = table.format.schemas(table.path)
    assert columns.names == ["id", "a.b", ROW_ID]
    assert files.names == ["id", "a.b", ROW_ID]


def test_a_write_of_an_attempt_at_another_link_is_made_anew(table):
    """Its files are removed when that link's number is taken by another link."""
    first = table.write(1, None, add=[1])
    made = []
    for link in (5, 5, 6):
        stage = f"{link:020d}-t1-a1"
        write = TableWrite(2, first, stage, table.file([2]))
        made.append(table.format.write(table.path, 1, write))
    assert made[0] == made[1]
    assert made[2].snapshot != made[0].snapshot
    assert made[2].stage == f"{6:020d}-t1-a1"
    assert table.ids(made[2].snapshot) == [1, 2]


@pytest.mark.parametrize(("version", "kind"), [(2, ".parquet"), (3, ".puffin")])
def test_deletes_by_position_of_others_are_verified_and_built_upon_as_vectors_only(
    spark, request, monkeypatch, version, kind
):
    cache = "spark.sql.iceberg.executor-cache.delete-files.enabled"
    spark.conf.set(cache, "false")
    request.addfinalizer(lambda: spark.conf.unset(cache))
    warehouse = Path(spark.conf.get("spark.sql.catalog.tuskline.warehouse"))
    monkeypatch.setitem(iceberg._PROPERTIES, "format-version", str(version))
    monkeypatch.setattr(iceberg, "_VERSION", version)
    table = Table(spark, warehouse.parent, name=f"deletes{version}")
    table.format.show(table.path, 1, table.write(1, None, add=[1, 2, 3]))
    name = f"tuskline.shop.public.deletes{version}"
    properties = f"'format-version'='{version}', 'write.delete.mode'='merge-on-read'"
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ({properties})")
    spark.sql(f"DELETE FROM {name} WHERE id = 2")
    assert table.main() == [1, 3]
    current = table.format._tables.current(table.path).currentSnapshot()
    snapshot, manifests = current.snapshotId(), place_of(str(current.manifestListLocation()))
    if version == 2:
        for look in (
            lambda: table.format.scan(table.path, snapshot),
            lambda: count(manifests, ["id"]),
        ):
            with pytest.raises(NotSupportedError, match="deletes by position"):
                look()
    else:
        # Vectors are what Tuskline writes itself.
        assert count(manifests, ["id"]) == 2
    (file,) = Path(table.path, "data").glob(f"*deletes*{kind}")
    assert check(file)
    good = file.read_bytes()
    for place in (5, len(good) // 2, len(good) - 5):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises((PySparkException, Py4JJavaError), match=file.name):
            table.ids(snapshot)
        with pytest.raises(CorruptError, match=file.name):
            check(file)
    file.write_bytes(good)
    assert table.ids(snapshot) == [1, 3]


def test_a_vector_replaces_the_one_before_and_a_dead_file_goes(table):
    first = table.write(1, None, add=range(10))
    second = table.write(2, first, add=[20], delete=[3])
    third = table.write(3, second, delete=[4, 5, 20])
    fourth = table.write(4, third, add=[30], delete=[0, 1, 2, 6, 7, 8, 9])
    assert table.ids(second) == [0, 1, 2, *range(4, 10), 20]
    assert table.ids(third) == [0, 1, 2, 6, 7, 8, 9]
    assert table.ids(fourth) == [30]
    assert [len(table.format.scan(table.path, s)) for s in (second, third, fourth)] == [2, 1, 1]
    assert table.format.scan(table.path, fourth)[0].vector is None
    summary = table.format._tables.current(table.path).snapshot(fourth).summary()
    assert summary.get("total-delete-files") == summary.get("total-position-deletes") == "0"


def test_a_second_vector_of_a_data_file_is_refused_before_it_is_committed(table):
    """Iceberg commits it, and no reader can read the table any more."""
    first = table.write(1, None, add=range(10))
    second = table.write(2, first, delete=[3])
    removal = table.removal(second, {4})
    removal["replaced"] = []
    write = TableWrite(3, second, "stage-3", count=8, **removal)
    with pytest.raises(CorruptError, match=r"expected 8 rows after the epoch, .* would have 7"):
        table.format.write(table.path, 1, write)
    assert table.ids(second) == [0, 1, 2, *range(4, 10)]
    assert table.ids(table.write(3, second, delete=[4])) == [0, 1, 2, *range(5, 10)]


def test_a_puffin_file_stays_while_a_snapshot_needs_its_vector(table):
    first = table.write(1, None, add=range(10))
    second = table.write(2, first, add=range(10, 20))
    third = table.write(3, second, delete=[1, 11])
    fourth = table.write(4, third, delete=[2])
    fifth = table.write(5, fourth, delete=[12])
    left = [*range(3, 10), 0, 10, *range(13, 20)]
    for kept, files in (({fourth, fifth}, 3), ({fifth}, 2)):
        table.format.expire(table.path, 1, kept)
        assert table.ids(fifth) == sorted(left)
        assert len(list(Path(table.path, "data").glob("*.puffin"))) == files


def test_vectors_of_a_truncated_table_go_with_it(table):
    first = table.write(1, None, add=range(10))
    second = table.write(2, first, delete=[3])
    write = TableWrite(3, second, "stage-3", table.file([50]), truncate=True, count=1)
    third = table.format.write(table.path, 1, write).snapshot
    assert table.ids(third) == [50]
    assert [file.vector for file in table.format.scan(table.path, third)] == [None]


@pytest.mark.parametrize("version", [2, 3])
def test_a_commit_makes_of_a_table_what_icebergs_own_library_makes_of_it(
    spark, tmp_path, monkeypatch, version
):
    monkeypatch.setitem(iceberg._PROPERTIES, "format-version", str(version))
    table = Table(spark, tmp_path)
    compared: list[Any] = []

    def compare(path, term, effect):
        answer = carry_out(path, term, effect)
        if isinstance(effect, takeover.LinkTable):
            compare_with(effect.made)
        return answer

    def compare_with(metadata):
        made = spark._jvm.org.apache.iceberg.TableMetadataParser.toJson(metadata)
        there = FolderCatalog(tmp_path).load(TableId.at(table.path))
        assert there is not None
        assert timeless(there.metadata) == timeless(json.loads(made))
        compared.append(there)

    def show(term, snapshot):
        """The library has no part in it, but would make the same."""
        library = table.format._iceberg
        base = table.format._tables.current(table.path).operations().current()
        main = library.SnapshotRef.branchBuilder(snapshot).build()
        made = library.TableMetadata.buildFrom(base).setRef("main", main).build()
        table.format.show(table.path, term, snapshot)
        compare_with(made)

    carry_out = table.format._do
    monkeypatch.setattr(table.format, "_do", compare)
    first = table.write(1, None, add=[1, 2, 3])
    show(1, first)
    table.write(2, first, add=[4], delete=[1])
    # The attempt before was not published: the branch goes back.
    third = table.write(3, first, add=[5], delete=[2])
    table.format.take_over(table.path, third, 2, 3)
    extend(table, 2, third, pa.schema([pa.field("more", pa.list_(pa.int64()))]))
    for layout in (
        TableLayout.parse(["bucket(3, id)"], ["id desc"], {"own": "1", CODEC: "snappy"}),
        TableLayout.parse(["id", "bucket(3, id)"], ["id"], {"own": "2"}),
        TableLayout.parse(["bucket(3, id)"], ["id desc"]),
        TableLayout(),
    ):
        table.format.arrange(table.path, 2, layout)
        properties = compared[-1].metadata["properties"]
        assert properties[CODEC] == dict(layout.options).get(CODEC, "zstd")
        assert properties.get("own") == dict(layout.options).get("own")
    specs = [s["fields"] for s in compared[-1].metadata["partition-specs"]]
    assert [[f["field-id"] for f in fields] for fields in specs] == [[], [1000], [1001, 1000]]
    fourth = table.write(4, third, truncate=True, term=2)
    show(2, fourth)
    table.format.expire(table.path, 2, [fourth])
    assert [s["snapshot-id"] for s in compared[-1].metadata["snapshots"]] == [fourth]
    assert compared[-1].metadata["format-version"] == 3
    assert len(compared) == 13


def timeless(metadata):
    """The metadata without the moments at which it was made."""
    log = [each["snapshot-id"] for each in metadata["snapshot-log"]]
    files = [each["metadata-file"] for each in metadata["metadata-log"]]
    return {**metadata, "last-updated-ms": 0, "snapshot-log": log, "metadata-log": files}
