"""What the catalog of each major says of changes that emit no replication message."""

from dataclasses import replace

import psycopg
import pytest

from spark_consumers.lake.tables.shape import changed, refusal
from spark_consumers.lake.tables.sources import (
    Source,
    columns_now,
    read_again,
    read_publication,
    shapes,
)
from tests.support.servers import MAJORS_IN_TURN, Database, MakeServer, each_major
from walsender_bridge.demo.local_server.account import server_account
from walsender_bridge.errors import UnavailableError

ROOT = "public.t"
OWN_OUTPUT = "CREATE OR REPLACE FUNCTION own_out(own) RETURNS cstring AS '{}' LANGUAGE internal IMMUTABLE STRICT"
SETUP = (
    "CREATE TYPE own",
    "CREATE FUNCTION own_in(cstring) RETURNS own AS 'int4in' LANGUAGE internal IMMUTABLE STRICT",
    OWN_OUTPUT.format("int4out"),
    "CREATE TYPE own (INPUT = own_in, OUTPUT = own_out, LIKE = int4)",
    "CREATE DOMAIN owned AS own",
    "CREATE TYPE owner AS (o owned[])",
    "CREATE TYPE mood AS ENUM ('calm', 'cross')",
    "CREATE DOMAIN moods AS mood[]",
    "CREATE TYPE pair AS (x int, m moods)",
    "CREATE TABLE typed (id int PRIMARY KEY, p pair, o owner)",
    """CREATE TABLE modified (id int PRIMARY KEY, n numeric(10,2), v varchar(9), ts timestamp(6), ti time(6),
    i interval(6), b bit varying(8), c char(4), a numeric(10,2)[])""",
    """INSERT INTO modified VALUES (1, 1.25, 'a  ', '2001-01-01 00:00:00.5', '00:00:00.5', '0.5 s', '1010', 'ab', '{1.25}')""",
    "CREATE TABLE plain (id int PRIMARY KEY, note text)",
    """CREATE TABLE t (id int PRIMARY KEY CHECK (id > 0), note text DEFAULT 'x', at date NOT NULL DEFAULT now())
    PARTITION BY RANGE (id)""",
    "CREATE TABLE t_a PARTITION OF t FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE t_m PARTITION OF t FOR VALUES FROM (100) TO (200) PARTITION BY RANGE (id)",
    "CREATE TABLE t_m1 PARTITION OF t_m FOR VALUES FROM (100) TO (150)",
    "INSERT INTO t VALUES (1), (101)",
)
LOOSE = "CREATE TABLE {0} (LIKE t INCLUDING ALL)"
#: Statements, and a word of the reason for the table, if there is one; the first are for every major.
STEPS = (
    ("typed", ("ALTER TYPE mood ADD VALUE 'sad'",), ""),
    ("typed", ("ALTER TYPE mood RENAME VALUE 'calm' TO 'serene'",), "serene"),
    ("typed", ("ALTER TYPE pair ADD ATTRIBUTE y int",), "composite"),
    ("typed", (OWN_OUTPUT.format("oidout"),), "output function of the type own"),
    # What was sent meanwhile has other texts, although the function is as it was.
    ("typed", (OWN_OUTPUT.format("int4out"), OWN_OUTPUT.format("oidout")), "output function of"),
    # A modifier alone: the server rewrites the table where values may change, on every major.
    ("modified", ("ALTER TABLE modified ALTER n TYPE numeric(12,2)",), ""),
    ("modified", ("ALTER TABLE modified ALTER n TYPE numeric(12,1)",), "'n' was altered"),
    ("modified", ("ALTER TABLE modified ALTER v TYPE varchar(20)",), ""),
    ("modified", ("ALTER TABLE modified ALTER v TYPE varchar(2)",), "'v' was altered"),
    ("modified", ("ALTER TABLE modified ALTER ts TYPE timestamp(0)",), "'ts' was altered"),
    ("modified", ("ALTER TABLE modified ALTER ts TYPE timestamp(3)",), ""),
    ("modified", ("ALTER TABLE modified ALTER ti TYPE time(0)",), "'ti' was altered"),
    ("modified", ("ALTER TABLE modified ALTER i TYPE interval(0)",), "'i' was altered"),
    ("modified", ("ALTER TABLE modified ALTER b TYPE bit varying(10)",), ""),
    ("modified", ("ALTER TABLE modified ALTER b TYPE bit varying(6)",), "'b' was altered"),
    ("modified", ("ALTER TABLE modified ALTER c TYPE char(6)",), "'c' was altered"),
    ("modified", ("ALTER TABLE modified ALTER a TYPE numeric(12,1)[]",), "'a' was altered"),
    ("plain", ("TRUNCATE plain", "ANALYZE plain"), ""),
    ("plain", ("ALTER TABLE plain ALTER note SET STATISTICS 9", "VACUUM plain"), ""),
    ("plain", ("ALTER TABLE plain ALTER note TYPE text USING note || '!'",), "rewritten"),
    ("plain", ("ALTER TABLE plain ADD r float8 DEFAULT random()",), "default"),
    ("plain", ("ALTER TABLE plain ADD n int",), ""),
    ("plain", ("ALTER TABLE plain ALTER n SET DEFAULT 7",), ""),
    ("plain", ("ALTER TABLE plain ADD c int DEFAULT 7",), "'c' was added with a default"),
    (
        "plain",
        ("ALTER TABLE plain ADD d int DEFAULT 7", "ALTER TABLE plain ALTER d DROP DEFAULT"),
        "'d' was added with a default",
    ),
    ("plain", ("TRUNCATE plain", "ALTER TABLE plain ADD e int"), "rewritten or truncated"),
    ("plain", ("ALTER TABLE plain RENAME n TO m",), "renamed to 'm'"),
    (
        "plain",
        (
            """BEGIN; ALTER TABLE plain RENAME c TO tmp; ALTER TABLE plain RENAME d TO c;
            ALTER TABLE plain RENAME tmp TO d; COMMIT""",
        ),
        "renamed",
    ),
    (
        "plain",
        (
            "BEGIN; ALTER TABLE plain DROP c; ALTER TABLE plain RENAME d TO c; ALTER TABLE plain ADD d int; COMMIT",
        ),
        "renamed",
    ),
    ("plain", ("ALTER TABLE plain DROP e",), "lost e"),
    (
        "plain",
        ("ALTER TABLE plain ADD g int", "ALTER TABLE plain DROP g", "ALTER TABLE plain ADD g int"),
        "dropped again",
    ),
    (
        "plain",
        ("ALTER PUBLICATION p DROP TABLE plain", "ALTER PUBLICATION p ADD TABLE plain"),
        "added again",
    ),
    ("plain", ("ALTER PUBLICATION p SET (publish = 'insert')",), "sends insert"),
)
VIA_ROOT = (
    ("t", ("CREATE TABLE t_b PARTITION OF t FOR VALUES FROM (200) TO (300)", "INSERT INTO t VALUES (201)"), ""),
    ("t", ("CREATE TABLE t_m2 PARTITION OF t_m FOR VALUES FROM (150) TO (200)", "INSERT INTO t VALUES (151)"), ""),
    ("t", (LOOSE.format("t_c"), "ALTER TABLE t ATTACH PARTITION t_c FOR VALUES FROM (300) TO (400)"), ""),
    ("t", ("TRUNCATE t_c",), "t_c was truncated"),
    (
        "t",
        (
            f"""BEGIN; {LOOSE.format("t_d")}; INSERT INTO t_d VALUES (401);
            ALTER TABLE t ATTACH PARTITION t_d FOR VALUES FROM (400) TO (500); COMMIT""",
        ),
        "t_d was attached with rows",
    ),
    (
        "t",
        (
            f"""BEGIN; {LOOSE.format("t_e")}; ALTER TABLE t_e ADD junk int; ALTER TABLE t_e DROP junk;
            INSERT INTO t_e VALUES (601); ALTER TABLE t ATTACH PARTITION t_e FOR VALUES FROM (600) TO (700); COMMIT""",
        ),
        "t_e was attached with rows",
    ),
    (
        "t",
        (
            f"""BEGIN; {LOOSE.format("t_f")}; INSERT INTO t_f VALUES (701);
            ALTER TABLE t ATTACH PARTITION t_f FOR VALUES FROM (700) TO (800);
            SAVEPOINT s; ALTER TABLE t_f ALTER note SET STATISTICS 9; ROLLBACK TO s; COMMIT""",
        ),
        "t_f was attached with rows",
    ),
    ("t", ("ALTER TABLE t_m DETACH PARTITION t_m1", "ALTER TABLE t_m ATTACH PARTITION t_m1 FOR VALUES FROM (100) TO (150)"), "t_m1 was detached and attached"),
    ("t", ("ALTER TABLE t DETACH PARTITION t_m", "ALTER TABLE t ATTACH PARTITION t_m FOR VALUES FROM (100) TO (200)"), "t_m was detached and attached"),
    (
        "t",
        (
            "CREATE TABLE t_n (LIKE t INCLUDING ALL) PARTITION BY RANGE (id)",
            "CREATE TABLE t_n1 PARTITION OF t_n FOR VALUES FROM (500) TO (550)",
            "INSERT INTO t_n VALUES (501)",
            "ALTER TABLE t ATTACH PARTITION t_n FOR VALUES FROM (500) TO (600)",
        ),
        "t_n1 was attached with rows",
    ),
    (
        "t",
        (
            "CREATE TABLE t_g PARTITION OF t FOR VALUES FROM (800) TO (900)",
            "INSERT INTO t VALUES (801)",
            "TRUNCATE t_g",
            "INSERT INTO t VALUES (802)",
        ),
        "new partition public.t_g was truncated",
    ),
    (
        "t",
        (
            LOOSE.format("t_h"),
            "ALTER TABLE t ATTACH PARTITION t_h FOR VALUES FROM (900) TO (950)",
            "INSERT INTO t VALUES (901)",
            "TRUNCATE t_h",
        ),
        "new partition public.t_h was truncated",
    ),
    ("t", ("ALTER TABLE t ADD plain int",), ""),
    ("t", ("ALTER TABLE t ADD d int DEFAULT 7", "ALTER TABLE t ALTER d DROP DEFAULT"), "'d' was added with a default"),
    ("t", ("ALTER TABLE t RENAME note TO memo",), "renamed to 'memo'"),
    ("t", ("ALTER TABLE t RENAME memo TO note",), "renamed to 'note'"),
    ("t", ("DROP TABLE t_a",), "t_a was dropped"),
    ("t", ("ALTER TABLE t RENAME TO u", "CREATE TABLE t (id int PRIMARY KEY)", "ALTER PUBLICATION p ADD TABLE t"), "another one created"),
)  # fmt: skip
LISTS = (
    ("plain", ("ALTER PUBLICATION p SET TABLE plain (id), t, typed, modified",), "column list"),
    ("plain", ("ALTER PUBLICATION p SET TABLE plain WHERE (id > 5), t, typed, modified",), "column list"),
    ("plain", ("ALTER PUBLICATION p SET TABLE plain, t, typed, modified",), "row filter"),
    ("plain", ("ALTER PUBLICATION p ADD TABLES IN SCHEMA public",), ""),
    ("plain", ("ALTER PUBLICATION p DROP TABLE plain",), ""),
    ("plain", ("ALTER PUBLICATION p DROP TABLES IN SCHEMA public", "ALTER PUBLICATION p ADD TABLE plain"), "added again"),
)  # fmt: skip


@pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)
def test_each_change_shows_and_nothing_else_does(database):
    source = _source(database)
    major = database.server.installation.major
    database.execute(*SETUP)
    steps = [*STEPS]
    if major >= 13:
        database.execute(
            "CREATE PUBLICATION p FOR TABLE plain, typed, modified, t",
            "ALTER PUBLICATION p SET (publish_via_partition_root = true)",
        )
        steps = [*VIA_ROOT, *steps]
    else:
        database.execute("CREATE PUBLICATION p FOR TABLE plain, typed, modified, t_a, t_m1")
    if major >= 15:
        steps = [*LISTS, *steps]
    reading = None
    for table, statements, word in steps:
        before = read_publication(source).shapes[f"public.{table}"]
        reading = read_again(source, before.relations, reading)
        database.execute(*statements)
        after = read_publication(source, before.relations)
        now = after.shapes[f"public.{table}"]
        # What is asked only for changes finds each of them.
        reading = read_again(source, before.relations, reading)
        assert (reading.publication.shapes, reading.publication.empty) == (
            after.shapes,
            after.empty,
        )
        found = changed(before, now, after.empty)
        assert word in str(found) if word else found is None, (statements, found)
        assert changed(now, now) is None
        # An idle look finds what it found before.
        assert read_publication(source).shapes[f"public.{table}"].dump() == now.dump()


