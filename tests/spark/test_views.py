"""Views: at every epoch, equal to what PostgreSQL answers to the same SQL at the same cut."""

import gc
import json
import random
import shutil
import threading
import time
from dataclasses import replace

import pytest
from pyspark.errors import PySparkException

from spark_consumers import Source, read
from spark_consumers.lake.epoch import (
    epoch_changes,
    epoch_writer,
    table_changes,
    view_attempts,
    view_sink,
    view_writer,
)
from spark_consumers.lake.flush import flush
from spark_consumers.lake.format import checksums
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.verify import verify
from spark_consumers.lake.views import plan
from spark_consumers.lake.views.definition import ViewDefinition
from spark_consumers.lake.writer import requests
from spark_consumers.spark.failures import SPARK_ERRORS
from tests.support import bank_load
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.lake_check import assert_no_orphans
from tests.support.lake_pipeline import Pipeline
from tests.support.stack import Stack
from tests.support.view_check import (
    BAG,
    BANK,
    BY_TITLE,
    CHANGES,
    FLAT,
    JOINED,
    VIEWS,
    assert_views,
    assert_views_of_epoch,
    settings_of,
)
from tests.support.waiting import wait_for
from walsender_bridge.errors import LakeError
from walsender_bridge.runtime import fail_point


def with_views(pipeline, *views):
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(views=views)
    return pipeline.house


def test_27_views_equal_their_sql_on_postgresql_at_every_cut(pipeline, database):
    with_views(pipeline, *VIEWS)
    assert_views(database, pipeline.flush(), VIEWS)
    kinds = {name: view.kind for name, view in pipeline.head().views.items()}
    assert kinds.pop("views.outer") == "recomputed"
    assert set(kinds.values()) == {"incremental"}
    for changes in CHANGES:
        database.execute(*changes)
        assert_views(database, pipeline.flush(), VIEWS)


@pytest.mark.timeout(600)
def test_27_views_of_random_changes_equal_their_sql(spark, tmp_path, database, seed):
    """Rows with NULLs, key changes, deletes, TRUNCATE, several equal rows, many changes in one epoch."""
    draw = random.Random(seed)
    database.execute(*RANDOM_TABLES)
    with Pipeline(spark, tmp_path, database, ("public.facts", "public.dims")) as pipeline:
        with_views(pipeline, *RANDOM_VIEWS)
        pipeline.wait_for_tables("facts", "dims")
        for _ in range(5):
            with database.connect() as connection:
                for _ in range(draw.randint(1, 8)):
                    connection.execute(random_change(draw))
            assert_views(database, pipeline.flush(), RANDOM_VIEWS)
        assert_equal_tables(pipeline)


