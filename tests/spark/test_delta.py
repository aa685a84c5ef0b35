"""Delta tables over the data files of the lake's Iceberg tables: PostgreSQL's rows at every epoch, by Delta's own reader."""

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from spark_consumers import Lakehouse, read
from spark_consumers.lake import reader
from spark_consumers.lake.delta_log import delta_tables
from spark_consumers.lake.delta_log.delta_tables import DeltaTables
from spark_consumers.lake.delta_log.log import DeltaLog, refusal_of
from spark_consumers.lake.delta_log.record import read_record
from spark_consumers.lake.epoch import epoch_writer as epoch_module
from spark_consumers.lake.flush import flush
from spark_consumers.lake.format import avro, snapshot_files
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.reader import view_names
from spark_consumers.lake.tables.sources import Source
from spark_consumers.lake.verify import verify
from spark_consumers.lake.views.definition import ViewDefinition
from spark_consumers.lake.writer import requests
from tests.cluster.test_types import SETUP, TEXTUAL, TYPED
from tests.spark.test_engines import (
    EPOCHS,
    MORE_TABLES,
    REMADE,
    TOUCHED,
    fill_types,
    types_table,
)
from tests.spark.test_lake_s3 import new_lake
from tests.spark.test_recorded_changes import install
from tests.support.bank_load import TABLES as BANK
from tests.support.bank_load import check, load
from tests.support.capture_stack import STREAM
from tests.support.engines import fault_of, has_same_rows
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import PUBLISHED, TABLES, Pipeline
from tests.support.machine_files import machine
from tests.support.pin_requests import Pins
from tests.support.s3 import options_at
from tests.support.stack import Stack
from tests.support.suspended import is_suspended
from tests.support.waiting import wait_for
from walsender_bridge.cli import app as cli
from walsender_bridge.errors import FencedError, LakeError, NotSupportedError, TrimmedError
from walsender_bridge.postgres.table_layout import SOFT_DELETE, LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern

pytestmark = pytest.mark.iceberg_only("reads by Delta where it says so")

ALL = (*PUBLISHED, "public.days", "public.many")
NAMES = tuple(name.removeprefix("public.") for name in ALL)
SMALL = ("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")


def restarted(pipeline, **options):
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(delta=True, **options)


def by_delta(pipeline, **options):
    return read(pipeline.spark, pipeline.lake, format="delta", **options)


def assert_postgresql_s(database, shown, names=None):
    """Each of these tables of the snapshot, by default all, has PostgreSQL's columns and rows as they are now."""
    names = shown.tables if names is None else names
    faults = {name: fault_of(database.dsn, name, shown[name].toArrow()) for name in names}
    assert not any(faults.values()), faults


def assert_same(pipeline, epoch, *names):
    """Delta reads at this epoch what Iceberg reads, of these tables or of all."""
    there, here = read(pipeline.spark, pipeline.lake, epoch=epoch), by_delta(pipeline, epoch=epoch)
    assert there.tables == here.tables
    for name in names or there.tables:
        assert has_same_rows(there[name].toArrow(), here[name].toArrow()), (name, epoch)


def log_of(pipeline, name):
    return DeltaLog(pipeline.lake / pipeline.head().tables[f"{STREAM}.public.{name}"].path)


def epochs_of(pipeline, name):
    """The epochs that the versions of a table's log show."""
    log = log_of(pipeline, name)
    return [log.shown(version).epoch for version in log.listing().commits]


def assert_found_by_names(pipeline, name):
    """Readers that know no ids find each column by its physical name in each file that has it, and no other column by that."""
    log = log_of(pipeline, name)
    state = log.state()
    described = [
        field["metadata"] for field in json.loads(state.metadata["schemaString"])["fields"]
    ]
    kind = "delta.columnMapping."
    names = {each[f"{kind}id"]: each[f"{kind}physicalName"] for each in described}
    for path in state.adds:
        columns = pq.read_schema(log.folder.parent / unquote(path))
        there = {int(c.metadata[b"PARQUET:field_id"]): c.name for c in columns}
        by_id = {number: there.get(number) for number in names}
        by_name = {n: name if name in there.values() else None for n, name in names.items()}
        assert by_id == by_name, path


