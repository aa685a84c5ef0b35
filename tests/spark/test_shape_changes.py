"""Changes at the source that emit no replication message: noticed, and mended before a flush returns."""

import re
import threading
import time

import pytest

from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.reader import read
from spark_consumers.lake.status import read_status, table_rows
from spark_consumers.lake.tables.sources import Source
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import Pipeline, unreadable
from tests.support.waiting import wait_for
from walsender_bridge.postgres.client import replication_connection

#: A partitioned table `{t}` with 10 rows in `{t}_a` and 20 in `{t}_b`.
TREE = (
    "CREATE TABLE {t} (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
    "CREATE TABLE {t}_a PARTITION OF {t} FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE {t}_b PARTITION OF {t} FOR VALUES FROM (100) TO (200)",
    "INSERT INTO {t} SELECT g, 'a' FROM generate_series(1, 10) g",
    "INSERT INTO {t} SELECT g, 'b' FROM generate_series(101, 120) g",
)
PLAIN = (
    "CREATE TABLE {t} (id int PRIMARY KEY, note text)",
    "INSERT INTO {t} SELECT g, 'old' FROM generate_series(1, 9) g",
)
LOOSE = "CREATE TABLE {t}_c (LIKE {t} INCLUDING ALL)"
ATTACH = "ALTER TABLE {t} ATTACH PARTITION {t}_c FOR VALUES FROM (200) TO (300)"
MAKE = "CREATE TABLE {t}_c PARTITION OF {t} FOR VALUES FROM (200) TO (300)"
FILL = "INSERT INTO {t}_c SELECT g, 'c' FROM generate_series(201, 205) g"
DETACH, REATTACH = (
    "ALTER TABLE {t} DETACH PARTITION {t}_a",
    "ALTER TABLE {t} ATTACH PARTITION {t}_a FOR VALUES FROM (0) TO (100)",
)
OUTPUT = "CREATE OR REPLACE FUNCTION {{t}}_out({{t}}_own) RETURNS cstring AS '{}' LANGUAGE internal IMMUTABLE STRICT"
ENUM = "CREATE TYPE {t}_mood AS ENUM ('calm', 'cross')"
ADD, REMOVE = (
    f"ALTER PUBLICATION {PUBLICATION} {{}} TABLE {{{{t}}}}".format(w) for w in ("ADD", "DROP")
)