#: What ends up as it was may have been another in between; catalogs that no step above changes.
BETWEEN = (
    "ALTER TABLE plain RENAME TO other",
    "ALTER TABLE other RENAME TO plain",
    "ALTER TABLE plain REPLICA IDENTITY FULL",
    "ALTER TABLE plain REPLICA IDENTITY DEFAULT",
    "CREATE UNIQUE INDEX CONCURRENTLY noted ON plain (note)",
    "ALTER TABLE plain ALTER note SET NOT NULL",
    "ALTER TABLE plain REPLICA IDENTITY USING INDEX noted",
    "DROP INDEX CONCURRENTLY noted",
    "ALTER TABLE plain SET SCHEMA elsewhere",
    "ALTER SCHEMA elsewhere RENAME TO there",
    "ALTER TABLE there.plain SET SCHEMA public",
    "DROP TABLE plain",
    "CREATE TABLE plain (id int PRIMARY KEY, note text)",
    "ALTER PUBLICATION p ADD TABLE plain",
    "ALTER PUBLICATION p RENAME TO q",
    "ALTER PUBLICATION q RENAME TO p",
    "ALTER TYPE pair ADD ATTRIBUTE z int",
    "ALTER TABLE t DETACH PARTITION t_a",
    "VACUUM FULL pg_attribute",
    "VACUUM FULL pg_class",
)