def logs_behind(pipeline):
    """What status and doctor are told of logs that are behind."""
    record = read_record(open_chain(pipeline.lake).store)
    assert record is not None
    return record.behind


def resynced(pipeline, name):
    """Have a table copied again."""
    before = log_of(pipeline, name).folder
    requests.ask(open_chain(pipeline.lake), "resync", [f"{STREAM}.public.{name}"])

    def is_another():
        pipeline.house.run_once(force=True)
        return log_of(pipeline, name).folder != before

    wait_for(is_another, 60, "another copy")


@pytest.mark.parametrize(
    ("rows", "each"),
    # A table that an epoch has not changed has no other version of its log, and is only read again by the long form.
    [(5_000, False), pytest.param(200_000, True, marks=pytest.mark.long)],
    ids=["changed", "all"],
)
@pytest.mark.timeout(600)
def test_14_24_25_28_delta_reads_postgresql_s_rows_at_every_epoch(
    spark, tmp_path, database, monkeypatch, rows, each
):
    monkeypatch.setattr(epoch_module, "_COMPACT_FILES", 3)
    monkeypatch.setattr(delta_tables, "CHECKPOINT_EVERY", 3)
    database.execute(*TABLES, *MORE_TABLES)
    database.execute(f"INSERT INTO many SELECT g, g FROM generate_series(1, {rows}) g")
    with Pipeline(spark, tmp_path, database, ALL) as pipeline:
        restarted(pipeline)
        pipeline.wait_for_tables(*NAMES)
        epochs = [pipeline.head().epoch]
        seen: dict[str, int] = {}
        # Tables that are copied again are Delta tables of their own.
        remade = REMADE if each else REMADE[-1:]
        for statements in (*EPOCHS, *((*changes, *TOUCHED) for changes in remade)):
            database.execute(*statements)
            epochs.append(pipeline.flush().epoch)
            now = {name: table.snapshot_id for name, table in pipeline.head().readable.items()}
            changed = [name for name, snapshot in now.items() if each or seen.get(name) != snapshot]
            assert len(changed) >= len(TOUCHED), changed
            assert_postgresql_s(database, by_delta(pipeline), changed)
            seen = now
        for epoch in epochs if each else ():
            assert_same(pipeline, epoch)
        # By the statistics, which are of all rows of a file, removed ones too.
        many = by_delta(pipeline)["many"]
        for condition in ("id < 0", f"id > {rows - 10}", "v < 0"):
            with database.connect() as connection:
                query = f"SELECT count(*) FROM many WHERE {condition}".encode()
                assert connection.execute(query).fetchone() == (many.where(condition).count(),)
        assert_no_orphans(pipeline.spark, pipeline.lake)
        assert verify(open_chain(pipeline.lake), lambda *_: None).errors == []


def test_14_28_columns_that_are_changed_in_place_are_changed_for_delta(spark, tmp_path, database):
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, name text, n int, gone text)",
        "INSERT INTO t SELECT g, 'n' || g, g, 'x' FROM generate_series(1, 20) g",
    )
    with Pipeline(spark, tmp_path, database, ["public.t"]) as pipeline:
        install(database)
        restarted(pipeline)
        pipeline.wait_for_tables("t")
        path, epochs = pipeline.head().tables[f"{STREAM}.public.t"].path, []
        for changes in (
            ("ALTER TABLE t RENAME name TO title", "UPDATE t SET title = 'new' WHERE id = 3"),
            ("ALTER TABLE t DROP gone", "ALTER TABLE t ADD name text"),
            ("UPDATE t SET name = 'again' WHERE id IN (3, 4)", "DELETE FROM t WHERE id = 5"),
            ("ALTER TABLE t ALTER n TYPE bigint", f"UPDATE t SET n = {2**40} WHERE id = 6"),
        ):
            database.execute(*changes)
            epochs.append(pipeline.flush().epoch)
            assert_postgresql_s(database, by_delta(pipeline))
            assert_found_by_names(pipeline, "t")
        assert pipeline.head().tables[f"{STREAM}.public.t"].path == path, "nothing is copied"
        for epoch in epochs:
            assert_same(pipeline, epoch)
        # Files are skipped by the statistics of the right column.
        shown = by_delta(pipeline)["t"]
        assert shown.where("name = 'again'").count() == 2
        assert shown.where("title = 'n7'").count() == 1
        assert shown.where(f"n = {2**40}").count() == 1