RANDOM_TABLES = (
    "CREATE TABLE dims (id int PRIMARY KEY, name text, rate numeric(8,3), day date)",
    "INSERT INTO dims SELECT g, 'd' || g % 4, g / 7.0, date '2024-01-01' + g FROM generate_series(1, 12) g",
    "CREATE TABLE facts (dim int, n int, big bigint, small smallint, x numeric(10,2), f float8, t text, ok bool, at timestamp)",
    "ALTER TABLE facts REPLICA IDENTITY FULL",
    (
        "INSERT INTO facts SELECT g % 14, g % 5 - 2, g * 1000000000::bigint, g % 9, g / 3.0, g / 2.0, 't' || g % 3, g % 2 = 0,"
        " timestamp '2024-01-01 10:00:00' + g * interval '7 hours' FROM generate_series(1, 120) g"
    ),
)
RANDOM_VIEWS = (
    ViewDefinition(
        "views.chosen",
        "SELECT t || '-' || n::text AS label, CASE WHEN ok THEN n * 2 WHEN ok IS NULL THEN -1 ELSE small END AS c,"
        " coalesce(x, 0) + n AS s, n / 2 AS half, n % 3 AS rest, at::date AS day, extract(month FROM at) AS month, f, big"
        " FROM facts WHERE n <> 1 AND (t LIKE 't%' OR t IS NULL) AND NOT coalesce(ok, false)",
    ),
    ViewDefinition(
        "views.grouped",
        "SELECT t, ok, count(*) AS rows, count(x) AS xs, sum(n) AS n, sum(big) AS big, sum(x) AS x, avg(n) AS a, avg(x) AS b,"
        " round(avg(big), 3) AS c, avg(x)::numeric(12,4) AS d, min(n) AS low, max(x) AS high, max(at) AS last,"
        " sum(n) FILTER (WHERE ok) AS good FROM facts GROUP BY t, ok",
    ),
    ViewDefinition(
        "views.whole",
        "SELECT count(*) AS rows, sum(x) AS x, min(n) AS low, max(big) AS high FROM facts",
    ),
    ViewDefinition(
        "views.joined",
        "SELECT d.name, f.n, f.x * d.rate AS amount FROM facts f JOIN dims d ON f.dim = d.id WHERE d.rate > 0.5",
    ),
    ViewDefinition(
        "views.per_name",
        "SELECT d.name, extract(year FROM f.at) AS year, count(*) AS rows, sum(f.x * d.rate) AS amount, max(d.day) AS last"
        " FROM facts f JOIN dims d ON f.dim = d.id GROUP BY 1, 2",
    ),
    ViewDefinition(
        "views.pairs",
        "SELECT a.id, b.id AS other FROM dims a JOIN dims b ON a.name = b.name AND a.id < b.id",
    ),
    ViewDefinition("views.names", "SELECT DISTINCT name FROM dims"),
    ViewDefinition(
        "views.busy",
        "WITH c AS (SELECT dim, count(*) AS n FROM facts GROUP BY dim) SELECT d.id, d.name, c.n FROM dims d LEFT JOIN c ON c.dim = d.id",
    ),
    ViewDefinition("views.many", "SELECT t FROM facts GROUP BY t HAVING count(*) > 20"),
    ViewDefinition(
        "views.all", "SELECT name AS t FROM dims UNION ALL SELECT t FROM facts WHERE n = 0"
    ),
)


def random_change(draw):
    """One statement."""
    some = f"ctid IN (SELECT ctid FROM facts ORDER BY md5(ctid::text || '{draw.random()}') LIMIT {draw.randint(1, 30)})"
    one = draw.randint(1, 20)
    return draw.choice(
        [
            f"INSERT INTO facts SELECT {draw.choice(['NULL', str(one)])}, g - 3, -g, g, g / 7.0, 'NaN', NULL, NULL, NULL FROM generate_series(1, {one}) g",
            "INSERT INTO facts SELECT * FROM facts WHERE n = 0 LIMIT 40",
            f"DELETE FROM facts WHERE {some}",
            f"DELETE FROM facts WHERE {some}",
            f"UPDATE facts SET n = n + 1, x = x * -1, f = '-0' WHERE {some}",
            f"UPDATE facts SET t = 't' || {one % 4}, ok = NOT ok WHERE {some}",
            f"UPDATE facts SET n = NULL, x = NULL, big = NULL WHERE {some}",
            f"UPDATE dims SET id = id + {100 * one} WHERE id = (SELECT min(id) FROM dims)",
            f"UPDATE dims SET name = 'd{one % 3}', rate = NULLIF(rate, {one % 2}) WHERE id % 3 = {one % 3}",
            f"DELETE FROM dims WHERE id % 5 = {one % 5}",
            f"INSERT INTO dims VALUES ({one}, NULL, {one}.125, '2025-05-05') ON CONFLICT (id) DO UPDATE SET rate = 1",
            draw.choice(["TRUNCATE facts", "TRUNCATE dims", "SELECT 1", "SELECT 1"]),
        ]
    )


def assert_equal_tables(pipeline):
    """The lake's own files agree with its manifest, those of views too."""
    assert [error.what for error in verify(open_chain(pipeline.lake), lambda *_: None).errors] == []


def test_27_live_reads_compute_views_from_the_live_tables(pipeline, database):
    with_views(pipeline, *VIEWS)
    assert_views(database, pipeline.flush(), VIEWS)
    for changes in CHANGES[:3]:
        database.execute(*changes)
    pipeline.barrier()
    snapshot = read(pipeline.spark, pipeline.lake, live=True, log=pipeline.log.address)
    assert_views(database, snapshot, VIEWS, counted=False)
    database.execute(
        "ALTER TABLE pairs RENAME COLUMN b TO c", "INSERT INTO pairs VALUES (7, 'c', NULL, NULL)"
    )
    pipeline.barrier()
    snapshot = read(pipeline.spark, pipeline.lake, live=True, log=pipeline.log.address)
    assert "shop.views.joined" not in snapshot.tables
    assert "shop.views.titles" in snapshot.tables
    with pytest.raises(LakeError, match=r"it reads shop[.]public[.]pairs"):
        snapshot["views.joined"]


