"""What other roles have made in a source's database never runs with the rights of a session of Tuskline's."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from slot_sync.apply import carry_out
from slot_sync.probe.primary import PrimaryProbe
from slot_sync.resolver.transitions import Drop
from slot_sync.sessions import Sessions
from spark_consumers.lake.flush import force_barrier
from spark_consumers.lake.tables.sources import Source, read_publication
from tests.support.attached import Attached, run_script
from tests.support.servers import MAJORS_IN_TURN, Database
from walsender_bridge.capture import source as capture
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.doctor import slots
from walsender_bridge.errors import Cause, ServerSettingError, UntrustedError
from walsender_bridge.own_schema.provisioned import ProvisionedRecord
from walsender_bridge.provisioning import quorum
from walsender_bridge.provisioning.detach import detach
from walsender_bridge.provisioning.init import as_admin, init
from walsender_bridge.runtime.sql import load

SECRET = "planted-secret-9f2c"
TABLES = ("public.orders", "public.audit")
ADMIN = ("--admin", "user=postgres")

each_major = pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)

#: Functions that fit better than those of pg_catalog, whose parameters are `any...`; they return the same.
BETTER = (
    ("cardinality", "text[]", "int"),
    ("cardinality", "bigint[]", "int"),
    ("to_jsonb", "pg_catalog.pg_publication", "jsonb"),
    ("to_jsonb", "pg_catalog.pg_replication_slots", "jsonb"),
    ("to_jsonb", "pg_catalog.pg_attribute", "jsonb"),
    ("jsonb_build_array", "name, name", "jsonb"),
)


@dataclass(frozen=True)
class Intruder:
    """An ordinary role of the test's database, whose code says in `public.ran` as whom it was run."""

    shop: Database
    name: str
    #: The DSN of a source whose role may replicate.
    source: str

    @property
    def env(self) -> dict[str, str]:
        """The environment in which the administrator's password is found."""
        return {"PGPASSWORD": str(conninfo_to_dict(self.shop.dsn)["password"])}

    def execute(self, *statements: str) -> None:
        """Run statements as this role."""
        dsn = self.shop.server.dsn(self.shop.name, user=self.name, password=SECRET)
        with psycopg.connect(dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def trap(self, signature: str, returns: str, value: str) -> None:
        """A function that makes this role a superuser, if whoever runs it may, whatever role is set."""
        self.execute(
            f"CREATE FUNCTION {signature} RETURNS {returns} LANGUAGE plpgsql AS $$ BEGIN"
            " INSERT INTO public.ran VALUES (session_user, current_setting('application_name'));"
            " IF (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = session_user) THEN"
            f" PERFORM pg_catalog.set_config('role', session_user, false); ALTER ROLE {self.name} SUPERUSER;"
            f" END IF; RETURN {value}; END $$"
        )

    def ran(self) -> list[tuple[str, str]]:
        """As whom, and in which session, code of this role was run; what it may not do, it has done as well."""
        with self.shop.connect() as connection:
            found = connection.execute("SELECT DISTINCT who, session FROM public.ran").fetchall()
            asked = "SELECT rolname, 'is a superuser' FROM pg_roles WHERE rolname = %s AND rolsuper"
            return [*found, *connection.execute(asked, [self.name]).fetchall()]


@pytest.fixture
def intruder(shop: Database) -> Iterator[Intruder]:
    name, role = f"intruder_{shop.name}", f"attached_{shop.name}"
    shop.execute(
        f"CREATE ROLE {name} LOGIN PASSWORD '{SECRET}'",
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{SECRET}'",
        # As in every database of 11 to 14.
        "GRANT CREATE ON SCHEMA public TO PUBLIC",
        "CREATE TABLE public.ran (who name, session text)",
        "GRANT INSERT ON public.ran TO PUBLIC",
    )
    yield Intruder(shop, name, shop.server.dsn(shop.name, user=role, password=SECRET))
    with shop.connect() as connection:
        for each in (name, role):
            found = sql.Identifier(each)
            connection.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(found))
            connection.execute(sql.SQL("DROP ROLE {}").format(found))


