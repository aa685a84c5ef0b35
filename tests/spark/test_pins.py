"""Pinned epochs: kept whole while their neighbours expire, tagged in every table or in none, whatever dies."""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import StaticTable

from spark_consumers import read
from spark_consumers.lake import reader
from spark_consumers.lake.catalog.statements import ENGINES, PYICEBERG, SPARK
from spark_consumers.lake.format.iceberg_files import refs_in
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.manifest.pin import PINNED, tag_of
from spark_consumers.lake.manifest.pinned_links import PinnedLinks
from spark_consumers.lake.writer import requests
from spark_consumers.spark.session import catalog_settings
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_no_orphans
from tests.support.machine_files import machine
from tests.support.pin_requests import Pins
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from walsender_bridge.cli import app as cli
from walsender_bridge.cli.epochs import cut_tables
from walsender_bridge.errors import FencedError, LakeError, TrimmedError
from walsender_bridge.runtime import fail_point

DOCS = f"{STREAM}.public.docs"


@pytest.fixture(autouse=True)
def no_leases(monkeypatch):
    """Readers keep nothing: what stays is what a pin keeps."""
    monkeypatch.setattr(reader, "lease_on", lambda _: None)


def rows(snapshot):
    """All rows of a snapshot, by table."""
    return {
        name: sorted(str(tuple(row)) for row in snapshot[name].collect())
        for name in snapshot.tables
    }


def tags(lake, link):
    """For each table of a link the tags of pins, by name, at their snapshots."""
    return {
        name: {
            tag: ref.snapshot for tag, ref in refs_in(f"{lake}/{table.path}").items() if ref.is_pin
        }
        for name, table in link.tables.items()
    }


def changed(pipeline, database, house=None):
    """One more epoch, in which every table has changed."""
    database.execute(
        "UPDATE docs SET n = n + 1",
        "UPDATE pairs SET at = now() + a * interval '1 day'",
        "INSERT INTO bag SELECT * FROM bag WHERE ctid = (SELECT min(ctid) FROM bag)",
    )
    return pipeline.flush(house)


def test_10_a_pinned_epoch_outlives_its_neighbours_in_every_engine(pipeline, database):
    pins = Pins(pipeline)
    before = changed(pipeline, database).epoch
    snapshot = changed(pipeline, database)
    kept, link = rows(snapshot), snapshot.manifest
    folder = f"{pipeline.lake}/{link.tables[DOCS].path}"
    assert pins.pin("release", snapshot.epoch) == f"pins epoch {snapshot.epoch}"
    # Repeated, it is the same pin; another epoch needs another name.
    assert pins.pin("release", snapshot.epoch) == f"pins epoch {snapshot.epoch} already"
    with pytest.raises(LakeError, match=f"it pins epoch {snapshot.epoch} already"):
        pins.pin("release", before)
    for _ in range(3):
        changed(pipeline, database)
    # Also of a table that was copied again since, whose folder no link in the chain names.
    requests.ask(pins.chain, "resync", [DOCS])
    wait_for(
        lambda: changed(pipeline, database).manifest.tables[DOCS].path != link.tables[DOCS].path,
        60,
        "the copy",
    )
    changed(pipeline, database)
    del snapshot
    pins.expire()
    for number in (before, link.epoch + 1):
        with pytest.raises((TrimmedError, LakeError)):
            read(pipeline.spark, pipeline.lake, epoch=number)
    with pytest.raises(TrimmedError, match="has expired"):
        pins.pin("late", before)
    assert rows(read(pipeline.spark, pipeline.lake, pin="release")) == kept
    assert rows(read(pipeline.spark, pipeline.lake, epoch=link.epoch)) == kept
    wanted = {name: {tag_of("release"): t.snapshot_id} for name, t in link.tables.items()}
    assert tags(pipeline.lake, link) == wanted
    # An engine that knows nothing of the lake.
    for name, table in link.tables.items():
        opened = StaticTable.from_metadata(f"{pipeline.lake}/{table.path}")
        found = opened.scan().use_ref(tag_of("release")).to_arrow()
        assert found.num_rows == table.rows
        if name == DOCS:
            shown = {
                row.id: row.n
                for row in read(pipeline.spark, pipeline.lake, pin="release")[name].collect()
            }
            assert dict(zip(found["id"].to_pylist(), found["n"].to_pylist(), strict=True)) == shown
    assert pins.unpin("release") == f"no longer pins epoch {link.epoch}"
    assert set(map(str, tags(pipeline.lake, link).values())) == {"{}"}
    with pytest.raises(LakeError, match="there is no pin 'release'"):
        read(pipeline.spark, pipeline.lake, pin="release")
    pins.expire()
    assert PinnedLinks(pins.chain.store).names() == []
    assert not Path(folder).exists()
    with pytest.raises(TrimmedError):
        read(pipeline.spark, pipeline.lake, epoch=link.epoch)
    with pytest.raises(LakeError, match="there is no pin of this name"):
        pins.unpin("release")
    assert_no_orphans(pipeline.spark, pipeline.lake)


