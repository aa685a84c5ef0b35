"""Which tables a source's publication has: never one whose UPDATEs would be refused, and those that come to fit."""

from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.support.attached import Attached, run_script
from tests.support.capture_stack import CaptureProcess, ChangeLog, wal_end
from tests.support.servers import MAJORS_IN_TURN, Database
from tests.support.waiting import wait_for
from walsender_bridge.capture import publication
from walsender_bridge.capture import source as capture
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.cli.status import summary
from walsender_bridge.config import load_config
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.doctor.server import examine
from walsender_bridge.errors import PrivilegeError, PublicationError
from walsender_bridge.observability.observation import Observer
from walsender_bridge.provisioning.default_privileges import offered
from walsender_bridge.provisioning.detach import detach
from walsender_bridge.provisioning.init import init, withdraw
from walsender_bridge.provisioning.table import add_table
from walsender_bridge.runtime.sql import load

SECRET = "planted-secret-3e80"

each_major = pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)


def source_of(database: Database, *tables: str, dsn: str = "") -> CaptureSource:
    return CaptureSource("shop", dsn or database.dsn, "tuskline_shop", "tuskline_shop", tables)


def published(database: Database) -> set[str]:
    """The publication's tables, without our own."""
    with database.connect() as connection:
        query = "SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = 'tuskline_shop'"
        rows = connection.execute(query.encode()).fetchall()
    # FOR ALL TABLES has both of ours.
    return {table for (table,) in rows if not table.startswith("tuskline.")}


def found(
    source: CaptureSource, check: str, severity: Severity = Severity.WARNING
) -> list[Finding]:
    return [e for e in examine(source) if e.check == check and e.severity is severity]


def follow(source: CaptureSource) -> None:
    """One look of a running capture at the catalog."""
    with capture.connect(source) as connection:
        publication.follow(connection, source)


@each_major
def test_no_update_is_refused_because_of_what_is_published_by_default(shop: Database) -> None:
    major = shop.server.installation.major
    shop.execute(
        "CREATE TABLE bare (id int)",
        "CREATE TABLE whole (id int)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        "CREATE UNLOGGED TABLE quick (id int PRIMARY KEY)",
        "CREATE TABLE heir (note text) INHERITS (orders)",
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)",
        # Its next partition would have none, whatever this one has.
        "CREATE TABLE days (day int) PARTITION BY RANGE (day)",
        "CREATE TABLE days_1 PARTITION OF days FOR VALUES FROM (0) TO (10)",
        "ALTER TABLE days_1 REPLICA IDENTITY FULL",
    )
    if major >= 12:
        shop.execute(
            "CREATE TABLE made (id int, twice int GENERATED ALWAYS AS (id * 2) STORED)",
            "ALTER TABLE made REPLICA IDENTITY FULL",
        )
    source = source_of(shop)
    init(source)
    shop.execute(
        "CREATE TABLE late (id int)",
        "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (10) TO (20)",
        "CREATE TABLE days_2 PARTITION OF days FOR VALUES FROM (10) TO (20)",
    )
    tables = {"bare", "whole", "quick", "heir", "late", "orders", "audit", "parts", "days"}
    for table in tables | ({"made"} if major >= 12 else set()):
        column = {"days": "day", "audit": "order_id"}.get(table, "id")
        shop.execute(
            f"INSERT INTO {table} ({column}) VALUES (1), (12)"
            if table in {"parts", "days"}
            else f"INSERT INTO {table} ({column}) VALUES (1)",
            f"UPDATE {table} SET {column} = {column} + 1",
            f"DELETE FROM {table}",
        )
    wanted = {"public.orders", "public.audit", "public.whole"}
    wanted |= {"public.parts"} if major >= 13 else {"public.parts_1", "public.days_1"}
    wanted |= {"public.made"} if 12 <= major < 18 else set()
    assert published(shop) == wanted
    told = {each.what.split(" ")[0]: each for each in found(source, "tables left out")}
    assert {"public.bare", "public.late", "public.quick", "public.heir"} <= set(told)
    assert "ALTER TABLE public.bare REPLICA IDENTITY FULL" in told["public.bare"].repair
    assert "whole old row" in told["public.bare"].repair
    if major >= 13:
        assert "next partition" in told["public.days"].what
    if major >= 18:
        assert "generated" in told["public.made"].what
    # What has a price is in the script, and does nothing there.
    assert all(each.fix.startswith("--") for each in told.values())
    detach(source)


