"""Names chosen by whoever may create a table: they are data in a script, a grant, a record and on a terminal."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from tests.support.attached import Attached, difference, run_script, server_state
from tests.support.servers import Database
from walsender_bridge.errors import Cause

SECRET = "planted-secret-77d1"
#: Each ends a comment of SQL, a line of psql or a quotation, and would then drop `orders`.
BREAKOUTS = (
    "line\nDROP TABLE public.orders; --",
    "return\rDROP TABLE public.orders; --",
    'quote"; DROP TABLE public.orders; --',
    "meta\n\\! touch planted\n--",
    "variable :'HOME' \\\\ :\"USER\"",
    "escape \x1b]0;owned\x07 \x9b31m",
)


@pytest.fixture
def role(shop: Database) -> Iterator[str]:
    """A role that may replicate and nothing else."""
    name = f"hostile_{shop.name}"
    shop.execute(f"CREATE ROLE {name} LOGIN REPLICATION PASSWORD '{SECRET}'")
    yield name
    shop.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def create(shop: Database, schema: str, table: str, columns: str) -> None:
    with shop.connect() as connection:
        name = sql.Identifier(schema)
        connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
        relation = sql.Identifier(schema, table)
        shape = sql.SQL("CREATE TABLE {} ({})").format(relation, sql.SQL(columns))
        connection.execute(shape)


def identity(shop: Database, table: str) -> str | None:
    with shop.connect() as connection:
        row = connection.execute(
            "SELECT relreplident::text FROM pg_class WHERE relname = %s", [table]
        ).fetchone()
    return None if row is None else row[0]


def test_a_name_in_the_repair_script_stays_a_name(
    tmp_path: Path, shop: Database, role: str
) -> None:
    for table in BREAKOUTS:
        create(shop, "public", table, "id int")
    tables = ["public.orders", *(f"public.{table}" for table in BREAKOUTS)]
    dsn = shop.server.dsn(shop.name, user=role, password=SECRET)
    tuskline = Attached(tmp_path, {"shop": {"dsn": dsn, "tables": tables}})
    done = tuskline.run("doctor", "--fix-sql")
    assert done.returncode == Cause.PUBLICATION
    controls = {c for c in done.stdout if not c.isprintable()} - {"\n"}
    assert controls == set(), "a terminal or an editor obeys these"
    run_script(shop.dsn, done.stdout)
    assert identity(shop, "orders") is not None, "the script dropped a table"
    identities = {table: identity(shop, table) for table in BREAKOUTS}
    assert set(identities.values()) == {"f"}, identities
    assert not Path("planted").exists(), "psql ran a command of the shell"


@pytest.mark.parametrize(
    ("named", "granted", "other"),
    [('"a.b".c', ("a.b", "c"), ("a", "b.c")), ("a.b.c", ("a", "b.c"), ("a.b", "c"))],
    ids=["schema", "table"],
)
def test_a_dot_in_a_name_grants_on_that_table_alone(
    tmp_path: Path,
    shop: Database,
    role: str,
    named: str,
    granted: tuple[str, str],
    other: tuple[str, str],
) -> None:
    create(shop, "a", "b.c", "id int PRIMARY KEY")
    create(shop, "a.b", "c", "id int PRIMARY KEY")
    before = server_state(shop.dsn)
    dsn = shop.server.dsn(shop.name, user=role, password=SECRET)
    tuskline = Attached(tmp_path, {"shop": {"dsn": dsn, "tables": [named]}})
    admin = {"PGPASSWORD": str(conninfo_to_dict(shop.dsn)["password"])}
    made = {
        r["created"]
        for r in tuskline.json("init", "--admin", "user=postgres", env=admin)["created"]
    }
    assert f"SELECT on table {named} for {role}" in made
    with psycopg.connect(dsn, autocommit=True) as connection:
        read = sql.SQL("SELECT FROM {}")
        connection.execute(read.format(sql.Identifier(*granted)))
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(read.format(sql.Identifier(*other)))
    with shop.connect() as connection:
        published = connection.execute(
            "SELECT schemaname, tablename FROM pg_publication_tables WHERE schemaname LIKE 'a%'"
        ).fetchall()
    assert published == [granted]
    assert tuskline.json("doctor")["errors"] == 0
    tuskline.json("detach", "--admin", "user=postgres", env=admin)
    assert difference(before, server_state(shop.dsn)) == []


def test_markup_and_escapes_in_a_name_are_shown_and_not_obeyed(
    tmp_path: Path, shop: Database
) -> None:
    names = ["[/red]", "[bold]x", "line\nok       faked", "bell\x07\x1b[2J"]
    for name in names:
        create(shop, "public", name, "id int PRIMARY KEY")
    tables = [f"public.{name}" for name in names]
    tuskline = Attached(
        tmp_path, {"shop": {"dsn": shop.dsn, "tables": [*tables, "public.no\x1b[31m"]}}
    )
    for command in (["doctor"], ["init"], ["status"], ["lag"]):
        done = tuskline.run(*command)
        shown = done.stdout + done.stderr
        assert "Traceback" not in shown, shown
        assert {c for c in shown if not c.isprintable()} <= {"\n"}, (command, shown)
        assert not any(line.startswith("ok       faked") for line in shown.splitlines())