def test_27_a_view_of_a_table_that_does_not_follow_is_stale_with_the_reason(pipeline, database):
    with_views(pipeline, FLAT, JOINED)
    pipeline.flush()
    pairs = f"{STREAM}.public.pairs"
    before = pipeline.head()
    requests.ask(open_chain(pipeline.lake), requests.PAUSE, [pairs])
    database.execute("INSERT INTO docs VALUES (50, 'x', NULL, 1, 1)", "DELETE FROM pairs")
    snapshot = pipeline.flush()
    assert snapshot["views.titles"].filter("id = 50").count() == 1
    with pytest.raises(LakeError, match=r"it reads shop[.]public[.]pairs, which is paused"):
        snapshot["views.joined"]
    old = read(pipeline.spark, pipeline.lake, allow_stale=True)
    then = read(pipeline.spark, pipeline.lake, epoch=before.epoch)
    assert old["views.joined"].collect() == then["views.joined"].collect()
    assert old.manifest.readable["shop.views.joined"].as_of == before.epoch
    requests.ask(open_chain(pipeline.lake), requests.RESUME, [pairs])
    wait_for(lambda: pipeline.flush().manifest.tables[pairs].state == "live", 60, "the resume")
    database.execute("INSERT INTO pairs VALUES (1, 'back', NULL, NULL)")
    assert_views(database, pipeline.flush(), (FLAT, JOINED))
    # Copied again: computed again, from the new Iceberg table.
    requests.ask(open_chain(pipeline.lake), requests.RESYNC, [pairs])
    path = pipeline.head().tables[pairs].path

    def copied():
        return pipeline.flush().manifest.tables[pairs].path != path

    wait_for(copied, 60, "the copy")
    assert_views(database, pipeline.flush(), (FLAT, JOINED))


def test_27_a_view_whose_column_is_gone_is_stale_and_follows_its_new_definition(pipeline, database):
    with_views(pipeline, FLAT, BAG)
    pipeline.flush()
    database.execute("ALTER TABLE docs DROP COLUMN title", "UPDATE docs SET n = 5 WHERE id = 1")

    def is_gone():
        view = pipeline.flush().manifest.views[FLAT.name]
        return "column title does not exist" in view.reason

    wait_for(is_gone, 60, "the view without its column")
    snapshot = read(pipeline.spark, pipeline.lake)
    assert FLAT.name not in snapshot
    assert BAG.name in snapshot
    changed = ViewDefinition(FLAT.name, "SELECT id, n FROM docs")
    with_views(pipeline, changed)
    snapshot = pipeline.flush()
    assert_views(database, snapshot, (changed,))
    # One that is not configured any more is not in the next epoch.
    assert BAG.name not in snapshot.manifest.views


def test_27_constants_and_names_mean_the_same_as_in_postgresql(pipeline, database):
    views = (
        ViewDefinition(
            "views.constants",
            "SELECT id, nullif('t1', title) AS a, nullif(id, 2.5) AS b, nullif('x', NULL) AS c, '${env:HOME}' AS d,"
            " title = '$t' AS e, title LIKE 't$%' AS f, substring(title, 1, 0) AS g, substring(title, 2) AS h, NULL = NULL AS i FROM docs",
        ),
        ViewDefinition("views.extremes", "SELECT bool_and(id > 3), bool_or(id > 3) FROM docs"),
        ViewDefinition(
            "views.nested",
            "WITH d AS (SELECT id FROM docs), e AS (SELECT d.id FROM d JOIN pairs p ON p.a = d.id) SELECT * FROM e",
        ),
    )
    with_views(pipeline, *views)
    assert_views(database, pipeline.flush(), views)
    database.execute("UPDATE docs SET title = CASE WHEN id < 4 THEN '$t' ELSE 't$x' END")
    assert_views(database, pipeline.flush(), views)


def changed_again(pipeline, database):
    """The tables and views of an epoch with one more change."""
    database.execute("UPDATE docs SET n = n WHERE id = 1")
    return pipeline.flush()