#: What is done to each table before and after it is copied, and a word of the reason.
NOTICED = {
    "leaf_truncated": (TREE, ("TRUNCATE {t}_a",), "partition"),
    "leaf_truncated_only": (TREE, ("TRUNCATE ONLY {t}_b",), "partition"),
    "leaf_dropped": (TREE, ("DROP TABLE {t}_a",), "partition"),
    "leaf_detached": (TREE, (DETACH,), "partition"),
    "leaf_attached": ((*TREE, LOOSE, FILL), (ATTACH,), "partition"),
    "leaf_made_and_attached": (TREE, (f"BEGIN; {LOOSE}; {FILL}; {ATTACH}; COMMIT",), "partition"),
    "leaf_away_and_back": (TREE, (DETACH, "DELETE FROM {t}_a WHERE id < 5", REATTACH), "partition"),
    "leaf_came_and_went": (TREE, (MAKE, FILL, "DROP TABLE {t}_c"), "with OID"),
    "leaf_came_and_truncated": (TREE, (MAKE, FILL, "TRUNCATE {t}_c", FILL), "new partition"),
    "swapped": (
        (*PLAIN, "CREATE TABLE {t}_new (LIKE {t} INCLUDING ALL)"),
        (
            "INSERT INTO {t}_new VALUES (1, 'new')",
            (
                "BEGIN; ALTER TABLE {t} RENAME TO {t}_old; ALTER TABLE {t}_new RENAME TO {t};"
                f" ALTER PUBLICATION {PUBLICATION} DROP TABLE {{t}}_old; {ADD}; COMMIT"
            ),
        ),
        "another one created",
    ),
    "made_again": (
        PLAIN,
        (
            f"BEGIN; DROP TABLE {{t}}; CREATE TABLE {{t}} (id int PRIMARY KEY, note text); {ADD}; COMMIT",
        ),
        "another one created",
    ),
    "list_grown": (
        (*PLAIN, REMOVE, f"ALTER PUBLICATION {PUBLICATION} ADD TABLE {{t}} (id)"),
        (f"BEGIN; {REMOVE}; {ADD}; COMMIT",),
        "column list",
    ),
    "filter_taken_away": (
        (*PLAIN, REMOVE, f"ALTER PUBLICATION {PUBLICATION} ADD TABLE {{t}} WHERE (id > 5)"),
        (f"BEGIN; {REMOVE}; {ADD}; COMMIT",),
        "row filter",
    ),
    "out_and_in": (PLAIN, (REMOVE, "UPDATE {t} SET note = 'unsent'", ADD), "publication"),
    "label_renamed": (
        (
            ENUM,
            "CREATE TABLE {t} (id int PRIMARY KEY, m {t}_mood)",
            "INSERT INTO {t} VALUES (1, 'calm')",
        ),
        ("ALTER TYPE {t}_mood RENAME VALUE 'calm' TO 'serene'",),
        "serene",
    ),
    "label_of_array": (
        (
            ENUM,
            "CREATE DOMAIN {t}_d AS {t}_mood[]",
            "CREATE TABLE {t} (m {t}_d)",
            "ALTER TABLE {t} REPLICA IDENTITY FULL",
            "INSERT INTO {t} VALUES ('{{calm}}'), ('{{cross}}')",
        ),
        (
            "ALTER TYPE {t}_mood RENAME VALUE 'cross' TO 'angry'",
            "DELETE FROM {t} WHERE m = '{{angry}}'",
        ),
        "angry",
    ),
    "attribute_added": (
        (
            "CREATE TYPE {t}_pair AS (x int, y int)",
            "CREATE TABLE {t} (id int PRIMARY KEY, p {t}_pair)",
            "INSERT INTO {t} VALUES (1, '(1,2)')",
        ),
        ("ALTER TYPE {t}_pair ADD ATTRIBUTE z int",),
        "composite type",
    ),
    "column_again": (
        PLAIN,
        (
            "ALTER TABLE {t} ADD c int",
            "UPDATE {t} SET c = 7 WHERE id < 4",
            "ALTER TABLE {t} DROP c",
            "ALTER TABLE {t} ADD c int",
        ),
        "dropped again",
    ),
    "columns_swapped": (
        PLAIN,
        (
            "ALTER TABLE {t} ADD c int, ADD d int",
            "UPDATE {t} SET c = 1, d = 2 WHERE id < 4",
            "BEGIN; ALTER TABLE {t} RENAME c TO e; ALTER TABLE {t} RENAME d TO c; ALTER TABLE {t} RENAME e TO d; COMMIT",
        ),
        "has been replaced since",
    ),
    "name_taken": (
        PLAIN,
        (
            "ALTER TABLE {t} ADD c int",
            "UPDATE {t} SET c = 7 WHERE id < 4",
            "BEGIN; ALTER TABLE {t} RENAME c TO d; ALTER TABLE {t} ADD c int; COMMIT",
        ),
        "has been replaced since",
    ),
    "expression_dropped": (
        (
            "CREATE TABLE {t} (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED)",
            "INSERT INTO {t} VALUES (1), (2)",
        ),
        ("ALTER TABLE {t} ALTER g DROP EXPRESSION", "INSERT INTO {t} VALUES (3, 1)"),
        "no longer generated",
    ),
    "output_replaced": (
        (
            "CREATE TYPE {t}_own",
            "CREATE FUNCTION {t}_in(cstring) RETURNS {t}_own AS 'int4in' LANGUAGE internal IMMUTABLE STRICT",
            OUTPUT.format("int4out"),
            "CREATE TYPE {t}_own (INPUT = {t}_in, OUTPUT = {t}_out, LIKE = int4)",
            "CREATE TABLE {t} (id int PRIMARY KEY, o {t}_own[])",
            "INSERT INTO {t} VALUES (1, '{{-1}}')",
        ),
        (OUTPUT.format("oidout"),),
        "output function",
    ),
    "rounded": (
        (
            "CREATE TABLE {t} (id int PRIMARY KEY, n numeric(10,2), at timestamp(6))",
            "INSERT INTO {t} VALUES (1, 1.25, '2001-01-01 00:00:00.7')",
        ),
        ("ALTER TABLE {t} ALTER n TYPE numeric(10,1), ALTER at TYPE timestamp(0)",),
        "rewritten",
    ),
    "rewritten": (PLAIN, ("ALTER TABLE {t} ALTER note TYPE text USING note || '!'",), "rewritten"),
}
#: As above, and nothing has to be copied.
FOLLOWED = {
    "leaf_made": (
        TREE,
        (MAKE, FILL),
    ),
    "empty_attached": (TREE, (LOOSE, ATTACH)),
    "emptied": (PLAIN, ("TRUNCATE {t}", "INSERT INTO {t} VALUES (1, 'new')")),
    "tuned": (PLAIN, ("ANALYZE {t}", "ALTER TABLE {t} ALTER id SET STATISTICS 9")),
    "widened": (
        (
            "CREATE TABLE {t} (id int PRIMARY KEY, n numeric(10,2), v varchar(10))",
            "INSERT INTO {t} VALUES (1, 1.25, 'a')",
        ),
        ("ALTER TABLE {t} ALTER n TYPE numeric(12,2), ALTER v TYPE varchar(20)",),
    ),
    "label_added": (
        (ENUM, "CREATE TABLE {t} (id int PRIMARY KEY, m {t}_mood)"),
        ("ALTER TYPE {t}_mood ADD VALUE 'sad'", "INSERT INTO {t} VALUES (1, 'sad')"),
    ),
}


