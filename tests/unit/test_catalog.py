"""The names of a lake's tables for other engines: the catalog's entries and the links, and who may change them."""

import errno
import fcntl
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import unquote

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from structlog.testing import capture_logs

from spark_consumers.lake.catalog import file as catalog_file
from spark_consumers.lake.catalog import links as table_links
from spark_consumers.lake.catalog.entries import TABLE, CatalogChanges, Entry, Name, changes
from spark_consumers.lake.catalog.other_engines import OtherEngines, TableNames
from spark_consumers.lake.manifest.chain import LEFT, Manifest, TableVersion, open_chain
from spark_consumers.lake.manifest.takeover import name_of
from spark_consumers.lake.verify import verify
from spark_consumers.lake.writer.lake_site import LakeSite
from walsender_bridge.errors import CorruptError
from walsender_bridge.postgres.protocol.relation_name import relation_name
from walsender_bridge.runtime import fail_point

ORDERS, ITEMS = Name("shop.public", "orders"), Name("shop.public", "items")


@pytest.mark.parametrize(
    ("name", "namespace", "table"),
    [
        ("shop.public.orders", "shop.public", "orders"),
        ("shop.public.Or.ders", "shop.public", "Or.ders"),
        ('shop."Odd.Schema".%t1-ab', "shop.Odd.Schema", "%t1-ab"),
    ],
)
def test_a_name_is_postgresql_s_own(name: str, namespace: str, table: str) -> None:
    assert Name.of(name) == (namespace, table)


@pytest.mark.parametrize(
    ("there", "wanted", "expected"),
    [
        ([], {}, CatalogChanges((), ())),
        ([], {ORDERS: "a"}, CatalogChanges((), ((ORDERS, "a", None),))),
        ([Entry(1, ORDERS, "a", TABLE)], {ORDERS: "a"}, CatalogChanges((), ())),
        ([Entry(1, ORDERS, "a", TABLE)], {ORDERS: "b"}, CatalogChanges((1,), ((ORDERS, "b", "a"),))),
        # Its metadata cannot be read now.
        ([Entry(1, ORDERS, "a", TABLE)], {ORDERS: None}, CatalogChanges((), ())),
        ([], {ORDERS: None}, CatalogChanges((), ())),
        # Not in the lake any more, or never.
        ([Entry(1, ORDERS, "a", TABLE), Entry(2, ITEMS, "b", TABLE)], {ITEMS: "b"}, CatalogChanges((1,), ())),
        # What another made of it.
        ([Entry(1, ORDERS, "a", "VIEW")], {ORDERS: "a"}, CatalogChanges((1,), ((ORDERS, "a", "a"),))),
        ([Entry(1, ORDERS, "a", None)], {ORDERS: "a"}, CatalogChanges((1,), ((ORDERS, "a", "a"),))),
        ([Entry(1, ORDERS, None, TABLE)], {ORDERS: "a"}, CatalogChanges((1,), ((ORDERS, "a", None),))),
        ([Entry(1, ORDERS, "a", TABLE), Entry(2, ORDERS, "a", TABLE)], {ORDERS: "a"}, CatalogChanges((2,), ())),
    ],
)  # fmt: skip
def test_what_differs_is_changed_and_nothing_else(there, wanted, expected) -> None:
    assert changes(there, wanted) == expected


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("tables/s/p/orders%t3-9f0c", "tables/s/p/orders"),
        # Tables that are called as if they were folders of copies.
        ("tables/s/p/orders%25t3-9f0c%t4-00ab", "tables/s/p/orders%25t3-9f0c"),
        ("tables/s/p/%C3%A9%2E%t12-ab", "tables/s/p/%C3%A9%2E"),
        # Of an early version, and what is nobody's.
        ("tables/s/p/orders", "tables/s/p/orders"),
        ("tables/s/p/orders%t-ab", "tables/s/p/orders%t-ab"),
    ],
)
def test_the_link_of_a_folder_has_the_table_s_name(path: str, name: str) -> None:
    assert name_of(path) == name
    expected = {} if name == path else {name: path.rpartition("/")[2]}
    stream, schema, table = name.split("/")[1:]
    own = relation_name(unquote(schema), unquote(table))
    assert table_links.links({f"{stream}.{own}": path}) == expected


