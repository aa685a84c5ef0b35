"""The extension's refusals, privileges and crashes on real pairs of servers."""

import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.support import extension
from tests.support.extension import MAJORS
from tests.support.slot_copies import (
    PHYSICAL,
    Fields,
    Pair,
    decoded,
    fields,
    inspect,
    rows,
    running_pair,
    slot_names,
)

RESERVE = "SELECT tuskline_slots.reserve(%s, %s, %s, %s, %s, %s)"
MOVE = "SELECT tuskline_slots.set_fields(%s, %s, %s, %s::text::xid, %s)"
RENAME = "SELECT tuskline_slots.rename(%s, %s)"
DROP = "SELECT tuskline_slots.drop(%s)"
ADVANCE = "SELECT tuskline_slots.advance(%s, %s)"
RESTORE = "SELECT tuskline_slots.restore_mappings(%s)"
MARK = "SELECT tuskline_slots.mark(%s, %s)"
COPY = "_tuskline_tmp_copy"
NEW = "_tuskline_tmp_new"
AHEAD = "FFFFFFFF/FFFFFFFF"
# inactive_since (17 and later) is when somebody last let go of the slot: a refusal may have had it in hand.
LOGICAL_SLOTS = "SELECT to_jsonb(slots) - 'inactive_since' FROM pg_replication_slots AS slots WHERE slot_type = 'logical'"