#: In `make test`; the others differ from these in the catalog's query alone.
SOME = (
    *("leaf_truncated", "leaf_dropped", "leaf_attached", "swapped", "list_grown", "out_and_in"),
    *("label_of_array", "leaf_made", "leaf_came_and_went", "emptied"),
    *("column_again", "name_taken", "output_replaced", "rounded", "widened"),
)


def run(database, table, statements):
    database.execute(*(statement.format(t=table) for statement in statements))


def flushed(pipeline, timeout=60.0):
    """What `tuskline flush` returns for, while the pipeline runs; the newest epoch then."""
    done: list[int | Exception] = []

    def ask():
        try:
            source = Source(STREAM, pipeline.database.dsn, PUBLICATION)
            done.append(flush(str(pipeline.lake), pipeline.log.address, [source], timeout=timeout))
        except Exception as error:
            done.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        pipeline.house.run_once()
        thread.join(0.05)
    if isinstance(done[0], Exception):
        raise done[0]
    return read(pipeline.spark, pipeline.lake)


def paths(pipeline):
    return {name.rpartition(".")[2]: t.path for name, t in pipeline.head().tables.items()}


def unequal(dsn, snapshot):
    """The tables that have not PostgreSQL's rows."""
    found = []
    for name in snapshot.tables:
        try:
            assert_equal(dsn, One(snapshot, name))
        except AssertionError:
            found.append(name.rpartition(".")[2])
    return found


class One:
    """A snapshot of one table alone."""

    def __init__(self, snapshot, name):
        self.tables, self.manifest, self._snapshot = [name], snapshot.manifest, snapshot

    def __getitem__(self, name):
        return self._snapshot[name]