@each_major
def test_a_named_table_whose_updates_would_be_refused_is_not_published(shop: Database) -> None:
    shop.execute("CREATE TABLE heir (note text) INHERITS (orders)")
    with pytest.raises(PublicationError, match=r"no replica identity: public\.heir"):
        init(source_of(shop, "public.orders"))
    if shop.server.installation.major >= 18:
        shop.execute(
            "CREATE TABLE made (id int, twice int GENERATED ALWAYS AS (id * 2) STORED)",
            "ALTER TABLE made REPLICA IDENTITY FULL",
        )
        with pytest.raises(PublicationError, match="generated columns"):
            init(source_of(shop, "public.made"))
    assert published(shop) == set()


@pytest.mark.parametrize("pg_server", [18], indirect=True, ids="pg{}".format)
def test_a_table_whose_new_generated_column_has_its_updates_refused_is_taken_out(
    shop: Database,
) -> None:
    source = source_of(shop)
    init(source)
    shop.execute("CREATE TABLE whole (id int)", "ALTER TABLE whole REPLICA IDENTITY FULL")
    follow(source)
    assert "public.whole" in published(shop)
    for kind in ("STORED", "VIRTUAL"):
        shop.execute(
            "INSERT INTO whole VALUES (1)",
            f"ALTER TABLE whole ADD twice int GENERATED ALWAYS AS (id * 2) {kind}",
        )
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            shop.execute("UPDATE whole SET id = 2")
        with shop.connect() as connection:
            names = {"publication": source.publication}
            refused = connection.execute(
                load("doctor/published_unidentified").encode(), names
            ).fetchall()
        assert refused == [("public.whole",)]
        follow(source)
        assert "public.whole" not in published(shop)
        shop.execute("UPDATE whole SET id = 2", "ALTER TABLE whole DROP twice")
        follow(source)
        assert "public.whole" in published(shop)
    detach(source)


def test_tables_are_published_as_they_come_to_fit_and_taken_out_without_a_key(
    shop: Database,
) -> None:
    source = source_of(shop)
    init(source)
    shop.execute("CREATE TABLE late (id int)", "INSERT INTO late VALUES (1)")
    follow(source)
    assert published(shop) == {"public.orders", "public.audit"}
    shop.execute("ALTER TABLE late ADD PRIMARY KEY (id)")
    follow(source)
    assert published(shop) == {"public.orders", "public.audit", "public.late"}
    shop.execute("ALTER TABLE late DROP CONSTRAINT late_pkey")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        shop.execute("UPDATE late SET id = 2")
    follow(source)
    shop.execute("UPDATE late SET id = 2")
    assert published(shop) == {"public.orders", "public.audit"}
    detach(source)


def test_a_table_that_somebody_has_locked_keeps_no_other_from_being_published(
    shop: Database,
) -> None:
    source = source_of(shop)
    init(source)
    shop.execute("CREATE TABLE held (id int PRIMARY KEY)", "CREATE TABLE late (id int PRIMARY KEY)")
    with shop.connect() as locking:
        locking.execute("BEGIN")
        locking.execute("LOCK TABLE held IN SHARE UPDATE EXCLUSIVE MODE")
        follow(source)
        assert published(shop) == {"public.orders", "public.audit", "public.late"}
    follow(source)
    assert "public.held" in published(shop)
    detach(source)


def test_capture_publishes_a_new_table_while_it_runs(
    tmp_path: Path, log: ChangeLog, shop: Database
) -> None:
    with CaptureProcess(tmp_path, log, shop.dsn) as capturing:
        wait_for(capturing.streams, 30, "capture streams")
        shop.execute("CREATE TABLE late (id int PRIMARY KEY)")
        wait_for(lambda: "public.late" in published(shop), 60, "the new table is published")
        shop.execute("INSERT INTO late VALUES (20261123)")
        wait_for(lambda: any(b"20261123" in m for m in log.messages()), 30, "its rows arrive")
        assert capturing.stop() == 0


@each_major
def test_a_source_moves_from_all_tables_to_a_publication_of_ours(
    tmp_path: Path, log: ChangeLog, shop: Database
) -> None:
    """The way of docs/tables.md: the slot is past the moment at which the other publication was made."""
    shop.execute("CREATE PUBLICATION tuskline_shop FOR ALL TABLES", "CREATE TABLE bare (id int)")
    with CaptureProcess(tmp_path, log, shop.dsn) as capturing:
        wait_for(capturing.streams, 30, "capture streams")
        shop.execute("INSERT INTO orders VALUES (1, 'before')")
        init(CaptureSource("shop", shop.dsn, "tuskline_shop", "tuskline_own"))
        with shop.connect() as connection:
            made = wal_end(connection)
        shop.execute("UPDATE tuskline.flush SET token = token + 1")
        wait_for(lambda: capturing.status()["confirmed_lsn"] > made, 30, "the slot is past it")
        assert capturing.stop() == 0
        own = replace(capturing.settings.source, publication="tuskline_own")
        capturing.settings = replace(capturing.settings, source=own)
        capturing.start()
        wait_for(capturing.streams, 30, "it streams from the other publication")
        shop.execute("DROP PUBLICATION tuskline_shop", "INSERT INTO orders VALUES (2, '20261123')")
        wait_for(lambda: any(b"20261123" in m for m in log.messages()), 30, "changes arrive")
        shop.execute("INSERT INTO bare VALUES (1)", "UPDATE bare SET id = 2")
        assert capturing.stop() == 0