@each_major
def test_no_change_of_the_catalog_is_missed_where_only_versions_are_read(database):
    source = _source(database)
    database.execute(*SETUP, "CREATE SCHEMA elsewhere")
    database.execute("CREATE PUBLICATION p FOR TABLE plain, typed, t_a, t_m1")
    reading = read_again(source, (), None)
    for statement in BETWEEN:
        database.execute(statement)
        wanted = read_publication(source)
        before, reading = reading, read_again(source, (), reading)
        assert reading.versions != before.versions, statement
        found = reading.publication
        assert (found.shapes, found.empty) == (wanted.shapes, wanted.empty), statement


@each_major
def test_where_no_catalog_row_has_changed_the_shapes_are_those_of_before(database):
    source = _source(database)
    database.execute(*SETUP, "CREATE PUBLICATION p FOR TABLE plain, typed, t_a, t_m1")
    first = read_again(source, [1], None)
    assert set(first.publication.shapes) == {
        "public.plain",
        "public.typed",
        "public.t_a",
        "public.t_m1",
    }
    with database.connect() as connection:
        connection.execute("INSERT INTO plain VALUES (7, 'seven')")
        connection.execute("CREATE TEMP TABLE passing (id int PRIMARY KEY, t text, m mood)")
        connection.execute("ANALYZE plain")
        again = read_again(source, [1], first)
    assert again.publication.shapes is first.publication.shapes
    assert again.publication.lsn > first.publication.lsn
    # Whether a partition is empty depends on which ones are known.
    other = read_again(source, [1, 2], again)
    assert other.publication.shapes is not first.publication.shapes
    restarted = replace(first, versions=b"of a server that was started at another time")
    assert read_again(source, [1], restarted).publication.shapes is not first.publication.shapes