class Lake:
    """A lake without Iceberg: a table's metadata files are empty, and numbered as its snapshots are."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.chain = open_chain(root)
        self.chain.initialise("log", "iceberg")
        self.head: Manifest | None = None
        self.asked: list[str] = []
        self.clock = 0.0

    def names(self) -> TableNames:
        """Those that one driver keeps."""
        return TableNames(self.chain, self.metadata, lambda: self.clock)

    def metadata(self, path: str, snapshot: int) -> Path | None:
        self.asked.append(path)
        file = self.root / path / "metadata" / f"v{snapshot}.metadata.json"
        return file if file.exists() else None

    def publish(self, term: int = 1, **tables: str) -> Manifest:
        """Publish a link: for each table of schema `public` its folder and snapshot, `orders%t1-ab 3`."""
        made = {}
        for name, where in tables.items():
            folder, _, snapshot = where.rpartition(" ")
            path = f"tables/shop/public/{folder}"
            file = self.root / path / "metadata" / f"v{snapshot}.metadata.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            made[f"shop.public.{name}"] = TableVersion(
                path, "iceberg", int(snapshot), "", ("id",), (), 1, 1, 9, 1
            )
        head = self.head
        if head is None:
            link = Manifest("lake", 1, 1, 0, term, 0.0, tables=made)
        else:
            link = head.next(0.0, tables=made, term=term, epoch=head.epoch + 1)
        self.chain.publish(link, head)
        self.head = link
        return link

    def entries(self) -> dict[str, str]:
        """The catalog: by name what is behind `tables/shop/public/`."""
        with closing(sqlite3.connect(self.root / "catalog.db")) as connection:
            rows = connection.execute(
                "SELECT table_name, metadata_location FROM iceberg_tables"
                " WHERE catalog_name = 'tuskline' AND table_namespace = 'shop.public'"
            ).fetchall()
        before = f"{self.root}/tables/shop/public/"
        return {name: at.removeprefix(before) for name, at in rows}

    def links(self) -> dict[str, str]:
        """The links among the folders of tables."""
        found = (self.root / "tables/shop/public").iterdir()
        return {path.name: str(path.readlink()) for path in found if path.is_symlink()}

    def row(self, statement: str) -> None:
        """Change the catalog as somebody else would."""
        with closing(sqlite3.connect(self.root / "catalog.db")) as connection, connection:
            connection.execute(statement)


@pytest.fixture
def lake(tmp_path):
    return Lake(tmp_path / "lake")


def test_a_table_that_could_not_be_shown_is_shown_with_the_next_epoch(lake):
    """Otherwise plain readers would see it an epoch behind the others until its next change."""
    tables = Mock(metadata_file=lambda path, at: None)
    engines = OtherEngines(lake.chain, tables, lake.publish(orders="orders%t1-ab 1"))
    published = lake.publish(orders="orders%t1-ab 2")
    tables.show.side_effect = CorruptError("gave up")
    engines.show(published)
    # Between two links there are ten looks a second.
    engines.show(published)
    assert tables.show.call_count == 1
    tables.show.side_effect = None
    engines.show(lake.publish(orders="orders%t1-ab 2", items="items%t1-cd 1"))
    assert tables.show.call_count == 3
    engines.show(lake.head)
    assert tables.show.call_count == 3


def test_a_table_that_was_brought_level_before_a_takeover_is_shown_by_its_epoch(lake):
    """It is in the folder of the table that it replaces, of which the takeover has shown the earlier snapshot."""
    tables = Mock(metadata_file=lambda path, at: None)
    before = lake.publish(orders="orders%t1-ab 1").tables["shop.public.orders"]
    level = replace(before, snapshot_id=2)
    head = lake.head.next(0.0, term=2, copies={"shop.public.orders": level})
    lake.chain.publish(head, lake.head)
    lake.head = head
    engines = OtherEngines(lake.chain, tables, head)
    engines.show(lake.publish(term=2, orders="orders%t1-ab 2"))
    tables.show.assert_called_once_with(str(lake.root / before.path), 2, 2)


def test_a_name_gives_the_newest_copy_and_goes_with_its_table(lake):
    names = lake.names()
    names.follow(lake.publish(orders="orders%t1-ab 1", items="items%t1-cd 1"))
    assert lake.entries() == {
        "orders": "orders%t1-ab/metadata/v1.metadata.json",
        "items": "items%t1-cd/metadata/v1.metadata.json",
    }
    assert lake.links() == {"orders": "orders%t1-ab", "items": "items%t1-cd"}
    names.follow(lake.publish(orders="orders%t1-ef 7", items="items%t1-cd 2"))
    assert lake.entries() == {
        "orders": "orders%t1-ef/metadata/v7.metadata.json",
        "items": "items%t1-cd/metadata/v2.metadata.json",
    }
    assert lake.links() == {"orders": "orders%t1-ef", "items": "items%t1-cd"}
    names.follow(lake.publish(items="items%t1-cd 2"))
    assert list(lake.entries()) == list(lake.links()) == ["items"]


def test_no_reader_sees_two_epochs(lake, monkeypatch):
    names = lake.names()
    names.follow(lake.publish(orders="orders%t1-ab 1", items="items%t1-cd 1"))
    before, seen = lake.entries(), []
    hit = fail_point.hit

    def look(place: str) -> None:
        seen.append((place, lake.entries()))
        hit(place)

    monkeypatch.setattr(fail_point, "hit", look)
    names.follow(lake.publish(orders="orders%t1-ef 7", late="late%t1-cd 2"))
    assert seen == [("catalog-written", before)]
    assert lake.entries() == {
        "orders": "orders%t1-ef/metadata/v7.metadata.json",
        "late": "late%t1-cd/metadata/v2.metadata.json",
    }


def test_a_table_that_read_shows_keeps_its_name_though_it_follows_no_more(lake):
    names, link = lake.names(), lake.publish(orders="orders%t1-ab 1")
    names.follow(link)
    (table,) = link.tables.values()
    left = link.next(0.0, tables={"shop.public.orders": TableVersion.from_json(
        {**{n: getattr(table, n) for n in table.__slots__}, "state": LEFT, "as_of": 1}
    )})  # fmt: skip
    lake.chain.publish(left, link)
    names.follow(left)
    assert list(lake.entries()) == ["orders"]


def test_nothing_is_written_or_asked_while_nothing_changes(lake):
    names = lake.names()
    names.follow(lake.publish(orders="orders%t1-ab 1"))
    made, link = (
        (lake.root / "catalog.db").stat(),
        os.lstat(lake.root / "tables/shop/public/orders"),
    )
    asked = list(lake.asked)
    for _ in range(3):
        names.follow(lake.publish(orders="orders%t1-ab 1"))
    lake.clock += 100
    names.follow(lake.head)
    now = (lake.root / "catalog.db").stat()
    assert (now.st_mtime_ns, now.st_ino) == (made.st_mtime_ns, made.st_ino)
    assert os.lstat(lake.root / "tables/shop/public/orders").st_ino == link.st_ino
    assert lake.asked == asked
    # Metadata that was committed since, with the same snapshot shown.
    (lake.root / "tables/shop/public/orders%t1-ab/metadata/v2.metadata.json").touch()
    names.follow(lake.publish(orders="orders%t1-ab 1"))
    assert lake.asked == asked, "a table that was not written is looked at now and again only"
    lake.clock += 100
    names.follow(lake.publish(orders="orders%t1-ab 1"))
    assert len(lake.asked) == len(asked) + 1


def test_what_others_change_is_mended_and_other_catalogs_are_left_alone(lake):
    names = lake.names()
    names.follow(lake.publish(orders="orders%t1-ab 1"))
    right = lake.entries()
    lake.row("DELETE FROM iceberg_tables")
    lake.row(
        "INSERT INTO iceberg_tables VALUES"
        " ('tuskline', 'shop.public', 'foreign', '/x', NULL, 'TABLE'),"
        " ('tuskline', 'shop.public', CAST(x'ff' AS TEXT), '/x', NULL, 'TABLE'),"
        " ('mine', 'shop.public', 'orders', '/x', NULL, 'TABLE')"
    )
    (lake.root / "tables/shop/public/orders").unlink()
    names.follow(lake.head)
    assert lake.links() == {}, "it looks now and again only"
    lake.clock += 100
    names.follow(lake.head)
    assert lake.entries() == right
    assert lake.links() == {"orders": "orders%t1-ab"}
    with closing(sqlite3.connect(lake.root / "catalog.db")) as connection:
        (kept,) = connection.execute(
            "SELECT table_name, metadata_location FROM iceberg_tables WHERE catalog_name = 'mine'"
        ).fetchall()
    assert kept == ("orders", "/x")


def test_metadata_that_cannot_be_read_leaves_the_entry_and_the_other_tables_go_on(
    lake, monkeypatch
):
    names = lake.names()
    names.follow(lake.publish(orders="orders%t1-ab 1", items="items%t1-cd 1"))

    def damaged(path: str, snapshot: int) -> Path | None:
        if "orders" in path:
            raise CorruptError("it is damaged", where=path)
        return lake.metadata(path, snapshot)

    monkeypatch.setattr(names, "_metadata", damaged)
    names.follow(lake.publish(orders="orders%t1-ab 2", items="items%t1-cd 2"))
    assert lake.entries() == {
        "orders": "orders%t1-ab/metadata/v1.metadata.json",
        "items": "items%t1-cd/metadata/v2.metadata.json",
    }


@pytest.mark.parametrize("moment", ["before it has the lock", "when it has compared its link"])
def test_a_driver_that_slept_puts_nothing_older_back(lake, monkeypatch, moment):
    older, newer = lake.names(), lake.names()
    older.follow(lake.publish(orders="orders%t1-ab 1"))
    mine = lake.publish(orders="orders%t1-ab 2")

    def take_over():
        newer.follow(lake.publish(2, orders="orders%t2-cd 1", late="late%t2-cd 1"))

    if moment.startswith("before"):
        take_over()
        older.follow(mine)
    else:
        follow, slept = older._follow_links, []

        def sleep(head: Manifest) -> None:
            slept.append(head)
            with capture_logs() as logged:
                take_over()
            # It waits for the one that sleeps, and its rounds go on.
            assert "another driver is updating the names" in logged[0]["error"]
            follow(head)

        monkeypatch.setattr(older, "_follow_links", sleep)
        older.follow(mine)
        assert slept
        assert list(lake.entries()) == ["orders"]
        lake.clock += 2
        newer.follow(lake.head)
    expected = {
        "orders": "orders%t2-cd/metadata/v1.metadata.json",
        "late": "late%t2-cd/metadata/v1.metadata.json",
    }
    assert lake.entries() == expected
    lake.clock += 1000
    older.follow(mine)
    assert lake.entries() == expected
    assert lake.links() == {"orders": "orders%t2-cd", "late": "late%t2-cd"}


@pytest.mark.parametrize(
    "kind",
    # The pages of both tables and of their keys.
    [
        *("no database", *(f"damaged page {number}" for number in (2, 3, 4, 5))),
        *("another database", "other columns", "a folder", "a link to itself"),
    ],
)
def test_a_file_that_is_no_catalog_is_kept_aside_and_made_again(lake, kind):
    file, names = lake.root / "catalog.db", lake.names()
    names.follow(lake.publish(orders="orders%t1-ab 1", items="items%t1-cd 1"))
    if kind == "no database":
        file.write_bytes(b"precious" * 1000)
    elif kind.startswith("damaged"):
        content = bytearray(file.read_bytes())
        end = int(kind[-1]) * 4096
        content[end - 4096 : end] = bytes(4096)
        file.write_bytes(content)
    else:
        file.unlink()
        if kind == "a folder":
            file.mkdir()
        elif kind == "a link to itself":
            file.symlink_to(file.name)
        else:
            lake.row(
                f"CREATE TABLE {'mine' if kind.startswith('another') else 'iceberg_tables'} (a)"
            )
    there = file.read_bytes() if file.is_file() else None
    # It belongs to that file, and would be applied to the new one.
    Path(f"{file}-journal").write_bytes(b"" if there is not None else b"of another")
    with capture_logs() as logged:
        names.follow(lake.publish(orders="orders%t1-ab 2", items="items%t1-cd 1"))
    assert [line["event"] for line in logged] == ["catalog recreated"]
    assert lake.entries() == {
        "orders": "orders%t1-ab/metadata/v2.metadata.json",
        "items": "items%t1-cd/metadata/v1.metadata.json",
    }
    kept = lake.root / "catalog.db.1.bad"
    assert os.path.lexists(kept)
    if there is None:
        assert Path(f"{kept}-journal").read_bytes() == b"of another"
    else:
        assert kept.read_bytes() == there


def test_a_file_that_pyiceberg_made_is_used(lake):
    """A reader that came before the first driver has it open."""
    uri = f"sqlite:///{lake.root}/catalog.db"
    reader = SqlCatalog("tuskline", uri=uri)
    try:
        lake.names().follow(lake.publish(orders="orders%t1-ab 1", items="items%t1-cd 1"))
        assert not list(lake.root.glob("catalog.db.*"))
        assert reader.list_namespaces() == [("shop",)]
        assert reader.list_namespaces("shop") == [("shop", "public")]
        assert sorted(reader.list_tables("shop.public")) == [
            ("shop", "public", "items"),
            ("shop", "public", "orders"),
        ]
    finally:
        reader.close()


def test_a_write_ahead_log_that_others_have_chosen_is_given_up_again(lake):
    """With one, no reader without write access to the folder opens the file."""
    names = lake.names()
    names.follow(lake.publish(orders="orders%t1-ab 1"))
    uri = f"file:{lake.root}/catalog.db"
    with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("BEGIN")
        other.execute("SELECT * FROM iceberg_tables").fetchall()
        names.follow(lake.publish(orders="orders%t1-ab 2"))
        assert lake.entries() == {"orders": "orders%t1-ab/metadata/v2.metadata.json"}
    names.follow(lake.publish(orders="orders%t1-ab 3"))
    with closing(sqlite3.connect(f"{uri}?mode=ro", uri=True)) as reader:
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert lake.entries() == {"orders": "orders%t1-ab/metadata/v3.metadata.json"}


def test_a_catalog_that_another_program_is_just_making_is_used(lake):
    lake.row(catalog_file._PROPERTIES)
    lake.names().follow(lake.publish(orders="orders%t1-ab 1"))
    assert list(lake.entries()) == ["orders"]
    assert not list(lake.root.glob("catalog.db.*"))


def test_a_catalog_of_iceberg_s_first_schema_gets_the_column_that_it_lacks(lake):
    lake.row(catalog_file._TABLES.replace(",\n  iceberg_type VARCHAR(5)", ""))
    lake.row(catalog_file._PROPERTIES)
    lake.names().follow(lake.publish(orders="orders%t1-ab 1"))
    assert list(lake.entries()) == ["orders"]
    assert not list(lake.root.glob("catalog.db.*"))


@pytest.mark.parametrize("holds", ["SELECT 1 FROM iceberg_tables", "write", "everything"])
def test_a_lock_of_others_delays_the_catalog_alone(lake, holds):
    names = lake.names()
    names.follow(lake.publish(orders="orders%t1-ab 1", items="items%t1-cd 1"))
    with closing(sqlite3.connect(lake.root / "catalog.db", isolation_level=None)) as other:
        begin = {"write": "BEGIN IMMEDIATE", "everything": "BEGIN EXCLUSIVE"}.get(holds, "BEGIN")
        other.execute(begin)
        if begin == "BEGIN":
            other.execute(f"{holds} LIMIT 1").fetchone()
        link = lake.publish(orders="orders%t1-ef 1", items="items%t1-cd 2")
        with capture_logs() as logged:
            for _ in range(3):
                names.follow(link)
                lake.clock += 2
        assert [line["event"] for line in logged] == ["table names are out of date"]
        assert "locked" in logged[0]["error"]
        # The folder's names do not depend on it.
        assert lake.links()["orders"] == "orders%t1-ef"
        if begin != "BEGIN EXCLUSIVE":
            assert set(lake.entries().values()) == {
                "orders%t1-ab/metadata/v1.metadata.json",
                "items%t1-cd/metadata/v1.metadata.json",
            }
    with capture_logs() as logged:
        names.follow(link)
    assert [line["event"] for line in logged] == ["table names are up to date again"]
    assert lake.entries()["items"] == "items%t1-cd/metadata/v2.metadata.json"


def test_a_full_disk_delays_the_names_alone(lake, monkeypatch):
    names = lake.names()
    names.follow(lake.publish(orders="orders%t1-ab 1"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    link = lake.publish(orders="orders%t1-ef 1")
    with monkeypatch.context() as disk:
        disk.setattr(Path, "symlink_to", full)
        names.follow(link)
    # The one does not wait for the other.
    assert lake.entries() == {"orders": "orders%t1-ef/metadata/v1.metadata.json"}
    assert lake.links() == {"orders": "orders%t1-ab"}
    lake.clock += 2
    names.follow(link)
    assert lake.links() == {"orders": "orders%t1-ef"}


def test_links_that_fail_are_each_named_and_the_others_are_made(lake):
    """Below files in the places of two schemas' folders."""
    names = lake.names()
    link = lake.publish(a="a%t1-ab 1", b="b%t1-cd 1", c="c%t1-ef 1", d="d%t1-01 1")
    schemas = {"shop.public.a": "shop.one.a", "shop.public.c": "shop.two.c"}
    moved = {schemas.get(name, name): table for name, table in link.tables.items()}
    renamed = link.next(0.0, tables=moved)
    lake.chain.publish(renamed, link)
    for schema in ("one", "two"):
        (lake.root / f"tables/shop/{schema}").touch()
    failed = ["tables/shop/one/a", "tables/shop/two/c"]
    with capture_logs() as logged:
        names.follow(renamed)
        lake.clock += 2
        names.follow(renamed)
    assert lake.links() == {"b": "b%t1-cd", "d": "d%t1-01"}
    assert [line["path"] for line in logged[:2]] == failed
    (last,) = logged[2:]
    assert all(name in last["error"] for name in failed)
    # Once its folder can be made, so can the link.
    (lake.root / "tables/shop/one").unlink()
    lake.clock += 2
    names.follow(renamed)
    assert (lake.root / "tables/shop/one/a").readlink() == Path("../public/a%t1-ab")