def test_23_28_delta_reads_values_of_every_type(spark, tmp_path, database):
    kinds = {**TYPED, **TEXTUAL}
    database.execute(*SETUP, types_table(kinds))
    fill_types(database, kinds, 1)
    with Pipeline(spark, tmp_path, database, ["public.t"]) as pipeline:
        restarted(pipeline)
        pipeline.wait_for_tables("t")
        fill_types(database, kinds, 1000)
        database.execute("DELETE FROM t WHERE id % 5 = 0")
        pipeline.flush()
        assert_postgresql_s(database, by_delta(pipeline))


def test_5_6_7_13_28_the_next_writer_makes_the_commits_that_are_missing(
    spark, tmp_path, database, monkeypatch
):
    def fail(*_):
        raise OSError("no space left on device")

    database.execute(*SMALL)
    with Pipeline(spark, tmp_path, database, ["public.t"]) as pipeline:
        pipeline.wait_for_tables("t")
        # Without the setting, the lake has nothing of Delta's. With it, the log of a table that is there begins with its newest epochs.
        assert not list(pipeline.lake.rglob("*_delta*"))
        restarted(pipeline)
        pipeline.wait_for_tables("t")
        before = epochs_of(pipeline, "t")
        assert before
        missing = []
        with monkeypatch.context() as patch:
            patch.setattr(DeltaLog, "commit", fail)
            for number in range(3, 5):
                database.execute(
                    f"INSERT INTO t VALUES ({number}, 'c')", "DELETE FROM t WHERE id = 1"
                )
                missing.append(pipeline.flush().epoch)
            # Epochs do not depend on it, and a reader by Delta is told.
            assert epochs_of(pipeline, "t") == before
            patch.setattr("spark_consumers.lake.delta_log.read._PATIENCE", 0.1)
            with pytest.raises(LakeError, match="Delta log does not show"):
                by_delta(pipeline)["t"]
        stale = pipeline.house._writer.delta
        pipeline.house = pipeline.lakehouse(delta=True)
        # They wait for no epoch of its own.
        with monkeypatch.context() as patch:
            patch.setattr(Lakehouse, "_update_tables", fail)
            with pytest.raises(OSError, match="no space"):
                pipeline.house.run_once()
        assert epochs_of(pipeline, "t") == [*before, *missing]
        database.execute("UPDATE t SET v = 'd'")
        epoch = pipeline.flush().epoch
        # What the older writer has still to do, when it wakes up, has been done.
        stale._retry_at.clear()
        assert stale._pending
        stale.show()
        assert not stale._pending
        assert epochs_of(pipeline, "t") == [*before, *missing, epoch]
        for each in epochs_of(pipeline, "t"):
            assert_same(pipeline, each)