def test_27_a_query_that_fails_makes_its_view_stale_and_holds_nothing(pipeline, database):
    failing = ViewDefinition("views.failing", "SELECT id, 10 / (id - 6) AS q FROM docs")
    with_views(pipeline, failing, FLAT)
    snapshot = pipeline.flush()
    assert_views(database, snapshot, (FLAT,))
    assert "DIVIDE_BY_ZERO" in snapshot.manifest.views[failing.name].reason
    assert failing.name not in snapshot
    database.execute("DELETE FROM docs WHERE id = 6")
    # On a busy machine, the attempt may have taken long enough for a wait.
    wait_for(lambda: failing.name in changed_again(pipeline, database), 120, "the view is kept")
    assert_views(database, pipeline.flush(), (failing, FLAT))
    database.execute("UPDATE docs SET id = 6 WHERE id = 7")
    snapshot = pipeline.flush()
    assert failing.name not in snapshot
    assert snapshot.stale["shop.views.failing"].startswith("as of epoch")


def kept_rows(spark):
    """The IDs of what the session's executors keep. Delta's reader keeps the state of each log that a test before has read."""
    ids = spark.sparkContext._jsc.sc().getPersistentRDDs().keySet().mkString(",")
    return set(ids.split(",")) - {""}


def nothing_is_kept(spark, before):
    """Whether Spark's cache has no entry, and its executors no rows but those that they had `before`.

    A query that is cancelled may ask for the rows of an entry that is gone, as a test before may have left one; these go with its plan.
    """
    if not spark._jsparkSession.sharedState().cacheManager().isEmpty():
        return False

    def is_empty():
        gc.collect()
        spark._jvm.System.gc()
        return kept_rows(spark) <= before

    wait_for(is_empty, 60, "the rows of queries that are gone are removed")
    return True


def test_an_epoch_reads_of_a_table_only_what_has_changed_for_its_views(
    spark, tmp_path, database, monkeypatch
):
    """The rows that are read of the tables are those that were changed, whatever the tables' sizes, and once for all views."""
    database.execute(
        "CREATE TABLE facts (id int PRIMARY KEY, g int, note text, n int)",
        "INSERT INTO facts SELECT g, g % 50, 'note', g FROM generate_series(1, 200000) g",
    )
    views = (
        ViewDefinition("views.flat", "SELECT id, n + 1 AS more FROM facts WHERE g = 7"),
        ViewDefinition(
            "views.sums", "SELECT g, count(*) AS rows, sum(n) AS n FROM facts GROUP BY g"
        ),
    )
    before, read_rows, computed, plans = kept_rows(spark), [], [], []
    files, compute = table_changes.changes_tasks, view_writer.ViewWriter._compute
    write, collect = view_sink.sink, view_sink.collected

    def reading(folder, changed, schema, sign):
        read_rows.append((sum(file.rows for file in changed), schema.names))
        return files(folder, changed, schema, sign)

    def writing(frame, *rest):
        plans.append(frame._jdf.queryExecution().executedPlan().toString())
        return write(frame, *rest)

    def computing(self, work, *rest):
        computed.append(work.definition.name)
        return compute(self, work, *rest)

    def collecting(frame, *rest):
        plans.append(frame._jdf.queryExecution().executedPlan().toString())
        return collect(frame, *rest)

    monkeypatch.setattr(epoch_changes, "changes_tasks", reading)
    monkeypatch.setattr(view_writer, "sink", writing)
    monkeypatch.setattr(view_writer, "collected", collecting)
    monkeypatch.setattr(view_writer.ViewWriter, "_compute", computing)
    with Pipeline(spark, tmp_path, database, ("public.facts",)) as pipeline:
        with_views(pipeline, *views)
        pipeline.wait_for_tables("facts")
        assert_views(database, pipeline.flush(), views)
        computed.clear()
        for change in ("UPDATE facts SET n = 0 WHERE id <= 10", "DELETE FROM facts WHERE id = 57"):
            database.execute(change)
            assert_views(database, pipeline.flush(), views)
        assert computed == []
        assert read_rows[-2:] == [(20, ["id", "g", "n"]), (1, ["id", "g", "n"])]
        # Each of the two views, at both epochs, has them from the cache.
        assert all("InMemoryTableScan" in plan for plan in plans[-4:])
        assert nothing_is_kept(spark, before)
        assert not [
            view for view in spark.catalog.listTables() if view.name.startswith("tuskline_")
        ]


