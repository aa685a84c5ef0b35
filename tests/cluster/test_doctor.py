"""`tuskline doctor`: each fault is found on a real server, and the SQL that it prints repairs it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.attached import Attached, run_script
from tests.support.capture_stack import make_tables
from tests.support.servers import MAJORS_IN_TURN, Database, MakeServer
from walsender_bridge.errors import Cause

SECRET = "planted-secret-51ab"

each_major = pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)


@pytest.fixture
def role(shop: Database) -> Iterator[str]:
    """A role that may replicate and nothing else."""
    name = f"doctor_{shop.name}"
    shop.execute(f"CREATE ROLE {name} LOGIN REPLICATION PASSWORD '{SECRET}'")
    yield name
    shop.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def findings(report: dict[str, Any], severity: str) -> dict[str, list[str]]:
    """What was found of a severity, by check."""
    found: dict[str, list[str]] = {}
    for each in report["findings"]:
        if each["severity"] == severity:
            found.setdefault(each["check"], []).append(each["what"])
    return found


@each_major
def test_a_good_server_has_no_errors_before_and_after_init(tmp_path: Path, shop: Database) -> None:
    tables = ["public.orders", "public.audit"]
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": tables}})
    report = tuskline.json("doctor")
    assert report["errors"] == 0
    warnings = findings(report, "warning")
    # Our superuser's DSN, and a server that keeps WAL without limit: both are worth a word.
    assert {"role", "max_slot_wal_keep_size"} <= set(warnings)
    tuskline.json("init")
    report = tuskline.json("doctor")
    assert report["errors"] == 0
    assert any("tuskline_shop retains" in what for what in findings(report, "ok")["slot"])
    tuskline.json("detach")


@each_major
def test_the_script_repairs_what_a_plain_role_lacks_and_detach_takes_it_back(
    tmp_path: Path, shop: Database, role: str
) -> None:
    generates = shop.server.installation.major >= 12
    twice = "twice int GENERATED ALWAYS AS (id * 2) STORED" if generates else "twice int"
    shop.execute(
        f"CREATE TABLE bare (id int, {twice})",
        "CREATE TABLE policed (id int PRIMARY KEY)",
        "ALTER TABLE policed ENABLE ROW LEVEL SECURITY",
    )
    dsn = shop.server.dsn(shop.name, user=role, password=SECRET)
    tables = ["public.orders", "public.bare", "public.policed"]
    tuskline = Attached(tmp_path, {"shop": {"dsn": dsn, "tables": tables}})
    report = tuskline.json("doctor", "--fix-sql", code=Cause.PUBLICATION)
    errors = findings(report, "error")
    assert set(errors) == {"replica identity", "row security", "publication", "privileges"}
    assert "public.bare" in errors["replica identity"][0]
    assert "public.policed" in errors["row security"][0]
    if generates:
        assert "public.bare.twice" in findings(report, "warning")["generated columns"][0]
    assert SECRET not in str(report)
    # Nothing was executed.
    assert tuskline.json("doctor", code=Cause.PUBLICATION)["errors"] == report["errors"]
    for _ in range(2):
        # The second run of doctor sees what could not be seen before: who may use the flush table.
        script = tuskline.run("doctor", "--fix-sql").stdout
        run_script(shop.dsn, script)
    assert tuskline.json("doctor")["errors"] == 0
    assert {row["created"] for row in tuskline.json("init")["created"]} == {"slot tuskline_shop"}
    with shop.connect() as connection:
        query = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'tuskline_shop'"
        assert connection.execute(query.encode()).fetchone() == (1,)


def test_a_script_for_several_databases_connects_to_each(tmp_path: Path, shop: Database) -> None:
    name = "it's \\b"
    quoted = '"it\'s \\b"'
    shop.execute(f"CREATE DATABASE {quoted}")
    other = shop.server.dsn(name)
    for dsn in (shop.dsn, other):
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE bare (id int)")
    section = {"tables": ["public.bare"]}
    sources = {"shop": {"dsn": shop.dsn, **section}, "till": {"dsn": other, **section}}
    tuskline = Attached(tmp_path, sources)
    try:
        for _ in range(2):
            run_script(shop.server.dsn(), tuskline.run("doctor", "--fix-sql").stdout)
        assert tuskline.json("doctor")["errors"] == 0
    finally:
        tuskline.json("init")
        tuskline.json("detach")
        shop.execute(f"DROP DATABASE {quoted}")


def test_keys_that_the_stream_would_not_carry(tmp_path: Path, shop: Database) -> None:
    """A partition that names rows by another index than its table; a column list without a part of the key."""
    shop.execute(
        "CREATE TABLE parted (id int PRIMARY KEY, code int NOT NULL) PARTITION BY RANGE (id)",
        'CREATE TABLE "Odd ""1" PARTITION OF parted FOR VALUES FROM (0) TO (100)',
        'CREATE UNIQUE INDEX odd ON "Odd ""1" (code)',
        'ALTER TABLE "Odd ""1" REPLICA IDENTITY USING INDEX odd',
        "CREATE TABLE pairs (a int, b int, note text, PRIMARY KEY (a, b))",
    )
    tables = ["public.parted", "public.pairs"]
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": tables}})
    report = tuskline.json("doctor", code=Cause.PUBLICATION)
    (told,) = findings(report, "error")["replica identity"]
    assert "another replica identity than public.parted" in told
    assert "replica identity differs" in tuskline.error("init", code=Cause.PUBLICATION)["what"]
    run_script(shop.dsn, tuskline.run("doctor", "--fix-sql").stdout)
    assert tuskline.json("doctor")["errors"] == 0
    tuskline.json("init")
    shop.execute(
        "ALTER PUBLICATION tuskline_shop DROP TABLE pairs",
        "ALTER PUBLICATION tuskline_shop ADD TABLE pairs (a, note)",
    )
    report = tuskline.json("doctor", code=Cause.PUBLICATION)
    told = "public.pairs is published without these columns of its key: b"
    assert told in findings(report, "error")["publication"]
    shop.execute('ALTER TABLE "Odd ""1" SET UNLOGGED')
    (told,) = findings(tuskline.json("doctor", code=Cause.PUBLICATION), "error")["tables"]
    assert "a partition of public.parted, is unlogged" in told
    tuskline.json("detach")


def test_what_the_server_is_set_to(tmp_path: Path, make_server: MakeServer) -> None:
    server = make_server(
        18,
        wal_level="replica",
        max_replication_slots="1",
        max_wal_senders="1",
        max_slot_wal_keep_size="64MB",
        idle_replication_slot_timeout="60s",
        max_prepared_transactions="5",
        fsync="off",
    )
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE old ENCODING SQL_ASCII TEMPLATE template0")
    with psycopg.connect(server.dsn("old"), autocommit=True) as connection:
        make_tables(connection)
        connection.execute("BEGIN")
        connection.execute("INSERT INTO orders VALUES (1, 'x')")
        connection.execute("PREPARE TRANSACTION 'forgotten'")
    tuskline = Attached(tmp_path, {"shop": {"dsn": server.dsn("old"), "tables": ["public.orders"]}})
    report = tuskline.json("doctor", code=Cause.SERVER_SETTING)
    assert findings(report, "error") == {"wal_level": ["wal_level is replica"]}
    warnings = findings(report, "warning")
    for check, word in {
        "max_slot_wal_keep_size": "64 MB",
        "idle_replication_slot_timeout": "60 s",
        "encoding": "SQL_ASCII",
        "prepared transactions": "'forgotten'",
        "max_replication_slots": "while tables are copied",
        "max_wal_senders": "while tables are copied",
    }.items():
        assert word in warnings[check][0], check
    script = tuskline.run("doctor", "--fix-sql").stdout
    run_script(server.dsn("old"), script)
    server.restart()
    after = tuskline.json("doctor")
    left = findings(after, "warning")
    assert not {"max_slot_wal_keep_size", "idle_replication_slot_timeout"} & set(left)
    assert not {"max_replication_slots", "max_wal_senders"} & set(left)


def test_slots_that_are_not_ours_or_lost(tmp_path: Path, make_server: MakeServer) -> None:
    server = make_server(fsync="off", max_slot_wal_keep_size="1MB", max_wal_size="32MB")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
        tables = ["public.orders"]
        tuskline = Attached(tmp_path, {"shop": {"dsn": server.dsn(), "tables": tables}})
        tuskline.json("init")
        for number in range(4):
            connection.execute(
                "INSERT INTO orders SELECT %s * 20000 + g, repeat('x', 900)"
                " FROM generate_series(1, 20000) AS g",
                [number],
            )
            connection.execute("SELECT pg_switch_wal()")
        connection.execute("CHECKPOINT")
        report = tuskline.json("doctor", code=Cause.SLOT)
        assert "is lost" in findings(report, "error")["slot"][0]
        # To another source in the database the same slot is a word of warning.
        (tmp_path / "other").mkdir()
        other = Attached(tmp_path / "other", {"other": {"dsn": server.dsn(), "tables": tables}})
        report = other.json("doctor")
        assert "is lost" in findings(report, "warning")["slot"][0]
        connection.execute("SELECT pg_drop_replication_slot('tuskline_shop')")
        connection.execute("SELECT pg_create_physical_replication_slot('tuskline_shop')")
        report = tuskline.json("doctor", code=Cause.SLOT)
        connection.execute("SELECT pg_drop_replication_slot('tuskline_shop')")
        connection.execute("DROP PUBLICATION tuskline_shop")
        connection.execute("SELECT pg_create_logical_replication_slot('tuskline_shop', 'pgoutput')")
        report = tuskline.json("doctor", code=Cause.PUBLICATION)
        assert "was dropped" in findings(report, "error")["publication"][0]
        connection.execute("DELETE FROM tuskline.provisioned")
        report = tuskline.json("doctor", code=Cause.PUBLICATION)
        assert "no change can be decoded" in findings(report, "error")["publication"][0]


def test_a_table_that_is_not_there_or_not_a_table(tmp_path: Path, shop: Database) -> None:
    shop.execute("CREATE VIEW seen AS SELECT * FROM orders")
    for name, cause in (("public.ordres", Cause.CONFIG), ("public.seen", Cause.PUBLICATION)):
        tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": [name]}})
        report = tuskline.json("doctor", code=cause)
        assert name in findings(report, "error")["tables"][0]