def test_10_28_versions_stay_as_long_as_their_epochs(spark, tmp_path, database, monkeypatch):
    monkeypatch.setattr(delta_tables, "_CLEAN_AT_LEAST", 2)
    monkeypatch.setattr(reader, "lease_on", lambda _: None)
    database.execute(*SMALL)
    with Pipeline(spark, tmp_path, database, ["public.t"]) as pipeline:
        restarted(pipeline)
        pipeline.wait_for_tables("t")
        epochs = []
        for number in range(3, 9):
            database.execute(f"INSERT INTO t VALUES ({number}, 'c')", "UPDATE t SET v = v || 'x'")
            epochs.append(pipeline.flush().epoch)
            if number == 4:
                Pins(pipeline).pin("audit", epochs[-1])
                kept = by_delta(pipeline)["t"].toArrow()
        Pins(pipeline).expire()
        assert epochs_of(pipeline, "t") == [epochs[1], epochs[-1]]
        assert has_same_rows(by_delta(pipeline, pin="audit")["t"].toArrow(), kept)
        assert_same(pipeline, epochs[-1])
        with pytest.raises(TrimmedError):
            by_delta(pipeline, epoch=epochs[2])["t"]
        with pytest.raises(Exception, match="non-existent version 4"):
            spark.read.format("delta").option("versionAsOf", 4).load(
                str(log_of(pipeline, "t").folder.parent)
            )
        # Nothing is written any more to a copy that has expired.
        old, tables = log_of(pipeline, "t").folder.parent, pipeline.house._writer.delta
        path = str(old.relative_to(pipeline.lake))
        with monkeypatch.context() as patch:
            patch.setattr(DeltaLog, "commit", lambda *_: 1 / 0)
            database.execute("DELETE FROM t WHERE id = 1")
            pipeline.flush()
            resynced(pipeline, "t")
            assert path in tables._pending
            Pins(pipeline).unpin("audit")
            Pins(pipeline).expire()
        assert not old.exists()
        assert path not in tables._pending


def test_28_no_other_program_writes_to_a_delta_table(spark, tmp_path, database):
    database.execute(*SMALL)
    with Pipeline(spark, tmp_path, database, ["public.t"]) as pipeline:
        restarted(pipeline)
        pipeline.wait_for_tables("t")
        folder = log_of(pipeline, "t").folder.parent
        table = f"delta.`{folder}`"
        # With one data file, there is nothing that it could commit.
        assert not refused(spark, f"OPTIMIZE {table}")
        database.execute("INSERT INTO t VALUES (3, 'c')")
        pipeline.flush()
        before, versions = set(folder.rglob("*")), log_of(pipeline, "t").listing()
        for statement in (
            f"INSERT INTO {table} VALUES (4, 'd')",
            f"DELETE FROM {table} WHERE id = 1",
            f"VACUUM {table} RETAIN 200 HOURS",
            f"VACUUM {table} LITE",
            f"OPTIMIZE {table}",
            f"ALTER TABLE {table} ADD COLUMN x int",
        ):
            assert "DELTA_UNSUPPORTED_FEATURES_FOR_WRITE" in refused(spark, statement), statement
        assert log_of(pipeline, "t").listing() == versions
        # Delta's INSERT writes its rows before it is refused; nothing names that file.
        assert before <= set(folder.rglob("*"))
        assert spark.sql(f"SELECT count(*) FROM {table}").collect()[0][0] == 3
        # A log that cannot be written is told, until it can; epochs go on.
        log = log_of(pipeline, "t").folder
        shown, aside = pipeline.head().epoch, log.rename(log.with_name("aside"))
        log.touch()
        database.execute("INSERT INTO t VALUES (5, 'e')")
        pipeline.flush()
        told = logs_behind(pipeline)[f"{STREAM}.public.t"]
        assert (told.shown, told.newest) == (shown, pipeline.head().epoch)
        assert str(log) in told.reason
        log.unlink()
        aside.rename(log)

        def is_told_no_more():
            pipeline.house.run_once(force=True)
            return not logs_behind(pipeline)

        wait_for(is_told_no_more, 30, "the log to be written")
        assert_same(pipeline, pipeline.head().epoch, "t")


def test_33_a_log_that_is_removed_begins_again(spark, tmp_path, database):
    database.execute(*SMALL)
    with Pipeline(spark, tmp_path, database, ["public.t"]) as pipeline:
        restarted(pipeline)
        pipeline.wait_for_tables("t")
        tables = pipeline.house._writer.delta
        tables._look_at = float("inf")
        log = log_of(pipeline, "t")
        for number in range(3, 6):
            database.execute(f"INSERT INTO t VALUES ({number}, U&'\\+10FFFF')")
            pipeline.flush()
        # Escapes of such characters are not read correctly by all readers.
        (added,) = [a["add"] for a in log.actions(log.listing().newest) if "add" in a]
        assert "\U0010ffff" in added["stats"]
        log.commit_file(1).unlink()
        with pytest.raises(LakeError, match=r"Delta cannot open the table: .*DELTA_"):
            by_delta(pipeline)["t"]
        # The driver has what the log had in memory.
        shutil.rmtree(log.folder)
        database.execute("INSERT INTO t VALUES (6, 'd')")
        pipeline.flush()

        def is_there():
            pipeline.house.run_once(force=True)
            return log.listing().commits

        assert wait_for(is_there, 30, "the log")[0] == 0
        assert not logs_behind(pipeline)
        assert_same(pipeline, pipeline.head().epoch, "t")
        # Nor does it wait for a change of the table; then the log has the epochs before, too.
        shutil.rmtree(log.folder)
        tables._look_at = 0
        pipeline.house.run_once()
        shown = epochs_of(pipeline, "t")
        assert len(shown) == 5
        for epoch in shown:
            assert_same(pipeline, epoch, "t")