@each_major
def test_a_row_filter_is_read_each_time(database):
    """Its text has the names of operators and functions, whose rows are not looked at."""
    if database.server.installation.major < 15:
        pytest.skip("row filters are there since 15")
    database.execute(*SETUP, "CREATE PUBLICATION p FOR TABLE plain WHERE (id > 5)")
    first = read_again(_source(database), (), None)
    assert first.versions is None
    assert (
        read_again(_source(database), (), first).publication.shapes is not first.publication.shapes
    )


@each_major
def test_a_generated_column_that_becomes_an_ordinary_one_has_values_that_were_not_sent(database):
    major = database.server.installation.major
    if major < 13:
        pytest.skip("DROP EXPRESSION is there since 13")
    database.execute(
        "CREATE TABLE plain (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED)",
        "CREATE PUBLICATION p FOR TABLE plain",
    )
    source = _source(database)
    before = read_publication(source).shapes["public.plain"]
    assert before.generated == (2,)
    if major >= 18:
        database.execute("ALTER PUBLICATION p SET (publish_generated_columns = stored)")
        assert read_publication(source).shapes["public.plain"].generated == ()
        database.execute("ALTER PUBLICATION p SET (publish_generated_columns = none)")
        before = read_publication(source).shapes["public.plain"]
    database.execute("ALTER TABLE plain ALTER g DROP EXPRESSION")
    now = read_publication(source).shapes["public.plain"]
    assert "'g' is no longer generated" in str(changed(before, now))


@pytest.mark.parametrize("pg_server", [16], indirect=True)
def test_a_partition_whose_detaching_was_interrupted_is_none(database):
    """DETACH ... CONCURRENTLY commits between its two steps; another transaction keeps it from the second."""
    database.execute(
        *SETUP,
        "CREATE PUBLICATION p FOR TABLE t",
        "ALTER PUBLICATION p SET (publish_via_partition_root = true)",
    )
    source = _source(database)
    before = read_publication(source).shapes[ROOT]
    with database.connect() as holder, database.connect() as detaching:
        holder.execute("BEGIN; SELECT count(*) FROM t")
        detaching.execute("SET lock_timeout = '100ms'")
        with pytest.raises(Exception, match="timeout"):
            detaching.execute("ALTER TABLE t DETACH PARTITION t_a CONCURRENTLY")
    now = read_publication(source).shapes[ROOT]
    assert "t_a was dropped or detached" in str(changed(before, now))
    database.execute("ALTER TABLE t DETACH PARTITION t_a FINALIZE")
    assert changed(now, read_publication(source).shapes[ROOT]) is None


@each_major
def test_replica_identities_of_partitions_are_those_of_the_catalog(database):
    if database.server.installation.major < 13:
        pytest.skip("partitions are published through their root since 13")
    database.execute(
        *SETUP,
        "CREATE UNIQUE INDEX other ON t_a (at)",
        "CREATE PUBLICATION p FOR TABLE t",
        "ALTER PUBLICATION p SET (publish_via_partition_root = true)",
    )
    source = _source(database)
    for statement, word in (
        ("SELECT", ""),
        ("ALTER TABLE t_a REPLICA IDENTITY USING INDEX other", "t_a has another replica identity"),
        ("ALTER TABLE t_a REPLICA IDENTITY FULL", ""),
        ("ALTER TABLE t REPLICA IDENTITY FULL", "t_m1 has another replica identity"),
        ("ALTER TABLE t_m1 REPLICA IDENTITY FULL", ""),
        ("ALTER TABLE t REPLICA IDENTITY NOTHING", ""),
        ("ALTER TABLE t_m1 REPLICA IDENTITY DEFAULT", "t_m1 has another replica identity"),
    ):
        database.execute(statement)
        found = refusal(read_publication(source).shapes[ROOT])
        assert word in found.reason if found else not word, (statement, found)


