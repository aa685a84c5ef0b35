"""What housekeeping removes of a lake's folder, and what of users keeps it from it."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.table_catalog import TableId
from spark_consumers.lake.format.iceberg_files import refs_in, snapshots_in, versions_in
from spark_consumers.lake.format.iceberg_refs import of_users
from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.chain import Manifest, TableVersion, open_chain
from spark_consumers.lake.manifest.pin import PINNED, Pin
from spark_consumers.lake.manifest.pinned_links import PinnedLinks
from spark_consumers.lake.manifest.takeover import Leftover, LeftoverKind
from spark_consumers.lake.writer.lake_site import LakeSite
from spark_consumers.lake.writer.retention import Retention, clock_after
from walsender_bridge.errors import CorruptError, FencedError

OURS = {
    "main": {"snapshot-id": 7, "type": "branch"},
    "tuskline_t1": {"snapshot-id": 7, "type": "branch"},
    "tuskline_epoch_5": {"snapshot-id": 7, "type": "tag"},
    "epoch_3": {"snapshot-id": 6, "type": "tag"},
}
SNAPSHOTS = [
    {"snapshot-id": 6, "summary": {"tuskline.version": "3"}},
    {"snapshot-id": 7, "summary": {"tuskline.version": "5", "tuskline.tag": "tuskline_epoch_5"}},
]
OLD = "tables/shop/public/t%t1-0a"


class Format:
    """What a format says of a folder, without Spark."""

    def users_refs(self, path: str) -> list[str]:
        return of_users(refs_in(path))

    def drop(self, path: str) -> None:
        self.catalog.drop(TableId.at(path))

    def __init__(self, root: Path) -> None:
        self.catalog = FolderCatalog(root)
        self.swept: list[tuple[str, int, frozenset[str]]] = []
        self.tagged: list[tuple[str, dict[str, int]]] = []
        self.error: Exception | None = None

    def expire(self, *_: Any) -> int:
        return 0

    def pin(self, path: str, _: int, tags: dict[str, int], **__: bool) -> None:
        """It has no tags."""
        self.tagged.append((Path(path).name, tags))

    def sweep(self, path: str, term: int, listed: frozenset[str]) -> int:
        self.swept.append((path, term, listed))
        if self.error is not None:
            raise self.error
        return len(listed)


@pytest.fixture
def chain(tmp_path):
    chain = open_chain(tmp_path)
    lake = chain.initialise("log", "iceberg")
    version = TableVersion("tables/shop/public/t%t1-0b", "iceberg", 9, "", ("id",), (), 0, 1, 4, 1)
    tables = {"shop.public.t": version}
    chain.publish(Manifest(lake, 1, 5, 0, 2, 1000.0, 1000.0, tables=tables), None)
    return chain


@pytest.fixture
def site(chain):
    return LakeSite(chain, cast("Any", Format(chain.root)))


def write(root: Path, number: int, refs: dict[str, Any]) -> None:
    folder = root / OLD / "metadata"
    folder.mkdir(parents=True, exist_ok=True)
    record = {"refs": refs, "snapshots": SNAPSHOTS}
    (folder / f"v{number}.metadata.json").write_text(json.dumps(record))


@pytest.mark.parametrize("kind", ["branch", "tag"])
@pytest.mark.parametrize("name", ["mine", "epoch_5", "tuskline_epoch_3", "tuskline_epoch_7"])
def test_the_folder_of_an_older_copy_stays_while_users_have_references_in_it(
    chain, site, kind, name
):
    write(chain.root, 9, OURS | {name: {"snapshot-id": 7, "type": kind}})
    for _ in range(2):
        takeover.carry_out(takeover.sweep(chain.head()), site.do)
        assert (chain.root / OLD).exists()
    # Dropped; and its own references keep nothing.
    write(chain.root, 10, OURS)
    takeover.carry_out(takeover.sweep(chain.head()), site.do)
    assert not (chain.root / OLD).exists()


def test_retention_keeps_it_too_and_removes_it_when_they_are_dropped(chain, site):
    head = chain.head()
    kept = Retention.begin(chain, cast("Any", Format(chain.root)), site, clock_after(head))
    kept._last_use[OLD] = {}
    write(chain.root, 9, OURS | {"mine": {"snapshot-id": 6, "type": "tag"}})
    kept.expire(head, 0.0)
    assert (chain.root / OLD).exists()
    write(chain.root, 10, OURS)
    kept.expire(head, 0.0)
    assert not (chain.root / OLD).exists()


def test_housekeeping_removes_tags_of_no_pin_also_from_earlier_copies(chain, site):
    """A release goes on where a table is damaged; its tag is there when the table is restored."""
    first = chain.head()
    version = replace(first.tables["shop.public.t"], path=OLD.replace("0a", "0c"))
    head = first.next(1000.0, tables={"shop.public.t": version})
    chain.publish(head, first)
    tables = Format(chain.root)
    kept = Retention.begin(chain, cast("Any", tables), site, clock_after(head))
    kept.expire(head, 1e6)
    assert sorted(tables.tagged) == [("t%t1-0b", {}), ("t%t1-0c", {})]


def test_what_a_pin_keeps_is_no_leftover_also_while_that_is_not_known(chain, site):
    """Of a table that was copied again since, and of one that goes on: only the copy of the pinned link names these files."""
    head = chain.head()
    rows = f"quarantine/{1:020d}-t1-a1-rows.parquet"
    old = replace(head.tables["shop.public.t"], path=OLD, quarantine_files=(rows,))
    same = replace(head.tables["shop.public.t"], quarantine_files=(rows,))
    tables = {"shop.public.t": same, "shop.public.old": old}
    record = PinnedLinks(chain.store).keep(replace(head, tables=tables), 2)
    of_same = chain.root / same.path / rows
    of_same.parent.mkdir(parents=True)
    of_same.touch()
    file = chain.root / "_tuskline" / "pins" / record
    write(chain.root, 9, OURS)
    for name in (rows, f"quarantine/{1:020d}-t1-a1-garbage.parquet"):
        (chain.root / OLD / name).parent.mkdir(exist_ok=True)
        (chain.root / OLD / name).touch()
    pinned = head.next(1000.0, pins={"a": Pin(head.epoch, head.link, record, PINNED)})
    chain.publish(pinned, head)
    content = file.read_bytes()
    kept = Retention.begin(chain, cast("Any", Format(chain.root)), site, clock_after(pinned))

    def clean():
        takeover.carry_out(takeover.sweep(chain.head()), site.do)
        kept.expire(chain.head(), 0.0)

    file.write_bytes(content.replace(b"tables", b"tablet"))
    clean()
    assert len(list((chain.root / OLD / "quarantine").iterdir())) == 2
    assert chain.numbers() == [1, 2]
    file.write_bytes(content)
    clean()
    assert [path.name for path in (chain.root / OLD / "quarantine").iterdir()] == [Path(rows).name]
    assert of_same.exists()
    assert chain.numbers() == [2]
    # Released, it goes, and with it the copy of the link.
    chain.publish(pinned.next(1000.0, pins={}), pinned)
    clean()
    assert not (chain.root / OLD).exists()
    assert not of_same.exists()
    assert not file.exists()


def test_a_copy_that_is_mended_during_a_sweep_costs_no_table(chain, site):
    """What pins keep is asked once: the answer is for all that is found after it."""
    head = chain.head()
    old = replace(head.tables["shop.public.t"], path=OLD)
    record = PinnedLinks(chain.store).keep(replace(head, tables={"shop.public.t": old}), 2)
    chain.publish(head.next(1.0e3, pins={"a": Pin(head.epoch, 1, record, PINNED)}), head)
    write(chain.root, 9, OURS)
    staged = chain.staging / f"{1:020d}-t1-a1"
    staged.mkdir(parents=True)
    file = chain.root / "_tuskline" / "pins" / record
    content = file.read_bytes()
    file.write_bytes(content.replace(b"tables", b"tablet"))

    def do(effect):
        if isinstance(effect, takeover.ListLeftovers):
            file.write_bytes(content)
        return site.do(effect)

    takeover.carry_out(takeover.sweep(chain.head()), do)
    assert (chain.root / OLD).exists()
    # No pin keeps what is in there.
    assert not staged.exists()


def test_metadata_that_is_damaged_does_not_hide_the_references_before_it(chain, site):
    write(chain.root, 9, OURS | {"mine": {"snapshot-id": 7, "type": "tag"}})
    (chain.root / OLD / "metadata" / "v10.metadata.json").write_text('{"refs": ')
    site.remove(Leftover(LeftoverKind.TABLE, OLD))
    assert (chain.root / OLD).exists()


def test_metadata_that_another_writer_compressed_or_named_hides_no_references(chain, site):
    write(chain.root, 9, OURS | {"mine": {"snapshot-id": 7, "type": "tag"}})
    folder = chain.root / OLD / "metadata"
    for name in ("v10.gz.metadata.json", "v11-copy.metadata.json", "view.metadata.json"):
        (folder / name).write_text('{"refs": {}, "snapshots": []}')
    assert versions_in(folder) == [9]
    site.remove(Leftover(LeftoverKind.TABLE, OLD))
    assert (chain.root / OLD).exists()


def test_a_folder_without_a_table_is_removed(chain, site):
    (chain.root / OLD / "data").mkdir(parents=True)
    site.remove(Leftover(LeftoverKind.TABLE, OLD))
    assert not (chain.root / OLD).exists()


def test_each_table_is_swept_once_after_a_takeover_a_housekeeping_after_it_was_listed(chain, site):
    head, tables = chain.head(), Format(chain.root)
    folder = chain.root / "tables/shop/public/t%t1-0b"
    for name in (
        f"data/{3:020d}-t1-a1-x.parquet",
        f"data/{4:020d}-t2-a1-of-this-term.parquet",
        "data/00000-0-of-a-user.parquet",
        "data/copy-t1-0.parquet",
        f"data/.{3:020d}-t1-a1-lost.parquet.crc",
        f"data/.{3:020d}-t1-a1-x.parquet.crc",
        "metadata/snap-7.avro",
        "metadata/v3.metadata.json",
        "metadata/.v4.metadata.json.0a.tmp",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        os.utime(folder / name, (1, 1))
    # Written since the takeover: of a commit of this writer, perhaps.
    (folder / "metadata" / "snap-6.avro").touch()
    kept = Retention.begin(chain, cast("Any", tables), site, clock_after(head))
    kept.expire(head, 0.0)
    assert tables.swept == []
    # What comes after the listing is not looked at.
    (folder / "metadata" / "snap-8.avro").touch()
    tables.error = CorruptError("damaged", where=str(folder))
    for _ in range(3):
        kept.expire(head, 0.0)
    names = {
        f"data/{3:020d}-t1-a1-x.parquet",
        "data/copy-t1-0.parquet",
        f"data/{3:020d}-t1-a1-lost.parquet",
        "metadata/snap-7.avro",
        "metadata/.v4.metadata.json.0a.tmp",
    }
    assert tables.swept == [(str(folder), 2, frozenset(str(folder / name) for name in names))]
    kept = Retention.begin(chain, cast("Any", tables), site, clock_after(head))
    tables.error = FencedError("taken over")
    kept.expire(head, 0.0)
    with pytest.raises(FencedError):
        kept.expire(head, 0.0)


def test_the_snapshots_in_metadata_are_read_also_where_another_writer_compressed_it(tmp_path):
    content = json.dumps({"snapshots": [{"snapshot-id": 7}, {"snapshot-id": 9}]}).encode()
    plain, small = tmp_path / "v1.metadata.json", tmp_path / "v2.gz.metadata.json"
    plain.write_bytes(content)
    small.write_bytes(gzip.compress(content))
    assert snapshots_in(plain) == snapshots_in(small) == [7, 9]
    plain.write_bytes(b"{}")
    assert snapshots_in(plain) == []