def refused(spark, statement):
    """What Delta says to a statement; nothing if it runs."""
    try:
        spark.sql(statement).collect()
    except Exception as error:
        return str(error)
    return ""


def test_14_27_28_feeds_views_and_kept_rows_are_delta_tables_a_default_is_refused_by_name(
    spark, tmp_path, database, monkeypatch
):
    database.execute(*SMALL, *(statement.replace(" t ", " kept ") for statement in SMALL))
    sections = [
        LayoutRule(Pattern.parse("public.t"), TableLayout(), feed="{table}_changes"),
        LayoutRule(Pattern.parse("public.kept"), TableLayout(), mode=SOFT_DELETE),
    ]
    views = [ViewDefinition("views.counted", "SELECT v, count(*) AS n FROM t GROUP BY v")]
    with Pipeline(spark, tmp_path, database, ["public.t", "public.kept"]) as pipeline:
        install(database)
        restarted(pipeline, layouts=sections, views=views)
        pipeline.wait_for_tables("t", "kept", "t_changes")
        database.execute(
            "INSERT INTO t VALUES (3, 'b')",
            "DELETE FROM t WHERE id = 1",
            "DELETE FROM kept WHERE id = 1",
        )
        before = pipeline.flush()
        assert_same(pipeline, before.epoch)
        shown = by_delta(pipeline)
        assert {tuple(row) for row in shown["counted"].collect()} == {("b", 2)}
        assert [row._op for row in shown["t_changes"].orderBy("_version", "_offset").collect()] == [
            "begin",
            "insert",
            "delete",
        ]
        gone = shown["kept"].where("_deleted_at IS NOT NULL").collect()
        assert [row.id for row in gone] == [1]

        path = pipeline.head().tables[f"{STREAM}.public.t"].path
        database.execute("ALTER TABLE t ADD given int DEFAULT 7", "INSERT INTO t VALUES (4, 'd')")
        after = pipeline.flush()
        assert after["t"].where("given = 7").count() == 3
        assert pipeline.head().tables[f"{STREAM}.public.t"].path == path, "nothing is copied"
        with pytest.raises(NotSupportedError, match="its column 'given' has a default"):
            by_delta(pipeline)["t"]
        ((name, told),) = logs_behind(pipeline).items()
        assert (name, told.shown, told.newest) == (f"{STREAM}.public.t", before.epoch, after.epoch)
        assert told.reason.startswith("its column 'given' has a default")
        # Its feed has no default, the other tables go on, and so does the epoch before.
        assert_same(pipeline, before.epoch, "t")
        shown = by_delta(pipeline)
        for name in ("t_changes", "counted", "kept"):
            assert has_same_rows(after[name].toArrow(), shown[name].toArrow()), name
        resynced(pipeline, "t")
        assert_same(pipeline, pipeline.head().epoch, "t")
        assert not logs_behind(pipeline)
        # What is refused is one snapshot, and not those that were published behind it meanwhile.
        with monkeypatch.context() as patch:
            patch.setattr(DeltaTables, "show", lambda _: None)
            for change in ("ADD other int DEFAULT 7", "DROP other"):
                database.execute(f"ALTER TABLE t {change}", "UPDATE t SET v = v || 'x'")
                pipeline.flush()
        pipeline.house.run_once()
        assert_same(pipeline, pipeline.head().epoch, "t")
        assert refusal_of(log_of(pipeline, "t").folder.parent) is None
        assert_no_orphans(pipeline.spark, pipeline.lake)