@each_major
def test_functions_that_fit_better_than_those_of_the_catalog_are_not_called(
    tmp_path: Path, intruder: Intruder
) -> None:
    for name, parameters, result in BETTER:
        arguments = ", ".join(f"${n}" for n, _ in enumerate(parameters.split(","), 1))
        intruder.trap(f"public.{name}({parameters})", result, f"pg_catalog.{name}({arguments})")
    intruder.trap("public.at_least(oid, int)", "boolean", "$1 OPERATOR(pg_catalog.>=) $2::oid")
    intruder.execute(
        "CREATE OPERATOR public.>= (LEFTARG = oid, RIGHTARG = int, PROCEDURE = public.at_least)"
    )
    named = {"dsn": intruder.source, "tables": TABLES}
    tuskline = Attached(tmp_path, {"shop": named})
    assert tuskline.json("init", *ADMIN, env=intruder.env)["created"]
    assert intruder.ran() == []
    tuskline.json("doctor")
    tuskline.run("status")
    asked = quorum.ConfiguredQuorum(
        CaptureSource("shop", intruder.source, "s", "p"), "tuskline", "tuskline_physical"
    )
    with quorum.session(asked, ADMIN[1] + f" password={intruder.env['PGPASSWORD']}") as connection:
        quorum.facts(connection, asked)
    assert tuskline.json("detach", *ADMIN, env=intruder.env)["removed"]
    assert intruder.ran() == []


@each_major
def test_casts_to_json_of_types_of_new_columns_defaults_are_not_called(
    tmp_path: Path, intruder: Intruder
) -> None:
    intruder.execute(
        "CREATE TYPE public.mood AS ENUM ('glad')",
        "CREATE TABLE public.diary (id int PRIMARY KEY)",
        "INSERT INTO public.diary VALUES (1)",
    )
    intruder.trap("public.told(public.mood)", "json", "'1'")
    intruder.execute("CREATE CAST (public.mood AS json) WITH FUNCTION public.told(public.mood)")
    intruder.shop.execute("CREATE PUBLICATION watched FOR TABLE public.diary", load("ddl/install"))
    try:
        # The event trigger has its owner's rights.
        intruder.execute("ALTER TABLE public.diary ADD mood public.mood DEFAULT 'glad'")
        intruder.execute("ALTER TABLE public.diary ADD page int")
        assert intruder.ran() == []
    finally:
        intruder.shop.execute(load("ddl/remove"), "DROP PUBLICATION watched")
    tables = ("public.diary",)
    intruder.execute(f"GRANT SELECT ON public.diary TO attached_{intruder.shop.name}")
    tuskline = Attached(tmp_path, {"shop": {"dsn": intruder.source, "tables": tables}})
    assert tuskline.json("init", *ADMIN, env=intruder.env)["created"]
    tuskline.run("doctor")
    source = Source("shop", intruder.source, "tuskline_shop")
    assert read_publication(source).shapes["public.diary"].filled
    assert tuskline.json("detach", *ADMIN, env=intruder.env)["removed"]
    assert intruder.ran() == []