@each_major
def test_patterns_exclusions_and_odd_names(shop: Database) -> None:
    shop.execute(
        "CREATE SCHEMA sales",
        'CREATE SCHEMA "Odd.Schema"',
        "CREATE TABLE sales.order_1 (id int PRIMARY KEY)",
        "CREATE TABLE sales.order_2 (id int PRIMARY KEY)",
        "CREATE TABLE sales.other (id int PRIMARY KEY)",
        "CREATE TABLE audit_log (id int PRIMARY KEY)",
        'CREATE TABLE "Odd.Schema"."Na*me.x" (id int PRIMARY KEY)',
        'CREATE TABLE "Odd.Schema"."Naaame.x" (id int PRIMARY KEY)',
        'CREATE TABLE "Odd.Schema"."say ""it""" (id int PRIMARY KEY)',
    )
    source = source_of(
        shop,
        *("public.*", "!public.audit_*", "sales.order_*", "sales.gone_*", "!public.none"),
        *('"Odd.Schema"."Na*me.x"', '"Odd.Schema".say*'),
    )
    init(source)
    wanted = {
        *("public.orders", "public.audit", "sales.order_1", "sales.order_2"),
        *("Odd.Schema.Na*me.x", 'Odd.Schema.say "it"'),
    }
    assert published(shop) == wanted
    idle = [each.what for each in found(source, "tables")]
    assert len(idle) == 2
    assert all(name in " ".join(idle) for name in ("sales.gone_*", "!public.none"))
    # Made later, and matched: init, again, tells what it has added.
    shop.execute("CREATE TABLE sales.order_3 (id int PRIMARY KEY)")
    assert [str(m) for m in init(source)] == ["table sales.order_3 in publication tuskline_shop"]
    # One that is not matched, by a name that reads like a pattern; the others stay.
    add_table(source, '"Odd.Schema".Na*me.x')
    add_table(source, "sales.other")
    assert published(shop) == {*wanted, "sales.order_3", "sales.other"}
    detach(source)