def test_22_28_a_copy_is_a_delta_table_of_its_own_and_live_reads_merge_it(
    spark, tmp_path, database, monkeypatch
):
    database.execute(*SMALL)
    with Pipeline(spark, tmp_path, database, ["public.t"]) as pipeline:
        restarted(pipeline, deletes={"default": "position-deletes"})
        pipeline.wait_for_tables("t")
        # What could not be written to the log of a table before it was copied again is written all the same.
        with monkeypatch.context() as patch:
            patch.setattr(DeltaLog, "commit", lambda *_: 1 / 0)
            database.execute("DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (7, 'g')")
            before = pipeline.flush().epoch
            resynced(pipeline, "t")
        tables = pipeline.house._writer.delta
        tables._retry_at.clear()
        pipeline.house.run_once()
        assert_same(pipeline, before)
        assert len(tables._states) == len(tables._shown) == 1, "the earlier copy is forgotten"
        assert_postgresql_s(database, by_delta(pipeline))
        assert log_of(pipeline, "t").listing().commits[0] == 0
        # What plain readers open leads to it.
        plain = spark.read.format("delta").load(f"{pipeline.lake}/tables/{STREAM}/public/t")
        assert sorted(row.id for row in plain.collect()) == [2, 7]
        database.execute("UPDATE t SET v = 'live' WHERE id = 2", "DELETE FROM t WHERE id = 7")
        pipeline.barrier()
        live = by_delta(pipeline, live=True, log=pipeline.log.address)
        assert live.epoch > pipeline.head().epoch
        assert_postgresql_s(database, live)


def test_28_what_show_prints_reads_the_cut_by_delta(spark, tmp_path, database):
    database.execute(*SMALL, *(statement.replace(" t ", ' "o`dd" ') for statement in SMALL))
    config = tmp_path / "lake.toml"
    config.write_text(machine("lake").replace('uri = "lake"', f'uri = "{tmp_path / "lake"}"'))

    def printed(epoch):
        told = ["epochs", "show", str(epoch), "--sql", "delta", "--json", "-c", str(config)]
        done = CliRunner().invoke(cli.app, told, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout.splitlines()[-1])

    def assert_reads(epoch, *names):
        made = printed(epoch)
        assert [each["table"] for each in made["statements"]] == list(names)
        expected = read(spark, pipeline.lake, epoch=epoch)
        views = view_names(expected.manifest.readable)
        for each in made["statements"]:
            spark.sql(each["statement"].removesuffix(";"))
            view = next(v for v, name in views.items() if name == each["table"])
            shown = spark.table("`{}`".format(view.replace("`", "``")))
            assert has_same_rows(expected[each["table"]].toArrow(), shown.toArrow())
            spark.catalog.dropTempView(view)
        return made["left_out"]

    odd, t = (f"{STREAM}.public.{name}" for name in ("o`dd", "t"))
    with Pipeline(spark, tmp_path, database, ["public.t", 'public."o`dd"']) as pipeline:
        install(database)
        restarted(pipeline)
        pipeline.wait_for_tables("t", "o`dd")
        database.execute("DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (3, 'c')")
        first = pipeline.flush().epoch
        resynced(pipeline, "t")
        database.execute("UPDATE t SET v = 'new'", 'ALTER TABLE "o`dd" ADD given int DEFAULT 7')
        second = pipeline.flush().epoch
        assert assert_reads(first, odd, t) == {}
        left_out = assert_reads(second, t)
        assert list(left_out) == [odd]
        assert left_out[odd].startswith("its column 'given' has a default")