def test_a_schema_that_another_role_made_first_is_not_adopted(
    tmp_path: Path, intruder: Intruder
) -> None:
    shop = intruder.shop
    shop.execute(f"GRANT CREATE ON DATABASE {shop.name} TO {intruder.name}")
    tuskline = Attached(tmp_path, {"shop": {"dsn": intruder.source, "tables": TABLES}})
    script = tuskline.json("doctor", "--fix-sql", code=Cause.PRIVILEGE)["fix_sql"]
    intruder.execute("CREATE SCHEMA tuskline", "GRANT USAGE ON SCHEMA tuskline TO PUBLIC")

    source = CaptureSource("shop", intruder.source, "tuskline_shop", "tuskline_shop", TABLES)
    admin = ADMIN[1] + f" password={intruder.env['PGPASSWORD']}"

    def refused() -> None:
        for options in (None, admin):
            with pytest.raises(UntrustedError, match=f"belongs to role {intruder.name}") as caught:
                init(source, options)
            assert "DROP SCHEMA tuskline CASCADE" in caught.value.repair
        assert intruder.ran() == []

    refused()
    with shop.connect() as connection:
        # As init itself makes them, to begin with.
        connection.execute(f"SET ROLE {intruder.name}".encode())
        connection.execute(load("flush/send").encode())
    refused()
    intruder.execute("GRANT ALL ON tuskline.flush, tuskline.provisioned TO PUBLIC")
    intruder.trap("tuskline.t()", "trigger", "new")
    intruder.execute(
        "CREATE TRIGGER t BEFORE INSERT ON tuskline.provisioned FOR EACH ROW EXECUTE PROCEDURE tuskline.t()",
        "INSERT INTO tuskline.flush VALUES (1)",
        "CREATE TRIGGER t BEFORE UPDATE ON tuskline.flush FOR EACH ROW EXECUTE PROCEDURE tuskline.t()",
    )
    for dsn in (shop.dsn, intruder.source):
        with pytest.raises(UntrustedError, match=f"belongs to role {intruder.name}"):
            force_barrier("grpc://127.0.0.1:1", {"shop": dsn})
    refused()
    report = tuskline.json("doctor", "--fix-sql", code=Cause.PRIVILEGE)
    assert any(intruder.name in each["what"] for each in report["findings"]), report
    assert "tuskline.provisioned" not in report["fix_sql"]
    # A script that was printed before there was such a schema.
    with pytest.raises(AssertionError, match="belongs to another role"):
        run_script(shop.dsn, script)
    # The way out that the errors name.
    shop.execute("DROP SCHEMA tuskline CASCADE")
    assert tuskline.json("init", *ADMIN, env=intruder.env)["created"]
    assert tuskline.json("detach", *ADMIN, env=intruder.env)["removed"]
    assert intruder.ran() == []


#: What a source's role may do to its own tables, and whatever undoes that.
CHANGES = {
    "trigger": (
        "CREATE TRIGGER t BEFORE DELETE ON tuskline.provisioned FOR EACH ROW EXECUTE PROCEDURE mine.t()",
        "DROP TRIGGER t ON tuskline.provisioned",
    ),
    "view": (
        "ALTER TABLE tuskline.provisioned RENAME TO kept; CREATE VIEW tuskline.provisioned AS SELECT slot, mine.f(kind) AS kind, name, privilege, grantee, at FROM tuskline.kept",
        "DROP VIEW tuskline.provisioned; ALTER TABLE tuskline.kept RENAME TO provisioned",
    ),
    "default": (
        "ALTER TABLE tuskline.provisioned ALTER at SET DEFAULT mine.f('now')::timestamptz",
        "ALTER TABLE tuskline.provisioned ALTER at SET DEFAULT clock_timestamp()",
    ),
    "check": (
        "ALTER TABLE tuskline.provisioned ADD CONSTRAINT c CHECK (mine.f(kind) = kind) NOT VALID",
        "ALTER TABLE tuskline.provisioned DROP CONSTRAINT c",
    ),
    "rule": (
        "CREATE RULE r AS ON DELETE TO tuskline.provisioned DO ALSO SELECT mine.f('')",
        "DROP RULE r ON tuskline.provisioned",
    ),
    "policy": (
        "CREATE POLICY p ON tuskline.provisioned USING (mine.f(kind) = kind)",
        "DROP POLICY p ON tuskline.provisioned",
    ),
    "index": (
        "CREATE INDEX i ON tuskline.provisioned (mine.g(kind))",
        "DROP INDEX tuskline.i",
    ),
    "domain": (
        "CREATE DOMAIN mine.d AS text CHECK (mine.f(VALUE) = VALUE); ALTER TABLE tuskline.provisioned ADD more mine.d",
        "ALTER TABLE tuskline.provisioned DROP more",
    ),
    "child": (
        "CREATE TABLE mine.c () INHERITS (tuskline.provisioned)",
        "DROP TABLE mine.c",
    ),
}


@pytest.fixture
def own(intruder: Intruder) -> Intruder:
    """The intruder as the source's role, which can attach by itself."""
    shop, name = intruder.shop, intruder.name
    shop.execute(
        f"ALTER ROLE {name} REPLICATION",
        f"GRANT CREATE ON DATABASE {shop.name} TO {name}",
        *(f"ALTER TABLE {table} OWNER TO {name}" for table in TABLES),
    )
    intruder.execute("CREATE SCHEMA mine")
    intruder.trap("mine.t()", "trigger", "old")
    intruder.trap("mine.f(text)", "text", "$1")
    intruder.execute(
        "CREATE FUNCTION mine.g(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RETURN $1; END'"
    )
    return replace(intruder, source=shop.server.dsn(shop.name, user=name, password=SECRET))