@pytest.mark.iceberg_only(
    "the files of a Delta version that another engine removes are an error of Spark's own"
)
def test_10_the_writer_s_own_retention_keeps_what_others_may_destroy(pipeline, database):
    """A procedure of another engine takes the snapshots of unpinned epochs; a pinned one stays."""
    pins = Pins(pipeline)
    first = changed(pipeline, database)
    kept = rows(first)
    pins.pin("audit", first.epoch)
    second = changed(pipeline, database)
    last = changed(pipeline, database)
    assert set(refs_in(f"{pipeline.lake}/{last.manifest.tables[DOCS].path}")) == {
        "main",
        f"tuskline_t{last.manifest.term}",
        tag_of("audit"),
    }
    # Within the retention.
    assert len(rows(second)) == 3
    spark = pipeline.spark
    for key, value in catalog_settings(pipeline.lake, "others").items():
        spark.conf.set(key, value)
    for name, table in last.manifest.tables.items():
        loaded = f"{name.rpartition('.')[0]}.`{table.path.rpartition('/')[2]}`"
        spark.sql(
            f"CALL others.system.expire_snapshots(table => '{loaded}', "
            "older_than => TIMESTAMP '2999-01-01 00:00:00', retain_last => 1)"
        )
    assert rows(read(spark, pipeline.lake, pin="audit")) == kept
    assert rows(read(spark, pipeline.lake)) == rows(last)
    with pytest.raises(LakeError, match="has lost snapshot"):
        rows(read(spark, pipeline.lake, epoch=second.epoch))
    with pytest.raises(LakeError, match=r"snapshot \d+ is missing"):
        pins.pin("gone", second.epoch)
    # Refused as a whole: no table has a tag of it.
    wait_for(lambda: (pipeline.house.run_once(), "gone" not in pipeline.head().pins)[1], 30, "end")
    assert {tag for found in tags(pipeline.lake, last.manifest).values() for tag in found} == {
        tag_of("audit")
    }


class DiedError(BaseException):
    """The driver has died here."""


@contextmanager
def dying_at(monkeypatch, place):
    """From here on the first driver that comes to this fail point ends, and does nothing more."""

    def hit(name):
        if name == place:
            raise DiedError(name)

    with monkeypatch.context() as patched:
        patched.setattr(fail_point, "hit", hit)
        yield


@pytest.mark.parametrize("place", ["pin-recorded", "pin-linked", "pin-tagged-one", "pin-settled"])
def test_4_5_6_a_driver_that_dies_while_it_pins_leaves_all_or_nothing(
    pipeline, database, monkeypatch, place
):
    pins, spark = Pins(pipeline), pipeline.spark
    snapshot = changed(pipeline, database)
    kept, link = rows(snapshot), snapshot.manifest
    del snapshot

    def survives(request, house):
        """The driver dies at the place; another one takes over and expires what it may. The dead one changes nothing."""
        with dying_at(monkeypatch, place), pytest.raises(DiedError):
            pins.wait(request, house)
        # No reader is given half a pin.
        with pytest.raises(LakeError, match="pin 'a'"):
            read(spark, pipeline.lake, pin="a")
        assert {at for found in tags(pipeline.lake, link).values() for at in found} <= {tag_of("a")}
        newer = pipeline.lakehouse()
        newer.run_once()
        pins.expire(newer)
        pins.wait(request, newer)
        with pytest.raises(FencedError):
            changed(pipeline, database, house)
        return newer

    newer = survives(pins.ask("pin", "a", link.epoch), pipeline.house)
    pin = pipeline.head().pins["a"]
    assert (pin.state, pin.epoch) == (PINNED, link.epoch)
    assert tags(pipeline.lake, link) == {
        name: {tag_of("a"): table.snapshot_id} for name, table in link.tables.items()
    }
    assert rows(read(spark, pipeline.lake, pin="a")) == kept
    if place != "pin-recorded":  # not of a release
        newest = survives(pins.ask("unpin", "a"), newer)
        assert pipeline.head().pins == {}
        assert set(map(str, tags(pipeline.lake, link).values())) == {"{}"}
        # The name is free for another epoch.
        later = changed(pipeline, database, newest)
        pins.pin("a", later.epoch, house=newest)
        assert {at for found in tags(pipeline.lake, link).values() for at in found.values()} == {
            table.snapshot_id for table in later.manifest.tables.values()
        }


def test_a_pin_ends_by_itself_and_its_name_waits_for_its_tags(pipeline, database):
    pins = Pins(pipeline)
    first = changed(pipeline, database)
    pins.pin("week", first.epoch, seconds=3600.0)
    second = changed(pipeline, database)
    clock = pipeline.house._writer.tables._clock
    now = clock.now
    clock.now = lambda: now() + 3601
    # In one poll: released since its time is over, asked for again, and released.
    again, unpin = pins.ask("pin", "week", second.epoch), pins.ask("unpin", "week")
    pipeline.house.run_once()
    assert "week" not in pipeline.head().pins
    pins.wait(unpin)
    with pytest.raises(LakeError, match="released before"):
        pins.wait(again)
    assert pipeline.head().pins == {}
    assert set(map(str, tags(pipeline.lake, second.manifest).values())) == {"{}"}