@pytest.mark.parametrize(
    "chosen",
    [SOME, pytest.param((*NOTICED, *FOLLOWED), marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_what_the_stream_does_not_tell_is_mended_before_a_flush_returns(
    spark, tmp_path, database, chosen
):
    cases = {name: case for name, case in {**NOTICED, **FOLLOWED}.items() if name in chosen}
    noticed = {name: case for name, case in NOTICED.items() if name in chosen}
    run(database, "first", PLAIN)
    with Pipeline(spark, tmp_path, database, ["public.first"]) as pipeline:
        for table, (before, *_) in cases.items():
            statements = list(before)
            made = next(i for i, s in enumerate(statements) if s.startswith("CREATE TABLE {t} "))
            statements.insert(made + 1, ADD)
            run(database, table, statements)
        pipeline.wait_for_tables(*cases)
        start = flushed(pipeline)
        copied, link = paths(pipeline), start.manifest.link
        for table, (_, after, *_) in cases.items():
            run(database, table, after)
        shown = flushed(pipeline)
        assert unequal(database.dsn, shown) == []
        now = paths(pipeline)
        assert {t for t in cases if now[t] != copied[t]} == set(noticed)
        told = {
            (name.rpartition(".")[2], table.reason)
            for manifest in open_chain(pipeline.lake).links()
            for name, table in manifest.tables.items()
            if manifest.link > link
        }
        for table, (_, _, word) in noticed.items():
            assert any(word in reason for name, reason in told if name == table), (table, told)
        assert {t.state for t in shown.manifest.tables.values()} == {"live"}
        # Once is enough: nothing is copied for the same change again.
        assert_equal(database.dsn, flushed(pipeline))
        assert paths(pipeline) == now
        assert_no_orphans(spark, pipeline.lake)


def reasons(pipeline):
    """Why tables are not copied, or do not follow, by name."""
    head = pipeline.head()
    told = {name.rpartition(".")[2]: t.reason for name, t in head.tables.items() if t.reason}
    return told | {name.rpartition(".")[2]: why for name, why in head.not_copied.items()}


def wait_for_reason(pipeline, table, *words):
    """Run rounds until it is said why a table does not follow."""

    def is_told():
        pipeline.house.run_once(force=True)
        return all(word in reasons(pipeline).get(table, "") for word in words)

    wait_for(is_told, 60, f"{words} of {table}")


def test_tables_that_the_stream_cannot_follow_are_refused_by_name(
    spark, tmp_path, database, monkeypatch
):
    """A partition that names rows otherwise, and a column list without a part of the key: new, and later on."""
    monkeypatch.setattr("spark_consumers.lake.writer.table_work._AFTER_FAILURE", 0.1)
    other = (
        "CREATE UNIQUE INDEX {t}_code ON {t}_a (note)",
        "ALTER TABLE {t}_a ALTER note SET NOT NULL, REPLICA IDENTITY USING INDEX {t}_code",
    )
    tree = (*TREE, "UPDATE {t} SET note = id")
    run(database, "first", PLAIN)
    with Pipeline(spark, tmp_path, database, ["public.first"]) as pipeline:
        run(database, "later", (*tree, ADD))
        run(database, "parted", (*tree, *other, ADD))
        pairs = "CREATE TABLE {t} (a int, b int, note text, PRIMARY KEY (a, b))"
        listed = f"ALTER PUBLICATION {PUBLICATION} ADD TABLE {{t}} (a, note)"
        run(database, "listed", (pairs, "INSERT INTO {t} VALUES (1, 1), (1, 2)", listed))
        wait_for_reason(pipeline, "parted", "parted_a has another replica identity", "ALTER TABLE")
        wait_for_reason(pipeline, "listed", "its key contains the column b", "ALTER PUBLICATION")
        # The others go on; a flush names these.
        pipeline.wait_for_tables("first", "later")
        database.execute("UPDATE first SET note = 'new'")
        shown = pipeline.flush()
        assert set(shown.tables) == {f"{STREAM}.public.first", f"{STREAM}.public.later"}
        assert_equal(database.dsn, shown)
        told = unreadable(lambda seconds: flushed(pipeline, timeout=seconds))
        assert re.search(r"listed .*key contains the column b.*parted .*identity", told), told
        # What could be followed, until now: the update by the other index would leave its old row.
        run(database, "later", (*other, "UPDATE {t} SET id = 50 WHERE id = 5"))
        wait_for_reason(pipeline, "later", "later_a has another replica identity")
        assert pipeline.head().tables[f"{STREAM}.public.later"].state == "held"
        mended = "ALTER TABLE {t}_a REPLICA IDENTITY FULL"
        run(database, "later", (mended, "UPDATE {t} SET id = 60 WHERE id = 6"))
        run(database, "parted", (mended,))
        run(database, "listed", (REMOVE, ADD))
        shown = flushed(pipeline)
        assert len(shown.tables) == 4
        assert_equal(database.dsn, shown)
        assert not pipeline.head().not_copied
        # The publication itself leaves something out, and takes it up again.
        database.execute(f"ALTER PUBLICATION {PUBLICATION} SET (publish = 'insert, delete')")
        wait_for_reason(pipeline, "first", "does not send update, truncate", "ALTER PUBLICATION")
        database.execute(
            "UPDATE first SET note = 'unsent'",
            f"ALTER PUBLICATION {PUBLICATION} SET (publish = 'insert, update, delete, truncate')",
        )
        assert_equal(database.dsn, flushed(pipeline))
        assert_no_orphans(spark, pipeline.lake)


def test_a_copy_that_waits_for_a_transaction_names_it(spark, tmp_path, database, monkeypatch):
    monkeypatch.setattr(replication_connection, "_ALIVE_SECONDS", 0.1)
    run(database, "first", PLAIN)
    with Pipeline(spark, tmp_path, database, ["public.first"]) as pipeline:
        pipeline.wait_for_tables("first")
        run(database, "later", PLAIN)
        with database.connect() as other:
            other.execute("BEGIN; SELECT txid_current()")
            run(database, "later", (ADD,))
            words = (
                f"its copy waits for the transaction of the server process {other.info.backend_pid}"
            )

            def is_named():
                pipeline.house.run_once()
                chain = open_chain(pipeline.lake)
                rows = table_rows(pipeline.head(), read_status(chain), time.time())
                return any("later" in row["table"] and words in row["reason"] for row in rows)

            wait_for(is_named, 60, words)
            other.execute("ROLLBACK")
        pipeline.wait_for_tables("first", "later")
        assert_equal(database.dsn, pipeline.flush())