def test_views_of_the_same_rows_share_what_is_cached_until_both_are_done(
    pipeline, database, monkeypatch
):
    """Spark has one cache entry for equal plans: the view that is done first must not remove what the other one still reads."""
    views = [
        ViewDefinition(f"views.{name}", f"SELECT title, {name}(n) AS n FROM docs GROUP BY title")
        for name in ("min", "max")
    ]
    before = kept_rows(pipeline.spark)
    with_views(pipeline, *views)
    # However slow this machine is.
    monkeypatch.setattr(view_attempts, "_BRIEF", 600.0)
    monkeypatch.setattr(view_attempts, "_BESIDE", 600.0)
    assert_views(database, pipeline.flush(), views)
    apply, collect = view_writer.ViewWriter._apply, view_sink.collected
    both, first_is_done, read_from_cache = threading.Barrier(2), threading.Event(), []

    def applied(self, *rest):
        done = apply(self, *rest)
        first_is_done.set()
        return done

    def one_after_the_other(frame, *rest):
        if both.wait(120) == 0:
            assert first_is_done.wait(120)
        plan = frame._jdf.queryExecution().executedPlan().toString()
        read_from_cache.append(plan.count("InMemoryTableScan"))
        return collect(frame, *rest)

    monkeypatch.setattr(view_writer.ViewWriter, "_apply", applied)
    monkeypatch.setattr(view_writer, "collected", one_after_the_other)
    database.execute("UPDATE docs SET n = n + 1, title = 'x'")
    assert_views(database, pipeline.flush(), views)
    first, second = read_from_cache
    assert first == second > 1
    assert nothing_is_kept(pipeline.spark, before)


@pytest.mark.parametrize("deletes", ["vectors", "copy-on-write"])
def test_27_rows_that_an_epoch_only_moves_are_no_changes_of_its_views(
    spark, tmp_path, database, monkeypatch, deletes
):
    """Where the writer joins small files, or copies on write, views get the changed rows, and are not computed again."""
    # Each epoch makes all small files one.
    monkeypatch.setattr(epoch_writer.EpochWriter, "_small_files", lambda *_: 0)
    monkeypatch.setattr(plan, "_FEW", 100)
    database.execute(
        "CREATE TABLE facts (id int PRIMARY KEY, g int, body text, n int)",
        "ALTER TABLE facts ALTER body SET STORAGE EXTERNAL",
        "INSERT INTO facts SELECT g, g % 50, repeat('x', 3000), g FROM generate_series(1, 1000) g",
    )
    views = (
        ViewDefinition("views.flat", "SELECT id, n + 1 AS more, length(body) AS l FROM facts"),
        ViewDefinition("views.sums", "SELECT g, count(*) AS rows, sum(n) FROM facts GROUP BY g"),
    )
    computed, counts = [], []
    compute, files = view_writer.ViewWriter._compute, table_changes.changed_files

    def computing(self, work, *rest):
        computed.append(work.definition.name)
        return compute(self, work, *rest)

    def finding(before, after, moves):
        found = files(before, after, moves)
        counts.append((len(moves), sum(file.rows for file in found)))
        return found

    monkeypatch.setattr(view_writer.ViewWriter, "_compute", computing)
    monkeypatch.setattr(epoch_changes, "changed_files", finding)
    with Pipeline(spark, tmp_path, database, ("public.facts",)) as pipeline:
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse(views=views, deletes={"default": deletes})
        pipeline.wait_for_tables("facts")
        assert_views(database, pipeline.flush(), views)
        computed.clear()
        counts.clear()
        for change in (
            # Without the value of `body`: the rows are completed from the files that are rewritten.
            "UPDATE facts SET n = -n WHERE id % 100 = 0",
            "DELETE FROM facts WHERE id = 57",
            "INSERT INTO facts SELECT 2000 + g, g, 'new', g FROM generate_series(1, 5) g",
        ):
            database.execute(change)
            assert_views(database, pipeline.flush(), views)
        assert computed == []
        assert counts == [(1, 20), (1, 1), (1, 5)]
        # An attempt that fails leaves the table's write to the next one, whose own files have other names: these rows count as changed.
        database.execute("UPDATE facts SET n = 5, body = 'y' WHERE id = 3")
        with monkeypatch.context() as patch:
            patch.setattr(fail_point, "hit", failing_at("views-staged"))
            with pytest.raises(RuntimeError, match="fails here"):
                pipeline.flush()
        # The same epoch once more.
        pipeline.house.run_once()
        assert_views(database, read(spark, pipeline.lake), views)
        assert counts[-1] == (1, 1004 + 1004)
        assert_equal_tables(pipeline)