def test_36_a_user_s_tag_of_a_pin_s_name_is_left_alone(pipeline, database):
    pins = Pins(pipeline)
    link = changed(pipeline, database).manifest
    path = f"{pipeline.lake}/{link.tables[DOCS].path}"
    raw = pipeline.house._format._tables._tables.load(path)
    raw.manageSnapshots().createTag(tag_of("mine"), link.tables[DOCS].snapshot_id).commit()
    with pytest.raises(LakeError, match="exists that no pin created"):
        pins.pin("mine", link.epoch)
    wait_for(lambda: (pipeline.house.run_once(), not pipeline.head().pins)[1], 30, "its end")
    pins.pin("yours", link.epoch)
    pins.expire()
    pins.unpin("yours")
    pins.expire()
    assert refs_in(path)[tag_of("mine")].snapshot == link.tables[DOCS].snapshot_id
    assert tags(pipeline.lake, link) == {name: {} for name in link.tables}


def test_what_show_prints_reads_the_cut_in_spark_and_pyiceberg(pipeline, database, spark):
    pins = Pins(pipeline)
    snapshot = changed(pipeline, database)
    link, kept = snapshot.manifest, rows(snapshot)
    config = pipeline.folder / "lake.toml"
    config.write_text(machine("lake").replace('uri = "lake"', f'uri = "{pipeline.lake}"'))
    # A session keeps a catalog that it has looked into once, also when its settings change: another test's lake.
    spark = spark.newSession()
    for key, value in catalog_settings(pipeline.lake, "tuskline").items():
        spark.conf.set(key, value)

    def printed(engine):
        from typer.testing import CliRunner

        arguments = [
            "epochs",
            "show",
            str(link.epoch),
            "--sql",
            engine,
            "--json",
            "-c",
            str(config),
        ]
        done = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout.splitlines()[-1])

    for pinned in (False, True):
        if pinned:
            pins.pin("shown", link.epoch)
            changed(pipeline, database)
        views, _ = cut_tables(link, pipeline.head())
        for each in printed(SPARK)["statements"]:
            spark.sql(each["statement"].removesuffix(";"))
            name = each["table"]
            view = views[name].view
            found = spark.table(f"`{view}`").drop("_tuskline_row")
            assert sorted(str(tuple(row)) for row in found.collect()) == kept[name]
            spark.catalog.dropTempView(view)
        made = printed(PYICEBERG)
        space: dict[str, Any] = {}
        exec("\n".join([made["preamble"], *(s["statement"] for s in made["statements"])]), space)  # noqa: S102
        for name, scan in space["tables"].items():
            assert scan.to_arrow().num_rows == len(kept[name])
        for engine in ENGINES:
            texts = [each["statement"] for each in printed(engine)["statements"]]
            by_tag = pinned and engine != "duckdb"
            assert all((tag_of("shown") in text) == by_tag for text in texts)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["pin", "unpin"])
def test_4_5_6_a_driver_killed_while_it_pins_or_unpins(tmp_path, database, spark, kind):
    """Real processes, SIGKILL."""
    database.execute(
        "CREATE TABLE one (id int PRIMARY KEY)",
        "CREATE TABLE two (id int PRIMARY KEY)",
        "INSERT INTO one VALUES (0)",
    )
    with Stack(tmp_path, {"shop": database.dsn}, epoch_interval=0.5) as stack:
        chain = open_chain(stack.lake)

        def head():
            return chain.head()

        stack.start("log-server", "bridge", "lake")
        wait_for(lambda: (h := head()) and len(h.tables) == 2, 240, "the first epoch")
        link = head()
        before = requests.ask(chain, "pin", (), pin="kept", epoch=link.epoch)
        requests.wait(chain, before, timeout=120)
        kept = rows(read(spark, stack.lake, pin="kept"))
        stack.kill("lake")
        name = "new" if kind == "pin" else "kept"
        for place in ("pin-linked", "pin-tagged-one", "pin-settled"):
            database.execute(f"INSERT INTO one VALUES ({len(place)})")
            request = requests.ask(chain, kind, (), pin=name, epoch=link.epoch)
            stack.start("lake", env={"TUSKLINE_FAIL_POINT": place})
            assert stack.wait("lake", 240) == -9
            assert name not in head().pins or head().pins[name].state != PINNED
        stack.start("lake")
        if kind == "pin":
            requests.wait(chain, request, timeout=240)
            assert rows(read(spark, stack.lake, pin="new")) == kept
            assert rows(read(spark, stack.lake, pin="kept")) == kept
        else:
            wait_for(lambda: not head().pins, 240, "the release")
        wanted = {tag_of(each): 1 for each in head().pins}
        assert all(found.keys() == wanted.keys() for found in tags(stack.lake, link).values())