#: Statements about a table of a publication that sends partitions through their root, and a word of the reason.
LENDING = (
    (("{attach}", "INSERT INTO t VALUES (1001)", "{detach}"), "been a partition of another"),
    (("BEGIN; {attach}; INSERT INTO t VALUES (1002); {detach}; DELETE FROM {lent}; COMMIT",), "been a partition of another"),
    (("{attach}", "{detach}", "ALTER TABLE {lent} ALTER note SET STATISTICS 9"), "been a partition of another"),
    (("ALTER TABLE {lent} ALTER note DROP DEFAULT", "GRANT SELECT ON {lent} TO PUBLIC", "CREATE INDEX ON {lent} (at)", "ANALYZE {lent}"), ""),
)  # fmt: skip


@each_major
def test_a_table_that_was_a_partition_for_a_while_lacks_what_was_sent_as_another_tables(database):
    if database.server.installation.major < 13:
        pytest.skip("partitions are published through their root since 13")
    database.execute(
        *SETUP,
        "CREATE TABLE lent (LIKE t INCLUDING ALL)",
        "CREATE TABLE lent_m (LIKE t INCLUDING ALL) PARTITION BY RANGE (id)",
        "CREATE TABLE lent_m1 PARTITION OF lent_m FOR VALUES FROM (1000) TO (1100)",
        "CREATE PUBLICATION p FOR TABLE t, lent, lent_m WITH (publish_via_partition_root = true)",
    )
    source = _source(database)
    for lent in ("lent", "lent_m"):
        attach = f"ALTER TABLE t ATTACH PARTITION {lent} FOR VALUES FROM (1000) TO (1100)"
        detach = f"ALTER TABLE t DETACH PARTITION {lent}"
        for statements, word in LENDING:
            before = read_publication(source).shapes[f"public.{lent}"]
            database.execute(
                *(each.format(lent=lent, attach=attach, detach=detach) for each in statements)
            )
            now = read_publication(source, before.relations).shapes[f"public.{lent}"]
            found = changed(before, now)
            assert word in str(found) if word else found is None, (statements, found)
            # What a publication sends under the table's own name lacks nothing.
            assert changed(before, replace(now, via_root=False)) is None
            assert now.via_root


@each_major
def test_a_partition_whose_changes_are_not_in_the_wal_is_refused(database):
    if database.server.installation.major < 13:
        pytest.skip("partitions are published through their root since 13")
    database.execute(
        *SETUP,
        "CREATE FOREIGN DATA WRAPPER nowhere",
        "CREATE SERVER away FOREIGN DATA WRAPPER nowhere",
        "CREATE TABLE keyless (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE keyless_a PARTITION OF keyless FOR VALUES FROM (0) TO (100)",
        "CREATE PUBLICATION p FOR TABLE t, keyless",
    )
    source = _source(database)
    steps = [
        ("ALTER TABLE t_m1 SET UNLOGGED", "t_m1 is unlogged", "ALTER TABLE public.t_m1 SET LOGGED"),
        ("ALTER TABLE t_m1 SET LOGGED", "", ""),
        (
            "CREATE FOREIGN TABLE keyless_f PARTITION OF keyless FOR VALUES FROM (900) TO (901) SERVER away",
            "keyless_f is a foreign table",
            "DETACH PARTITION public.keyless_f",
        ),
    ]
    for via_root in (True, False):
        database.execute(
            f"ALTER PUBLICATION p SET (publish_via_partition_root = {via_root})",
            "DROP FOREIGN TABLE IF EXISTS keyless_f",
        )
        for statement, reason, repair in steps:
            database.execute(statement)
            shapes = read_publication(source).shapes.values()
            found = [each for each in map(refusal, shapes) if each is not None]
            assert bool(found) == bool(reason), (via_root, statement, found)
            for each in found if via_root else ():
                assert reason in each.reason
                assert repair in each.repair


