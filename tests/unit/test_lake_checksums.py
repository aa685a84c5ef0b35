"""Checksums beside the lake's files, and `tuskline lake verify`, which reads them all."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64
from typer.testing import CliRunner

from spark_consumers.lake.format import avro
from spark_consumers.lake.format.checked import Checked
from spark_consumers.lake.format.checksums import (
    CHUNK,
    SMALL,
    check,
    file_of,
    remove,
    seal,
    sums_of,
)
from spark_consumers.lake.format.puffin import write_vectors
from spark_consumers.lake.format.table_format import Vector
from spark_consumers.lake.index.run_format import Tables, write_run
from spark_consumers.lake.manifest.chain import Manifest, TableVersion, open_chain
from tests.support import avro_file
from walsender_bridge.cli.app import app
from walsender_bridge.errors import Cause, CorruptError


@pytest.mark.parametrize("size", [0, 1, 700, SMALL, SMALL + 1, SMALL + CHUNK, SMALL + CHUNK + 9])
def test_33_a_file_that_was_changed_or_cut_is_told_from_its_checksums(
    tmp_path: Path, size: int
) -> None:
    file = tmp_path / "a.parquet"
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    good = choose.randbytes(size)
    file.write_bytes(good)
    assert not check(file), "it has none yet"
    seal(file)
    assert check(file)
    for at in {0, size - 1, size // 2, *(choose.randrange(max(size, 1)) for _ in range(5))}:
        if 0 <= at < size:
            file.write_bytes(
                good[:at] + bytes([good[at] ^ 1 << choose.randrange(8)]) + good[at + 1 :]
            )
            with pytest.raises(CorruptError, match="checksum mismatch in the chunk at byte"):
                check(file)
            file.write_bytes(good[:at])
            with pytest.raises(CorruptError, match=r"a\.parquet"):
                check(file)
    file.write_bytes(good + b"x")
    with pytest.raises(CorruptError):
        check(file)
    file.unlink()
    with pytest.raises(CorruptError, match="missing"):
        check(file)


def test_a_file_that_the_disk_cannot_read_is_damaged(tmp_path: Path) -> None:
    """Otherwise one bad sector in one table ends every attempt to take the whole lake over."""
    file = tmp_path / "v1.metadata.json"
    file.write_bytes(b"{}")
    seal(file)
    file.unlink()
    # Its first page is mapped nowhere: reading it is an EIO, as that of a bad sector.
    file.symlink_to("/proc/self/mem")
    with pytest.raises(CorruptError, match=r"could not read the file from disk") as found:
        check(file)
    assert found.value.where == str(file)
    with pytest.raises(CorruptError, match=r"could not read the file from disk"):
        avro.rows(file)


def test_a_length_that_is_damaged_is_damage_of_its_file(tmp_path: Path) -> None:
    """Manifests of older versions have no checksums."""
    file = tmp_path / "m.avro"
    for length in (b"\xfe" * 6 + b"\1", b"\xfe" * 8 + b"\1", b"\xfe" * 10 + b"\1"):
        file.write_bytes(b"Obj\1\2" + length + b"avro.schema")
        with pytest.raises(CorruptError, match="not an Avro file"):
            avro.rows(file)


def test_what_was_compared_is_remembered_for_as_long_as_it_is_there(tmp_path: Path) -> None:
    checked, folder = Checked(), tmp_path / "metadata"
    folder.mkdir()
    for number in range(5):
        file = folder / f"{number}.avro"
        file.write_bytes(b"manifest")
        seal(file)
        checked.all_manifests(tmp_path)
        if number < 3:
            remove(file)
    checked.all_manifests(tmp_path)
    assert sum(map(len, checked._seen.values())) == 2


def test_checksums_that_are_damaged_are_named_and_empty_ones_are_none(tmp_path: Path) -> None:
    file = tmp_path / "a.avro"
    file.write_bytes(b"manifest")
    seal(file)
    sums = sums_of(file)
    assert sums.name == ".a.avro.crc"
    assert file_of(sums) == file
    assert file_of(file) is None
    good = sums.read_bytes()
    for bad in (good[:-1], good[:3], b"abc\0" + good[4:]):
        sums.write_bytes(bad)
        with pytest.raises(CorruptError, match=r"\.a\.avro\.crc"):
            check(file)
    # What a power failure makes of a file that was not synced.
    for empty in (b"", bytes(len(good))):
        sums.write_bytes(empty)
        assert not check(file)


@pytest.mark.parametrize("moment", ["before the link", "after the first unlink"])
def test_a_file_removed_while_it_is_sealed_leaves_no_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    file = tmp_path / "a.parquet"
    file.write_bytes(b"rows")
    if moment == "before the link":
        link = os.link

        def removed(*names: Any) -> None:
            remove(file)
            link(*names)

        monkeypatch.setattr(os, "link", removed)
        seal(file)
    else:
        unlink = Path.unlink

        def sealed(path: Path, **options: Any) -> None:
            if path == file and not sums_of(file).exists():
                monkeypatch.setattr(Path, "unlink", unlink)
                seal(file)
            unlink(path, **options)

        monkeypatch.setattr(Path, "unlink", sealed)
        remove(file)
    assert list(tmp_path.iterdir()) == []


def table_files(table: Path, ids: list[int], told: int | None = None) -> None:
    """Write the table's files anew, with checksums; the manifest tells of so many rows."""
    rows = {"data/a.parquet": ids, "data/gone.parquet": [2], "quarantine/b.parquet": [9]}
    for name, values in rows.items():
        (table / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": values}), table / name)
    entry: dict[str, Any] = {"content": "int", "file_path": "string"}
    entry |= {"record_count": "long", "file_size_in_bytes": "long"}
    fields = {"status": "int", "sequence_number": ["null", "long"], "data_file": entry}
    fields["data_file"] = avro_file.record("file", entry)
    for number, (content, name, count) in enumerate(
        [(0, "a", len(ids) if told is None else told), (2, "gone", 1)]
    ):
        path = f"file://{table}/data/{name}.parquet"
        one = {"content": content, "file_path": path, "record_count": count}
        one["file_size_in_bytes"] = 1
        row = {"status": 1, "sequence_number": None, "data_file": one}
        avro_file.write(table / f"metadata/m{number}.avro", fields, [row])
    avro_file.write(
        table / "metadata/snap-7.avro",
        {"manifest_path": "string", "sequence_number": "long"},
        [
            {"manifest_path": str(table / f"metadata/m{number}.avro"), "sequence_number": number}
            for number in range(2)
        ],
    )
    for folder in ("metadata", "data", "quarantine"):
        for file in (table / folder).glob("[!.]*"):
            sums_of(file).unlink(missing_ok=True)
            seal(file)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A lake of one table: five rows, of which a file of deletes takes one."""
    root = tmp_path / "lake"
    chain = open_chain(root)
    identity = chain.initialise("log", "iceberg")
    table = root / "tables" / "shop" / "public" / "t"
    table_files(table, [1, 2, 3, 4, 5])
    lists = [{"snapshot-id": 7, "manifest-list": str(table / "metadata" / "snap-7.avro")}]
    metadata = table / "metadata" / "v2.metadata.json"
    metadata.write_text(json.dumps({"snapshots": lists}))
    seal(metadata)
    version = TableVersion("tables/shop/public/t", "iceberg", 7, "", ("id",), (), 0, 1, 4, 1)
    manifest = Manifest(identity, 1, 5, 0, 1, 1000.0, tables={"shop.public.t": version})
    chain.publish(manifest, None)
    (tmp_path / "tuskline.toml").write_text(
        f"""
[log]
data_dir = "{tmp_path}/log"
listen = "127.0.0.1:7400"
[[log_server]]
data_dir = "{tmp_path}/log-server"
listen = "127.0.0.1:7401"
[[source]]
name = "shop"
dsn = "service=shop"
[lake]
uri = "{root}"
"""
    )
    return root


def verified(lake: Path) -> tuple[int, dict[str, Any]]:
    arguments = ["lake", "verify", "--json", "-c", str(lake.parent / "tuskline.toml")]
    result = CliRunner().invoke(app, arguments)
    error = result.exception
    code = error.cause if isinstance(error, CorruptError) else result.exit_code
    return int(code), json.loads(result.stdout.splitlines()[-1])


def test_lake_verify_reads_everything(lake: Path) -> None:
    code, record = verified(lake)
    assert code == 0
    assert (record["links"], record["files"], record["damaged"]) == (1, 7, 0)
    assert record["without_checksums"] == 0
    old = lake / "tables/shop/public/t/data/old.parquet"
    old.write_bytes(b"of an older version")
    # As far as can be seen, it is just being written: its checksums come next.
    assert verified(lake)[1]["without_checksums"] == 0
    os.utime(old, (0, 0))
    assert verified(lake)[1]["without_checksums"] == 1


LINK = "_tuskline/epochs/00000000000000000001.json"
METADATA = "tables/shop/public/t/metadata/v2.metadata.json"
OTHERS = [
    f"tables/shop/public/t/{name}"
    for name in (
        "metadata/snap-7.avro",
        "metadata/m0.avro",
        "data/a.parquet",
        "quarantine/b.parquet",
    )
]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in (LINK, METADATA, *OTHERS) for damage in ("flip", "cut")),
        # A link that is gone was retired, and a version of the metadata superseded.
        *((name, "gone") for name in OTHERS),
    ],
)
def test_33_lake_verify_names_each_kind_of_file_that_is_damaged(
    lake: Path, name: str, damage: str
) -> None:
    file = lake / name
    good = file.read_bytes()
    match damage:
        case "flip":
            middle = len(good) // 2
            file.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        case "cut":
            file.write_bytes(good[:-10])
        case "gone":
            file.unlink()
    code, record = verified(lake)
    assert code == Cause.CORRUPT
    assert any(str(file) in error["where"] for error in record["errors"])


@pytest.mark.parametrize(
    ("text", "is_wrong"), [("92", True), ("2", False), ("x", False), ("", False)]
)
def test_lake_verify_names_a_hint_at_metadata_that_is_not_there(
    lake: Path, text: str, is_wrong: bool
) -> None:
    """Iceberg opens no table with such a hint, and lists the metadata where it is no number."""
    hint = lake / "tables/shop/public/t/metadata/version-hint.text"
    hint.write_text(text)
    code, record = verified(lake)
    assert (code == Cause.CORRUPT) is is_wrong
    assert [error["where"] for error in record["errors"]] == [str(hint)] * is_wrong


def test_33_lake_verify_reads_the_older_links_too(lake: Path) -> None:
    """A damaged newest link is one that is lost, whoever reads it; this one only its checksum tells."""
    chain = open_chain(lake)
    head = chain.head()
    assert head is not None
    chain.publish(head.next(head.steady_at, epoch=6), head)
    file = lake / LINK
    file.write_text(file.read_text().replace('"epoch": 5', '"epoch": 4'))
    code, record = verified(lake)
    assert code == Cause.CORRUPT
    assert [error["where"] for error in record["errors"]] == [str(file)]


@pytest.mark.parametrize(
    ("ids", "told", "said"),
    [
        # What was damaged before it was copied into files whose checksums are right.
        (
            [1, 2, 3],
            None,
            "shop.public.t: its manifest has 4 rows at epoch 5, but its files have 2",
        ),
        (
            [1, 3, 4, 5, 6],
            None,
            "shop.public.t: its manifest has 4 rows at epoch 5, but its files have 5",
        ),
        ([1, 2, 3], 5, "a.parquet: has 3 rows, but its manifest records 5"),
    ],
)
def test_lake_verify_counts_the_rows_of_the_newest_epoch(
    lake: Path, ids: list[int], told: int | None, said: str
) -> None:
    table_files(lake / "tables" / "shop" / "public" / "t", ids, told)
    code, record = verified(lake)
    assert code == Cause.CORRUPT
    (error,) = record["errors"]
    assert said in f"{error['where']}: {error['what']}"
    assert "table resync shop.public.t" in error["repair"]


def table_with_vectors(table: Path, vectors: list[Vector]) -> None:
    """Five rows, and these vectors."""
    table_files(table, [1, 2, 3, 4, 5])
    entry: dict[str, Any] = {"content": "int", "file_path": "string"}
    numbers = ("record_count", "file_size_in_bytes", "content_offset", "content_size_in_bytes")
    entry |= dict.fromkeys(numbers, "long") | {"referenced_data_file": "string"}
    fields = {"status": "int", "sequence_number": ["null", "long"]}
    rows = []
    for vector in vectors:
        values = (vector.rows, vector.size, vector.offset, vector.length)
        one = {"content": 1, "file_path": str(table / vector.puffin)}
        one |= dict(zip(numbers, values, strict=True))
        one["referenced_data_file"] = str(table / vector.file)
        rows.append({"status": 1, "sequence_number": None, "data_file": one})
    path = table / "metadata" / "m1.avro"
    avro_file.write(path, {**fields, "data_file": avro_file.record("file", entry)}, rows)
    sums_of(path).unlink()
    seal(path)


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ([[1]], None),
        ([[1, 2]], "its manifest has 4 rows at epoch 5, but its files have 3"),
        ([[7]], "a deletion vector has position 7 of 5 rows"),
        ([[1], [2]], "a data file has two deletion vectors"),
        (["other"], "is of a data file that the table does not have"),
        (["count"], "has 1 positions, but its manifest records 2"),
    ],
)
def test_lake_verify_reads_the_deletion_vectors(
    lake: Path, positions: Any, said: str | None
) -> None:
    table = lake / "tables" / "shop" / "public" / "t"
    made = []
    for number, some in enumerate(positions):
        rows = BitMap64([1] if isinstance(some, str) else some)
        file = "data/other.parquet" if some == "other" else "data/a.parquet"
        (vector,) = write_vectors(str(table), f"{number}", {file: rows})
        made.append(replace(vector, rows=2) if some == "count" else vector)
    table_with_vectors(table, made)
    code, record = verified(lake)
    assert [said in error["what"] for error in record["errors"]] == [True] * (said is not None)
    assert code == (0 if said is None else Cause.CORRUPT)


@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_lake_verify_names_a_damaged_run_which_no_reader_needs(lake: Path, damage: str) -> None:
    chain = open_chain(lake)
    head = chain.head()
    assert head is not None
    (name, table), *_ = head.tables.items()
    file = lake / table.path / "index" / "a.run"
    write_run(str(lake / table.path), "index/a.run", [], Tables())
    known = replace(table, runs=(("index/a.run", 1),))
    chain.publish(head.next(head.steady_at, tables={name: known}), head)
    assert verified(lake)[0] == 0
    if damage == "flip":
        file.write_bytes(b"x" + file.read_bytes()[1:])
    else:
        remove(file)
    code, record = verified(lake)
    assert code == Cause.CORRUPT
    (error,) = record["errors"]
    assert error["where"] == str(file)
    assert "builds the table's row index again" in error["repair"]
