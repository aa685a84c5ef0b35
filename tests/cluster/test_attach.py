"""`tuskline init` and `tuskline detach`: what is made is recorded, and exactly that is taken back."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from structlog.testing import capture_logs

from spark_consumers.lake.flush import flush, force_barrier
from spark_consumers.lake.tables import sources
from tests.support.attached import Attached, difference, server_state
from tests.support.capture_stack import CaptureProcess, ChangeLog, check_equal
from tests.support.servers import MAJORS_IN_TURN, Database
from tests.support.waiting import wait_for
from walsender_bridge.capture import publication
from walsender_bridge.capture import source as source_module
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.errors import Cause, ConfigError, DeadlineError, PublicationError
from walsender_bridge.provisioning import init as attaching
from walsender_bridge.runtime import pid_file

TABLES = ("public.orders", "public.audit")
SECRET = "planted-secret-9f2c"

each_major = pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)


@pytest.fixture
def role(shop: Database) -> Iterator[str]:
    """The name of a role that does not exist; gone again afterwards."""
    name = f"attached_{shop.name}"
    yield name
    with shop.connect() as connection:
        found = connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [name]).fetchone()
        if found is not None:
            connection.execute(f"DROP OWNED BY {name}".encode())
            connection.execute(f"DROP ROLE {name}".encode())


def as_role(shop: Database, role: str) -> str:
    return shop.server.dsn(shop.name, user=role, password=SECRET)


def administrator(shop: Database) -> dict[str, str]:
    """The environment in which the superuser's password is found, and no flag tells it."""
    password = conninfo_to_dict(shop.dsn)["password"]
    return {"PGPASSWORD": str(password)}


def test_flush_before_init_names_init(shop: Database) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        force_barrier("grpc://127.0.0.1:1", {"shop": shop.dsn})
    assert "tuskline init" in caught.value.repair


def test_flush_does_not_wait_for_a_change_that_is_not_published(
    tmp_path: Path, shop: Database
) -> None:
    """ALTER PUBLICATION ... SET TABLE takes out what it does not name."""
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": TABLES}})
    tuskline.json("init")
    source = sources.Source("shop", shop.dsn, "tuskline_shop")
    assert sources.read_publication(source).marked
    shop.execute("ALTER PUBLICATION tuskline_shop SET TABLE orders")
    with pytest.raises(PublicationError, match=r"does not publish tuskline\.flush") as caught:
        flush(str(tmp_path / "lake"), "grpc://127.0.0.1:1", [source])
    assert caught.value.repair.startswith("run tuskline init, which adds it")
    with capture_logs() as told:
        sources.mark(source)
    assert "does not publish tuskline.flush" in told[0]["error"]
    tuskline.json("init")
    assert sources.read_publication(source).marked
    tuskline.json("detach")


@each_major
def test_what_init_makes_detach_takes_back_and_nothing_else(tmp_path: Path, shop: Database) -> None:
    before = server_state(shop.dsn)
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": TABLES}})
    made = tuskline.json("init")["created"]
    assert {row["created"] for row in made} == {
        "publication tuskline_shop",
        "schema tuskline",
        "slot tuskline_shop",
    }
    attached = server_state(shop.dsn)
    assert difference(before, attached)
    # Done again, it makes nothing.
    assert tuskline.json("init")["created"] == []
    assert difference(attached, server_state(shop.dsn)) == []
    taken = tuskline.json("detach")["removed"]
    assert {row["removed"] for row in taken} == {row["created"] for row in made}
    assert difference(before, server_state(shop.dsn)) == []
    assert tuskline.json("detach")["removed"] == []


def test_detach_names_what_it_leaves_for_its_record_is_lost(tmp_path: Path, shop: Database) -> None:
    """A slot that nobody reads from keeps WAL until the server's disk is full."""
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": TABLES}})
    tuskline.json("init")
    shop.execute("DROP SCHEMA tuskline CASCADE")
    done = tuskline.run("detach")
    assert done.returncode == 0, done.stderr
    assert "as it should be" not in done.stderr
    ways = [line.rpartition("used elsewhere: ")[2] for line in done.stderr.splitlines()]
    assert len(ways) == 2, done.stderr
    shop.execute(*ways)
    assert "nothing to do" in tuskline.run("detach").stderr