def test_a_link_is_made_beside_others_with_the_same_letters_and_never_in_place_of_a_users(lake):
    place = lake.root / "tables/shop/public"
    place.mkdir(parents=True)
    (place / "mine").mkdir()
    (place / "mine" / "file").touch()
    (place / "other").symlink_to("elsewhere")
    (place / "Gone").symlink_to("Gone%t1-ab")
    (place / "kept").symlink_to("other%t1-ab")
    names = lake.names()
    odd = {"%t1-ab": "%25t1-ab%t1-ef 1", "Orders": "Orders%t1-cd 1", "orders": "orders%t1-ab 1"}
    with capture_logs() as logged:
        names.follow(lake.publish(mine="mine%t1-ab 1", other="other%t1-ab 1", **odd))
        names.follow(lake.publish(mine="mine%t1-ab 1", other="other%t1-ab 1", **odd))
    assert [line["path"] for line in logged] == [
        "tables/shop/public/mine",
        "tables/shop/public/other",
    ]
    assert lake.links() == {
        "%25t1-ab": "%25t1-ab%t1-ef",
        "Orders": "Orders%t1-cd",
        "orders": "orders%t1-ab",
        "other": "elsewhere",
        "kept": "other%t1-ab",
    }
    assert (place / "mine" / "file").exists()
    assert len(lake.entries()) == 5