@each_major
def test_an_administrator_runs_nothing_of_the_role_that_attached(
    tmp_path: Path, own: Intruder
) -> None:
    tuskline = Attached(tmp_path, {"shop": {"dsn": own.source, "tables": TABLES}})
    assert tuskline.json("init")["created"]
    source = CaptureSource("shop", own.source, "tuskline_shop", "tuskline_shop", TABLES)
    admin = ADMIN[1] + f" password={own.env['PGPASSWORD']}"
    for change, (do, undo) in CHANGES.items():
        for statement in do.split("; "):
            own.execute(statement)
        for act in (init, detach):
            with pytest.raises(UntrustedError) as caught:
                act(source, admin)
            assert f"as role {own.name}" in caught.value.repair, change
        assert "tuskline." in caught.value.what
        for statement in undo.split("; "):
            own.execute(statement)
        own.shop.execute("TRUNCATE public.ran")
        assert init(source, admin) == [], change
        assert own.ran() == [], change
    own.execute(CHANGES["trigger"][0])
    error = tuskline.error("detach", *ADMIN, env=own.env, code=Cause.PRIVILEGE)
    assert "trigger t on tuskline.provisioned" in error["what"]
    own.execute(CHANGES["trigger"][1])
    assert tuskline.json("detach", *ADMIN, env=own.env)["removed"]
    assert own.ran() == []


def test_while_an_administrator_uses_the_tables_their_owner_cannot_change_them(
    own: Intruder,
) -> None:
    source = CaptureSource("shop", own.source, "tuskline_shop", "tuskline_shop", TABLES)
    init(source)
    maker = as_admin(source, ADMIN[1] + f" password={own.env['PGPASSWORD']}")
    later = [do.split("; ")[0] for do, _ in CHANGES.values() if "DOMAIN" not in do]
    with capture.connect(maker) as connection:
        record = ProvisionedRecord(connection, source.slot, source.dsn)
        with record.held():
            assert record.own()
            for statement in (*later, "ALTER SCHEMA tuskline RENAME TO mine_too"):
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    own.execute("SET lock_timeout = '100ms'", statement)
            # What a flush does goes on.
            own.execute("SET lock_timeout = '1s'", load("flush/write"))
    own.execute(
        "ALTER SCHEMA tuskline RENAME TO mine_too", "ALTER SCHEMA mine_too RENAME TO tuskline"
    )
    assert detach(source)


def test_functions_under_the_extensions_names_are_not_called_unless_a_superuser_made_them(
    intruder: Intruder,
) -> None:
    shop = intruder.shop
    shop.execute(f"GRANT CREATE ON DATABASE {shop.name} TO {intruder.name}")
    intruder.execute(
        "CREATE SCHEMA tuskline_slots", "GRANT USAGE ON SCHEMA tuskline_slots TO PUBLIC"
    )
    for signature in ("marker(name)", "drop(name, boolean)", "drop(text, boolean)"):
        intruder.trap(f"tuskline_slots.{signature}", "text", "NULL")
    intruder.execute(
        "CREATE TYPE tuskline_slots.row AS (slot_name name, marker text, two_phase boolean)",
        "CREATE FUNCTION tuskline_slots.inspect(name DEFAULT NULL) RETURNS SETOF tuskline_slots.row"
        " LANGUAGE sql AS 'SELECT NULL::name, tuskline_slots.marker(NULL), false'",
    )
    with shop.connect() as connection:
        create = "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')"
        connection.execute(create, [f"kept_{shop.name}"])
    look = PrimaryProbe(intruder.source)
    sessions = Sessions(intruder.source)
    try:
        assert not look.read().has_extension
        with pytest.raises(ServerSettingError, match="not owned by a superuser"):
            carry_out(Drop("kept", shop.name), sessions, sessions)
        facts = slots.ask(intruder.source)
    finally:
        look.close()
        sessions.close()
    assert intruder.ran() == []
    told = [
        each for each in slots.evaluate_primary(facts, set(), "here") if each.check == "extension"
    ]
    assert [intruder.name in each.what for each in told] == [True]
    shop.execute("DROP SCHEMA tuskline_slots CASCADE")