@each_major
def test_an_administrator_makes_a_role_that_may_do_no_more_than_it_needs(
    tmp_path: Path, shop: Database, role: str
) -> None:
    shop.execute(
        "CREATE SCHEMA sales",
        "CREATE TABLE sales.parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE sales.parts_1 PARTITION OF sales.parts FOR VALUES FROM (0) TO (9)",
        "CREATE TABLE secrets (id int PRIMARY KEY)",
    )
    before = server_state(shop.dsn)
    # Before 13 a partitioned table cannot be published, its partitions can.
    roots = shop.server.installation.major >= 13
    tables = [*TABLES, "sales.parts" if roots else "sales.parts_1"]
    tuskline = Attached(tmp_path, {"shop": {"dsn": as_role(shop, role), "tables": tables}})
    made = tuskline.json("init", "--admin", "user=postgres", env=administrator(shop))["created"]
    told = {row["created"] for row in made}
    assert f"role {role}" in told
    assert f"SELECT on table sales.parts_1 for {role}" in told
    with psycopg.connect(as_role(shop, role), autocommit=True) as connection:
        connection.execute(f"SELECT * FROM orders, audit, {', '.join(tables[2:])}, sales.parts_1 p")
        connection.execute("UPDATE tuskline.flush SET token = token + 1")
        for refused in (
            "SELECT * FROM secrets",
            "INSERT INTO orders VALUES (1, '')",
            "INSERT INTO tuskline.provisioned VALUES ('', 'role', 'postgres')",
            "CREATE SCHEMA mine",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(refused.encode())
    # What the role needs is there: capture runs as it.
    with ChangeLog(tmp_path) as log:
        capture = CaptureProcess(tmp_path, log, as_role(shop, role), *tables)
        with capture:
            wait_for(capture.streams, 30, "capture streams")
            shop.execute("INSERT INTO orders VALUES (1, 'x')")
            check_equal(log, shop.dsn)
            assert capture.stop() == 0
    # Not by the role itself: it did not make these things.
    error = tuskline.error("detach", code=Cause.PRIVILEGE)
    assert "--admin user=postgres" in error["repair"]
    tuskline.json("detach", "--admin", "user=postgres", env=administrator(shop))
    assert difference(before, server_state(shop.dsn)) == []


def test_what_was_there_before_stays(tmp_path: Path, shop: Database, role: str) -> None:
    shop.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{SECRET}'",
        f"GRANT SELECT ON orders TO {role}",
        "CREATE PUBLICATION own FOR TABLE orders",
        "SELECT pg_create_logical_replication_slot('own_slot', 'pgoutput')",
    )
    before = server_state(shop.dsn)
    section = {
        "dsn": as_role(shop, role),
        "tables": TABLES,
        "slot": "own_slot",
        "publication": "own",
    }
    tuskline = Attached(tmp_path, {"shop": section})
    admin = ("--admin", "user=postgres")
    made = tuskline.json("init", *admin, env=administrator(shop))["created"]
    told = {row["created"] for row in made}
    assert "table public.audit in publication own" in told
    assert not any(line.startswith(("role", "slot", "publication")) for line in told)
    assert f"SELECT on table public.orders for {role}" not in told
    tuskline.json("detach", *admin, env=administrator(shop))
    assert difference(before, server_state(shop.dsn)) == []


def test_two_sources_of_one_database_share_what_the_last_takes_back(
    tmp_path: Path, shop: Database, role: str
) -> None:
    before = server_state(shop.dsn)
    sources = {
        "orders": {"dsn": as_role(shop, role), "tables": TABLES[:1]},
        "audit": {"dsn": as_role(shop, role), "tables": TABLES[1:]},
    }
    tuskline = Attached(tmp_path, sources)
    admin = ("--admin", "user=postgres")
    tuskline.json("init", *admin, env=administrator(shop))
    tuskline.json("detach", "--source", "orders", *admin, env=administrator(shop))
    left = server_state(shop.dsn)
    assert any("'tuskline_audit'" in line for line in left["slots"])
    assert not any("'tuskline_orders'" in line for line in left["slots"])
    with psycopg.connect(as_role(shop, role), autocommit=True) as connection:
        connection.execute("SELECT * FROM audit")
    tuskline.json("detach", *admin, env=administrator(shop))
    assert difference(before, server_state(shop.dsn)) == []


