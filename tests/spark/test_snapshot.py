"""`format("tuskline-snapshot")`: exact at its LSN, for every kind of table, while others write."""

import itertools
import threading
from collections import Counter
from typing import Any

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from spark_consumers.decode.entries import decode_entries
from spark_consumers.snapshot.exported import ExportedSnapshot, PublishedTable
from tests.support.servers import MAJORS_IN_TURN, Database, each_major
from tests.support.slot_changes import PUBLICATION, changes_of
from walsender_bridge.errors import PublicationError, SnapshotError

SIZE = 4000


def read(spark: SparkSession, snapshot: ExportedSnapshot, table: str, **options: Any) -> DataFrame:
    reader = spark.read.format("tuskline-snapshot").option("dsn", snapshot.dsn)
    reader = reader.option("snapshot", snapshot.snapshot).option("table", table)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in frame.collect()), key=repr)


def tables(snapshot: ExportedSnapshot) -> dict[str, PublishedTable]:
    return {table.full_name: table for table in snapshot.tables(PUBLICATION)}


class Writers:
    """Clients that insert, update and delete in a keyed and a keyless table until the block ends.

    The block begins when each has written a little.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._stop = threading.Event()
        self._under_way = threading.Barrier(3)
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(2)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()
        self._under_way.wait(30)

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _write(self, number: int) -> None:
        with self._database.connect() as connection:
            for turn in itertools.count():
                if self._stop.wait(0.005):
                    return
                if turn == 20:
                    self._under_way.wait(30)
                key = (turn * 2 + number) % SIZE
                with connection.transaction():
                    connection.execute("UPDATE keyed SET note = %s WHERE id = %s", [turn, key])
                    connection.execute("INSERT INTO bag VALUES (%s, 'new')", [key])
                    connection.execute("DELETE FROM bag WHERE id = %s", [SIZE - key])


def test_20_exact_at_its_lsn_under_writes_with_and_without_a_key(
    spark: SparkSession, database: Database
) -> None:
    """The snapshot and the changes of the transactions at or behind its LSN are the tables."""
    database.execute(
        "CREATE TABLE keyed (id int PRIMARY KEY, note text)",
        "CREATE TABLE bag (id int, note text)",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        f"INSERT INTO keyed SELECT g, repeat('k', 300) FROM generate_series(0, {SIZE - 1}) g",
        f"INSERT INTO bag SELECT g / 2, 'x' FROM generate_series(0, {2 * SIZE - 1}) g",
        f"CREATE PUBLICATION {PUBLICATION} FOR TABLE keyed, bag",
    )
    with changes_of(database.dsn) as changes:
        with Writers(database), ExportedSnapshot(database.dsn) as snapshot:
            keyed_frame = read(spark, snapshot, "public.keyed", partitions=4)
            assert keyed_frame.rdd.getNumPartitions() == 4
            keyed = dict(rows(keyed_frame))
            bag = Counter(rows(read(spark, snapshot, "public.bag", partitionBytes="32k")))
            found = tables(snapshot)
        log = changes()
    assert found["public.keyed"].key == ("id",)
    assert found["public.bag"].key is None
    assert len(keyed) == SIZE

    before = after = 0
    for batch in decode_entries(log.entries, log.schemas):
        new = list(zip(*(c.to_pylist() for c in batch.columns), strict=True))
        old = list(zip(*(c.to_pylist() for c in batch.old_columns or batch.columns), strict=True))
        for i, lsn in enumerate(batch.commit_lsn.tolist()):
            if lsn < snapshot.lsn:
                before += 1
                continue
            after += 1
            if batch.relation.name == "keyed":
                keyed[new[i][0]] = new[i][1]
                continue
            if chr(batch.ops[i]) == "D":
                bag[old[i]] -= 1
            else:
                bag[new[i]] += 1
    # Writes lie on both sides of the snapshot, or the test shows nothing.
    assert before > 0
    assert after > 0
    with database.connect() as connection:
        assert keyed == dict(connection.execute("SELECT * FROM keyed").fetchall())
        assert +bag == Counter(connection.execute("SELECT * FROM bag").fetchall())


@pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)
def test_20_partitions_generated_columns_and_no_rows(
    spark: SparkSession, database: Database
) -> None:
    major = database.server.installation.major
    # Before 12 no column is generated; before 13 a publication has partitions, never their root.
    generated = ", twice int GENERATED ALWAYS AS (id * 2) STORED" if major >= 12 else ""
    root = major >= 13
    via_root = " WITH (publish_via_partition_root = true)" if root else ""
    database.execute(
        "CREATE TABLE parted (id int, region text, PRIMARY KEY (id, region)) "
        "PARTITION BY LIST (region)",
        "CREATE TABLE parted_a PARTITION OF parted FOR VALUES IN ('a')",
        # The columns of a partition may lie in another order.
        "CREATE TABLE parted_b (region text NOT NULL, id int NOT NULL, PRIMARY KEY (id, region))",
        "ALTER TABLE parted ATTACH PARTITION parted_b FOR VALUES IN ('b')",
        "INSERT INTO parted SELECT g, CASE g % 2 WHEN 0 THEN 'a' ELSE 'b' END "
        "FROM generate_series(1, 1000) g",
        f"CREATE TABLE made (id int PRIMARY KEY{generated})",
        "INSERT INTO made VALUES (1), (2)",
        "CREATE TABLE none (id int, note text)",
        'CREATE TABLE "Odd ""name" ("a b" int, "C%d" text, dropped int)',
        'ALTER TABLE "Odd ""name" DROP COLUMN dropped',
        'INSERT INTO "Odd ""name" VALUES (1, \'100%\')',
        f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES{via_root}",
    )
    with ExportedSnapshot(database.dsn) as snapshot:
        found = tables(snapshot)
        shown = ["public.parted"] if major >= 13 else ["public.parted_a", "public.parted_b"]
        parts = [read(spark, snapshot, name, partitionBytes="8k") for name in shown]
        parted = parts[0] if root else parts[0].union(parts[1].select("id", "region"))
        assert rows(parted) == sorted(
            ((i, "a" if i % 2 == 0 else "b") for i in range(1, 1001)), key=repr
        )
        assert parted.rdd.getNumPartitions() > 2 or major < 14
        assert all(set(found[name].key or ()) == {"id", "region"} for name in shown)
        assert [found[name].kind for name in shown] == (["p"] if root else ["r", "r"])
        assert [c.name for c in found["public.made"].columns] == ["id"]
        assert rows(read(spark, snapshot, "public.made")) == [(1,), (2,)]
        assert rows(read(spark, snapshot, "public.none")) == []
        odd = read(spark, snapshot, 'public.Odd "name')
        assert odd.columns == ["a b", "C%d"]
        assert rows(odd) == [(1, "100%")]
        chosen = read(spark, snapshot, 'public.Odd "name', columns="C%d")
        assert rows(chosen) == [("100%",)]


@pytest.mark.long
def test_20_a_row_of_100_megabytes(spark: SparkSession, database: Database) -> None:
    size = 100 * 2**20
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, body text)",
        f"INSERT INTO big VALUES (1, 'small'), (2, repeat('x', {size})), (3, NULL)",
    )
    with ExportedSnapshot(database.dsn) as snapshot:
        frame = read(spark, snapshot, "public.big")
        found = frame.selectExpr("id", "length(body)", "md5(body)").orderBy("id").collect()
    with database.connect() as connection:
        expected = connection.execute("SELECT id, length(body), md5(body) FROM big ORDER BY id")
        assert [tuple(row) for row in found] == expected.fetchall()


@pytest.mark.parametrize("pg_server", [15, 18], indirect=True)
def test_column_lists_and_row_filters_are_those_of_the_publication(
    spark: SparkSession, database: Database
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, open boolean, secret text)",
        "INSERT INTO t VALUES (1, true, 'x'), (2, false, 'y'), (3, NULL, 'z')",
        f"CREATE PUBLICATION {PUBLICATION} FOR TABLE t (id) WHERE (id <> 2)",
    )
    with ExportedSnapshot(database.dsn) as snapshot:
        assert rows(read(spark, snapshot, "public.t", publication=PUBLICATION)) == [(1,), (3,)]
        assert len(rows(read(spark, snapshot, "public.t"))) == 3
        with pytest.raises(PublicationError, match="no tables"):
            snapshot.tables("another")


@pytest.mark.parametrize("pg_server", [18], indirect=True)
def test_generated_columns_that_the_publication_sends_are_read(
    spark: SparkSession, database: Database
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)",
        "INSERT INTO t VALUES (21)",
        f"CREATE PUBLICATION {PUBLICATION} FOR TABLE t WITH (publish_generated_columns = stored)",
    )
    with ExportedSnapshot(database.dsn) as snapshot:
        assert rows(read(spark, snapshot, "public.t", publication=PUBLICATION)) == [(21, 42)]


# -- errors by name ---------------------------------------------------------------------------------


@each_major
def test_a_snapshot_that_is_gone_is_named(spark: SparkSession, database: Database) -> None:
    database.execute("CREATE TABLE t (id int)")
    with ExportedSnapshot(database.dsn) as snapshot:
        frame = read(spark, snapshot, "public.t")
    with pytest.raises(PySparkException, match=r"(?s)SnapshotError.*is no longer exported"):
        read(spark, snapshot, "public.t")
    with pytest.raises(PySparkException, match=r"(?s)SnapshotError.*is no longer exported"):
        frame.collect()
    with pytest.raises(SnapshotError, match="is no longer exported"):
        snapshot.tables(PUBLICATION)


@pytest.mark.parametrize("what", ["TRUNCATE t", "ALTER TABLE t ALTER id TYPE bigint"])
def test_a_table_that_was_rewritten_after_the_snapshot_is_not_read_as_empty(
    spark: SparkSession, database: Database, what: str
) -> None:
    database.execute("CREATE TABLE t (id int)", "INSERT INTO t VALUES (1)")
    with ExportedSnapshot(database.dsn) as snapshot:
        frame = read(spark, snapshot, "public.t")
        database.execute(what)
        with pytest.raises(PySparkException, match=r"(?s)SnapshotError.*truncated or rewritten"):
            frame.collect()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"partitoins": 2}, "UsageError.*did you mean 'partitions'"),
        ({"partitions": 0}, "UsageError.*below 1"),
        ({"partitions": 2, "partitionBytes": "1m"}, "UsageError.*specify either"),
        ({"columns": "nope"}, "UsageError.*no column 'nope'"),
        ({"table": "public.nope"}, "UsageError.*does not exist"),
        ({"dsn": "postgresql://nobody@127.0.0.1:1/x"}, "ConnectionFailedError"),
    ],
)
def test_wrong_options_are_named(
    spark: SparkSession, database: Database, options: dict[str, Any], what: str
) -> None:
    database.execute("CREATE TABLE t (id int)")
    with (
        ExportedSnapshot(database.dsn) as snapshot,
        pytest.raises(PySparkException, match=f"(?s){what}"),
    ):
        read(spark, snapshot, options.pop("table", "public.t"), **options).collect()


def test_row_security_is_an_error_and_not_fewer_rows(
    spark: SparkSession, database: Database
) -> None:
    role = f"reader_{database.name}"
    database.execute(
        "CREATE TABLE t (id int)",
        "INSERT INTO t VALUES (1), (2)",
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'reads'",
        f"GRANT SELECT ON t TO {role}",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY visible ON t USING (id = 1)",
    )
    try:
        dsn = psycopg.conninfo.make_conninfo(database.dsn, user=role, password="reads")
        with (
            ExportedSnapshot(dsn) as snapshot,
            pytest.raises(PySparkException, match=r"(?s)PrivilegeError.*row-level security"),
        ):
            read(spark, snapshot, "public.t").collect()
    finally:
        database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