def failing_at(point):
    """For `fail_point.hit`: an error at this one."""

    def hit(name):
        if name == point:
            raise RuntimeError("fails here")

    return hit


@pytest.mark.timeout(600)
def test_27_views_survive_kills_of_the_driver(tmp_path, database, spark, seed):
    """At every epoch, before and after kills, under load: each view is PostgreSQL's answer over that epoch's tables."""
    database.execute(*bank_load.TABLES)
    stop = threading.Event()
    tables = tuple(f"public.{name}" for name in ("accounts", "moves", "audit"))
    with Stack(
        tmp_path, {"shop": database.dsn}, epoch_interval=0.5, tables=tables, lake=settings_of(BANK)
    ) as stack:
        stack.start("log-server", "bridge", "lake")

        def head():
            return open_chain(stack.lake).head()

        def is_whole():
            found = head()
            return found is not None and len(found.readable) == 3 + len(BANK)

        wait_for(is_whole, 180, "the first epoch with views")
        load = threading.Thread(target=bank_load.transfer, args=(database.dsn, stop, seed, 0.05))
        load.start()
        try:
            stack.kill("lake")
            for place in ("table-written", "views-staged", "before-manifest", "after-manifest"):
                before = head()
                stack.start("lake", env={"TUSKLINE_FAIL_POINT": place})
                assert stack.wait("lake", 240) == -9
                assert (head().epoch > before.epoch) == (place == "after-manifest")
            stack.start("lake")
            link = head().link + 3
            wait_for(lambda: head().link >= link, 240, "epochs go on")
        finally:
            stop.set()
            load.join()
        flush(
            stack.lake,
            stack.log_address,
            [Source("shop", database.dsn, "tuskline_shop")],
            timeout=240,
        )
        listed = json.loads(stack.cli("view", "list", "--json").stdout)
        explained = stack.cli("view", "explain", "by_account")
        assert stack.stop("lake") == 0
        epochs = {
            m.epoch for m in open_chain(stack.lake).links() if len(m.readable) == 3 + len(BANK)
        }
        assert len(epochs) >= 4
        for epoch in sorted(epochs):
            assert_views_of_epoch(database, read(spark, stack.lake, epoch=epoch), BANK)
        assert_views(database, read(spark, stack.lake), BANK)
        assert_no_orphans(spark, stack.lake)
    kept = {row["view"]: (row["state"], row["kept"]) for row in listed["views"]}
    assert kept.pop("views.idle") == ("live", "recomputed")
    assert set(kept.values()) == {("live", "incremental")}
    assert "groups of tables and inner joins" in explained.stdout


#: Ten thousand million pairs.
ENDLESS = ViewDefinition(
    "views.endless",
    "SELECT a.id, b.id AS other FROM wide a JOIN wide b ON a.n = b.n",
    timeout=6.0,
    max_rows=10**12,
)


@pytest.fixture
def wide(pipeline, database):
    database.execute(
        "CREATE TABLE wide (id int PRIMARY KEY, n int)",
        "INSERT INTO wide SELECT g, 0 FROM generate_series(1, 100000) g",
        f"ALTER PUBLICATION {PUBLICATION} ADD TABLE wide",
    )
    pipeline.wait_for_tables("wide")
    return pipeline


def reason_of(pipeline, name):
    return pipeline.head().views[f"views.{name}"].reason


def test_a_view_that_takes_too_long_is_stopped_and_holds_nothing_back(wide, database):
    with_views(wide, FLAT, ENDLESS)
    assert_views(database, wide.flush(), (FLAT,))
    assert "took longer than 6 s" in reason_of(wide, "endless")
    # It waits for nine times as long as it took, and the epochs do not.
    database.execute(
        "UPDATE wide SET n = n WHERE id = 1", "UPDATE docs SET title = 'on' WHERE id = 1"
    )
    began = time.monotonic()
    assert_views(database, wide.flush(), (FLAT,))
    assert time.monotonic() - began < 15
    assert "took longer than 6 s" in reason_of(wide, "endless")
    assert not [*wide.lake.glob("_tuskline/views/*")]
    # What a task still finished while it was cancelled goes with the view's folder, which no epoch names.
    with_views(wide, FLAT)
    assert_views(database, wide.flush(), (FLAT,))
    assert_no_orphans(wide.spark, wide.lake)