def test_a_folder_of_an_early_version_is_its_own_name_until_the_table_is_copied(lake):
    names = lake.names()
    names.follow(lake.publish(orders="orders 3"))
    assert lake.entries() == {"orders": "orders/metadata/v3.metadata.json"}
    assert lake.links() == {}
    link = lake.publish(orders="orders%t1-ab 1")
    names.follow(link)
    assert lake.links() == {}
    assert lake.entries() == {"orders": "orders%t1-ab/metadata/v1.metadata.json"}
    # Retention removes it.
    (lake.root / "tables/shop/public/orders/metadata/v3.metadata.json").unlink()
    (lake.root / "tables/shop/public/orders/metadata").rmdir()
    (lake.root / "tables/shop/public/orders").rmdir()
    lake.clock += 100
    names.follow(link)
    assert lake.links() == {"orders": "orders%t1-ab"}


def test_a_link_is_no_second_table_to_whoever_lists_the_folders(lake):
    lake.names().follow(lake.publish(orders="orders%t1-ab 1"))
    folder = lake.root / "tables/shop/public/orders%t1-ab"
    (folder / "quarantine").mkdir()
    (folder / "quarantine" / "copy-t1-1.parquet").touch()
    assert list(table_links.folders(lake.root)) == [folder]
    left = [each.path for each in LakeSite(lake.chain, Mock()).left()]
    assert left == [
        "tables/shop/public/orders%t1-ab",
        "tables/shop/public/orders%t1-ab/quarantine/copy-t1-1.parquet",
    ]
    read: list[str] = []
    verify(lake.chain, lambda file, *_: read.append(file))
    assert len(read) == len(set(map(os.path.realpath, (lake.root / file for file in read)))) == 2


def test_a_link_that_nobody_needs_is_taken_away_and_not_what_it_names(lake):
    names = lake.names()
    names.follow(lake.publish(orders="orders%t1-ab 1"))
    names.follow(lake.publish())
    assert lake.links() == {}
    assert (lake.root / "tables/shop/public/orders%t1-ab/metadata/v1.metadata.json").exists()


def test_a_file_system_without_locks_has_names_too(lake, monkeypatch):
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    lake.names().follow(lake.publish(orders="orders%t1-ab 1"))
    assert list(lake.entries()) == ["orders"]