def test_28_a_commit_reads_the_manifests_that_are_new(spark, tmp_path, database, monkeypatch):
    """Not all of the table's: a commit would cost the more, the more files there are."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, part int, v text)",
        "INSERT INTO t SELECT g, g % 7, 'a' FROM generate_series(1, 70) g",
    )
    opened = []

    def rows(file):
        opened.append(str(file))
        return avro.rows(file)

    with Pipeline(spark, tmp_path, database, ["public.t"]) as pipeline:
        install(database)
        layout = TableLayout.parse(["part"])
        restarted(pipeline, layouts=[LayoutRule(Pattern.parse("public.t"), layout)])
        pipeline.wait_for_tables("t")
        # Iceberg's library reads the manifests that it joins by itself, and not by this.
        monkeypatch.setattr(snapshot_files, "avro", SimpleNamespace(rows=rows))
        seen: set[str] = set()
        for number in range(4):
            database.execute(
                f"INSERT INTO t VALUES ({100 + number}, 3, 'b')",
                f"UPDATE t SET v = 'c{number}' WHERE id IN (1, 2)",
            )
            opened.clear()
            pipeline.flush()
            pipeline.house.run_once()
            by_delta(pipeline)
            assert 1 <= len(opened) <= 3, "new rows, and vectors of removed ones"
            assert seen.isdisjoint(opened)
            seen.update(opened)
            assert_postgresql_s(database, by_delta(pipeline))
        # The statistics are of columns by their physical names: with another schema all is read again.
        database.execute("ALTER TABLE t ADD w int", "UPDATE t SET w = 7 WHERE id < 9")
        pipeline.flush()
        assert_postgresql_s(database, by_delta(pipeline))
        assert by_delta(pipeline)["t"].where("w = 7").count() == 8
        # And behind an attempt that failed.
        with monkeypatch.context() as patch:
            patch.setattr(DeltaLog, "commit", lambda *_: 1 / 0)
            database.execute("DELETE FROM t WHERE id = 3")
            pipeline.flush()
        database.execute("DELETE FROM t WHERE id = 4")
        pipeline.flush()
        pipeline.house._writer.delta._retry_at.clear()
        pipeline.house.run_once()
        assert_postgresql_s(database, by_delta(pipeline))


def test_28_sections_of_tables_say_which_are_delta_tables(spark, tmp_path, database):
    database.execute(*SMALL, *(statement.replace(" t ", " plain ") for statement in SMALL))
    section = LayoutRule(Pattern.parse("public.t"), TableLayout(), delta=True)
    with Pipeline(spark, tmp_path, database, ["public.t", "public.plain"]) as pipeline:
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse(layouts=[section])
        pipeline.wait_for_tables("t", "plain")
        database.execute("DELETE FROM t WHERE id = 1", "DELETE FROM plain WHERE id = 1")
        pipeline.flush()
        shown = by_delta(pipeline)
        assert_postgresql_s(database, shown, [f"{STREAM}.public.t"])
        assert not log_of(pipeline, "plain").folder.exists()
        with pytest.raises(LakeError, match="has no Delta log"):
            shown["plain"]
        record = read_record(open_chain(pipeline.lake).store)
        assert record is not None
        assert (record.tables, record.behind) == (1, {})


def test_28_status_and_doctor_name_a_log_that_is_behind(spark, tmp_path, database):
    database.execute(*SMALL)
    config = tmp_path / "lake.toml"
    text = machine("lake").replace('uri = "lake"', f'uri = "{tmp_path / "lake"}"')
    config.write_text(f'{text}[[lake.tables]]\npattern = "public.*"\ndelta = true\n')

    def said(command):
        done = CliRunner().invoke(cli.app, [command, "-c", str(config)])
        return done.output

    with Pipeline(spark, tmp_path, database, ["public.t"]) as pipeline:
        install(database)
        restarted(pipeline)
        pipeline.wait_for_tables("t")
        pipeline.flush()
        assert "1 of 1 tables at their newest epoch" in said("status")
        assert "Delta" not in said("doctor")
        database.execute("ALTER TABLE t ADD given int DEFAULT 7", "UPDATE t SET v = 'x'")
        newest = pipeline.flush().epoch
        assert "0 of 1 tables at their newest epoch; behind: shop.public.t" in said("status")
        told = " ".join(said("doctor").split())
        assert "Delta logs do not show the newest epoch of 1 table" in told, told
        shown = epochs_of(pipeline, "t")[-1]
        assert f"shows epoch {shown} of {newest}, because its column 'given' has a default" in told


@pytest.mark.long
@pytest.mark.timeout(600)
def test_3_5_6_28_a_driver_killed_around_a_delta_commit_leaves_whole_epochs(
    tmp_path, database, spark
):
    database.execute(*BANK)

    def head():
        return open_chain(stack.lake).head()

    with Stack(
        tmp_path, {"shop": database.dsn}, epoch_interval=0.5, lake="delta = true\n"
    ) as stack:
        stack.start("log-server", "bridge", "lake")
        wait_for(lambda: head() and len(head().readable) == 3, 120, "the first epoch")
        stack.kill("lake")
        for place in ("before-delta-commit", "after-delta-commit"):
            database.execute("UPDATE accounts SET balance = balance")
            stack.start("lake", env={"TUSKLINE_FAIL_POINT": place})
            assert stack.wait("lake", 240) == -9
        stack.start("lake")
        flush(
            stack.lake,
            stack.log_address,
            [Source("shop", database.dsn, "tuskline_shop")],
            timeout=240,
        )
        shown = read(spark, stack.lake, format="delta")
        assert_equal(database.dsn, shown)
        assert stack.stop("lake") == 0
        for epoch in {m.epoch for m in open_chain(stack.lake).links() if len(m.readable) == 3}:
            check(read(spark, stack.lake, epoch=epoch, format="delta"))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_2_13_28_a_driver_suspended_before_a_delta_commit_changes_nothing_later(
    tmp_path, database, spark, seed
):
    database.execute(*BANK)

    def head():
        return open_chain(stack.lake).head()

    def logs():
        return [DeltaLog(Path(stack.lake) / table.path) for table in head().readable.values()]

    def seen():
        """All files of the logs, and what Delta reads at each epoch."""
        files = {file: file.read_bytes() for log in logs() for file in log.folder.iterdir()}
        rows = {}
        for epoch in epochs:
            shown = read(spark, stack.lake, epoch=epoch, format="delta")
            check(shown)
            rows[epoch] = {
                name: sorted(map(str, shown[name].toArrow().to_pylist())) for name in shown.tables
            }
        return files, rows

    with Stack(
        tmp_path, {"shop": database.dsn}, epoch_interval=0.5, lake="delta = true\n"
    ) as stack:
        stack.start("log-server", "bridge", "lake")
        wait_for(lambda: head() and len(head().readable) == 3, 120, "the first epoch")
        assert stack.stop("lake") == 0
        stack.start("lake", env={"TUSKLINE_FAIL_POINT": "before-delta-commit:stop"})
        stale = stack.take("lake")
        try:
            with load(database.dsn, seed):
                wait_for(lambda: is_suspended(stale.pid), 240, "the driver to be suspended")
            # The epoch is published, and commits of it are missing.
            epochs = [head().epoch]
            assert any(log.shown(log.listing().newest).epoch < epochs[0] for log in logs())
            # The command would refuse a second driver on this machine.
            source = Source("shop", database.dsn, "tuskline_shop")
            house = Lakehouse(spark, stack.lake, stack.log_address, [source], delta=True)
            for number in range(3):
                with load(database.dsn, seed + number):
                    made = wait_for(lambda: house.run_once(force=True), 60, "an epoch")
                epochs.append(made.epoch)
            house.close()
            before = seen()
            stale.send_signal(signal.SIGCONT)
            assert stale.wait(120) == FencedError.cause
            assert seen() == before
        finally:
            stale.kill()
            stale.wait()


@pytest.mark.long
@pytest.mark.usefixtures("s3_keys")
def test_28_delta_tables_in_a_bucket(spark, tmp_path, database, s3_port):
    database.execute(*SMALL)
    at = {"lake": new_lake(), "store": options_at(s3_port)}
    with Pipeline(spark, tmp_path, database, ["public.t"], **at) as pipeline:
        restarted(pipeline)
        pipeline.wait_for_tables("t")
        database.execute("DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (7, 'g')")
        pipeline.flush()
        assert_postgresql_s(database, by_delta(pipeline, store=pipeline.store))