def test_37_what_attempts_of_tasks_leave_is_no_row_of_a_view(pipeline, database, monkeypatch):
    """An attempt that goes on after its retry has won: while the epoch is written, and its files go with that; and after that."""
    write = view_sink.sink

    def twice(frame, task, record):
        write(frame, task, f"{record}.lost")
        return write(frame, task, record)

    with monkeypatch.context() as patch:
        patch.setattr(view_writer, "sink", twice)
        with_views(pipeline, FLAT, JOINED)
        assert_views(database, pipeline.flush(), (FLAT, JOINED))
        for changes in CHANGES[:2]:
            database.execute(*changes)
            assert_views(database, pipeline.flush(), (FLAT, JOINED))
        kinds = {view.kind for view in pipeline.head().views.values()}
        assert kinds == {"incremental"}
        assert_no_orphans(pipeline.spark, pipeline.lake)
    tables = [view.table for view in pipeline.head().views.values()]
    for table in tables:
        data = pipeline.lake / table.path / "data"
        newest = max(data.glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
        late = newest.with_name(f"{newest.stem}9.parquet")
        shutil.copy(newest, late)
        checksums.seal(late)
        shutil.copy(newest, newest.with_name(f".{late.name}.0123.tmp"))
    assert_views(database, pipeline.flush(), (FLAT, JOINED))
    database.execute("UPDATE docs SET title = 'later' WHERE id = 2")
    assert_views(database, pipeline.flush(), (FLAT, JOINED))
    # Nor does the next writer take what no snapshot has for rows.
    with_views(pipeline, FLAT, JOINED)
    assert_views(database, pipeline.flush(), (FLAT, JOINED))


def test_27_views_are_kept_beside_each_other_and_only_an_attempt_of_its_own_fails_one(
    wide, database, monkeypatch
):
    """A view that takes long holds up those beside it for a while, and neither its time nor its failure is theirs."""
    # Long enough for one changed row on any machine.
    endless = replace(ENDLESS, timeout=15.0)
    database.execute("UPDATE wide SET n = id")
    with_views(wide, endless, FLAT, BY_TITLE)
    assert_views(database, wide.flush(), (endless, FLAT, BY_TITLE))
    beside, alone = [], []
    attempted, attempt = view_writer.ViewWriter._attempted_beside, view_writer.ViewWriter._attempted

    def attempting_beside(self, work):
        done = attempted(self, work)
        beside.append((work.definition.name, done is not None))
        return done

    def attempting(self, work, *rest):
        alone.append(work.definition.name)
        return attempt(self, work, *rest)

    monkeypatch.setattr(view_writer.ViewWriter, "_attempted_beside", attempting_beside)
    monkeypatch.setattr(view_writer.ViewWriter, "_attempted", attempting)
    # However slow this machine is.
    monkeypatch.setattr(view_attempts, "_BRIEF", 60.0)
    monkeypatch.setattr(view_attempts, "_BESIDE", 60.0)
    for number in range(2):
        alone.clear()
        database.execute(
            f"UPDATE wide SET n = -{number} WHERE id = 1",
            f"UPDATE docs SET n = {number} WHERE id < 4",
        )
        assert_views(database, wide.flush(), (endless, FLAT, BY_TITLE))
    # The first changes were made by each by itself, since the computation may have taken longer.
    names = {endless.name, FLAT.name, BY_TITLE.name}
    assert alone == []
    assert {name for name, done in beside[-3:] if done} == names
    monkeypatch.setattr(view_attempts, "_BESIDE", 1.0)
    database.execute(
        "UPDATE wide SET n = 0 WHERE id < 50000", "UPDATE docs SET title = 'on' WHERE id = 1"
    )
    assert_views(database, wide.flush(), (FLAT, BY_TITLE))
    assert (endless.name, False) in beside[-3:]
    assert alone[0] == endless.name
    assert "took longer than 15 s" in reason_of(wide, "endless")
    # It is not tried beside others again.
    beside.clear()
    database.execute("UPDATE docs SET title = 'off' WHERE id = 1")
    assert_views(database, wide.flush(), (FLAT, BY_TITLE))
    assert endless.name not in dict(beside)
    assert_equal_tables(wide)


def test_27_changes_of_a_view_of_many_rows_are_folded_by_several_tasks(wide, database):
    same = replace(ENDLESS, sql=f"{ENDLESS.sql} AND a.id = b.id", timeout=600.0)
    grouped = ViewDefinition("views.grouped", "SELECT id % 50000 AS k, sum(n) FROM wide GROUP BY 1")
    with_views(wide, same, grouped)
    assert_views(database, wide.flush(), (same, grouped))
    database.execute("DELETE FROM wide WHERE id <= 10000", "UPDATE wide SET n = 1 WHERE id > 90000")
    assert_views(database, wide.flush(), (same, grouped))
    kinds = {view.kind for view in wide.head().views.values()}
    assert kinds == {"incremental"}


def test_a_view_with_more_rows_than_it_may_have_is_stale(wide, database):
    few = ViewDefinition("views.few", "SELECT id FROM wide WHERE n = 0", max_rows=99_999)
    growing = ViewDefinition("views.growing", "SELECT id FROM wide WHERE n = 1", max_rows=10)
    with_views(wide, few, growing)
    wide.flush()
    assert "more than 99999 rows (max_rows)" in reason_of(wide, "few")
    database.execute("UPDATE wide SET n = 1 WHERE id <= 10")
    assert_views(database, wide.flush(), (growing,))
    database.execute("UPDATE wide SET n = 1 WHERE id = 11")
    wide.flush()
    assert "more than 10 rows (max_rows)" in reason_of(wide, "growing")
    assert_no_orphans(wide.spark, wide.lake)


def test_a_view_that_ends_its_driver_again_and_again_is_left_alone(wide, database, monkeypatch):
    """What its query leaves behind when the process ends in it, and what the next process makes of that."""
    monkeypatch.setattr(view_attempts, "_LONG", 0.2)
    record = wide.lake / "_tuskline/views/views.endless"
    record.parent.mkdir()
    record.write_text(json.dumps({"sql": ENDLESS.sql, "deaths": 2}))
    with_views(wide, FLAT, ENDLESS)
    seen: list[str] = []

    def look():
        while not seen:
            text = record.read_text() if record.exists() else ""
            seen.extend([text] if '"deaths": 3' in text else [])
            time.sleep(0.05)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    wide.flush()
    thread.join(60)
    assert not record.exists()
    # The process ended in it:
    record.write_text(seen[0])
    with_views(wide, FLAT, ENDLESS)
    database.execute("UPDATE wide SET n = n WHERE id = 1")
    assert_views(database, wide.flush(), (FLAT,))
    assert "its query ended the driver 3 times" in reason_of(wide, "endless")
    # Other SQL is another query.
    with_views(wide, FLAT, replace(ENDLESS, sql="SELECT id FROM wide WHERE n = 0"))
    database.execute("UPDATE wide SET n = 1 WHERE id = 1")
    wide.flush()
    assert reason_of(wide, "endless") == ""


def test_a_view_that_cannot_be_run_holds_the_round_up_twice(wide, database, monkeypatch):
    """A failure that is not the query's own, as without memory: of PySpark's classes, or of none."""
    sink, failures = view_sink.sink, []

    def without_memory(frame, task, record):
        if isinstance(task, view_sink.StoreRows):
            failures.append(task)
            if len(failures) == 1:
                raise PySparkException("planted: no memory")
            wide.spark._jvm.java.util.Objects.requireNonNull(None, "planted: no result")
        return sink(frame, task, record)

    with_views(wide, FLAT)
    wide.flush()
    monkeypatch.setattr(view_writer, "sink", without_memory)
    with_views(wide, FLAT, replace(ENDLESS, timeout=600.0, sql="SELECT id FROM wide"))
    database.execute("UPDATE docs SET title = 'on' WHERE id = 1")
    wide.barrier()
    for _ in range(2):
        with pytest.raises(SPARK_ERRORS, match="planted"):
            wide.house.run_once(force=True)
    assert_views(database, wide.flush(), (FLAT,))
    assert "its query cannot be run: java.lang.NullPointerException: planted" in reason_of(
        wide, "endless"
    )