@each_major
def test_a_default_that_was_dropped_again_shows_in_the_partitions_alone(database):
    """A partitioned table has no rows of its own, so its own column says nothing of a value that they got."""
    database.execute(
        *SETUP,
        "ALTER TABLE t ADD d int DEFAULT 7, ADD plain int",
        "ALTER TABLE t ALTER d DROP DEFAULT",
    )
    with database.connect() as connection:
        [(oid,)] = connection.execute("SELECT 't'::regclass::oid").fetchall()
    filled = {name: found for name, (*_, found) in columns_now(_source(database), oid).items()}
    assert filled == {"id": True, "note": True, "at": True, "d": True, "plain": False}


def _source(database):
    return Source("shop", database.dsn, "p")


@each_major
def test_the_catalog_is_read_without_compiling_the_query(database):
    """With JIT a poll, of which every epoch and flush has one, takes seconds of the server's processor."""
    database.execute(*SETUP, "CREATE PUBLICATION p FOR TABLE plain, typed")
    with database.connect() as connection:
        connection.execute("SET jit = on; SET jit_above_cost = 0")
        shapes(connection, "p")
        # What it compiled would show in the plan of the next query, under the same settings.
        plan = connection.execute("EXPLAIN ANALYZE SELECT count(*) FROM pg_class").fetchall()
    assert "JIT:" not in {line for (line,) in plan}


def test_a_new_partition_that_is_locked_keeps_no_backend_waiting(database: Database) -> None:
    database.execute(*SETUP, "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)")
    source = Source("shop", database.dsn, "p")
    with database.connect() as other:
        with other.transaction():
            other.execute("LOCK TABLE t_a")
            with pytest.raises(UnavailableError, match="lock timeout") as raised:
                read_publication(source, known=[1])
            assert "pg_locks" in raised.value.repair
            waiting = "SELECT FROM pg_locks WHERE NOT granted AND relation = 't_a'::regclass"
            assert other.execute(waiting).fetchall() == []
        assert ROOT in read_publication(source, known=[1]).shapes


def test_14_a_table_that_gets_the_oid_of_a_dropped_one_is_another(make_server: MakeServer) -> None:
    """The counter of OIDs starts again after four billion, of which TOAST values have their share."""
    server = make_server(autovacuum="off")
    server.start()
    source = Source("s", server.dsn(), "p")
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES; CREATE TABLE a (id int)")
    before = read_publication(source).shapes["public.a"]
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("ALTER TABLE a RENAME TO b; GRANT SELECT ON b TO PUBLIC; ANALYZE")
        assert changed(before, read_publication(source).shapes["public.b"]) is None
        connection.execute("DROP TABLE b")
        # The server uses no OID again that a row which is not visible any more has.
        connection.execute("VACUUM pg_class")
    server.stop()
    tool = server.installation.tool("pg_resetwal")
    server_account().run([tool, "--next-oid", str(before.oid), "-D", server.data_dir])
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE c (id int)")
    now = read_publication(source).shapes["public.c"]
    # Nothing else tells them apart: another file, or another name, is no reason for a copy.
    assert (now.oid, now.file, now.members) == (before.oid, before.file, before.members)
    assert changed(replace(before, born=""), now) is None
    assert changed(before, now) == "the table was dropped, and another one created with its OID"