def test_capture_records_what_it_makes_without_init(tmp_path: Path, shop: Database) -> None:
    before = server_state(shop.dsn)
    with ChangeLog(tmp_path) as log:
        capture = CaptureProcess(tmp_path, log, shop.dsn, *TABLES)
        with capture:
            wait_for(capture.streams, 30, "capture streams")
            tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": TABLES}})
            error = tuskline.error("detach", code=Cause.SLOT)
            assert "active" in error["what"]
            assert capture.stop() == 0
    tuskline.json("detach")
    assert difference(before, server_state(shop.dsn)) == []


def test_detach_is_refused_while_up_runs(tmp_path: Path, shop: Database) -> None:
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": TABLES}})
    tuskline.json("init")
    with pid_file.held(tuskline.run_dir):
        error = tuskline.error("detach", code=Cause.RUNNING)
    assert error["repair"] == "tuskline down"
    tuskline.json("detach")


def test_a_role_that_may_not_is_told_the_two_ways(
    tmp_path: Path, shop: Database, role: str
) -> None:
    shop.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{SECRET}'")
    before = server_state(shop.dsn)
    tuskline = Attached(tmp_path, {"shop": {"dsn": as_role(shop, role), "tables": TABLES}})
    error = tuskline.error("init", code=Cause.PRIVILEGE)
    assert "--admin" in error["repair"]
    assert difference(before, server_state(shop.dsn)) == []


def test_a_password_in_a_flag_is_refused(tmp_path: Path, shop: Database) -> None:
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn}})
    for arguments in (
        ("init", "--admin", f"user=postgres password={SECRET}"),
        ("detach", "--admin", f"postgresql://postgres:{SECRET}@localhost/x"),
    ):
        error = tuskline.error(*arguments, code=Cause.USAGE)
        assert ".pgpass" in error["repair"]
        assert SECRET not in str(error)
    error = tuskline.error(
        "--set", f"source.shop.dsn=host=127.0.0.1 password={SECRET}", "init", code=Cause.USAGE
    )
    assert SECRET not in str(error)


def test_a_slot_that_cannot_be_made_in_time_is_given_up(
    shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "SLOT_SECONDS", 0.5)
    source = CaptureSource("shop", shop.dsn, "tuskline_shop", "tuskline_shop", TABLES)
    with psycopg.connect(shop.dsn) as holding, shop.connect() as connection:
        holding.execute("INSERT INTO orders VALUES (1, 'not committed')")
        with pytest.raises(DeadlineError, match="did not answer"):
            attaching.init(source)
        # While the transaction goes on: nobody waits for it any more, and the slot's name is free.
        for rows in (
            "pg_replication_slots WHERE slot_name = 'tuskline_shop' AND database =",
            "pg_stat_activity WHERE backend_type = 'walsender' AND datname =",
        ):
            query = f"SELECT count(*) FROM {rows} current_database()".encode()
            wait_for(
                partial(_is_zero, connection, query),
                10,
                "the walsender gave up, and no slot is left",
            )


def _is_zero(connection: psycopg.Connection, query: bytes) -> bool:
    return connection.execute(query).fetchone() == (0,)


def _gate(tuskline: Attached) -> None:
    with tuskline.config.open("a") as file:
        file.write('[gate]\ncandidates = ["standby_a"]\n')


def _sees(shop: Database, role: str) -> bool:
    with shop.connect() as connection:
        query = "SELECT pg_has_role(%s, 'pg_read_all_stats', 'USAGE')"
        row = connection.execute(query.encode(), [role]).fetchone()
    assert row is not None
    return bool(row[0])