@each_major
def test_partitions_follow_their_table(shop: Database) -> None:
    shop.execute(
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE piece PARTITION OF parts FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE others (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_of_others PARTITION OF others FOR VALUES FROM (0) TO (10)",
    )
    roots = shop.server.installation.major >= 13
    source = source_of(shop, "public.p*", "!public.others")
    init(source)
    assert published(shop) == {"public.parts" if roots else "public.piece"}
    if roots:
        (idle,) = [each.what for each in found(source_of(shop, "*.*", "!*.piece"), "tables")]
        assert "!*.piece" in idle
    shop.execute("CREATE TABLE second PARTITION OF parts FOR VALUES FROM (10) TO (20)")
    follow(source)
    assert published(shop) == ({"public.parts"} if roots else {"public.piece", "public.second"})
    detach(source)


def test_init_brings_our_publication_up_to_the_present_tables(shop: Database) -> None:
    shop.execute("CREATE TABLE more (id int PRIMARY KEY)")
    init(source_of(shop, "public.orders", "public.audit"))
    source = source_of(shop, "public.*", "!public.audit")
    entries = b"SELECT prrelid::regclass::text, oid, xmin::text FROM pg_publication_rel"
    with shop.connect() as connection:
        before = {name: rest for name, *rest in connection.execute(entries).fetchall()}
        version = connection.execute(b"SELECT xmin::text FROM pg_publication").fetchall()
        told = " ".join(each.what for each in found(source, "publication"))
        assert "lacks public.more" in told
        assert "has public.audit, which" in told
        assert [str(m) for m in init(source)] == ["table public.more in publication tuskline_shop"]
        assert withdraw(source) == ["public.audit"]
        # What stays has the entry that it had, so the lake copies nothing of it.
        after = {name: rest for name, *rest in connection.execute(entries).fetchall()}
        assert {**before, **after} == {**after, "audit": before["audit"]}
        assert set(after) == {"orders", "more", "tuskline.flush"}
        assert connection.execute(b"SELECT xmin::text FROM pg_publication").fetchall() == version
    assert init(source) == []
    assert withdraw(source) == []
    detach(source)


@pytest.mark.parametrize("statement", ["FOR ALL TABLES", "FOR TABLE orders"], ids=["all", "some"])
def test_a_publication_of_the_users_stays_as_it_is(shop: Database, statement: str) -> None:
    shop.execute(f"CREATE PUBLICATION tuskline_shop {statement}")
    before, is_all = published(shop), statement == "FOR ALL TABLES"
    source = source_of(shop)
    init(source)
    shop.execute("CREATE TABLE late (id int PRIMARY KEY)")
    follow(source)
    assert withdraw(source) == []
    severity = Severity.WARNING if is_all else Severity.OK
    assert any("was not created by" in each.what for each in found(source, "publication", severity))
    late = {"public.late"} if is_all else set()
    assert published(shop) == before | late
    # What `tables` match is added to it, as they say so; nothing is taken out.
    if not is_all:
        init(source_of(shop, "public.l*"))
        assert published(shop) == {*before, "public.late"}
    detach(source)
    assert published(shop) == before | late


def test_what_the_role_may_not_publish_is_named_with_its_sql(
    tmp_path: Path, shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    role, admin = f"chosen_{shop.name}", "user=postgres"
    dsn = shop.server.dsn(shop.name, user=role, password=SECRET)
    monkeypatch.setenv("PGPASSWORD", str(conninfo_to_dict(shop.dsn)["password"]))
    source = source_of(shop, dsn=dsn)
    init(source, admin)
    tuskline = Attached(tmp_path, {"shop": {"dsn": dsn}})

    def notes() -> list[str]:
        with Observer(load_config(tuskline.config)) as observer:
            noted: list[str] = summary(observer.observe())["notes"]
            return noted

    assert notes() == []
    shop.execute('CREATE TABLE "Late" (id int PRIMARY KEY)')
    follow(source)
    assert "public.Late" not in published(shop)
    (note,) = notes()
    assert 'ALTER PUBLICATION "tuskline_shop" ADD TABLE ONLY "public"."Late"' in note
    (told,) = found(source, "publication")
    assert "public.Late" in told.what
    with pytest.raises(PrivilegeError, match=r"public\.Late"):
        init(source)
    run_script(shop.dsn, told.fix)
    assert "public.Late" in published(shop)
    # It is sent, and could not be copied: the grant is a matter of its own.
    (note,) = notes()
    assert f'GRANT SELECT ON TABLE "public"."Late" TO "{role}"' in note
    (told,) = found(source, "privileges", Severity.ERROR)
    assert not told.prevents
    shop.execute("CREATE TABLE late_too (id int PRIMARY KEY)")
    init(source, admin)
    assert notes() == []
    assert not [each for each in examine(source) if each.severity is Severity.ERROR]
    detach(source, admin)


@each_major
def test_init_offers_what_lets_the_role_read_tables_that_are_made_later(
    shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    role, admin = f"reader_{shop.name}", "user=postgres"
    dsn = shop.server.dsn(shop.name, user=role, password=SECRET)
    monkeypatch.setenv("PGPASSWORD", str(conninfo_to_dict(shop.dsn)["password"]))
    source = source_of(shop, dsn=dsn)
    init(source, admin)
    statements = offered(source, admin)
    has_group = shop.server.installation.major >= 14
    assert [each.split(" ")[0] for each in statements] == ["GRANT"] * has_group + ["ALTER"]
    assert offered(source_of(shop, "public.orders", dsn=dsn), admin) == []
    for statement in statements:
        shop.execute(statement, "DROP TABLE IF EXISTS late", "CREATE TABLE late (id int)")
        with psycopg.connect(dsn) as connection:
            connection.execute("SELECT FROM late")
        assert offered(source, admin) == []
        shop.execute(*([f"REVOKE pg_read_all_data FROM {role}"] if has_group else []))
    shop.execute(f"DROP OWNED BY {role}")
    detach(source, admin)


def test_a_role_that_owns_the_new_table_and_the_publication_publishes_it(shop: Database) -> None:
    role = f"owner_{shop.name}"
    shop.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{SECRET}'",
        f"GRANT CREATE ON DATABASE {shop.name} TO {role}",
        f"GRANT CREATE ON SCHEMA public TO {role}",
        *(f"ALTER TABLE {table} OWNER TO {role}" for table in ("orders", "audit")),
    )
    source = source_of(shop, dsn=shop.server.dsn(shop.name, user=role, password=SECRET))
    try:
        init(source)
        shop.execute(f"SET ROLE {role}; CREATE TABLE late (id int PRIMARY KEY)")
        follow(source)
        assert "public.late" in published(shop)
        shop.execute("CREATE TABLE foreigner (id int PRIMARY KEY)")
        follow(source)
        assert "public.foreigner" not in published(shop)
        detach(source)
    finally:
        shop.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