@pytest.fixture(scope="module", params=MAJORS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair with a proven copy of the slot `kept`, for tests that leave it as it is."""
    settings: dict[str, Any] = {}
    if extension.lists_plugins(request.param):
        settings["output_plugin_libraries"] = "pgoutput, no_such_plugin, plpgsql"
    with running_pair(request.param, **settings) as pair:
        pair.make_slot("kept")
        pair.reserve(COPY, "kept")
        pair.prove(COPY, "kept")
        yield pair


def refusal(pair: Pair, query: str, *arguments: object, primary: bool = False) -> psycopg.Error:
    """The error that a call ends with; nothing has changed by it."""
    server = pair.primary if primary else pair.standby
    before = rows(server, LOGICAL_SLOTS)
    with pytest.raises(psycopg.Error) as caught:
        rows(server, query, *arguments)
    assert rows(server, LOGICAL_SLOTS) == before
    return caught.value


def test_10_what_cannot_be_right_is_refused_with_its_reason(pair: Pair) -> None:
    restart, confirmed, xmin = fields(pair.standby, COPY)
    past_gone = "0/100"
    table: list[tuple[str, tuple[object, ...], str | None, str]] = [
        (RESERVE, (None, "pgoutput", restart, confirmed, False, None), "22004", "slot_name must not be null"),
        (RESERVE, (NEW, None, restart, confirmed, False, None), "22004", "plugin must not be null"),
        (RESERVE, (NEW, "pgoutput", None, confirmed, False, None), "22004", "restart_lsn must not be null"),
        (RESERVE, (NEW, "pgoutput", restart, None, False, None), "22004", "confirmed_flush_lsn must"),
        (RESERVE, (NEW, "pgoutput", restart, confirmed, None, None), "22004", "two_phase must not be null"),
        (RESERVE, (NEW, "pgoutput", "0/0", confirmed, False, None), "22023", "invalid restart_lsn"),
        (RESERVE, (NEW, "pgoutput", AHEAD, confirmed, False, None), "22023", "must not be after"),
        (RESERVE, (NEW, "pgoutput", restart, AHEAD, False, None), "55000", "has not replayed"),
        (RESERVE, (NEW, "pgoutput", past_gone, confirmed, False, None), "55000", "lacks WAL"),
        (RESERVE, (NEW, "pgoutput", restart, confirmed, True, None), None, ""),
        (RESERVE, (NEW, "pgoutput", restart, confirmed, False, restart), "22023", "together"),
        (RESERVE, (NEW, "no_such_plugin", restart, confirmed, False, None), "58P01", ""),
        (RESERVE, (NEW, "plpgsql", restart, confirmed, False, None), "42883", ""),
        (RESERVE, (NEW, "../pgoutput", restart, confirmed, False, None), "42602", "not the name of"),
        (RESERVE, (NEW, "", restart, confirmed, False, None), "42602", "not the name of"),
        (RESERVE, ("kept", "pgoutput", restart, confirmed, False, None), "42602", "not a temporary"),
        (RESERVE, (NEW + "/../x", "pgoutput", restart, confirmed, False, None), "42602", "invalid"),
        (RESERVE, ("", "pgoutput", restart, confirmed, False, None), "42602", "too short"),
        (RESERVE, (COPY, "pgoutput", restart, confirmed, False, None), "42710", "already exists"),
        (MOVE, ("no_such", restart, confirmed, xmin, False), "42704", "does not exist"),
        (MOVE, (COPY, restart, confirmed, None, False), "22023", "catalog_xmin"),
        (MOVE, (COPY, restart, confirmed, "2", False), "22023", "catalog_xmin"),
        (MOVE, (COPY, restart, confirmed, str(int(xmin) + 1_000_000), False), "22023", "catalog_xm"),
        (MOVE, (COPY, confirmed, restart, xmin, True), None, ""),
        (MOVE, (COPY, restart, AHEAD, xmin, True), "55000", "has not replayed"),
        (MOVE, (COPY, restart, confirmed, xmin, None), "22004", "may_go_back must not be null"),
        (RENAME, (COPY, None), "22004", "new_name must not be null"),
        (RENAME, ("no_such", "kept"), "42602", "not a temporary"),
        (RENAME, ("_tuskline_tmp_no_such", "kept"), "42704", "does not exist"),
        (RENAME, (COPY, COPY), "42602", "is a temporary name"),
        (RENAME, (COPY, "Kept"), "42602", "invalid character"),
        (DROP, ("no_such",), "42704", "does not exist"),
        (DROP, (None,), "22004", "slot_name must not be null"),
        (MARK, ("no_such", "x"), "42704", "does not exist"),
        (MARK, (COPY, "x\ny"), "22023", "incarnation id"),
        (MARK, (COPY, "x" * 65), "22023", "incarnation id"),
        (MARK, (COPY, None), "22004", "value must not be null"),
    ]  # fmt: skip
    for query, arguments, state, text in table:
        error = refusal(pair, query, *arguments)
        assert state in {None, error.sqlstate}, (query, arguments, error)
        assert text in str(error), (query, arguments, error)
        assert error.diag.message_hint or text in {"too short", "invalid character", "invalid"}, (
            error
        )
    # On the primary there is nothing to copy to.
    for query, arguments, text in (
        (RESERVE, (NEW, "pgoutput", restart, restart, False, None), "not in recovery"),
        (MOVE, ("kept", restart, confirmed, xmin, False), "not in recovery"),
        (RENAME, (COPY, "other"), "not in recovery"),
        (DROP, ("kept",), "on a primary"),
    ):
        error = refusal(pair, query, *arguments, primary=True)
        assert text in str(error)


def test_10_a_plugin_that_the_server_does_not_trust_is_refused(pair: Pair) -> None:
    """Newer minor releases take no others; who may make copies must not have any library loaded either."""
    restart, confirmed, _ = fields(pair.standby, COPY)
    error = refusal(pair, RESERVE, NEW, "otherput", restart, confirmed, False, None)
    if extension.lists_plugins(pair.major):
        assert error.sqlstate == "55000"
        assert "may not be used as an output plugin" in str(error)
        assert "add it to that parameter" in (error.diag.message_hint or "")
    else:
        assert error.sqlstate == "58P01"


def test_10_a_slot_that_is_used_or_of_another_database_is_left_alone(pair: Pair) -> None:
    restart, confirmed, xmin = fields(pair.standby, COPY)
    pair.on_primary("CREATE DATABASE elsewhere")
    pair.catch_up()
    extension.create_extension(pair.primary, pair.library, "elsewhere")
    pair.catch_up()
    for query, arguments in (
        (MOVE, (COPY, restart, confirmed, xmin, False)),
        (RENAME, (COPY, "other")),
        (DROP, (COPY,)),
    ):
        with (
            psycopg.connect(pair.standby.dsn("elsewhere"), autocommit=True) as connection,
            pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="belongs to database"),
        ):
            connection.execute(query, arguments)
    # A name that is taken, by whom ever, is refused.
    pair.on_standby(RESERVE, NEW, "pgoutput", restart, confirmed, False, None)
    pair.on_standby(RESTORE, NEW)
    pair.on_standby(RENAME, NEW, "taken")
    error = refusal(pair, RENAME, COPY, "taken")
    assert error.sqlstate == "42710"
    pair.on_standby(DROP, "taken")
    # An error that a handler swallows leaves nothing in use.
    body = f"BEGIN PERFORM tuskline_slots.reserve('{NEW}', 'pgoutput', '0/100', '{confirmed}');"
    body = f"DO $$ {body} EXCEPTION WHEN OTHERS THEN RAISE NOTICE '%', SQLERRM; END $$"
    with psycopg.connect(pair.standby.dsn(), autocommit=True) as connection:
        for _ in range(3):
            connection.execute(body.encode())
        connection.execute(MOVE, [COPY, restart, confirmed, xmin, False])
    assert slot_names(pair.standby) == {COPY}


def test_13_only_its_role_may_call_it_and_a_search_path_changes_nothing(pair: Pair) -> None:
    pair.on_primary(
        "CREATE ROLE stranger LOGIN PASSWORD 'x'",
        "CREATE ROLE keeper LOGIN PASSWORD 'x'",
        "GRANT tuskline_slots TO keeper",
        "CREATE SCHEMA hostile",
        "GRANT ALL ON SCHEMA hostile TO PUBLIC",
        "CREATE FUNCTION hostile.reserve(name, name, pg_lsn, pg_lsn) RETURNS xid LANGUAGE plpgsql"
        " AS $$BEGIN RAISE EXCEPTION 'hostile'; END$$",
        "CREATE FUNCTION hostile.never(pg_lsn, pg_lsn) RETURNS boolean LANGUAGE plpgsql"
        " AS $$BEGIN RAISE EXCEPTION 'hostile'; END$$",
        "CREATE OPERATOR hostile.> (FUNCTION = hostile.never, LEFTARG = pg_lsn, RIGHTARG = pg_lsn)",
    )
    pair.catch_up()
    restart, confirmed, xmin = fields(pair.standby, COPY)
    calls: list[tuple[str, tuple[object, ...]]] = [
        (RESERVE, (NEW, "pgoutput", restart, confirmed, False, None)),
        (MOVE, (COPY, restart, confirmed, xmin, False)),
        (ADVANCE, (COPY, confirmed)),
        (RESTORE, (NEW,)),
        (RENAME, (NEW, "renamed")),
        (DROP, ("renamed",)),
        ("SELECT * FROM tuskline_slots.inspect(%s)", (COPY,)),
        (MARK, (PHYSICAL, "stranger")),
    ]
    for query, arguments in calls:
        with (
            psycopg.connect(pair.standby.dsn(user="stranger", password="x")) as connection,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            connection.execute(query, arguments)
    with psycopg.connect(
        pair.standby.dsn(user="keeper", password="x"), autocommit=True
    ) as connection:
        connection.execute("SET search_path = hostile, pg_catalog")
        for query, arguments in calls[:-1]:
            connection.execute(query, arguments)
    granted = rows(
        pair.primary,
        "SELECT p.oid::regprocedure::text FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = pronamespace"
        " WHERE nspname = 'tuskline_slots' AND has_function_privilege('stranger', p.oid, 'EXECUTE')",
    )
    assert granted == []


def test_21_a_slot_that_reserve_did_not_make_is_not_dropped_by_its_name(pair: Pair) -> None:
    restart, confirmed, _ = fields(pair.standby, COPY)
    pair.on_standby(RESERVE, NEW, "pgoutput", restart, confirmed, False, None)
    assert "mapping files" in str(refusal(pair, RENAME, NEW, "renamed"))
    pair.on_standby(RESTORE, NEW)
    pair.on_standby(RENAME, NEW, "renamed")
    assert inspect(pair.standby, "renamed")["marker"] == NEW
    assert inspect(pair.standby, "renamed")["mappings_complete"]
    (pair.standby.data_dir / "pg_replslot" / "renamed" / "tuskline_marker").unlink()
    error = refusal(pair, DROP, "renamed")
    assert error.sqlstate == "55000"
    assert "was not created by reserve()" in str(error)
    pair.on_standby("SELECT tuskline_slots.drop('renamed', any_slot => true)")
    assert slot_names(pair.standby) == {COPY}


@pytest.mark.parametrize("hope", ["a member", "a login"])
def test_13_a_role_that_somebody_has_prepared_is_not_granted_anything(
    pair: Pair, hope: str
) -> None:
    database = f"hoped_{hope[2:]}"
    prepare, undo = (
        ("GRANT tuskline_slots TO hoping", "REVOKE tuskline_slots FROM hoping")
        if hope == "a member"
        else ("ALTER ROLE tuskline_slots LOGIN", "ALTER ROLE tuskline_slots NOLOGIN")
    )
    others = rows(
        pair.primary,
        "SELECT member::regrole::text FROM pg_auth_members WHERE roleid = 'tuskline_slots'::regrole",
    )
    pair.on_primary(f"CREATE DATABASE {database}", "CREATE ROLE hoping")
    pair.on_primary(*(f"REVOKE tuskline_slots FROM {name}" for (name,) in others))
    try:
        extension.create_extension(pair.primary, pair.library, database)
        remove_extension(pair, database)
        pair.on_primary(prepare)
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="can be used by"):
            extension.create_extension(pair.primary, pair.library, database)
        remove_extension(pair, database)
        pair.on_primary(f"ALTER DATABASE {database} SET tuskline.trust_role = on")
        extension.create_extension(pair.primary, pair.library, database)
    finally:
        pair.on_primary(undo, "DROP ROLE IF EXISTS hoping", f"DROP DATABASE {database}")
        pair.on_primary(*(f"GRANT tuskline_slots TO {name}" for (name,) in others))


def remove_extension(pair: Pair, database: str) -> None:
    with psycopg.connect(pair.primary.dsn(database), autocommit=True) as connection:
        connection.execute("DROP EXTENSION IF EXISTS tuskline")
        connection.execute("DROP SCHEMA IF EXISTS tuskline_slots CASCADE")


def test_13_a_schema_of_somebody_else_is_not_used(pair: Pair) -> None:
    with psycopg.connect(pair.primary.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE prepared")
        connection.execute("CREATE ROLE preparer")
    with psycopg.connect(pair.primary.dsn("prepared"), autocommit=True) as connection:
        connection.execute("CREATE SCHEMA tuskline_slots AUTHORIZATION preparer")
        if pair.major < extension.CONTROL_PATH:
            script = extension.SCRIPT.read_text().replace("@extschema@", extension.SCHEMA)
            script = "\n".join(line for line in script.splitlines() if line[:1] != "\\")
        else:
            script = "CREATE EXTENSION tuskline"
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="belongs to another role"):
            connection.execute(script.encode())


def test_10_no_argument_harms_the_server(pair: Pair, seed: int) -> None:
    draw = random.Random(seed)
    restart, confirmed, xmin = fields(pair.standby, COPY)
    started = rows(pair.standby, "SELECT pg_postmaster_start_time()")
    names = [COPY, NEW, "kept", PHYSICAL, "", "x" * 63, "_tuskline_tmp_", "../state", "é", None]
    lsns = [restart, confirmed, "0/0", "0/1", AHEAD, "7FFFFFFF/0", None]
    xids = [xmin, "0", "1", "2", "3", "4294967295", "2147483648", None]
    flags = [True, False, None]
    plugins = ["pgoutput", "", "/", "plpgsql", "tuskline", "a" * 63, "é", "..", None]
    calls = [
        (RESERVE, (names, plugins, lsns, lsns, flags, lsns)),
        (MOVE, (names, lsns, lsns, xids, flags)),
        (RENAME, (names, names)),
        (ADVANCE, (names, lsns)),
        (RESTORE, (names,)),
        (MARK, (names, ["", "a", "a" * 64, "é", "\n", "%s%n", None])),
        ("SELECT * FROM tuskline_slots.inspect(%s)", (names,)),
    ]
    refused: set[str | None] = set()
    with psycopg.connect(pair.standby.dsn(), autocommit=True) as connection:
        for _ in range(600):
            query, domains = draw.choice(calls)
            try:
                connection.execute(query, [draw.choice(domain) for domain in domains])
            except psycopg.Error as error:
                refused.add(error.sqlstate)
    assert refused
    assert not refused & {None, "XX000"}
    assert rows(pair.standby, "SELECT pg_postmaster_start_time()") == started
    for name in slot_names(pair.standby) - {COPY}:
        pair.on_standby(DROP, name)
    if COPY not in slot_names(pair.standby):
        pair.reserve(COPY, "kept")
        pair.prove(COPY, "kept")
    pair.standby.restart()


#: Where the standby's process ends, and the slots that a start finds then.
CRASHES: dict[str, tuple[set[str], ...]] = {
    "reserve.created": ({COPY},),
    "reserve.reserved": ({COPY},),
    "reserve.persisted": ({COPY, NEW},),
    "mappings.restored": ({COPY},),
    "set_fields.written": ({COPY},),
    "set_fields.saved": ({COPY},),
    "rename.created": ({COPY},),
    "rename.copied": ({COPY},),
    "rename.persisted": ({COPY, "kept"},),
    "rename.dropped": ({"kept"},),
}


def crash(pair: Pair, point: str, before: Fields) -> None:
    calls: dict[str, tuple[str, tuple[object, ...]]] = {
        "reserve": (RESERVE, (NEW, "pgoutput", *before[:2], False, None)),
        "mappings": (RESTORE, (COPY,)),
        "set_fields": (MOVE, (COPY, *before, False)),
        "rename": (RENAME, (COPY, "kept")),
    }
    query, arguments = calls[point.partition(".")[0]]
    with psycopg.connect(pair.standby.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("SET tuskline.fail_point = {}").format(point))
        with pytest.raises(psycopg.OperationalError):
            connection.execute(query, arguments)
    pair.standby.kill()
    pair.standby.start()


@pytest.mark.parametrize("major", MAJORS)
def test_6_after_a_crash_at_any_step_each_slot_is_whole_or_gone(major: int) -> None:
    with running_pair(major, fail_points=True) as pair:
        pair.make_slot("kept")
        pair.reserve(COPY, "kept")
        pair.prove(COPY, "kept")
        for point, expected in CRASHES.items():
            before = fields(pair.standby, COPY)
            crash(pair, point, before)
            assert slot_names(pair.standby) in expected, point
            for name in slot_names(pair.standby):
                found = inspect(pair.standby, name)
                assert str(found["restart_lsn"]) == str(found["saved_restart_lsn"]), point
                assert found["invalidation"] is None
                if name != NEW:
                    assert fields(pair.standby, name) == before, point
                    assert found["snapshot_present"], point
                elif found["wal_present"]:
                    pair.on_standby(DROP, NEW)
            if slot_names(pair.standby) == {COPY, "kept"}:
                pair.on_standby(DROP, "kept")
            assert not list((pair.standby.data_dir / "pg_replslot").glob("*.tmp")), point
        pair.on_primary("INSERT INTO shop VALUES (5000, 'row-7')")
        pair.catch_up()
        pair.promote()
        assert decoded(pair.standby, "kept") == [7]


@pytest.mark.long
@pytest.mark.parametrize("major", MAJORS)
def test_6_after_kills_at_random_each_slot_is_whole_or_gone(major: int, seed: int) -> None:
    draw = random.Random(seed)
    with running_pair(major) as pair:
        pair.make_slot("kept")
        pair.reserve(COPY, "kept")
        pair.prove(COPY, "kept")
        base = fields(pair.standby, COPY)
        for _ in range(15):
            body = (
                f"DO $$ BEGIN LOOP PERFORM tuskline_slots.reserve('{NEW}', 'pgoutput',"
                f" '{base[0]}', '{base[1]}'); PERFORM tuskline_slots.restore_mappings('{NEW}');"
                f" PERFORM tuskline_slots.rename('{NEW}', 'kept');"
                " PERFORM tuskline_slots.drop('kept'); END LOOP; END $$"
            )
            connection = psycopg.pq.PGconn.connect(pair.standby.dsn().encode())
            connection.send_query(body.encode())
            rows(pair.standby, "SELECT pg_sleep(%s)", draw.uniform(0.05, 0.5))
            connection.consume_input()
            assert connection.is_busy()  # the loop still goes round
            pair.standby.kill()
            connection.finish()
            pair.standby.start()
            assert slot_names(pair.standby) - {COPY, NEW, "kept"} == set()
            for name in slot_names(pair.standby):
                assert fields(pair.standby, name)[:2] == base[:2]
                assert inspect(pair.standby, name)["snapshot_present"]
            for name in slot_names(pair.standby) - {COPY}:
                pair.on_standby(DROP, name)