@each_major
def test_the_role_sees_what_its_gate_waits_for_as_long_as_it_is_attached(
    tmp_path: Path, shop: Database, role: str
) -> None:
    """What streams from a candidate's slot is shown to members of pg_read_all_stats only."""
    before = server_state(shop.dsn)
    sources = {
        name: {"dsn": as_role(shop, role), "tables": tables}
        for name, tables in (("orders", TABLES[:1]), ("audit", TABLES[1:]))
    }
    tuskline = Attached(tmp_path, sources)
    admin, env = ("--admin", "user=postgres"), administrator(shop)
    tuskline.json("init", *admin, env=env)
    # Nobody waits for a candidate, so nobody has to see one.
    assert not _sees(shop, role)
    _gate(tuskline)
    made = tuskline.json("init", *admin, env=env)["created"]
    membership = f"membership of {role} in pg_read_all_stats"
    assert [(row["source"], row["created"]) for row in made] == [
        ("orders", membership),
        ("audit", membership),
    ]
    assert _sees(shop, role)
    assert tuskline.json("init", *admin, env=env)["created"] == []
    assert not any(
        "pg_read_all_stats" in finding["repair"]
        for finding in tuskline.json("doctor", code=Cause.SLOT)["findings"]
    )
    # The other source's gate still needs it.
    tuskline.json("detach", "--source", "orders", *admin, env=env)
    assert _sees(shop, role)
    # Not by the role itself: an administrator gave it.
    tuskline.error("detach", code=Cause.PRIVILEGE)
    taken = tuskline.json("detach", *admin, env=env)["removed"]
    assert membership in {row["removed"] for row in taken}
    assert difference(before, server_state(shop.dsn)) == []


def test_a_role_that_saw_before_sees_after(tmp_path: Path, shop: Database, role: str) -> None:
    shop.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{SECRET}'",
        f"GRANT pg_read_all_stats TO {role}",
    )
    before = server_state(shop.dsn)
    tuskline = Attached(tmp_path, {"shop": {"dsn": as_role(shop, role), "tables": TABLES}})
    _gate(tuskline)
    admin, env = ("--admin", "user=postgres"), administrator(shop)
    tuskline.json("init", *admin, env=env)
    tuskline.json("detach", *admin, env=env)
    assert _sees(shop, role)
    assert difference(before, server_state(shop.dsn)) == []


def test_a_role_that_attached_by_itself_is_let_see_by_an_administrator(
    tmp_path: Path, shop: Database, role: str
) -> None:
    """The record is the role's own then, and what an administrator gave is his to take back."""
    shop.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{SECRET}'",
        f"ALTER TABLE orders OWNER TO {role}",
        f"ALTER TABLE audit OWNER TO {role}",
        f"GRANT CREATE ON DATABASE {shop.name} TO {role}",
    )
    before = server_state(shop.dsn)
    tuskline = Attached(tmp_path, {"shop": {"dsn": as_role(shop, role), "tables": TABLES}})
    _gate(tuskline)
    tuskline.json("init")
    assert not _sees(shop, role)
    admin, env = ("--admin", "user=postgres"), administrator(shop)
    tuskline.json("init", *admin, env=env)
    assert _sees(shop, role)
    error = tuskline.error("detach", code=Cause.PRIVILEGE)
    assert "--admin user=postgres" in error["repair"]
    tuskline.json("detach", *admin, env=env)
    assert not _sees(shop, role)
    assert difference(before, server_state(shop.dsn)) == []


@pytest.mark.parametrize("pg_server", [15], indirect=True)
def test_a_table_that_takes_anothers_name_is_checked_before_it_is_published(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published without a replica identity, its UPDATEs would be refused."""
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)",
        "CREATE TABLE more (id int PRIMARY KEY)",
        "CREATE TABLE bare (id int)",
        "INSERT INTO bare VALUES (1)",
    )
    publish = publication._publish

    def renamed(connection: psycopg.Connection[Any], text: str, *given: Any) -> None:
        if text in {"publication/create", "publication/add"}:
            database.execute("ALTER TABLE orders RENAME TO old; ALTER TABLE bare RENAME TO orders")
        publish(connection, text, *given)

    def fails_without_a_trace(tables: tuple[str, ...]) -> None:
        before = server_state(database.dsn)
        source = CaptureSource("shop", database.dsn, "s", "p", tables)
        with monkeypatch.context() as patch:
            patch.setattr(publication, "_publish", renamed)
            with (
                source_module.connect(source) as connection,
                pytest.raises(PublicationError, match=r"replica identity: public\.orders"),
            ):
                source_module.prepare(connection, source)
        database.execute("UPDATE orders SET id = id")
        database.execute("ALTER TABLE orders RENAME TO bare; ALTER TABLE old RENAME TO orders")
        assert not difference(before, server_state(database.dsn))

    fails_without_a_trace(("public.orders",))
    source = CaptureSource("shop", database.dsn, "s", "p", ("public.more",))
    with source_module.connect(source) as connection:
        source_module.prepare(connection, source)
    fails_without_a_trace(("public.orders", "public.more"))
